"""How one tensor travels: the routes of a plan that read or write it, in readable form."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from weft.core.geometry.boxes import Ints
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.streams.plan_streams import PairLinks
from weft.core.streams.stream import Path
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One row of a plan: the same boxes, to one or more engine ranks."""

    tensor: str
    receivers: tuple[int, ...]
    dst_lo: tuple[int, ...]
    extent: tuple[int, ...]
    op: str
    source: str
    src_lo: tuple[int, ...]
    axes: tuple[int, ...]
    """Source dimension of each destination dimension; -1 where the source has none."""
    holders: tuple[int, ...]
    senders: tuple[int, ...]
    """One for each receiver."""
    path: str
    num_bytes: int
    """Of one copy."""
    num_writes: int
    """Of one copy; 0: packed together with others, or written by the sender's own instructions."""


def explain(plan: Plan, name: str) -> list[Explanation]:
    """All routes of an engine tensor, or of a trainer tensor, by name."""
    engine_rows = [i for i, tensor in enumerate(plan.recipe.engine.tensors) if tensor.name == name]
    source_rows = [i for i, tensor in enumerate(plan.trainer.tensors) if tensor.name == name]
    if not engine_rows and not source_rows:
        known = {tensor.name for tensor in (*plan.recipe.engine.tensors, *plan.trainer.tensors)}
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "use a name of the checkpoint or of the engine"
        raise ConfigError(f"the plan has no tensor `{name}`", hint=hint)
    written = np.isin(plan.dst, engine_rows)
    read = np.isin(plan.trainer.tensor_of[plan.shard], source_rows)
    return [_row(plan, int(row)) for row in np.flatnonzero(written | read)]


def _row(plan: Plan, row: int) -> Explanation:
    tensor = plan.recipe.engine.tensors[plan.dst[row]]
    shard = int(plan.shard[row])
    source = plan.trainer.tensors[plan.trainer.tensor_of[shard]]
    routes = slice(plan.first[row], plan.first[row + 1])
    path, num_writes = _travels(plan, row, routes)
    return Explanation(
        tensor=tensor.name,
        receivers=_ints(plan.receiver[routes]),
        dst_lo=_ints(plan.dst_lo[row])[: len(tensor.shape)],
        extent=_ints(plan.extent[row])[: len(tensor.shape)],
        op=Op(int(plan.recipe.op[plan.piece[row]])).name.lower(),
        source=source.name,
        src_lo=_ints(plan.src_lo[row])[: len(source.shape)],
        axes=_ints(plan.recipe.axes[plan.piece[row]])[: len(tensor.shape)],
        holders=_ints(plan.trainer.groups.of(int(plan.trainer.group_of[shard]))),
        senders=_ints(plan.sender[routes]),
        path=path,
        num_bytes=int(plan.row_bytes[row]),
        num_writes=num_writes,
    )


def _travels(plan: Plan, row: int, routes: slice) -> tuple[str, int]:
    """How a row travels (`direct` on one host, else `zero_copy` or `packed`), and its own writes, if any."""
    links = PairLinks.planned(plan.topology, plan.settings)
    if links.is_mapped[plan.sender[routes], plan.receiver[routes]].all():
        return Path.DIRECT.name.lower(), 0
    boxes = plan.row_boxes
    run_bytes = int(boxes.run_bytes(lands_in_stream=True)[row])
    is_long = boxes.op[row] == Op.COPY and run_bytes >= int(links.min_run_bytes[0, 0])
    if not is_long:
        return Path.PACKED.name.lower(), 0
    writes_per_run = -(-run_bytes // int(links.chunk_bytes.min()))
    return Path.ZERO_COPY.name.lower(), int(plan.row_bytes[row]) // run_bytes * writes_per_run


def _ints(values: Ints) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
