"""An engine's host is cut off in the middle of a version: how long everybody else waits, with weft and with Gloo."""

from __future__ import annotations

import time
from typing import Any

from weft.bench.scaling.lab_fleet import LabFleet
from weft.bench.scaling.rows import FleetShape, ScalingCase
from weft.bench.scaling.run import OpenFleet, start_fleet
from weft.config import TransferSettings
from weft.lab import Lab, alike

NIC = "60mbit"
SILENCE_S, VERSION_S = 5.0, 60.0
CUT_AFTER_S = 1.0
"""A version takes several seconds."""
GLOO_WAIT_S = 60.0
"""How long is waited for what never ends."""
VICTIM, OTHER = 1, 0
"""Engine ranks, which are on the hosts of the same numbers."""


def measure_cut_host() -> dict[str, Any]:
    """Seconds from the cut until all others knew, and what they were told."""
    case, fleet = ScalingCase(), FleetShape(num_senders=1, num_receivers=2)
    with Lab(alike(hosts=4, nic=NIC)) as lab:
        with start_fleet(lab, case, fleet) as processes:
            found = _with_weft(lab, processes)
        processes = start_fleet(lab, case, fleet)
        try:
            found |= _with_gloo(lab, processes)
        finally:
            processes.kill()
    return found


def _with_weft(lab: Lab, processes: LabFleet) -> dict[str, Any]:
    settings = TransferSettings(transport="nixl", silence_s=SILENCE_S, version_s=VERSION_S)
    with OpenFleet(processes, settings):
        engines = processes.ask("engine", "receive")
        assert _publish(processes, 1)[0]
        _take_again(processes, engines, within_s=VERSION_S)
        publishing = processes.ask("trainer", "publish", version=2, start=processes.soon())
        time.sleep(CUT_AFTER_S)
        lab.cut(VICTIM)
        began = time.monotonic()
        (outcome,) = processes.outcomes(publishing, within_s=2 * VERSION_S)
        ended_s = time.monotonic() - began
        assert outcome is not None
        assert not outcome[0], "the version was committed without the host that was cut off"
        lab.heal(VICTIM)
        healed, version = time.monotonic(), 3
        while not _publish(processes, version)[0]:
            version += 1
            _take_again(processes, engines, within_s=0.1)
        next_s = time.monotonic() - healed
        processes.outcomes(engines, within_s=VERSION_S)
    return {
        "silence_s": SILENCE_S,
        "weft_ended_s": ended_s,
        "weft_said": outcome[1],
        "weft_next_committed_s": next_s,
    }


def _publish(processes: LabFleet, version: int) -> tuple[bool, Any]:
    (outcome,) = processes.outcomes(
        processes.ask("trainer", "publish", version=version, start=processes.soon()), within_s=2 * VERSION_S
    )
    assert outcome is not None, f"the publication of version {version} did not end"
    return outcome


def _take_again(processes: LabFleet, engines: list[tuple[str, int]], *, within_s: float) -> None:
    """Engines that have taken a version, or were told that they cannot, wait for the next."""
    for engine in engines:
        if processes.outcomes([engine], within_s=within_s)[0] is not None:
            processes.ask_these([engine], "receive")


def _with_gloo(lab: Lab, processes: LabFleet) -> dict[str, Any]:
    processes.ask("engine", "broadcast")
    sending = processes.ask("trainer", "broadcast", start=processes.soon(), gather=False)
    time.sleep(CUT_AFTER_S)
    lab.cut(VICTIM)
    began = time.monotonic()
    ended = processes.outcomes([*sending, ("engine", OTHER)], within_s=GLOO_WAIT_S)
    return {
        "gloo_waited_s": time.monotonic() - began,
        "gloo_ended": [None if outcome is None else str(outcome[1]) for outcome in ended],
    }


if __name__ == "__main__":
    print(measure_cut_host())
