"""What is stormed: transport, mode, sizes and deadlines. Both sides derive everything else from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRANSPORTS = ("shm", "cma", "nixl")
MODES = ("shadow", "in_place", "patch")
ROW = 1024
"""Elements of a row; a tensor has `rows` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormSettings:
    """One storm."""

    transport: str = "shm"
    mode: str = "shadow"
    num_trainers: int = 2
    num_engine_ranks: int = 2
    ranks_per_engine: int = 1
    quorum: int = 0
    """Engines a version needs; 0: all."""
    num_tensors: int = 4
    precision: str = "fp32"
    """Of engines; trainers hold FP32. `fp8`: not with patches, whose contents are others."""
    rows: int = 1024
    silence_s: float = 1.5
    version_s: float = 6.1
    turn_s: float = 7.0
    """How long a publication waits for its turn."""

    @property
    def is_sparse(self) -> bool:
        """Whether only a part of the elements changes from version to version."""
        return self.mode == "patch"

    @property
    def num_bytes(self) -> int:
        """Of one copy of the weights."""
        return self.num_tensors * self.rows * ROW * 4

    @property
    def engine_bytes(self) -> int:
        """Of the weights one engine rank holds."""
        return self.num_bytes // self.ranks_per_engine // (4 if self.precision == "fp8" else 1)

    @property
    def end_s(self) -> float:
        """When every publication must have ended: its turn, its version, a lost member, and a busy machine."""
        return self.turn_s + self.version_s + 2 * self.silence_s + 10.0

    def transfer(self) -> dict[str, Any]:
        """As weft's controller takes them. In place, everything passes through windows of many small slots, where the
        transport takes descriptors."""
        return {
            "min_write_bytes": 8 << 20 if self.mode == "in_place" else 0,
            "window_bytes": 1 << 20,
            "transport": self.transport,
            "mode": self.mode,
            "delta": "on" if self.mode == "patch" else "off",
            "beat_s": self.silence_s / 5,
            "silence_s": self.silence_s,
            "version_s": self.version_s,
            "nixl_devices": "lo",
        }
