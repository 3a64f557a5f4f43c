"""How members are actually linked: the chosen transports, and how versions land.

Transports move bytes between memory of one kind. Where some members have their weights in CPU memory and others on
GPUs, all links go through host memory: members on GPUs send from pinned Chunks, and receive in a pinned landing area
or window.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from weft.config import DeltaPolicy, ReceiverMode, StagingPolicy, TransferSettings
from weft.core.geometry.alignment import ALIGN
from weft.core.geometry.boxes import Ints
from weft.core.plans.plan import Plan
from weft.core.recipe import Op
from weft.core.streams.plan_streams import PairLinks, chunk_sizes
from weft.devices import CPU, memory_kind
from weft.runtime.control.messages import Join
from weft.transport.capabilities import CAPABILITIES

NUM_SLOTS = 4
"""Chunks of one link that lie in an engine's window at once."""
SMALLEST_SLOT = 64 << 10
NEVER = 1 << 62
"""Runs of this many bytes do not exist."""
FEW_RUNS = 256
"""So many short writes take less time than a window that has to be drained before engines may digest and commit."""


def through_host(trainers: Mapping[int, Join], engines: Mapping[int, Join]) -> bool:
    """Whether links go through host memory, because members hold their weights in different kinds of memory."""
    joins = (*trainers.values(), *engines.values())
    return len({memory_kind(join.place.device) for join in joins}) > 1


def devices_of(joins: Mapping[int, Join]) -> dict[int, str]:
    """Where members have their weights."""
    return {rank: join.place.device for rank, join in joins.items()}


def member_links(
    plan: Plan,
    transports: Mapping[tuple[int, int], str],
    devices: Mapping[int, str],
    settings: TransferSettings,
    *,
    packed: Collection[tuple[int, int]] = (),
) -> PairLinks:
    """The links of a plan, which sets the size of Chunks. `devices`: where the weights of engine ranks lie.

    `packed`: links that carry packed Chunks only.
    """
    shape = plan.topology.num_trainers, plan.topology.num_engines
    is_mapped, min_run_bytes = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.int64)
    for link, transport in transports.items():
        is_mapped[link] = CAPABILITIES[transport].is_mapped and link not in packed
        memory = memory_kind(devices[link[1]])
        shortest = plan.settings.min_write_bytes or plan.topology.min_run_bytes(transport, memory)
        min_run_bytes[link] = NEVER if link in packed else shortest
    is_delta = settings.delta is DeltaPolicy.ON
    is_kept = is_delta or settings.staging is StagingPolicy.CPU
    in_place = settings.mode is ReceiverMode.IN_PLACE
    if in_place and not is_kept and not plan.settings.min_write_bytes:
        min_run_bytes[(min_run_bytes < NEVER) & _has_few_short_runs(plan, min_run_bytes)] = 0
    has_window = np.full(shape, settings.mode is not ReceiverMode.SHADOW) if is_delta else ~is_mapped & in_place
    chunk_bytes = chunk_sizes(is_mapped, plan.settings.chunk_bytes)
    for engine, device in devices.items():
        num_senders = max(int((plan.pair_bytes[:, engine] > 0).sum()), 1)
        share = settings.window_bytes_on(device) // (NUM_SLOTS * num_senders) // ALIGN * ALIGN
        slot = np.minimum(chunk_bytes[:, engine], max(share, SMALLEST_SLOT))
        chunk_bytes[:, engine] = np.where(has_window[:, engine], slot, chunk_bytes[:, engine])
    return PairLinks(
        is_mapped=is_mapped,
        min_run_bytes=min_run_bytes,
        chunk_bytes=chunk_bytes,
        num_slots=np.where(has_window, NUM_SLOTS, 0),
        lands_in_stream=settings.mode is ReceiverMode.SHADOW,
        is_kept=is_kept,
    )


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


def packed_links(
    trainers: Mapping[int, str], engines: Mapping[int, str], settings: TransferSettings
) -> set[tuple[int, int]]:
    """Links through host memory that carry packed Chunks only: transports reach neither weights on a GPU nor live ones.

    `trainers` and `engines`: their devices. An engine rank on a GPU has a landing area, or a window, in host memory.
    """
    lands_beside = settings.mode is ReceiverMode.SHADOW
    return {
        (trainer, engine)
        for trainer, src in trainers.items()
        for engine, dst in engines.items()
        if src != CPU or (dst != CPU and not lands_beside)
    }
