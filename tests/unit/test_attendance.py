"""Who takes part in the next round, and which members no round can begin without."""

from __future__ import annotations

import pytest

from tests.support.raw_member import join_message
from weft.runtime.control.member_id import MemberId
from weft.runtime.controller.attendance import Numbers, attend
from weft.runtime.controller.membership import Membership

TWO_OF_THREE = Numbers(num_trainers=2, num_engine_ranks=3, ranks_per_engine=1, needed_engines=2)
ALL_OF_THREE = Numbers(num_trainers=2, num_engine_ranks=3, ranks_per_engine=1, needed_engines=3)
ONE_OF_TWO_PAIRS = Numbers(num_trainers=1, num_engine_ranks=4, ranks_per_engine=2, needed_engines=1)
FIRST = "the first plan needs all members"


def members(text: str) -> set[MemberId]:
    """`t0 e1`: trainer 0 and engine 1."""
    sides = {"t": "trainer", "e": "engine"}
    return {MemberId(sides[word[0]], int(word[1:])) for word in text.split()}


@pytest.mark.parametrize(
    ("numbers", "present", "changed", "engines", "missing", "why"),
    [
        (TWO_OF_THREE, "t0 t1 e0 e1 e2", "", {0, 1, 2}, "", ""),
        (TWO_OF_THREE, "t0 t1 e0 e1 e2", "t0 e2", {0, 1, 2}, "", ""),
        (TWO_OF_THREE, "t0 t1 e0 e2", "", {0, 2}, "", ""),
        (TWO_OF_THREE, "t0 t1 e0", "", set(), "e1 e2", ""),
        (TWO_OF_THREE, "t0 e0 e2", "", set(), "t1", ""),
        (TWO_OF_THREE, "t0 e0", "", set(), "t1 e1 e2", ""),
        (TWO_OF_THREE, "t0 t1 e0 e2", "e0", set(), "e1", ""),
        (TWO_OF_THREE, "t0 t1 e0 e2", "t1", set(), "e1", "trainer 1 has changed, and a new plan needs all members"),
        (ALL_OF_THREE, "t0 t1 e0 e2", "", set(), "e1", ""),
        (ALL_OF_THREE, "t0 t1 e0 e2", "t1", set(), "e1", ""),
        (ALL_OF_THREE, "t0 e0 e1 e2", "", set(), "t1", ""),
        (ONE_OF_TWO_PAIRS, "t0 e0 e1 e3", "", {0, 1}, "", ""),
        (ONE_OF_TWO_PAIRS, "t0 e2 e3", "", {2, 3}, "", ""),
        (ONE_OF_TWO_PAIRS, "t0 e0 e3", "", set(), "e1 e2", ""),
        (ONE_OF_TWO_PAIRS, "t0 e0 e1 e3", "e1", set(), "e2", ""),
        (ONE_OF_TWO_PAIRS, "", "", set(), "t0 e0 e1 e2 e3", ""),
    ],
)
def test_with_a_plan_a_round_needs_all_trainers_and_a_quorum_of_whole_engines(
    numbers, present, changed, engines, missing, why
):
    found = attend(members(present), members(present) - members(changed), numbers)
    assert (found.engines, set(found.missing), found.why) == (engines, members(missing), why)


@pytest.mark.parametrize(
    ("numbers", "present", "missing", "why"),
    [
        (TWO_OF_THREE, "t0 t1 e0 e2", "e1", FIRST),
        (ONE_OF_TWO_PAIRS, "e0 e1", "t0 e2 e3", FIRST),
        (ALL_OF_THREE, "t0 t1 e0 e2", "e1", ""),
    ],
)
def test_the_first_plan_needs_all_members(numbers, present, missing, why):
    found = attend(members(present), None, numbers)
    assert (found.engines, set(found.missing), found.why) == (set(), members(missing), why)
    everybody = {*numbers.trainers, *(rank for engine in numbers.engines for rank in engine)}
    assert not attend(everybody, None, numbers).missing


class Fleet(Membership):
    """Members that join and leave by name; all have the layouts that were planned for."""

    def come(self, text: str) -> None:
        for member in sorted(members(text)):
            self.add(f"{member}#{len(self.lost)}", join_message(member.side, member.rank), 1)
            self.recognise([member])

    def go(self, text: str) -> None:
        for member in members(text):
            self.remove(member, "left")

    def plan(self) -> None:
        """All that take part open, and get their parts."""
        self.begin_round()
        for known in self.taking_part:
            self._open[known.member.side].add(known.member.rank)
        assert self.has_opened
        self.complete_round()


def test_a_round_goes_on_without_engines_that_leave_and_another_begins_when_they_are_back():
    fleet = Fleet(TWO_OF_THREE)
    fleet.come("t0 t1 e0 e1 e2")
    fleet.plan()
    fleet.go("e1")
    assert not fleet.needs_round, "the others are planned"
    assert fleet.obstacle == ""
    fleet.go("t0")
    fleet.come("t0")
    assert fleet.needs_round
    fleet.plan()
    assert not fleet.needs_round
    fleet.come("e1")
    assert fleet.needs_round
    fleet.plan()
    assert fleet.live_engines() == [0, 1, 2]


def test_a_round_that_lost_a_member_before_it_was_planned_begins_again():
    fleet = Fleet(TWO_OF_THREE)
    fleet.come("t0 t1 e0 e1 e2")
    fleet.begin_round()
    fleet.go("e1")
    assert fleet.needs_round
    assert not fleet.has_opened
    fleet.plan()
    assert fleet.live_engines() == [0, 2]


def test_a_rank_that_waits_for_the_others_of_its_engine_changes_nothing():
    fleet = Fleet(ONE_OF_TWO_PAIRS)
    fleet.come("t0 e0 e1 e2 e3")
    fleet.plan()
    fleet.go("e2 e3 t0")
    fleet.come("t0")
    fleet.begin_round()
    fleet.come("e2")
    assert not fleet.needs_round
    assert fleet.left_out(MemberId.engine(2)) == "waiting for engine 3 to join"
    assert not fleet.left_out(MemberId.engine(0))
    fleet.go("e2")
    assert not fleet.needs_round, "it had no part in the round"
    fleet.come("e2 e3")
    assert fleet.needs_round


def test_engines_that_were_away_hear_later_of_trainers_that_are_gone():
    fleet = Fleet(TWO_OF_THREE)
    fleet.come("t0 t1 e0 e1 e2")
    fleet.plan()
    fleet.go("e1 t0")
    fleet.settled.add(7)
    fleet.abandoned.update([0, 1])
    fleet.come("t0")
    fleet.plan()
    assert (fleet.settled, fleet.abandoned) == ({7}, {1})
    fleet.come("e1")
    fleet.plan()
    assert not fleet.settled
    assert not fleet.abandoned
