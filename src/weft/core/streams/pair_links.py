"""How the pairs of a plan are linked: by which transport, between which memories, and so how their bytes travel.

Before a run the wiring follows from the topology (`Wiring.planned`): members of one host map each other's memory,
others take descriptors. A runtime passes the transports it has chosen. Everything else is derived here, for planner,
simulator and runtime alike.

Transports move bytes between memory of one kind. Where some members have their weights in CPU memory and others on
GPUs, all links go through host memory: members on GPUs send from pinned Chunks, and receive in a pinned landing area
or window.

    links = PairLinks.of(plan, Wiring.planned(plan))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from weft.config import DeltaPolicy, ReceiverMode, StagingPolicy
from weft.core.geometry.alignment import ALIGN
from weft.core.geometry.boxes import Ints
from weft.core.recipe import Op
from weft.core.streams.carriage import Carriage
from weft.core.topology import CPU, CUDA

if TYPE_CHECKING:
    from weft.core.plans.plan import Plan

Int64s = NDArray[np.int64]
MAPPED = frozenset({"local", "shm", "cuda_ipc"})
"""Transports over which the sender's own instructions write the engine's memory."""
LARGEST_SENT = 256 << 20
"""Largest Chunk of links that take descriptors: long enough for any network card, and short enough to be on its way
while the next weights are still being copied and converted."""
NUM_SLOTS = 4
"""Chunks of one link that lie in an engine's window at once."""
SMALLEST_SLOT = 64 << 10
NEVER = 1 << 62
"""Runs of this many bytes do not exist."""
FEW_RUNS = 256
"""So many short writes take less time than a window that has to be drained before engines may digest and commit."""
_NEAR = {CPU: "shm", CUDA: "cuda_ipc"}
"""What members of one host use, by the kind of memory."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What carries each pair's bytes, and where both ends have their weights."""

    names: tuple[str, ...]
    """Transports."""
    transport: NDArray[np.int8]
    """Matrix [trainer, engine]: the number of the pair's transport."""
    trainer_memory: tuple[str, ...]
    """Kind of memory of every trainer's weights: `cpu` or `cuda`."""
    engine_memory: tuple[str, ...]

    @classmethod
    def of(
        cls, transports: Mapping[tuple[int, int], str], trainer_memory: Sequence[str], engine_memory: Sequence[str]
    ) -> Self:
        """What was chosen for each pair."""
        names = tuple(sorted(set(transports.values())))
        matrix = np.zeros((len(trainer_memory), len(engine_memory)), dtype=np.int8)
        for pair, name in transports.items():
            matrix[pair] = names.index(name)
        return cls(
            names=names, transport=matrix, trainer_memory=tuple(trainer_memory), engine_memory=tuple(engine_memory)
        )

    @classmethod
    def planned(cls, plan: Plan) -> Self:
        """What a controller chooses for members that are where the plan says."""
        topology, wanted = plan.topology, plan.settings.transport
        moved = CPU if plan.trainer_memory != plan.engine_memory else plan.engine_memory
        return cls(
            names=("nixl", _NEAR[moved]) if wanted == "auto" else (wanted, wanted),
            transport=topology.shares_host.astype(np.int8),
            trainer_memory=(plan.trainer_memory,) * topology.num_trainers,
            engine_memory=(plan.engine_memory,) * topology.num_engines,
        )

    @property
    def passes_host(self) -> bool:
        """Whether links go through host memory, because members hold their weights in different kinds of memory."""
        return len({*self.trainer_memory, *self.engine_memory}) > 1

    def packs_all(self, mode: ReceiverMode) -> NDArray[np.bool_]:
        """Links through host memory that carry packed Chunks only: transports reach neither weights on a GPU nor live
        ones. An engine rank on a GPU has a landing area, or a window, in host memory."""
        src_is_far = np.array([memory != CPU for memory in self.trainer_memory], dtype=bool)
        dst_is_far = np.array([memory != CPU for memory in self.engine_memory], dtype=bool)
        reached = src_is_far[:, None] | (dst_is_far[None, :] & (mode is not ReceiverMode.SHADOW))
        return reached & self.passes_host

    def is_mapped(self, mode: ReceiverMode) -> NDArray[np.bool_]:
        """Links over which trainers write the engine's memory by their own instructions."""
        return np.array([name in MAPPED for name in self.names])[self.transport] & ~self.packs_all(mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLinks:
    """How the pairs of a plan are linked, as matrices [trainer, engine]."""

    is_mapped: NDArray[np.bool_]
    """Whether the trainer's own instructions write the engine's memory."""
    min_run_bytes: Int64s
    """Shorter runs are packed."""
    chunk_bytes: Int64s
    num_slots: Int64s
    """Of the window packed Chunks pass through; 0: none."""
    lands_in_stream: bool = True
    """Whether versions land in stream order; otherwise where they belong."""
    is_kept: bool = False
    """Whether trainers keep an image of what they send."""

    @classmethod
    def of(cls, plan: Plan, wiring: Wiring) -> Self:
        """The links of a plan."""
        settings = plan.settings
        is_mapped, min_run_bytes = wiring.is_mapped(settings.mode), _shortest_runs(plan, wiring)
        is_delta = settings.delta is DeltaPolicy.ON
        is_kept = is_delta or settings.staging is StagingPolicy.CPU
        in_place = settings.mode is ReceiverMode.IN_PLACE
        if in_place and not is_kept and not settings.min_write_bytes:
            min_run_bytes[(min_run_bytes < NEVER) & _has_few_short_runs(plan, min_run_bytes)] = 0
        whole_beside = settings.mode is ReceiverMode.SHADOW
        has_window = np.full(is_mapped.shape, not whole_beside) if is_delta else ~is_mapped & in_place
        return cls(
            is_mapped=is_mapped,
            min_run_bytes=min_run_bytes,
            chunk_bytes=_chunk_sizes(plan, wiring, is_mapped, has_window),
            num_slots=np.where(has_window, NUM_SLOTS, 0),
            lands_in_stream=whole_beside,
            is_kept=is_kept,
        )

    def coarser(self, chunk_bytes: int) -> Self:
        """With Chunks of at least this size."""
        return replace(self, chunk_bytes=np.maximum(self.chunk_bytes, chunk_bytes))

    def carriage(self, trainer: int, engine: int) -> Carriage:
        """How one link carries its stream."""
        link = trainer, engine
        return Carriage(
            chunk_bytes=int(self.chunk_bytes[link]),
            min_run_bytes=int(self.min_run_bytes[link]),
            is_mapped=bool(self.is_mapped[link]),
            lands_in_stream=self.lands_in_stream,
            is_kept=self.is_kept,
            num_slots=int(self.num_slots[link]),
        )


def _shortest_runs(plan: Plan, wiring: Wiring) -> Int64s:
    """The shortest runs that are worth a write of their own."""
    of_memory = {
        memory: np.array([plan.topology.min_run_bytes(name, memory) for name in wiring.names])
        for memory in set(wiring.engine_memory)
    }
    shortest = np.stack([of_memory[memory] for memory in wiring.engine_memory])
    found = shortest[np.arange(len(wiring.engine_memory))[None, :], wiring.transport]
    asked = plan.settings.min_write_bytes
    return np.where(wiring.packs_all(plan.settings.mode), NEVER, asked or found)


def _chunk_sizes(plan: Plan, wiring: Wiring, is_mapped: NDArray[np.bool_], has_window: NDArray[np.bool_]) -> Int64s:
    """The largest Chunk of every link: a window's share, where there is one."""
    most = plan.settings.chunk_bytes_on(plan.engine_memory)
    sizes = np.where(is_mapped, most, min(most, LARGEST_SENT)).astype(np.int64)
    num_senders = np.maximum((plan.pair_bytes > 0).sum(axis=0), 1)
    window = np.array([plan.settings.window_bytes_on(memory) for memory in wiring.engine_memory])
    share = window // (NUM_SLOTS * num_senders) // ALIGN * ALIGN
    return np.where(has_window, np.minimum(sizes, np.maximum(share, SMALLEST_SLOT)), sizes)


def _has_few_short_runs(plan: Plan, min_run_bytes: Ints) -> NDArray[np.bool_]:
    """Links on which nothing is converted, and only a few runs are too short to go straight."""
    rows = plan.row_boxes
    run_bytes = rows.run_bytes(lands_in_stream=False)
    is_copy = rows.op == Op.COPY
    num_runs = np.where(is_copy, plan.row_bytes // run_bytes, FEW_RUNS + 1)
    row = np.repeat(np.arange(plan.num_rows), plan.fan_out)
    is_packed = ~is_copy[row] | (run_bytes[row] < min_run_bytes.ravel()[plan.pair])
    packed = np.bincount(plan.pair, weights=num_runs[row] * is_packed, minlength=min_run_bytes.size)
    return packed.reshape(min_run_bytes.shape) <= FEW_RUNS
