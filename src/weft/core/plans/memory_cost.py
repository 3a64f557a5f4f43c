"""What keeping versions costs in memory, computed from the plan before anything runs.

- `staging="cpu"` keeps what a trainer sends in host memory, once for all engine ranks that get the same bytes.
- Patches (`delta`) keep it twice: what the engines hold, and what comes next.
- Engines keep a second copy in mode `shadow`. With patches they keep room for these, a small share of the weights, and
  in modes `patch` and `in_place` a window for versions that are sent whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.geometry.boxes import Ints
from weft.core.plans.plan import Plan
from weft.core.streams.landing_areas import landing_room, patch_room


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """Bytes of the rank that needs most; `_host` of the host with most such ranks."""

    staging_bytes: int
    """Of a trainer, with `staging="cpu"`: host memory."""
    staging_host_bytes: int
    delta_bytes: int
    """Of a trainer, with `delta`: memory of the device, or of the host with `staging="cpu"`."""
    landing_bytes: int
    """Of an engine rank, in the plan's mode: a second copy in mode `shadow`, otherwise the window."""
    shadow_bytes: int
    """Of an engine rank, if it were mode `shadow`."""
    patch_bytes: int
    """Of an engine rank, with `delta`; the window, or the second copy, comes on top."""


def memory_cost(plan: Plan) -> MemoryCost:
    """Memory needed on top of the weights themselves."""
    images = image_bytes(plan)
    chunks = plan.chunks
    patches = patch_room(chunks.pair_sum(chunks.num_bytes, plan.pair_bytes.shape), plan.settings.patch_share)
    streams = np.bincount(chunks.receiver, weights=chunks.room, minlength=plan.topology.num_engines)
    host = plan.topology.host_of(plan.topology.trainer_device)
    return MemoryCost(
        staging_bytes=int(images.max(initial=0)),
        staging_host_bytes=int(np.bincount(host, weights=images).max(initial=0)),
        delta_bytes=2 * int(images.max(initial=0)),
        landing_bytes=int(landing_room(plan.links, chunks).sum(axis=0).max(initial=0)),
        shadow_bytes=int(streams.max(initial=0)),
        patch_bytes=int(patches.sum(axis=0).max(initial=0)),
    )


def image_bytes(plan: Plan) -> Ints:
    """Bytes every trainer sends, counting equal links once."""
    number = np.repeat(np.arange(plan.num_rows, dtype=np.uint64), plan.fan_out)
    mixed = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    content = np.zeros(plan.pair_bytes.size, dtype=np.uint64)
    np.add.at(content, plan.pair, mixed ^ (mixed >> np.uint64(27)))
    sender = np.repeat(np.arange(plan.topology.num_trainers), plan.topology.num_engines)
    alike = np.stack([sender.astype(np.uint64), content], axis=1)
    _, first = np.unique(alike, axis=0, return_index=True)
    sizes = plan.pair_bytes.reshape(-1)[first]
    return np.bincount(sender[first], weights=sizes, minlength=plan.topology.num_trainers).astype(np.int64)
