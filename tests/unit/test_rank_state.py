"""The versions one engine rank knows: every way a version can go, without threads."""

from __future__ import annotations

import pytest

from weft.runtime.receive.rank_state import Ending, RankState, Turn


def standing(state: RankState) -> tuple[object, ...]:
    return state.served, state.pending, state.is_paused, state.poison


def test_a_version_beside_the_live_weights():
    state = RankState()
    assert state.expect(7, whole=False) is False
    assert (state.is_under_way, state.ready) == (True, None)
    state.complete(7)
    assert (state.is_under_way, state.ready) == (True, 7)
    state.decide()
    assert (state.is_under_way, state.ready) == (False, None)
    assert state.hand_out(7, agrees=False) is None
    assert state.may_commit() is Turn.NOW
    state.serve(7)
    assert standing(state) == (7, None, False, None)
    assert state.holds == 7


@pytest.mark.parametrize(
    ("steps", "boundary", "turn"),
    [
        (0, None, Turn.NOT_YET),
        (1, None, Turn.NOT_YET),
        (2, None, Turn.UNKNOWN),
        (2, 4, Turn.NOT_YET),
        (4, 4, Turn.NOW),
        (5, 4, Turn.NOW),
    ],
)
def test_ranks_meet_at_a_step(steps, boundary, turn):
    """A rank that has reported step 0 waits at step 2 for the others."""
    state = RankState()
    assert state.hand_out(7, agrees=True) == 0
    assert not state.has_agreed
    for _ in range(steps):
        state.advance()
    if boundary is not None:
        assert state.meet_at(7, boundary)
    assert state.may_commit() is turn


def test_what_is_repeated_to_a_new_controller():
    state = RankState()
    assert state.step_to_repeat is None
    state.advance(41)
    state.hand_out(7, agrees=True)
    state.advance()
    assert state.step_to_repeat == 41
    assert not state.meet_at(6, 50), "of another version"
    assert state.meet_at(7, 50)
    assert state.step_to_repeat is None


def test_a_rank_that_waited_goes_on_where_the_others_are():
    state = RankState()
    state.hand_out(7, agrees=True)
    state.meet_at(7, 12)
    state.serve(7)
    assert state.step == 12
    assert state.may_commit() is Turn.NOT_YET


PAUSED_ENDS = [
    (True, Ending(version=7, commit=True), (7, None, False, None)),
    (True, Ending(version=7, commit=False), (None, None, False, None)),
    (True, Ending(version=7, commit=False, torn=True, reason="lost"), (None, None, False, None)),
    (False, Ending(version=7, commit=False), (None, None, False, None)),
]


@pytest.mark.parametrize(("paused", "ending", "after"), PAUSED_ENDS)
def test_updates_in_place_end_here_and_now(paused, ending, after):
    """The next version may come before the engine's thread has seen how this one ended."""
    state = RankState()
    state.expect(7, whole=False)
    state.hand_out(7, agrees=False)
    if paused:
        state.pause()
    assert state.end_in_place(ending) is (paused and ending.commit)
    assert standing(state) == after
    assert state.see_ending() == (ending if paused else None)
    assert state.see_ending() is None


def test_an_engine_that_stands_still_is_not_asked_twice():
    """The second round of a version that patches were not enough for."""
    state = RankState()
    state.expect(7, whole=False)
    state.hand_out(7, agrees=False)
    state.pause()
    assert state.expect(7, whole=True) is True
    assert state.is_whole
    assert state.expect(8, whole=False) is False


def test_poisoned_weights_are_no_version_until_one_is_served():
    state = RankState()
    state.serve(7)
    state.stay_torn("trainer 0 was lost")
    assert standing(state) == (7, None, False, None), "they are whole"
    state.tear("version 8 was torn")
    assert (state.served, state.holds, state.poison) == (7, None, "version 8 was torn")
    state.stay_torn("trainer 0 was lost")
    assert (state.served, state.holds, state.poison) == (7, None, "trainer 0 was lost")
    state.serve(9)
    assert standing(state) == (9, None, False, None)
    assert state.holds == 9


@pytest.mark.parametrize("forgets", [lambda state: state.overwrite(), lambda state: state.expect(8, whole=False)])
def test_what_has_arrived_is_ready_until_its_memory_is_used_again(forgets):
    state = RankState()
    state.expect(7, whole=False)
    state.complete(7)
    forgets(state)
    assert state.ready is None
    assert state.is_under_way
