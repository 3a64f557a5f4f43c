"""The Plan: every route of every byte, as immutable columns. Hashed, proven, saved, loaded.

A route is one source box → one destination box, for one engine rank, on a chosen sender. Routes with the same boxes
that go to several engine ranks share a row; `sender[first[i]:first[i + 1]]` are the senders of row i, one for each
rank of its destination group, in rank order. Planning makes plans (`weft.core.planner`), `weft.core.plans.proof` proves
them, `weft.core.plans.plan_file` saves them, schedules and runtimes read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from weft.config import Settings
from weft.core.geometry import boxes
from weft.core.geometry.boxes import Ints
from weft.core.geometry.fingerprint import distinct
from weft.core.geometry.scaling import SCALE_SUFFIX, cut_blocks
from weft.core.layout import Layout
from weft.core.recipe import Op, Recipe, to_destination_dims, to_source_dims
from weft.core.streams.exchange import ScaleGroups
from weft.core.streams.pair_links import PairLinks, Wiring
from weft.core.streams.plan_streams import PlanChunks, plan_chunks
from weft.core.streams.row_boxes import RowBoxes
from weft.core.topology import CUDA, Topology


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An immutable routing table between one trainer layout and one engine recipe.

    >>> from weft.core.case import Case, plan_case
    >>> plan = plan_case(Case(model="qwen2.5-0.5b", trainer="fsdp4", engine="tp2"))
    >>> plan.total_bytes, plan.tx_bytes.tolist()                     # every trainer rank sends a quarter
    (988153344, [247038336, 247038336, 247038336, 247038336])
    """

    model: str
    policy: str
    trainer: Layout
    """With the block scales of quantised tensors appended as tensors of their own."""
    recipe: Recipe
    topology: Topology
    settings: Settings
    piece: NDArray[np.int32]
    """Row of `recipe` each route row is part of."""
    shard: NDArray[np.int32]
    """Row of `trainer` each route row reads."""
    dst_lo: NDArray[np.int32]
    src_lo: NDArray[np.int32]
    extent: NDArray[np.int32]
    """In destination dimension order."""
    first: NDArray[np.int64]
    sender: NDArray[np.int32]
    trainer_memory: str = CUDA
    """Kind of memory trainers have their weights in: `cpu` or `cuda`."""
    engine_memory: str = CUDA
    gathered: bool = False
    """Whether `trainer` describes ranks after a gather of full tensors."""
    ignored: tuple[str, ...] = ()
    """Trainer tensors that are left out on purpose."""

    @property
    def num_rows(self) -> int:
        """Distinct pairs of boxes."""
        return len(self.piece)

    @property
    def num_routes(self) -> int:
        """Routes: every row once per engine rank it goes to."""
        return len(self.sender)

    @cached_property
    def dst(self) -> NDArray[np.int32]:
        """Engine row each route row writes."""
        return self.recipe.dst[self.piece]

    @cached_property
    def row_bytes(self) -> NDArray[np.int64]:
        """Bytes on the wire of one copy of each row: the destination's precision."""
        return boxes.volume(self.extent) * self.recipe.engine.itemsize[self.dst]

    @cached_property
    def receiver(self) -> NDArray[np.int32]:
        """Engine rank of every route, beside `sender`."""
        return self.recipe.engine.groups.expand(self.recipe.engine.group_of[self.dst])

    @cached_property
    def fan_out(self) -> NDArray[np.int64]:
        """Engine ranks each row goes to."""
        return np.diff(self.first)

    @cached_property
    def pair(self) -> NDArray[np.int64]:
        """Sender * number of engines + receiver, of every route."""
        return self.sender.astype(np.int64) * self.topology.num_engines + self.receiver

    @cached_property
    def pair_bytes(self) -> NDArray[np.int64]:
        """Matrix [trainer, engine] of bytes."""
        return self._pair_sum(np.repeat(self.row_bytes, self.fan_out)).astype(np.int64)

    @cached_property
    def row_boxes(self) -> RowBoxes:
        """Rows as boxes of memory."""
        return RowBoxes.of(self, ScaleGroups.of(self))

    @cached_property
    def links(self) -> PairLinks:
        """How pairs are linked if members are where the topology says."""
        return PairLinks.of(self, Wiring.planned(self))

    @cached_property
    def chunks(self) -> PlanChunks:
        """What is written over these links in a version that is sent whole, Chunk by Chunk."""
        return plan_chunks(self, self.links)

    @cached_property
    def pair_writes(self) -> NDArray[np.int64]:
        """Matrix [trainer, engine] of write operations."""
        shape = (self.topology.num_trainers, self.topology.num_engines)
        return self.chunks.pair_sum(self.chunks.num_writes, shape)

    def _pair_sum(self, values: Ints) -> NDArray[np.float64]:
        shape = (self.topology.num_trainers, self.topology.num_engines)
        summed = np.bincount(self.pair, weights=values, minlength=shape[0] * shape[1])
        return np.asarray(summed, dtype=np.float64).reshape(shape)

    @property
    def tx_bytes(self) -> NDArray[np.int64]:
        """Bytes every trainer rank sends."""
        return np.asarray(self.pair_bytes.sum(axis=1))

    @property
    def rx_bytes(self) -> NDArray[np.int64]:
        """Bytes every engine rank receives."""
        return np.asarray(self.pair_bytes.sum(axis=0))

    @property
    def total_bytes(self) -> int:
        """Bytes on all wires together."""
        return int(self.pair_bytes.sum())

    @property
    def num_writes(self) -> int:
        """Write operations of one update."""
        return int(self.pair_writes.sum())

    @cached_property
    def src_extent(self) -> Ints:
        """Extents in source dimension order."""
        return to_source_dims(self.extent, self.recipe.axes[self.piece])

    @cached_property
    def amax_bytes(self) -> int:
        """Bytes holders exchange to agree on the scales of FP8 blocks that shard borders cut."""
        touched, inside = self.touched_blocks
        return int(4 * (touched - inside).sum())

    @cached_property
    def touched_blocks(self) -> tuple[Ints, Ints]:
        """Of every shard that is quantised: how many blocks it touches, and how many of them it holds whole."""
        shards = self.quantized_shards
        tensor = self.trainer.tensor_of[shards]
        sides = self.recipe.block_sides(self.trainer)[tensor]
        return cut_blocks(self.trainer.lo[shards], self.trainer.extent[shards], self.trainer.shapes[tensor], sides)

    @cached_property
    def quantized_shards(self) -> Ints:
        """Rows of `trainer` that some engine takes as FP8."""
        return distinct(self.shard[self.recipe.op[self.piece] == Op.QUANTIZE], len(self.trainer.lo))


def route_boxes(
    recipe: Recipe, trainer: Layout, piece: Ints, shard: Ints
) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Intersections of pieces with shards: dst_lo, src_lo, extent (destination order), and which are not empty."""
    axes = recipe.axes[piece]
    piece_lo = recipe.src_lo[piece]
    lo, extent = boxes.intersect(piece_lo, recipe.src_extent[piece], trainer.lo[shard], trainer.extent[shard])
    dst_lo = recipe.dst_lo[piece] + to_destination_dims(lo - piece_lo, axes, 0)
    overlaps = np.asarray((extent > 0).all(axis=1))
    return dst_lo, lo, to_destination_dims(extent, axes, 1), overlaps


def scale_name(weight: str) -> str:
    """Name of the virtual tensor that holds a weight's block scales on the trainer side."""
    return weight + SCALE_SUFFIX


def piece_sources(recipe: Recipe, sources: Layout) -> Ints:
    """Tensor number, in the layout with scales, that each piece reads; -1 for padding."""
    number = sources.numbers
    plain = np.array([*map(number.get, recipe.sources, repeat(-1)), -1], dtype=np.int64)
    if not (recipe.op == Op.SCALE).any():
        return plain[recipe.src]
    scale = np.array([*map(number.get, map(scale_name, recipe.sources), repeat(-1)), -1], dtype=np.int64)
    return np.where(recipe.op == Op.SCALE, scale[recipe.src], plain[recipe.src])
