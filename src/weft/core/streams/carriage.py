"""How one link carries its stream: planner, simulator and both ends of the link choose paths by it."""

from __future__ import annotations

import msgspec


class Carriage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one link carries its stream; the same for both of its ends."""

    chunk_bytes: int
    min_run_bytes: int
    """Shorter runs are packed."""
    is_mapped: bool
    """Whether the trainer's own instructions write the engine's memory."""
    lands_in_stream: bool
    """Whether bytes land in stream order; otherwise where they belong."""
    is_kept: bool
    """Whether everything passes through an image the trainer keeps."""
    num_slots: int = 0
    """Packed Chunks that fit in the engine's window at once, which it drains; 0: no window."""
