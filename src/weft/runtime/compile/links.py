"""How members are actually linked: the chosen transports, and how versions land."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.config import DeltaPolicy, ReceiverMode, StagingPolicy, TransferSettings
from weft.core.geometry.alignment import ALIGN
from weft.core.plans.plan import Plan
from weft.core.streams.plan_streams import PairLinks
from weft.devices import memory_kind
from weft.transport.capabilities import CAPABILITIES

NUM_SLOTS = 4
"""Chunks of one link that lie in an engine's window at once."""
SMALLEST_SLOT = 64 << 10


def member_links(
    plan: Plan, transports: Mapping[tuple[int, int], str], devices: Mapping[int, str], settings: TransferSettings
) -> PairLinks:
    """The links of a plan, which sets the size of Chunks. `devices`: where the weights of engine ranks lie."""
    shape = plan.topology.num_trainers, plan.topology.num_engines
    is_mapped, min_run_bytes = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.int64)
    for link, transport in transports.items():
        is_mapped[link] = CAPABILITIES[transport].is_mapped
        memory = memory_kind(devices[link[1]])
        min_run_bytes[link] = plan.settings.min_write_bytes or plan.topology.min_run_bytes(transport, memory)
    is_delta = settings.delta is DeltaPolicy.ON
    in_place = settings.mode is ReceiverMode.IN_PLACE
    has_window = np.full(shape, settings.mode is not ReceiverMode.SHADOW) if is_delta else ~is_mapped & in_place
    chunk_bytes = np.empty(shape, dtype=np.int64)
    for engine, device in devices.items():
        chunk_bytes[:, engine] = plan.settings.chunk_bytes
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
        is_kept=is_delta or settings.staging is StagingPolicy.CPU,
    )
