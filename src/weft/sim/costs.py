"""The constants of the time model, where each comes from, and the fits that produce them.

Only micro-benchmarks and published stage costs are fitted; everything else is predicted from these (`weft validate`
states the split). Measured rates are this project's own, on one H200 (`docs/LOG.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCost:
    """Time of one write alone: latency + bytes / rate. In a stream: gap and bytes / rate, overlapped.

    `sharpness` is the exponent p of the overlap (gapᵖ + transferᵖ)^(1/p): large is the plain maximum, 1 the sum.
    """

    latency_us: float
    gap_us: float
    gb_per_s: float
    sharpness: float = 32.0

    def single_gbps(self, num_bytes: int) -> float:
        """Throughput of writes posted one after the other."""
        return num_bytes * 8 / (self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)) / 1e9

    def paged_gbps(self, num_bytes: int) -> float:
        """Throughput of many writes in flight."""
        gap_s, transfer_s = self.gap_us * 1e-6, num_bytes / (self.gb_per_s * 1e9)
        longer = max(gap_s, transfer_s)
        overlapped = longer * ((gap_s / longer) ** self.sharpness + (transfer_s / longer) ** self.sharpness) ** (
            1 / self.sharpness
        )
        return num_bytes * 8 / overlapped / 1e9


SINGLE_WRITE_GBPS = {
    "EFA": ((64 << 10, 16.0), (256 << 10, 54.0), (1 << 20, 145.0), (32 << 20, 336.0)),
    "CX7": ((64 << 10, 44.0), (256 << 10, 116.0), (1 << 20, 245.0), (32 << 20, 378.0)),
}
"""Published by fabric-lib (arXiv 2510.27656): Gb/s of single writes by size."""
PAGED_GBPS = {
    "EFA": ((1 << 10, 17.0), (8 << 10, 138.0), (16 << 10, 274.0), (64 << 10, 364.0)),
    "CX7": ((1 << 10, 91.0), (8 << 10, 320.0), (16 << 10, 367.0), (64 << 10, 370.0)),
}
"""Published by fabric-lib: Gb/s of paged writes (many in flight) by page size."""


def fit_writes(nic: str) -> WriteCost:
    """Latency and rate by least squares of relative errors over single writes; gap and sharpness over paged ones."""
    samples = SINGLE_WRITE_GBPS[nic]
    seconds = np.array([size * 8 / (gbps * 1e9) for size, gbps in samples])
    terms = np.array([[1.0, size] for size, _ in samples])
    latency_s, s_per_byte = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(samples)), rcond=None)[0]
    smallest, gbps = PAGED_GBPS[nic][0]
    candidates = [
        WriteCost(
            latency_us=float(latency_s * 1e6),
            gap_us=smallest * 8 / gbps / 1e3,
            gb_per_s=float(1 / s_per_byte / 1e9),
            sharpness=float(sharpness),
        )
        for sharpness in np.geomspace(1, 32, 41)
    ]
    return min(candidates, key=lambda cost: max(abs(error) for error in paged_errors(cost, nic)))


def single_errors(cost: WriteCost, nic: str) -> list[float]:
    """Relative errors over the published single writes."""
    return [cost.single_gbps(size) / gbps - 1 for size, gbps in SINGLE_WRITE_GBPS[nic]]


def paged_errors(cost: WriteCost, nic: str) -> list[float]:
    """Relative errors over the published paged writes."""
    return [cost.paged_gbps(size) / gbps - 1 for size, gbps in PAGED_GBPS[nic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What preparing and committing cost, relative to the device they run on."""

    convert_of_copy: float = 1.19
    """Rate of fused pack + FP8, in source bytes, over the device's one-way copy rate (measured: 2.5 of 2.1 TB/s)."""
    digest_of_copy: float = 1.86
    """Rate of the digest over the one-way copy rate (measured: 3.9 of 2.1 TB/s)."""
    encode_of_copy: float = 0.83
    """Rate of making patches, in bytes of weights, over the one-way copy rate (measured: 1.75 of 2.1 TB/s)."""
    apply_of_copy: float = 2.1
    """Rate of applying BF16 patches of 1%, in bytes of weights, over the one-way copy rate (measured: 4.4 of 2.1 TB/s).

    Other densities and widths are not measured. Assumed: applying takes the time of its memory traffic, which is the
    patch, read once, and every 128-byte cache line with a change in it, read and written (`delta_size.apply_traffic`).
    That alone gives 2.08 at 1%, so the measured rate is one of traffic, and scales with it: 0.96 at 10%, 0.67 at 100%.
    """
    control_s: float = 0.001
    """One round of control messages (assumed)."""
    num_control_rounds: int = 3
    """publish → ready → commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCosts:
    """What `full_tensor()` systems pay, from Perplexity's Kimi-K2 breakdown (1233 ms; arXiv 2510.27656, Table 5)."""

    num_calls: int = 974
    full_tensor_s: float = 0.518
    h2d_s: float = 0.184
    fuse_s: float = 0.018
    quantize_s: float = 0.088
    submit_s: float = 0.026
    wait_s: float = 0.357
    exposed_s: float = 0.042

    @property
    def total_s(self) -> float:
        """The published sum."""
        return self.prepare_s + self.wait_s + self.exposed_s

    @property
    def prepare_s(self) -> float:
        """A rank's own work, without waiting and transfer."""
        return self.h2d_s + self.full_tensor_s + self.fuse_s + self.quantize_s + self.submit_s
