"""What a controller accepts from members: the right side, plausible values, consistent with what it was told before.

Pure checks; each raises a WeftError that says what is wrong. The controller refuses the member that sent it, and only
that one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from functools import cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from weft.core.geometry.fingerprint import by_appearance, distinct_rows
from weft.core.layout import DTYPE_BYTES, MAX_DIMS, MAX_ELEMENTS, MAX_TENSOR_DIM, Shard, shard_problem
from weft.core.version import MAX_FIRST, MAX_STEP, MAX_VERSION
from weft.devices import is_device
from weft.errors import ConfigError, LayoutError, ProtocolError
from weft.runtime.compile.member_plans import Opening, Owed
from weft.runtime.control.addresses import is_address
from weft.runtime.control.held import HeldTable
from weft.runtime.control.keys import is_key
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Committed, FromEngine, FromTrainer, Join, Opened, Written, unpack
from weft.transport.base import Endpoint
from weft.transport.capabilities import CAPABILITIES

MAX_SHARDS = 1_000_000
MAX_RUNS = 1 << 22
"""Maximum pieces of memory in one member's shards: each costs the controller about 100 bytes."""
MAX_ADDRESS = 1 << 63
MAX_SECONDS = 1e6
"""What is reported to have taken longer was not measured right."""
MAX_GBPS = 1e6
MAX_STAGES = 16
NEAR = 1 << 29
"""With strides up to this, offsets fit into 64 bits, whatever the extents."""
_ALLOWED = {"trainer": frozenset(get_args(FromTrainer)), "engine": frozenset(get_args(FromEngine))}


def check_side(side: str, message: Any) -> None:
    """Raise if members of this side do not send such messages."""
    if type(message) not in _ALLOWED[side]:
        raise ProtocolError(f"{type(message).__name__} is not a message of a {side}")


def check_version(version: int) -> None:
    """Raise if this cannot be the number of a version."""
    if not 0 <= version <= MAX_VERSION:
        raise ProtocolError(f"version {version} is out of range, expected 0 to {MAX_VERSION}")


def check_step(step: int) -> None:
    """Raise if an engine cannot have made this many steps."""
    if not 0 <= step < MAX_ADDRESS:
        raise ProtocolError(f"step {step} is out of range, expected 0 to {MAX_ADDRESS - 1}")


def check_join(join: Join) -> None:
    """Raise unless what a member reports about itself is plausible."""
    versions = {"last": join.last, "pending": join.pending, "ready": join.ready, "holds": join.holds, "seen": join.seen}
    wrong = [f"{name} {v}" for name, v in versions.items() if v is not None and not 0 <= v <= MAX_VERSION]
    if join.side == "trainer":
        wrong += [f"{name} {v}" for name, v in versions.items() if v is not None and name != "last"]
        wrong += ["offered memory"] if join.offered else []
    elif join.abandoned:
        wrong.append("abandoned engines")
    if not (math.isfinite(join.age_s) and join.age_s >= 0) or not 0 <= join.incarnation < MAX_ADDRESS:
        wrong.append(f"an age of {join.age_s} s, incarnation {join.incarnation}")
    place = join.place
    if not is_device(place.device) or not 0 <= place.nic_gbps < MAX_GBPS:
        wrong.append(f"device {place.device[:32]}, network cards of {place.nic_gbps} Gb/s")
    if wrong:
        raise ProtocolError(f"{join.side} {join.rank} joined with impossible values: {', '.join(wrong)}")
    held = join.held.table
    _check_shards(held)
    if join.side == "engine" and len(set(held.names)) < len(held):
        twice = [name for name, count in Counter(held.names).items() if count > 1]
        raise LayoutError(
            "an engine must name each tensor once", problems=tuple(f"{name}: named twice" for name in twice)
        )


def claim(join: Join) -> int | None:
    """The highest version a member says it knows of."""
    known = [v for v in (join.last, join.pending, join.ready, join.holds, join.seen) if v is not None]
    return max(known, default=None)


def unbelievable(joins: Mapping[MemberId, Join]) -> dict[MemberId, str]:
    """Members whose versions are far beyond what all others know, with the problem of each."""
    claims = {member: found for member, join in joins.items() if (found := claim(join)) is not None}
    wrong = {}
    for member, version in claims.items():
        others = [found for other, found in claims.items() if other != member]
        most = max(others) + MAX_STEP if others else MAX_FIRST
        if version > most:
            known = max(others, default=0)
            wrong[member] = f"{member} claims version {version}, but no other member knows of one above {known}"
    return wrong


def _check_shards(held: HeldTable) -> None:
    """Raise unless every shard is a box of its tensor, in memory that is not used twice, in not too many pieces.

    Columns show which shards are suspect; shards that differ only in their names, such as those of experts, are then
    checked once.
    """
    if len(held) > MAX_SHARDS:
        raise LayoutError(f"member holds {len(held)} shards", hint=f"at most {MAX_SHARDS} on one member")
    what = cache(_shard_problem)
    doubtful = [held[number] for number in np.flatnonzero(_is_doubtful(held)).tolist()]
    found = [(shard.name, what(shard.dtype, shard.shape, shard.lo, shard.extent, shard.strides)) for shard in doubtful]
    problems = [f"{name}: {problem}" for name, problem in found if problem]
    problems += ["a shard has no name"] * list(held.names).count("")
    if problems:
        raise LayoutError("the shards are invalid", problems=tuple(problems))
    _check_runs(held)


def _is_doubtful(held: HeldTable) -> NDArray[np.bool_]:
    """Shards that may be invalid: all but those whose strides descend from the outer dimension inwards, as most do."""
    shape, lo, extent, strides = held.shape, held.lo, held.extent, held.strides
    doubtful = np.array([dtype not in DTYPE_BYTES for dtype in held.dtypes] or [False])[held.dtype]
    doubtful |= (held.num_dims < 1) | ((shape < 1) | (shape > MAX_TENSOR_DIM)).any(axis=1)
    doubtful |= np.prod(shape + 1.0, axis=1) > MAX_ELEMENTS
    doubtful |= ((lo < 0) | (extent < 0) | (lo > shape) | (extent > shape - lo)).any(axis=1)
    doubtful |= ((strides < 1) | (strides > NEAR)).any(axis=1)
    reach = np.zeros(len(held), dtype=np.int64)
    for dim in range(extent.shape[1] - 1, -1, -1):
        walked = extent[:, dim] > 1
        doubtful |= walked & (strides[:, dim] <= reach)
        reach = np.where(walked & ~doubtful, reach + strides[:, dim] * (extent[:, dim] - 1), reach)
    return doubtful


def _check_runs(held: HeldTable) -> None:
    """Raise if the shards consist of too many pieces of memory."""
    num_runs = held.num_runs
    total = int(num_runs.sum())
    if total <= MAX_RUNS:
        return
    columns = (held.dtype[:, None], held.shape, held.lo, held.extent, held.strides)
    first, alike = by_appearance(distinct_rows(np.concatenate(columns, axis=1))[1])
    runs = np.bincount(alike, weights=num_runs).astype(np.int64)
    worst = np.argsort(-runs, kind="stable")[:5].tolist()
    raise LayoutError(
        f"the shards consist of {total} separate pieces of memory, more than {MAX_RUNS}",
        problems=tuple(f"{held.names[first[kind]]} and those like it: {runs[kind]} pieces" for kind in worst),
        hint="are they transposed? make them contiguous",
    )


_Dims = tuple[int, ...]


def _shard_problem(dtype: str, shape: _Dims, lo: _Dims, extent: _Dims, strides: _Dims) -> str:
    """What is wrong with a shard; empty if nothing is."""
    if dtype not in DTYPE_BYTES:
        return f"unknown dtype `{dtype}`"
    is_possible = 0 < len(shape) <= MAX_DIMS and all(0 < n <= MAX_TENSOR_DIM for n in shape)
    if not is_possible or math.prod(n + 1 for n in shape) > MAX_ELEMENTS:
        return f"impossible shape {list(shape)}"
    return shard_problem(Shard(tensor="", rank=0, lo=lo, extent=extent, strides=strides), {"": shape})


def check_opened(join: Join, opened: Opened, transports: Collection[str], needed: Opening | None = None) -> None:
    """Raise unless a member has opened what it was asked to; `needed`: the memory an engine rank was asked for."""
    member = f"{join.side} {join.rank}"
    if not set(transports) <= set(opened.offers):
        raise ProtocolError(f"{member} opened {sorted(opened.offers)}, expected {sorted(transports)}")
    for name, offer in opened.offers.items():
        spoken = {offer.endpoint.transport, *(descriptor.transport for descriptor in offer.descriptors)}
        if spoken != {name} or offer.endpoint.member != member:
            raise ProtocolError(f"{member} offers {sorted(spoken)} of {offer.endpoint.member} as {name}")
    if needed is not None:
        _check_memory(member, len(join.held.table), opened, needed)


def check_endpoints(member: MemberId, endpoints: Sequence[Endpoint]) -> None:
    """Raise unless these are a trainer's own, one for each transport at most."""
    names = [endpoint.transport for endpoint in endpoints]
    if len(set(names)) != len(names) or not set(names) <= CAPABILITIES.keys():
        raise ProtocolError(f"{member} has reopened {sorted(names)[:8]}")
    if any(endpoint.member != str(member) for endpoint in endpoints):
        raise ProtocolError(f"{member} has reopened an endpoint of another member")


def _check_memory(member: str, num_shards: int, opened: Opened, needed: Opening) -> None:
    """Raise unless an engine rank offers what it was asked for: its live weights, or memory beside them."""
    if len(opened.live) != (8 * num_shards if needed.is_live else 0):
        raise ProtocolError(f"{member} has {len(opened.live)} bytes of addresses for {num_shards} shards")
    live = unpack(opened.live)
    wrong = live[live >= MAX_ADDRESS][:3].tolist()
    asked = ((opened.landing, needed.landing_bytes), (opened.patches, needed.patch_bytes))
    wrong += [address for address, size in asked if not bool(size) <= address < MAX_ADDRESS]
    if wrong:
        raise ProtocolError(f"{member} names impossible addresses: {wrong}")


def check_magnitudes(trainer: int, opened: Opened, *, is_asked: bool, has_keys: bool) -> None:
    """Raise unless other trainers can connect to one that they have to exchange magnitudes with."""
    server = opened.magnitudes
    if not is_asked:
        return
    if server is None:
        raise ProtocolError(f"trainer {trainer} does not listen for other trainers")
    if not is_address(server.address) or is_key(server.key) != has_keys:
        raise ProtocolError(
            f"trainer {trainer} listens at `{server.address[:64]}` with a key of {len(server.key)} bytes",
            hint="other trainers cannot connect to it",
        )


def check_numbers(*, num_trainers: int, num_engine_ranks: int, ranks_per_engine: int) -> None:
    """Raise unless a fleet can have so many members."""
    if num_trainers < 1 or num_engine_ranks < 1 or ranks_per_engine < 1 or num_engine_ranks % ranks_per_engine:
        raise ConfigError(
            f"invalid numbers of members: {num_trainers} trainers and {num_engine_ranks} engine ranks "
            f"in engines of {ranks_per_engine}",
            hint="at least one of each, and a whole number of engines",
        )


def check_committed(engine: int, message: Committed, num_trainers: int) -> None:
    """Raise unless an engine rank reports something that is possible."""
    trainers = [part.trainer for part in message.arrivals]
    if len(set(trainers)) != len(trainers) or not all(0 <= trainer < num_trainers for trainer in trainers):
        raise ProtocolError(
            f"engine {engine} reported arrivals from trainers {sorted(trainers)[:8]}, expected each of "
            f"{num_trainers} at most once"
        )
    spent = [message.pause_s, *(part.seconds for part in message.arrivals)]
    if not all(0 <= seconds < MAX_SECONDS for seconds in spent) or any(part.num_bytes < 0 for part in message.arrivals):
        raise ProtocolError(f"engine {engine} reported impossible arrivals or an impossible pause")


def check_written(trainer: int, message: Written, engines: Set[int], owed: Owed | None) -> bool:
    """Raise unless a trainer reports on what it was told to write; returns whether that is exactly what it owes.

    `owed`: bytes to each engine; None where patches are sent, whose length is open and which may not suffice.
    """
    if message.whole and owed is not None:
        raise ProtocolError(f"trainer {trainer} wants to write whole versions, which it was already told to do")
    if message.magnitude_bytes < 0:
        raise ProtocolError(f"trainer {trainer} reported {message.magnitude_bytes} bytes of magnitudes")
    if len(message.stages) > MAX_STAGES or not all(0 <= spent < MAX_SECONDS for spent in message.stages.values()):
        raise ProtocolError(f"trainer {trainer} reported invalid stages")
    if not 0 <= message.late_s < MAX_SECONDS:
        raise ProtocolError(f"trainer {trainer} reported that it was {message.late_s} s late")
    reports = message.reports
    reports.check()
    if not reports.sizes.keys() <= engines:
        raise ProtocolError(f"trainer {trainer} reported patches for engine ranks {sorted(reports.sizes)[:8]}")
    is_all = owed is not None and owed.is_met_by(reports) and not message.losses and owed.by_engine.keys() <= engines
    if not is_all:  # what differs from the plan is looked at link by link
        _check_links(trainer, message, engines, owed)
    return is_all


def _check_links(trainer: int, message: Written, engines: Set[int], owed: Owed | None) -> None:
    """Raise unless each link a trainer reports on is one it was told to write, and is reported once."""
    reports = list(message.reports)
    written = [each.peer for each in reports] + [loss.engine for loss in message.losses] + message.whole
    if len(set(written)) != len(written) or not set(written) <= engines:
        raise ProtocolError(
            f"trainer {trainer} wrote to engine ranks {sorted(written)}, expected a subset of {sorted(engines)}"
        )
    for each in reports:
        expected = each.num_bytes if owed is None else owed.by_engine.get(each.peer, 0)
        if each.num_bytes < 0 or each.num_bytes != expected:
            raise ProtocolError(
                f"trainer {trainer} wrote {each.num_bytes} bytes to engine {each.peer}, expected {expected}"
            )
