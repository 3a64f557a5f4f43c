"""Plan files: canonical JSON header + columns, with a digest; saved, loaded, compared.

Format, version 3. All integers little-endian.
 1. 8 bytes magic `WEFTPLAN`; u32 format version; u32 header length (at most 1 GiB).
 2. Header: canonical JSON (sorted keys, no spaces): names, texts, tensor tables, topology, settings, and for every
    column its dtype, shape and stored length, in the order they follow.
 3. Columns: zlib-compressed little-endian arrays, one after the other, nothing between or after them.
 4. The digest is BLAKE2b-256 over the header without `digest` and stored lengths, then every column uncompressed.
 5. A reader refuses: another magic or version, a digest that differs, a column that is shorter or longer than its
    shape says, bytes after the last column, a plan that `proof.prove` rejects.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.config import settings_from
from weft.core.geometry.fingerprint import Keys, mix, name_keys
from weft.core.geometry.scaling import Scaling
from weft.core.layout import Layout, RankGroups, Tensor
from weft.core.plans.plan import Plan
from weft.core.plans.proof import prove
from weft.core.recipe import Recipe
from weft.core.topology import CPU, CUDA, topology_from_mapping
from weft.errors import PlanError, WeftError

MAGIC = b"WEFTPLAN"
VERSION = 3
MAX_HEADER_BYTES = 1 << 30
MAX_COLUMN_BYTES = 1 << 34

Columns = dict[str, NDArray[Any]]
_DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    zlib.error,
    struct.error,
)
"""What reading a damaged file may raise; all of it becomes a PlanError."""


def digest(plan: Plan) -> str:
    """The plan's identity: equal plans have equal digests, on any machine."""
    return _digest(_header(plan), _columns(plan))


def save(plan: Plan, path: FilePath) -> str:
    """Write the plan; returns its digest. The file appears whole or not at all."""
    columns = _columns(plan)
    header = _header(plan)
    blobs = {name: zlib.compress(_little(column).tobytes(), 1) for name, column in columns.items()}
    identity = _digest(header, columns)
    header |= {"digest": identity, "stored": {name: len(blob) for name, blob in blobs.items()}}
    encoded = _canonical(header)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(MAGIC + struct.pack("<II", VERSION, len(encoded)) + encoded)
            file.writelines(blobs.values())
        part.replace(path)
    except OSError as error:
        raise PlanError(f"`{path}` cannot be written: {error.strerror}") from error
    return identity


def load(path: FilePath) -> Plan:
    """Read, check and prove a plan."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"`{path}` cannot be read: {error.strerror}") from error
    try:
        header, columns = _decode(data)
        plan = _plan(header, columns)
        plan.trainer.check()
        prove(plan)
    except _DAMAGE as error:
        raise PlanError(f"`{path}` is not a valid weft plan: {error}", hint="make it again with `weft plan`") from error
    except WeftError as error:
        raise PlanError(f"`{path}`: {error}", hint="make it again with `weft plan`") from error
    return plan


def _decode(data: bytes) -> tuple[dict[str, Any], Columns]:
    if data[:8] != MAGIC:
        raise ValueError("wrong magic bytes")
    version, length = struct.unpack_from("<II", data, 8)
    if version != VERSION:
        raise PlanError(f"format version {version}, expected {VERSION}")
    if length > MAX_HEADER_BYTES or 16 + length > len(data):
        raise ValueError("the header is longer than the file")
    header = json.loads(data[16 : 16 + length])
    position = 16 + length
    columns: Columns = {}
    for name, (dtype, shape) in header["columns"].items():
        stored = int(header["stored"][name])
        columns[name] = _read_column(data[position : position + stored], dtype, shape)
        position += stored
    if position != len(data):
        raise ValueError("bytes are missing, or follow the last column")
    if _digest(header, columns) != header["digest"]:
        raise ValueError("the digest does not match: the file is damaged or was altered")
    return header, columns


def _read_column(blob: bytes, dtype: str, shape: list[int]) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind != "i" or any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"a column of {dtype} {shape}")
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if expected > MAX_COLUMN_BYTES:
        raise ValueError("a column is too large")
    inflater = zlib.decompressobj()
    raw = inflater.decompress(blob, expected + 1)
    if len(raw) != expected or not inflater.eof:
        raise ValueError("the length of a column does not match its shape")
    return np.frombuffer(raw, dtype=kind).reshape(shape)


def _little(column: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<"))


def _canonical(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys, without spaces, in ASCII."""
    entries = (b'"%s":%s' % (key.encode(), _canonical_entry(key, value[key])) for key in sorted(value))
    return b"{%s}" % b",".join(entries)


def _canonical_entry(key: str, value: Any) -> bytes:
    """The same for one entry; msgspec writes names and whole numbers alike, if names are plain, but much faster."""
    if key in _LONG:
        with contextlib.suppress(TypeError, UnicodeEncodeError):  # it refuses subclasses of str, and lone surrogates
            fast = msgspec.json.encode(value, order="sorted")
            if fast.isascii() and b"\\" not in fast and b"\x7f" not in fast:
                return fast
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(header: Mapping[str, Any], columns: Columns) -> str:
    hasher = hashlib.blake2b(digest_size=32)
    hasher.update(_canonical({key: value for key, value in header.items() if key not in ("digest", "stored")}))
    for column in columns.values():
        hasher.update(_little(column).data)
    return hasher.hexdigest()


def _header(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "policy": plan.policy,
        "gathered": plan.gathered,
        "ignored": list(plan.ignored),
        "trainer": _layout_header(plan.trainer),
        "engine": _layout_header(plan.recipe.engine),
        "sources": list(plan.recipe.sources),
        "num_replicas": plan.recipe.num_replicas,
        "topology": plan.topology.to_json(),
        "settings": asdict(plan.settings),
        "memory": {"trainer": plan.trainer_memory, "engine": plan.engine_memory},
        "columns": {name: [column.dtype.str, list(column.shape)] for name, column in _columns(plan).items()},
        **({"scaling": dict(sorted(plan.recipe.scaling.items()))} if plan.recipe.scaling else {}),
    }


def _layout_header(layout: Layout) -> dict[str, Any]:
    return {
        "text": layout.text,
        "num_ranks": layout.num_ranks,
        "tensors": [(tensor.name, tensor.dtype, tensor.shape) for tensor in layout.tensors],
    }


def _columns(plan: Plan) -> Columns:
    route = ("piece", "shard", "dst_lo", "src_lo", "extent", "first", "sender")
    pieces = ("dst", "src", "op", "dst_lo", "extent", "src_lo", "axes")
    columns = {f"route.{name}": getattr(plan, name) for name in route}
    columns |= {f"piece.{name}": getattr(plan.recipe, name) for name in pieces}
    for side, layout in (("trainer", plan.trainer), ("engine", plan.recipe.engine)):
        columns |= {f"{side}.{name}": getattr(layout, name) for name in _LAYOUT_COLUMNS}
        columns |= {f"{side}.members": layout.groups.members, f"{side}.starts": layout.groups.starts}
    return dict(sorted(columns.items()))


_LONG = ("trainer", "engine", "sources")
"""Entries of a header that grow with the number of tensors."""
_LAYOUT_COLUMNS = ("tensor_of", "group_of", "lo", "extent", "strides")


def _check_references(header: dict[str, Any], columns: Columns) -> None:
    """Every index column stays inside the table it points into."""
    num_pieces = len(columns["piece.dst"])
    limits = {"piece.dst": len(columns["engine.lo"]), "route.piece": num_pieces}
    limits["route.shard"] = len(columns["trainer.lo"])
    for side in ("trainer", "engine"):
        limits[f"{side}.tensor_of"] = len(header[side]["tensors"])
        limits[f"{side}.group_of"] = len(columns[f"{side}.starts"]) - 1
        limits[f"{side}.members"] = int(header[side]["num_ranks"])
        starts = columns[f"{side}.starts"]
        if starts[0] != 0 or starts[-1] != len(columns[f"{side}.members"]) or (np.diff(starts) < 1).any():
            raise ValueError(f"{side} rank groups do not add up")
    for name, limit in limits.items():
        column = columns[name]
        if column.min(initial=0) < 0 or column.max(initial=-1) >= limit:
            raise ValueError(f"column {name} points outside its table")
    source = columns["piece.src"]
    if source.min(initial=-1) < -1 or source.max(initial=-1) >= len(header["sources"]):
        raise ValueError("a piece reads a source that does not exist")
    if not isinstance(header["num_replicas"], int) or header["num_replicas"] < 1:
        raise ValueError("the number of replicas is invalid")


def _plan(header: dict[str, Any], columns: Columns) -> Plan:
    _check_references(header, columns)
    layouts = {side: _layout(header[side], side, columns) for side in ("trainer", "engine")}
    recipe = Recipe(
        engine=layouts["engine"],
        sources=tuple(header["sources"]),
        num_replicas=header["num_replicas"],
        scaling={name: Scaling(kind) for name, kind in header.get("scaling", {}).items()},
        **{name.removeprefix("piece."): column for name, column in columns.items() if name.startswith("piece.")},
    )
    topology = topology_from_mapping(
        header["topology"],
        num_trainers=layouts["trainer"].num_ranks,
        num_engines=layouts["engine"].num_ranks,
        where="the plan's topology",
    )
    memory = header["memory"]
    if not {memory["trainer"], memory["engine"]} <= {CPU, CUDA}:
        raise ValueError(f"memory of {memory}")
    return Plan(
        model=header["model"],
        policy=header["policy"],
        gathered=bool(header["gathered"]),
        ignored=tuple(header["ignored"]),
        trainer=layouts["trainer"],
        recipe=recipe,
        topology=topology,
        settings=settings_from(header["settings"], where="the plan's settings"),
        trainer_memory=memory["trainer"],
        engine_memory=memory["engine"],
        **{name.removeprefix("route."): column for name, column in columns.items() if name.startswith("route.")},
    )


def _layout(header: dict[str, Any], side: str, columns: Columns) -> Layout:
    return Layout(
        side=side,
        num_ranks=header["num_ranks"],
        tensors=tuple(Tensor(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in header["tensors"]),
        groups=RankGroups(members=columns[f"{side}.members"], starts=columns[f"{side}.starts"]),
        text=header["text"],
        **{name: columns[f"{side}.{name}"] for name in _LAYOUT_COLUMNS},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changes between two plans, in routes and bytes."""

    same_digest: bool
    num_same: int
    num_moved: int
    """Same boxes, same receiver, another sender."""
    num_removed: int
    num_added: int
    moved_bytes: int
    removed_bytes: int
    added_bytes: int
    tensors: tuple[str, ...]
    """Engine tensors with any change, the first twenty by name."""


def compare(old: Plan, new: Plan) -> Difference:
    """Match routes of two plans by boxes and receiver, and list what changed."""
    old_keys, new_keys = _route_keys(old), _route_keys(new)
    _, in_old, in_new = np.intersect1d(old_keys, new_keys, return_indices=True)
    moved = old.sender[in_old] != new.sender[in_new]
    removed = np.ones(len(old_keys), dtype=bool)
    removed[in_old] = False
    added = np.ones(len(new_keys), dtype=bool)
    added[in_new] = False
    old_bytes, new_bytes = (np.repeat(plan.row_bytes, plan.fan_out) for plan in (old, new))
    changed = _tensor_names(old, removed) | _tensor_names(new, added)
    moved_mask = np.zeros(len(new_keys), dtype=bool)
    moved_mask[in_new[moved]] = True
    changed |= _tensor_names(new, moved_mask)
    return Difference(
        same_digest=digest(old) == digest(new),
        num_same=int((~moved).sum()),
        num_moved=int(moved.sum()),
        num_removed=int(removed.sum()),
        num_added=int(added.sum()),
        moved_bytes=int(new_bytes[moved_mask].sum()),
        removed_bytes=int(old_bytes[removed].sum()),
        added_bytes=int(new_bytes[added].sum()),
        tensors=tuple(sorted(changed)[:20]),
    )


def _tensor_names(plan: Plan, routes: NDArray[np.bool_]) -> set[str]:
    rows = np.unique(np.searchsorted(plan.first, np.flatnonzero(routes), side="right") - 1)
    return {plan.recipe.engine.tensors[i].name for i in np.unique(plan.dst[rows])}


def _route_keys(plan: Plan) -> Keys:
    """A 64-bit key of every route: engine tensor, receiver, boxes, source, operation."""
    engine_names = name_keys(tensor.name for tensor in plan.recipe.engine.tensors)
    source_names = name_keys(tensor.name for tensor in plan.trainer.tensors)
    keys = mix(engine_names[plan.dst], source_names[plan.trainer.tensor_of[plan.shard]], plan.recipe.op[plan.piece])
    keys = mix(keys, plan.dst_lo, plan.src_lo, plan.extent)
    return mix(np.repeat(keys, plan.fan_out), plan.receiver)
