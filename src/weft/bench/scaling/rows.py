"""What `weft bench scaling` is asked, and what it finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.bench import payload

SLOW_SHARE = 0.1
"""What the slow host of a run with one carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCase:
    """What is measured."""

    model: str = payload.SMALL
    num_senders: tuple[int, ...] = (1, 2, 4, 8)
    num_receivers: tuple[int, ...] = (8,)
    nic: str = "100mbit"
    num_nics: int = 1
    slow_host: bool = True
    """Whether a sender that carries a tenth is measured as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """Who sends and who receives in one part of a run; every member is a host of its own."""

    num_senders: int
    num_receivers: int
    layout: str = "fsdp"
    """Of trainers: `fsdp`, each has its shards; `ddp`, each has everything."""
    engines: str = "tp"
    """`tp` and `ep`: receivers are the ranks of one engine; `replicas`: each is an engine."""
    precision: str = "bf16"
    """Of engines: `bf16` or `fp8`."""
    slow_share: float | None = None
    """What the last sender carries of the others' rate, after it was planned."""

    @property
    def num_parts(self) -> int:
        """Ranks of one engine."""
        return 1 if self.engines == "replicas" else self.num_receivers

    @property
    def shares_experts(self) -> bool:
        """Whether the ranks of an engine share the experts of a MoE, and nothing else."""
        return self.engines == "ep"

    @property
    def num_bound(self) -> int:
        """Hosts whose NICs bound a version: those of the senders, or of the receivers where these are fewer."""
        return min(self.num_senders, self.num_receivers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One method with so many senders and receivers."""

    method: str
    num_senders: int
    num_receivers: int
    nic_gb_per_s: float
    """The raw rate of one NIC."""
    num_nics: int
    seconds: float
    gb_per_s: float
    fraction_of_nics: float
    """What `planned_bytes` are of the raw rate of all NICs that bound it: those of the senders, or of the receivers."""
    predicted_s: float | None = None
    """From the rate of plain sockets with as many senders; None where the simulator does not know the method."""
    bound_s: float | None = None
    """What the planner says no plan can be faster than, at the same rate."""
    verified: bool | None = None
    """None for plain sockets, which move no weights."""
    cpu_share: float = 0.0
    """How busy the machine's cores were: a network that waits for them is not measured."""
    sent_bytes: int = 0
    """Bytes on the NICs of the senders for one version, as the switches count them, without the headers of packets."""
    planned_bytes: int = 0
    """Bytes of weights one version puts on them, as planned or, for patches, as weft counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """The results of one run."""

    model: str
    num_bytes: int
    """Bytes of one version in BF16, to the most receivers."""
    nic: str
    rows: tuple[ScalingRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)
