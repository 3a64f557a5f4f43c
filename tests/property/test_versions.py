"""Whatever members do, in whatever order: a version is decided at most once, only as it may be, and never undone."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weft.core.version import CommitPolicy, Decision, VersionLedger
from weft.errors import VersionError

TRAINERS = 2
ENGINES = {0: 2, 1: 1, 2: 2}


class Versions(RuleBasedStateMachine):
    """Random reports; a plain model of what was reported judges every decision."""

    def __init__(self) -> None:
        super().__init__()
        self.next_version = 1
        self.decided: dict[int, Decision] = {}
        self.published: set[int] = set()
        self.written: set[int] = set()
        self.ready: set[tuple[int, int]] = set()
        self.dropped: set[int] = set()
        self.quorum = 2
        self.ledger = VersionLedger(
            num_trainers=TRAINERS, engines=ENGINES, policy=CommitPolicy.QUORUM, quorum=self.quorum
        )

    def _take(self, decision: Decision | None, version: int | None) -> None:
        if decision is None:
            return
        assert decision.version == version
        assert version not in self.decided
        self.decided[version] = decision
        if decision.commit:
            assert self.published == self.written == set(range(TRAINERS))
            assert len(decision.engines) >= self.quorum
            for engine in decision.engines:
                assert all((engine, rank) in self.ready for rank in range(ENGINES[engine]))
            assert self.ledger.committed == version
        self.next_version = version + 1
        self.published, self.written, self.ready = set(), set(), set()

    @rule(trainer=st.integers(0, TRAINERS - 1))
    def publish(self, trainer: int) -> None:
        if trainer in self.published:
            with pytest.raises(VersionError):
                self.ledger.publish(trainer=trainer, version=self.next_version)
            return
        self.ledger.publish(trainer=trainer, version=self.next_version)
        self.published.add(trainer)

    @rule(trainer=st.integers(0, TRAINERS - 1))
    def write(self, trainer: int) -> None:
        if trainer not in self.published or trainer in self.written:
            with pytest.raises(VersionError):
                self.ledger.written(trainer=trainer, version=self.next_version)
            return
        self.written.add(trainer)
        assert self.ledger.written(trainer=trainer, version=self.next_version) == (len(self.written) == TRAINERS)

    @rule(trainer=st.integers(0, TRAINERS - 1))
    def refuse(self, trainer: int) -> None:
        """A version that one trainer was refused is over for all."""
        if self.published:
            return
        self.ledger.refuse(self.next_version, "an engine is gone")
        with pytest.raises(VersionError, match="an engine is gone"):
            self.ledger.publish(trainer=trainer, version=self.next_version)
        self.next_version += 1

    @rule(version=st.sampled_from([-1, 2**62, 2**63]))
    def publish_an_impossible_number(self, version: int) -> None:
        with pytest.raises(VersionError):
            self.ledger.publish(trainer=0, version=version)
        self.ledger.check_number(self.next_version)

    @rule(engine=st.sampled_from(sorted(ENGINES)), rank=st.integers(0, 1))
    def report_ready(self, engine: int, rank: int) -> None:
        version = self.next_version
        present = engine in self.ledger.engines
        if not self.published or (present and (len(self.written) < TRAINERS or rank >= ENGINES[engine])):
            with pytest.raises(VersionError):
                self.ledger.ready(engine=engine, rank=rank, version=version)
            return
        if present:
            self.ready.add((engine, rank))
        self._take(self.ledger.ready(engine=engine, rank=rank, version=version), version)

    @rule(engine=st.sampled_from(sorted(ENGINES)))
    def engine_fails(self, engine: int) -> None:
        self._take(self.ledger.engine_failed(engine, "gone"), self.ledger.open_version or self.next_version)

    @rule(trainer=st.integers(0, TRAINERS - 1))
    def trainer_fails(self, trainer: int) -> None:
        self._take(self.ledger.trainer_failed(trainer, "gone"), self.next_version)

    @rule()
    def deadline_passes(self) -> None:
        self._take(self.ledger.timed_out("too slow"), self.next_version)

    @rule(engine=st.sampled_from(sorted(ENGINES)))
    def engine_returns(self, engine: int) -> None:
        if engine in self.ledger.engines or self.ledger.open_version is not None:
            with pytest.raises(VersionError):
                self.ledger.join(engine=engine, num_ranks=ENGINES[engine])
        else:
            self.ledger.join(engine=engine, num_ranks=ENGINES[engine])

    @rule(version=st.integers(0, 50))
    def late_report(self, version: int) -> None:
        if version in self.decided:
            assert self.ledger.ready(engine=0, rank=0, version=version) is None

    @invariant()
    def the_last_committed_version_stays(self) -> None:
        committed = [version for version, decision in self.decided.items() if decision.commit]
        assert self.ledger.committed == (max(committed) if committed else None)


TestVersions = Versions.TestCase
TestVersions.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def published(policy=CommitPolicy.ALL, quorum=0):
    ledger = VersionLedger(num_trainers=2, engines={0: 2, 1: 1}, policy=policy, quorum=quorum)
    ledger.publish(trainer=0, version=7)
    ledger.publish(trainer=1, version=7)
    assert not ledger.written(trainer=0, version=7)
    with pytest.raises(VersionError, match="before trainers"):
        ledger.ready(engine=1, rank=0, version=7)
    assert ledger.written(trainer=1, version=7)
    return ledger


def test_all_ranks_of_all_engines_must_be_ready():
    ledger = published()
    assert ledger.ready(engine=0, rank=0, version=7) is None
    assert ledger.ready(engine=1, rank=0, version=7) is None
    assert ledger.ready(engine=0, rank=0, version=7) is None
    assert ledger.ready(engine=0, rank=1, version=7) == Decision(version=7, commit=True, engines=(0, 1))
    assert ledger.committed == 7


@pytest.mark.parametrize("fail", [lambda v: v.trainer_failed(1, "killed"), lambda v: v.engine_failed(1, "killed")])
def test_a_failure_before_the_decision_aborts_and_the_old_version_stays(fail):
    ledger = published()
    decision = fail(ledger)
    assert not decision.commit
    assert "1: killed" in decision.reason
    assert ledger.committed is None
    assert ledger.ready(engine=0, rank=0, version=7) is None
    with pytest.raises(VersionError, match="1: killed"):
        ledger.publish(trainer=0, version=7)
    with pytest.raises(VersionError, match="was decided already"):
        ledger.publish(trainer=0, version=6)


def test_with_a_quorum_a_lost_engine_is_dropped():
    ledger = published(CommitPolicy.QUORUM, quorum=1)
    ledger.ready(engine=1, rank=0, version=7)
    assert ledger.engine_failed(0, "killed") == Decision(version=7, commit=True, engines=(1,))
    assert ledger.engines == (1,)
    ledger.join(engine=0, num_ranks=2)
    assert ledger.engines == (0, 1)


def test_a_deadline_commits_on_those_that_are_ready_or_aborts():
    slow = published(CommitPolicy.QUORUM, quorum=1)
    slow.ready(engine=1, rank=0, version=7)
    assert slow.timed_out("5 s").engines == (1,)
    assert not published(CommitPolicy.QUORUM, quorum=1).timed_out("5 s").commit
    assert not published().timed_out("5 s").commit


def test_impossible_ledgers():
    for wrong in ({"num_trainers": 0, "engines": {0: 1}}, {"num_trainers": 1, "engines": {}}):
        with pytest.raises(VersionError):
            VersionLedger(**wrong)
    with pytest.raises(VersionError, match="quorum of 3"):
        VersionLedger(num_trainers=1, engines={0: 1}, policy=CommitPolicy.QUORUM, quorum=3)
