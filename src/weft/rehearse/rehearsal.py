"""A rehearsal: members of a case join a real controller, get and compile their parts, and commit some versions.

report = rehearse(PRESETS["chen-kimi-k2"].case(), num_killed=2)
report.planned_s, report.longest_silence_s, report.controller_cpu_ms_per_version
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config import LARGEST_CHUNK, TransferSettings
from weft.core.case import Case, case_cluster, case_ranks
from weft.errors import ConfigError, TransferTimeout
from weft.observe.memory import PeakMemory, peak_rss_bytes
from weft.rehearse.cast import Cast
from weft.rehearse.process import Name, TroupeSetup, divided, raise_file_limit
from weft.rehearse.transport import STANDS_FOR, Board
from weft.runtime.controller.controller import Controller

PLANNED_S = 1200.0
VERSION_S = 600.0
IDLE_S = 2.0
LOOK_S = 0.02
SILENCE_S = 5.0
SHARING_S = 0.2
"""Longer silence that each member is allowed because all share this machine; the controller is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalReport:
    """What a rehearsal found. Seconds are of this machine, which all members share."""

    num_trainers: int
    num_engine_ranks: int
    joined_s: float
    """Until all members had joined."""
    plan_s: float
    """Making the plan, and what engines have to open."""
    ship_s: float
    """From the plan until every member was sent its part; memory is opened meanwhile."""
    planned_s: float
    """From the first join until every member has compiled its part."""
    compile_s: float
    """Of the slowest member."""
    shipped_bytes: int
    max_shipped_bytes: int
    """Of the member that was sent most."""
    longest_silence_s: float
    """The longest time a process waited for a heartbeat of the controller."""
    num_versions: int
    version_s: float
    """From the first trainer's request to write until the last engine's commit, of the last version."""
    magnitude_bytes: int
    """Magnitudes of FP8 blocks that trainers exchanged for a version."""
    controller_cpu_ms_per_version: float
    """Of its thread, for messages other than heartbeats."""
    heartbeat_cpu_share: float
    """Share of one core that heartbeats take."""
    num_writes: int
    planned_writes: int
    bytes_per_version: int
    controller_rss_bytes: int
    peak_rss_bytes: int
    """The most that all processes had at one moment, looked at twice a second."""
    num_killed: int = 0
    noticed_s: float = 0.0
    """From the loss of members until the controller had noticed all."""
    returned_s: float = 0.0
    """From their return until all members had a plan again."""
    is_plan_kept: bool = True
    """Whether nothing had to be planned for that."""


def rehearse(
    case: Case,
    *,
    num_versions: int = 3,
    num_killed: int = 0,
    num_processes: int = 0,
    events: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RehearsalReport:
    """Rehearse a case. `num_killed` members are killed after the versions, and return. `events`: file for events."""
    ranks = case_ranks(case)
    members: list[Name] = [("trainer", rank) for rank in range(ranks.num_trainers)]
    members += [("engine", rank) for rank in range(ranks.num_engine_ranks)]
    if num_killed > len(members) // 2:
        raise ConfigError(f"{num_killed} of {len(members)} members cannot be killed", hint="kill at most half of them")
    raise_file_limit()
    victims = [members[len(members) * number // num_killed] for number in range(num_killed)]
    others = [member for member in members if member not in victims]
    groups = [(victim,) for victim in victims] + divided(others, num_processes or os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="weft-rehearse-") as folder:
        board = Board(
            path=Path(folder) / "board", num_trainers=ranks.num_trainers, num_engine_ranks=ranks.num_engine_ranks
        )
        board.make()
        on_progress(f"laying out {len(members)} members in {len(groups)} processes")
        with Cast([TroupeSetup(case=case, members=group, board=board) for group in groups]) as cast:
            return _Rehearsal(case, cast, num_killed, events, on_progress).run(num_versions)


class _Rehearsal:
    """One controller and one cast."""

    def __init__(
        self, case: Case, cast: Cast, num_killed: int, events: Path | None, on_progress: Callable[[str], None]
    ) -> None:
        self._cast, self._victims, self._say = cast, range(num_killed), on_progress
        ranks = case_ranks(case)
        self._num_members = ranks.num_trainers + ranks.num_engine_ranks
        self._facts: dict[str, Any] = {"num_trainers": ranks.num_trainers, "num_engine_ranks": ranks.num_engine_ranks}
        self._controller = Controller(
            num_trainers=ranks.num_trainers,
            num_engine_ranks=ranks.num_engine_ranks,
            ranks_per_engine=ranks.ranks_per_engine,
            settings=TransferSettings(
                transport=STANDS_FOR,
                staging_bytes=4 * LARGEST_CHUNK,
                version_s=VERSION_S,
                silence_s=max(SILENCE_S, self._num_members * SHARING_S),
            ),
            policy=case.policy,
            topology=case_cluster(case),
            ignore=case.ignore,
            events=events,
        )

    def run(self, num_versions: int) -> RehearsalReport:
        """All of it."""
        with self._controller as controller, PeakMemory(self._cast.processes) as memory:
            self._cast.watch(controller.address)
            self._plan()
            silent_s = self._cast.longest_silence_s()
            self._publish(num_versions)
            if self._victims:
                self._lose_and_return(num_versions)
            self._facts["longest_silence_s"] = max(silent_s, self._cast.longest_silence_s())
        return RehearsalReport(**self._facts, controller_rss_bytes=peak_rss_bytes(), peak_rss_bytes=memory.peak_bytes)

    def _plan(self) -> None:
        """Let all members join and compile their parts."""
        self._say("members are joining")
        began = time.monotonic()
        self._cast.ask("join", address=self._controller.address)
        self._wait(lambda: len(self._controller.statistics().members) == self._num_members)
        self._facts["joined_s"] = time.monotonic() - began
        self._say("the controller is planning")
        if not self._controller.wait_planned(PLANNED_S):
            raise TransferTimeout(f"no plan after {PLANNED_S:.0f} s")
        self._say("members are compiling")
        found = [log for logs in self._cast.ask("wait_compiled", num_plans=1, timeout_s=PLANNED_S) for log in logs]
        known = self._controller.statistics()
        self._facts |= {
            "planned_s": time.monotonic() - began,
            "plan_s": known.plan_s,
            "ship_s": known.ship_s,
            "compile_s": max(log["compile_s"] for log in found),
            "shipped_bytes": sum(log["shipped_bytes"] for log in found),
            "max_shipped_bytes": max(log["shipped_bytes"] for log in found),
        }

    def _publish(self, num_versions: int) -> None:
        """Commit versions; the first one is not counted, because trainers name their blocks in it."""
        self._say("versions")
        share = self._heartbeat_share()
        self._commit(0)
        used = self._controller.statistics().cpu_s
        for version in range(1, num_versions + 1):
            counted = self._commit(version)
        known = self._controller.statistics()
        self._facts |= {
            "num_versions": num_versions,
            "version_s": known.last_version_s,
            "magnitude_bytes": known.last_magnitude_bytes,
            "controller_cpu_ms_per_version": (known.cpu_s - used) * 1e3 / num_versions,
            "heartbeat_cpu_share": share,
            "num_writes": counted,
            "planned_writes": known.writes_per_version,
            "bytes_per_version": known.bytes_per_version,
        }

    def _heartbeat_share(self) -> float:
        """CPU time of a second in which members send only heartbeats."""
        used = time.process_time()
        time.sleep(IDLE_S)
        return (time.process_time() - used) / IDLE_S

    def _commit(self, version: int) -> int:
        """Commit a version everywhere; returns the counted writes."""
        counted = self._cast.ask("publish", version=version, timeout_s=VERSION_S)
        return sum(count["num_writes"] for count in counted)

    def _lose_and_return(self, num_versions: int) -> None:
        """Kill members, let new processes take their places, and commit one more version."""
        self._say(f"killing {len(self._victims)} members")
        controller = self._controller
        num_plans = controller.statistics().num_plans
        began = time.monotonic()
        self._cast.kill(self._victims)
        self._wait(lambda: len(controller.statistics().lost) == len(self._victims))
        noticed_s = time.monotonic() - began
        self._say("they are rejoining")
        self._cast.start(self._victims)
        began = time.monotonic()
        self._cast.ask("join", self._victims, address=controller.address)
        if not controller.wait_planned(PLANNED_S):
            raise TransferTimeout(f"no plan after {PLANNED_S:.0f} s")
        self._cast.ask("wait_compiled", self._victims, num_plans=1, timeout_s=PLANNED_S)
        self._facts |= {
            "num_killed": len(self._victims),
            "noticed_s": noticed_s,
            "returned_s": time.monotonic() - began,
            "is_plan_kept": controller.statistics().num_plans == num_plans,
        }
        self._commit(num_versions + 1)

    @staticmethod
    def _wait(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PLANNED_S
        while not reached():
            if time.monotonic() > deadline:
                raise TransferTimeout(f"the controller has not seen every join or loss after {PLANNED_S:.0f} s")
            time.sleep(LOOK_S)
