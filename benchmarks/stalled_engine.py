"""One of two engines stops responding, while its process lives: how long the other waits; writes results/stalled.json.

`commit`: it is told to commit a version and does not. `pause`: it does not pause for a version in place. Both with a
quorum of one engine. What other versions take is beside it.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from typing import Any

import numpy as np

import machine
import weft
from recording import RESULTS
from weft.core.version import CommitPolicy

LIMIT_S = 2.0
WAIT_S = 30.0
NUM_ELEMENTS = 1_000_000


class Engine:
    """Takes versions on a thread of its own, until told to stand still."""

    def __init__(self, address: str, rank: int) -> None:
        self.is_standing = threading.Event()
        weights = weft.Weights.from_arrays({"w": np.zeros(NUM_ELEMENTS, np.float32)})
        self._receiver = weft.Receiver(address, rank=rank, weights=weights)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends.is_set():
            update = None if self.is_standing.is_set() else self._poll()
            if update is not None:
                update.commit(WAIT_S)
            else:
                time.sleep(0.001)

    def _poll(self) -> Any:
        try:
            return self._receiver.poll()
        except weft.WeftError:  # it was dropped, and joins again
            return None

    def close(self) -> None:
        self._ends.set()
        self._thread.join(WAIT_S)
        self._receiver.close()


def measure(mode: str) -> dict[str, Any]:
    """Seconds of the version during which an engine stands still, and of those before and after."""
    settings = weft.TransferSettings(mode=mode, commit_s=LIMIT_S, pause_s=LIMIT_S, version_s=WAIT_S)
    with weft.Controller(
        num_trainers=1, num_engine_ranks=2, commit_policy=CommitPolicy.QUORUM, quorum=1, settings=settings
    ) as controller:
        engines = [Engine(controller.address, rank) for rank in range(2)]
        trained = weft.Weights.from_arrays({"w": np.ones(NUM_ELEMENTS, np.float32)})
        with weft.Sender(controller.address, rank=0, weights=trained) as sender:
            usual = [publish(sender, version) for version in range(1, 6)]
            engines[1].is_standing.set()
            stalled = publish(sender, 6)
            after = [publish(sender, version) for version in range(7, 12)]
            lost = controller.statistics().lost
        for engine in engines:
            engine.close()
    return {
        "mode": mode,
        "limit_s": LIMIT_S,
        "usual_s": statistics.median(usual[1:]),
        "stalled_s": stalled,
        "after_s": statistics.median(after),
        "after_longest_s": max(after),
        "said": lost,
    }


def publish(sender: weft.Sender, version: int) -> float:
    """Seconds until all engines that take part serve a version."""
    began = time.monotonic()
    sender.publish(version=version).wait_committed(WAIT_S)
    return time.monotonic() - began


if __name__ == "__main__":
    found = {"machine": machine.describe(), "rows": [measure(mode) for mode in ("shadow", "in_place")]}
    (RESULTS / "stalled.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for row in found["rows"]:
        print(row)
