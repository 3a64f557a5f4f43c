"""Following the expected version on an engine rank: from its first byte to the report that it has arrived, or why not.

consumes      bytes and patches that land; what trainers report as sent (Verify)
produces      Ready or Failed; drained windows, digests, patches applied where the mode requires
waits for     nothing: `look` is called again and again
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from weft.config import CompressionPolicy, DigestPolicy, TransferSettings
from weft.devices import CPU, DeviceWork
from weft.errors import TransferTimeout, WeftError
from weft.runtime.control.messages import ArrivalReport, Failed, Ready, tag_of
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.receive.arrivals import Arrivals, spare_core
from weft.runtime.receive.landing import ArrivingLink, Landing
from weft.runtime.receive.modes import Mode
from weft.runtime.receive.patch_intake import PatchIntake
from weft.runtime.transports import OpenTransports

FOLLOW_S = 0.001
"""How long to wait between looks at what has landed."""
BUSY_S = 0.01
"""The same when all cores are busy, perhaps with writing."""
RARE_S = 0.1
PATIENCE = 32
"""Looks become rarer while nothing lands, up to RARE_S: what comes then is noticed late by 1/32 of that time."""
ARRIVING_S = 0.00005
"""The same when everything was sent: the last bytes, or their announcement, are about to arrive."""


TURN_S = 0.002
"""How long one look may go on, roughly: messages wait meanwhile."""


class Look(NamedTuple):
    """The result of a look at the expected version."""

    again_s: float | None
    """Seconds until the next look; None: at the next message."""
    report: Ready | Failed | None = None


class Following:
    """One version at a time."""

    def __init__(self, member: str, device: str, transports: OpenTransports, work: DeviceWork) -> None:
        self._device, self._transports, self._work = device, transports, work
        self.settings = TransferSettings()
        """The controller's settings."""
        self.landing: Landing | None = None
        """What comes, and where it belongs, as the plan says."""
        self._intake = PatchIntake(member, device)
        self._arrivals: Arrivals | None = None
        self._last: Arrivals | None = None
        """The version that was followed last."""
        self._reports: list[WriteReport] | None = None
        """What trainers have sent, once they have reported it."""
        self._deadline = 0.0
        self._as_patches, self._tag = False, 0
        self._next_look_s = ARRIVING_S
        """How long to wait for a Chunk that some trainer waits for; longer and longer while none comes."""
        self._moved_at = time.monotonic()
        """When something landed last, or the version was announced."""

    def plan(self, landing: Landing, *, from_host: bool = False) -> None:
        """Follow another plan. `from_host`: versions land in host memory, although the weights are on a GPU."""
        self.landing = landing
        self._intake.plan(landing.patched, from_host=from_host, stays_there=bool(landing.steps))

    def begin(self, version: int, *, as_patches: bool, whole: bool) -> None:
        """A version is expected."""
        self.end_old()
        self.stop()
        self._as_patches, self._tag = as_patches, tag_of(version, whole=whole)
        self._next_look_s, self._moved_at = ARRIVING_S, time.monotonic()
        if self.landing is not None and not as_patches:
            self._arrivals = self._arriving(version, self.landing.arriving)

    def _arriving(self, version: int, links: Sequence[ArrivingLink]) -> Arrivals:
        return Arrivals(
            version,
            links,
            self._transports,
            self._work,
            self.settings.digest,
            tag=self._tag,
            is_on_gpu=self._device != CPU,
        )

    def sent(self, version: int, reports: WriteReports) -> Failed | None:
        """All trainers have written; the sizes of patches are known now."""
        try:
            sent = list(reports)
            if self._as_patches and self.landing is not None:
                self._arrivals = self._arriving(version, self._intake.arriving(sent))
        except WeftError as error:
            return Failed(version=version, reason=str(error))
        if self._arrivals is not None and self._arrivals.version == version:
            self._reports, self._deadline = sent, time.monotonic() + self.settings.version_s
        return None

    def look(self, mode: Mode, base: int | None) -> Look:
        """Process what has landed; verify when all of it has arrived. `base`: the version patches are applied to."""
        arrivals = self._arrivals
        if arrivals is None:
            return Look(None)
        try:
            again_s = self._look_early(arrivals) if self._reports is None else self._look(arrivals, mode, base)
        except WeftError as error:
            self.stop()
            return Look(None, Failed(version=arrivals.version, reason=str(error)))
        if self._reports is None or again_s is not None:
            return Look(again_s)
        self.stop()
        return Look(None, Ready(version=arrivals.version))

    def _look(self, arrivals: Arrivals, mode: Mode, base: int | None) -> float | None:
        """Everything was sent: when to look again; None if it has arrived and is valid."""
        assert self._reports is not None
        moved = _follow(arrivals)
        if arrivals.is_whole:
            arrivals.check(self._reports)
            compressed = self.settings.compression is CompressionPolicy.ZSTD
            is_done = not self._as_patches or self._intake.took(
                arrivals.version, self._reports, mode, base, compressed=compressed
            )
            return None if is_done else FOLLOW_S
        if moved:
            return 0.0
        if time.monotonic() > self._deadline:
            what = f"{arrivals.num_bytes} of {arrivals.total_bytes} bytes arrived"
            raise TransferTimeout(f"{what} in {self.settings.version_s:.1f} s")
        return ARRIVING_S

    def _look_early(self, arrivals: Arrivals) -> float | None:
        """Drain and digest what has landed while the rest is in flight.

        If no trainer will ever wait for it, only on a spare core; otherwise always, or trainers would wait for ever on
        a machine whose cores are all busy.
        """
        if arrivals.is_awaited:
            has_moved = _follow(arrivals)
            self._next_look_s = ARRIVING_S if has_moved else min(2 * self._next_look_s, FOLLOW_S)
            return 0.0 if has_moved else self._next_look_s
        if not arrivals.will_be_awaited and (self.settings.digest is DigestPolicy.OFF or arrivals.uses_device):
            return None  # look when everything has been sent
        is_busy = self._device == CPU and not spare_core()
        if is_busy and not arrivals.will_be_awaited:
            return self._patient(BUSY_S)
        if _follow(arrivals):
            self._moved_at = time.monotonic()
            return 0.0
        if arrivals.is_whole:
            return None
        return self._patient(BUSY_S if is_busy else FOLLOW_S)

    def _patient(self, least_s: float) -> float:
        """How long to wait for the next Chunk."""
        return max(least_s, min((time.monotonic() - self._moved_at) / PATIENCE, RARE_S))

    def count(self) -> int | None:
        """Without a digest: process what was counted as arrived; returns the version if it is complete."""
        arrivals = self._arrivals
        if arrivals is None or self.settings.digest is DigestPolicy.ON:
            return None
        while arrivals.follow():
            pass
        return arrivals.version if arrivals.is_whole else None

    def end_old(self) -> None:
        """Wait for work on a version that was given up."""
        self._intake.end_old(self.settings.silence_s)

    def stop(self) -> None:
        """Stop following."""
        self._last = self._arrivals or self._last
        self._arrivals, self._reports = None, None

    def reports(self, version: int) -> list[ArrivalReport]:
        """What came from each trainer, if the version is the last that was followed; for any thread."""
        last = self._last
        return last.reports() if last is not None and last.version == version else []

    def close(self) -> None:
        """Stop its thread."""
        self._intake.close()
        self.stop()
        self._last = None
        self.landing = None


def _follow(arrivals: Arrivals) -> bool:
    """Process Chunks that have landed, as many as fit into a turn; returns whether there were any."""
    ends_at = time.monotonic() + TURN_S
    has_moved = arrivals.follow()
    while has_moved and time.monotonic() < ends_at and arrivals.follow():
        pass
    return has_moved
