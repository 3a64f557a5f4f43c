"""`weft bench fp8`: BF16 shards to an FP8 engine, by exchanging magnitudes and by gathering full tensors, in one run.

Trainers hold FSDP2 shards whose borders lie inside blocks. Both ways end when the engine has committed the version;
afterwards every code and every scale is compared with quantising whole tensors in plain torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from weft.bench import gathering, payload
from weft.bench.fleet import Fleet
from weft.bench.worker import start_fleet
from weft.config import ReceiverMode, TransferSettings
from weft.runtime.controller.controller import Controller

Say = Callable[[str], None]
WARM_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Row:
    """One way to FP8."""

    method: str
    seconds: float
    """From the start until the engine has committed."""
    before_sending_s: float
    """Until FP8 could be sent: the gather and quantising; finding magnitudes and quantising. Stages of the longest
    trainer, added up although weft overlaps them."""
    exchanged_bytes: int
    """Bytes the trainers exchanged."""
    wire_bytes: int
    """Bytes sent to the engine."""
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Report:
    """The results of one run."""

    model: str
    num_trainers: int
    source_bytes: int
    """Of the matrices that are quantised, in BF16."""
    rows: tuple[Fp8Row, ...]

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


def measure(model_name: str, *, num_trainers: int, repeat: int, say: Say) -> Fp8Report:
    """Both ways, over the same processes."""
    model = payload.load_payload(model_name)
    say(f"starting {num_trainers} trainers and an FP8 engine")
    with start_fleet(
        num_trainers=num_trainers, num_engine_ranks=1, num_parts=1, model=model_name, precision="fp8"
    ) as fleet:
        fleet.call("trainer", "fill_normal")
        versions = iter(range(1, 10_000))
        rows = (
            _exchanged(fleet, versions, repeat, say),
            _gathered(fleet, versions, repeat, say, gathering.gathered_bytes(model, num_trainers)),
        )
    source_bytes = sum(2 * t.num_elements for t in model.policy_tensors if t.quantized)
    return Fp8Report(model=model_name, num_trainers=num_trainers, source_bytes=source_bytes, rows=rows)


def _exchanged(fleet: Fleet, versions: Any, repeat: int, say: Say) -> Fp8Row:
    say("weft: magnitudes of cut blocks are exchanged")
    times, before = [], []
    with _controller(fleet) as controller:
        fleet.call("engine", "open", address=controller.address)
        fleet.call("trainer", "open", address=controller.address)
        for _ in range(WARM_UP + repeat):
            version = next(versions)
            fleet.call("trainer", "advance_normal", version=version)
            times.append(_publish(fleet, "publish", version)[0])
            busy = [sending["stages"] for sending in fleet.call("trainer", "last_sending")]
            before.append(max(stages["amax"] + stages["convert"] for stages in busy))
        exact = all(fleet.call("engine", "verify_fp8", version=version))
        found = controller.statistics()
        _shut(fleet)
    return Fp8Row(
        method="weft: exchange magnitudes",
        seconds=statistics.median(times[WARM_UP:]),
        before_sending_s=statistics.median(before[WARM_UP:]),
        exchanged_bytes=found.last_magnitude_bytes,
        wire_bytes=found.last_wire_bytes,
        exact=exact,
    )


def _gathered(fleet: Fleet, versions: Any, repeat: int, say: Say, gathered_bytes: int) -> Fp8Row:
    say("full tensors are gathered on every trainer (Gloo)")
    times, before = [], []
    with _controller(fleet) as controller:
        fleet.call("engine", "open", address=controller.address)
        fleet.call("trainer", "open_quantized", address=controller.address)
        for _ in range(WARM_UP + max(repeat // 2, 1)):
            version = next(versions)
            fleet.call("trainer", "advance_normal", version=version)
            seconds, made = _publish(fleet, "gather_and_publish", version)
            times.append(seconds)
            before.append(made)
        exact = all(fleet.call("engine", "verify_fp8", version=version))
        wire_bytes = controller.statistics().last_wire_bytes
        _shut(fleet)
    return Fp8Row(
        method="gather full tensors, quantise",
        seconds=statistics.median(times[WARM_UP:]),
        before_sending_s=statistics.median(before[WARM_UP:]),
        exchanged_bytes=gathered_bytes,
        wire_bytes=wire_bytes,
        exact=exact,
    )


def _controller(fleet: Fleet) -> Controller:
    settings = TransferSettings(mode=ReceiverMode.IN_PLACE)
    return Controller(num_trainers=fleet.num_trainers, num_engine_ranks=1, settings=settings)


def _publish(fleet: Fleet, how: str, version: int) -> tuple[float, float]:
    """Seconds until the engine has committed, and the last number trainers give."""
    fleet.call("engine", "spoil")
    receiving = fleet.ask("engine", "receive")
    spans = fleet.answers(fleet.ask("trainer", how, version=version, start=fleet.soon()), receiving)[0]
    return max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans), max(last for *_, last in spans)


def _shut(fleet: Fleet) -> None:
    for side in ("trainer", "engine"):
        fleet.call(side, "shut")
