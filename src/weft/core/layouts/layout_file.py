"""Layouts as files, for what a text cannot describe: explicit shards of a trainer, traced pieces of an engine.

Trainer (`--trainer FILE.json`), shards of the model's tensors; strides are optional:

    {"shards": [{"tensor": "model.norm.weight", "rank": 0, "lo": [0], "extent": [2048], "strides": [1]}, …]}

Engine (`--engine FILE.json`), for each rank of one engine its local tensors and the strided copies that fill them,
as a traced loader gives them; offsets and strides are in elements, `op` is copy, cast, quantize, scale:

    {"ranks": [{"tensors": [{"name": "w", "dtype": "bf16", "shape": [4, 2]}],
                "pieces": [{"dst": "w", "source": "w", "shape": [4, 2], "dst_offset": 0, "dst_strides": [2, 1],
                            "src_offset": 0, "src_strides": [2, 1], "op": "copy"}]}, …]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from weft.core.layout import Layout, Shard, Tensor
from weft.core.layouts.strided import StridedPiece, recipe_from_strided
from weft.core.models.model import Model
from weft.core.recipe import Op, Recipe
from weft.errors import ConfigError, LayoutError

MAX_FILE_BYTES = 1 << 30

Content = TypeVar("Content")


class _ShardEntry(msgspec.Struct, forbid_unknown_fields=True):
    tensor: str
    rank: int
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class _ShardFile(msgspec.Struct, forbid_unknown_fields=True):
    shards: list[_ShardEntry]


class _TensorEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _PieceEntry(msgspec.Struct, forbid_unknown_fields=True):
    dst: str
    source: str
    shape: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    op: Literal["copy", "cast", "quantize", "scale"] = "copy"


class _RankEntry(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[_TensorEntry]
    pieces: list[_PieceEntry]


class _EngineFile(msgspec.Struct, forbid_unknown_fields=True):
    ranks: list[_RankEntry]


def is_layout_file(text: str) -> bool:
    """Whether a layout option names a file instead of describing axes."""
    return text.endswith(".json")


def read_trainer_file(path: Path, model: Model) -> Layout:
    """The trainer layout of a file, over a model's policy tensors."""
    content = _read(path, _ShardFile)
    shards = [
        Shard(tensor=entry.tensor, rank=entry.rank, lo=entry.lo, extent=entry.extent, strides=entry.strides)
        for entry in content.shards
    ]
    return Layout.from_shards([tensor.tensor() for tensor in model.policy_tensors], shards)


def read_engine_file(path: Path, model: Model, *, num_replicas: int) -> Recipe:
    """The recipe of a file, repeated for every replica."""
    content = _read(path, _EngineFile)
    if not content.ranks or num_replicas < 1:
        raise ConfigError(
            f"`{path}`: {len(content.ranks)} ranks × {num_replicas} replicas", hint="give at least one of each"
        )
    sources = {tensor.name: tensor.tensor() for tensor in model.policy_tensors}
    tensors: dict[int, list[Tensor]] = {}
    pieces: dict[int, list[StridedPiece]] = {}
    for rank, entry in enumerate(content.ranks):
        tensors[rank] = [Tensor(name=t.name, dtype=t.dtype, shape=t.shape) for t in entry.tensors]
        pieces[rank] = [_strided(piece) for piece in entry.pieces]
    unknown = sorted({p.source for given in pieces.values() for p in given if p.source not in sources})
    if unknown:
        raise LayoutError(
            f"`{path}` reads {len(unknown)} tensors that `{model.name}` does not have",
            problems=tuple(f"missing: {name}" for name in unknown),
            hint="`weft models NAME` lists a model's tensors",
        )
    return recipe_from_strided(tensors, pieces, list(sources.values()), num_replicas=num_replicas)


def _strided(entry: _PieceEntry) -> StridedPiece:
    return StridedPiece(
        dst=entry.dst,
        source=entry.source,
        shape=entry.shape,
        dst_offset=entry.dst_offset,
        dst_strides=entry.dst_strides,
        src_offset=entry.src_offset,
        src_strides=entry.src_strides,
        op=Op[entry.op.upper()],
    )


def _read(path: Path, kind: type[Content]) -> Content:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"`{path}` is larger than {MAX_FILE_BYTES >> 20} MiB")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"`{path}`: {error}", hint="docs/layouts.md shows the format") from error
