"""The versions one engine rank knows, as a pure state machine: the one it serves, the one that comes, and where ranks
of one engine meet to commit it.

A version is *expected* when it is in transit, *ready* when it has arrived, complete and verified, and *pending* when
the engine's thread should act on it: make it visible, or, in place, stand still while it is written (*paused*). An
update that failed half-way in place leaves the rank *poisoned* until a version is served again.

    state = RankState()
    state.expect(7, whole=False)
    state.complete(7)                         # all of it has arrived
    state.decide()
    state.hand_out(7, agrees=True)            # 0: the step to tell the other ranks
    state.meet_at(7, 2)                       # they are all behind step 2
    state.advance(); state.may_commit()       # Turn.NOT_YET at step 1
    state.advance(); state.may_commit()       # Turn.NOW at step 2
    state.serve(7)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weft.runtime.control.messages import STEPS_AHEAD


class Turn(enum.Enum):
    """Whether the engine's thread may act on the pending version at its step."""

    NOW = "now"
    NOT_YET = "not yet"
    UNKNOWN = "unknown"
    """The other ranks have not reported their steps, and this one may not go further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an update in place ended."""

    version: int
    commit: bool
    torn: bool = False
    """Whether parts of a version that is not committed may have been written."""
    reason: str = ""


class RankState:
    """What one engine rank knows of versions. A caller with several threads protects it with a lock."""

    def __init__(self) -> None:
        self.served: int | None = None
        """The version that is visible, if any was committed."""
        self.poison: str | None = None
        """Why the weights are neither the version that was served nor any other."""
        self.expected: int | None = None
        """The last version that was announced."""
        self.is_whole = False
        """Whether it is sent whole although patches are in use."""
        self.is_under_way = False
        """Whether it is undecided, as far as is known here."""
        self.ready: int | None = None
        """A version that has arrived and is not decided, as far as is known here."""
        self.pending: int | None = None
        self.is_paused = False
        """Whether writers may write."""
        self.ending: Ending | None = None
        """How the last update in place ended, until the engine's thread has seen it."""
        self.step = 0
        self._fence: int | None = None
        """The step this rank does not pass until it knows where to meet."""
        self._boundary: int | None = None

    @property
    def holds(self) -> int | None:
        """The version of the weights; None if they are torn, or unknown."""
        return None if self.poison is not None else self.served

    def expect(self, version: int, *, whole: bool) -> bool:
        """A version is coming; returns whether the engine already stands still for it."""
        is_paused = self.expected == version and self.is_paused
        self.expected, self.is_whole, self.is_under_way, self.ready = version, whole, True, None
        return is_paused

    def complete(self, version: int) -> None:
        """All of a version has arrived, as far as that can be verified."""
        self.ready = version

    def overwrite(self) -> None:
        """The memory of what has arrived is used for something else."""
        self.ready = None

    def decide(self) -> None:
        """What happens to the expected version is known."""
        self.is_under_way, self.ready = False, None

    def hand_out(self, version: int, *, agrees: bool) -> int | None:
        """The engine's thread should act on a version; returns the step to report if the ranks have to agree on one."""
        self.pending = version
        if not agrees:
            return None
        self._fence, self._boundary = self.step + STEPS_AHEAD, None
        return self.step

    @property
    def step_to_repeat(self) -> int | None:
        """The step that was reported but not answered."""
        waits = self.pending is not None and self._fence is not None and self._boundary is None
        return self._fence - STEPS_AHEAD if waits and self._fence is not None else None

    def meet_at(self, version: int, step: int) -> bool:
        """The ranks of the engine have agreed; returns whether that matters here."""
        if self.pending != version:
            return False
        self._boundary = step
        return True

    @property
    def has_agreed(self) -> bool:
        """Whether ranks know where to meet, or need not."""
        return self._fence is None or self._boundary is not None

    def advance(self, step: int | None = None) -> None:
        """The engine is at its next step."""
        self.step = self.step + 1 if step is None else step

    def may_commit(self) -> Turn:
        """Whether this is the step at which to act on the pending version."""
        if self.pending is None:
            return Turn.NOT_YET
        if self._boundary is not None:
            return Turn.NOW if self.step >= self._boundary else Turn.NOT_YET
        if self._fence is None:
            return Turn.NOW
        return Turn.NOT_YET if self.step < self._fence else Turn.UNKNOWN

    def pause(self) -> None:
        """The engine stands still; writers may write."""
        self.is_paused, self.ending = True, None

    def end_in_place(self, ending: Ending) -> bool:
        """The pending update in place is over; returns whether it is served. The next may come before this is seen."""
        was_paused = self.is_paused
        if was_paused:
            self.ending = ending
        if was_paused and ending.commit:
            self.serve(ending.version)
            return True
        self.call_off()
        return False

    def see_ending(self) -> Ending | None:
        """How the update in place ended; returned once."""
        ending, self.ending = self.ending, None
        return ending

    def serve(self, version: int) -> None:
        """A version is visible now. A rank that waited resumes at the step of the others."""
        self.served, self.poison = version, None
        if self._boundary is not None:
            self.step = max(self.step, self._boundary)
        self.call_off()

    def tear(self, why: str) -> None:
        """The weights are neither the version that was served nor any other."""
        self.poison = why

    def stay_torn(self, why: str) -> None:
        """No version can come now, so weights that are torn remain so. Whole weights are as good as before."""
        if self.poison is not None:
            self.poison = why

    def call_off(self) -> None:
        """Nothing is pending."""
        self.pending, self._fence, self._boundary, self.is_paused = None, None, None, False
