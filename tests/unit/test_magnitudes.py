"""What trainers find in FP8 blocks that lie on several of them becomes the largest of all, whatever the order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ProtocolError
from weft.runtime.compile.sharing import COLLECTED_ELSEWHERE, COLLECTED_HERE, DIRECT
from weft.runtime.control.columns import squeeze
from weft.runtime.send.magnitudes import CutBlocks, Finding, Sharing


def blocks(keys: list[int], role: int = DIRECT) -> CutBlocks:
    return CutBlocks(np.array(sorted(keys), dtype=np.int64), np.full(len(keys), role, dtype=np.int64))


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@dataclass
class Trainers:
    """Sharings that talk to each other in an order a seed decides."""

    held: dict[int, list[CutBlocks]]
    """Trainer → its blocks, group by group."""
    random: random.Random
    sharings: dict[int, Sharing] = field(init=False)

    def __post_init__(self) -> None:
        others = {trainer: set(self.held) - {trainer} for trainer in self.held}
        self.sharings = {trainer: Sharing(held, peers=others[trainer]) for trainer, held in self.held.items()}
        self.met: set[tuple[int, int]] = set()

    def introduce(self, one: int, other: int) -> None:
        """As over a connection: both learn, and begin anew."""
        for mine, theirs in ((one, other), (other, one)):
            self.sharings[mine].met(theirs, self.sharings[theirs].introduction)
            self.met.add((mine, theirs))

    def tell(self, one: int, other: int) -> None:
        for finding, values in self.sharings[one].due(other):
            self.sharings[other].told(one, finding, values)

    def exchange(self, version: int, found: dict[int, list[np.ndarray]]) -> None:
        """Let everybody find its magnitudes, and tell, in any order; some connections are cut meanwhile."""
        steps = [("find", t, group) for t, held in self.held.items() for group in range(len(held))]
        pairs = [(a, b) for a in self.held for b in self.held if a < b]
        steps += [("introduce", *pair) for pair in pairs if pair not in self.met]
        steps += [("introduce", *pair) for pair in pairs if self.random.random() < 0.3]
        self.random.shuffle(steps)
        begun: set[int] = set()
        for kind, one, other in steps:
            if kind == "introduce":
                self.introduce(one, other)
                continue
            if one not in begun:
                begun.add(one)
                self.sharings[one].begin(version)
            self.sharings[one].found(other, found[one][other])
            for pair in self.random.sample(sorted(self.met), min(len(self.met), 2)):
                self.tell(*pair)
        for _ in range(3):
            for pair in sorted(self.met):
                self.tell(*pair)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_every_holder_of_a_block_gets_the_largest_of_all(seed):
    rng = random.Random(seed)
    num_trainers, num_groups, num_keys = rng.randint(2, 5), rng.randint(1, 3), rng.randint(1, 12)
    hubs = {key: rng.randrange(num_trainers) for key in range(num_groups * num_keys) if rng.random() < 0.3}
    held = {}
    for trainer in range(num_trainers):
        groups = []
        for group in range(num_groups):
            every = range(group * num_keys, (group + 1) * num_keys)
            keys = [key for key in every if hubs.get(key) == trainer or rng.random() < 0.6]
            roles = [DIRECT if key not in hubs else 1 + (hubs[key] != trainer) for key in keys]
            groups.append(CutBlocks(np.array(keys, dtype=np.int64), np.array(roles, dtype=np.int64)))
        held[trainer] = groups
    assert {COLLECTED_HERE, COLLECTED_ELSEWHERE} == {1, 2}
    trainers = Trainers(held, rng)
    for version in range(3):
        found = {
            trainer: [np.array([rng.random() for _ in group.keys], dtype=np.float32) for group in groups]
            for trainer, groups in held.items()
        }
        trainers.exchange(version, found)
        for trainer, groups in held.items():
            for number, group in enumerate(groups):
                wanted = [
                    max(
                        found[other][number][held[other][number].keys.tolist().index(key)]
                        for other in held
                        if key in held[other][number].keys
                    )
                    for key in group.keys.tolist()
                ]
                agreed = trainers.sharings[trainer].agreed(number)
                assert agreed is not None
                np.testing.assert_array_equal(agreed, np.array(wanted, dtype=np.float32))


def test_nothing_is_agreed_before_everybody_has_spoken():
    here = Sharing([blocks([5, 7])], peers=[1, 2])
    one, two = (Sharing([blocks(keys)], peers=[0]) for keys in ([7, 9], []))
    here.begin(1)
    here.found(0, floats(1.0, 2.0))
    assert here.agreed(0) is None
    assert here.missing() == [1, 2]
    here.met(2, two.introduction)  # has nothing of these
    here.met(1, one.introduction)
    assert here.missing() == [1]
    assert [(finding.group, values.tolist()) for finding, values in here.due(1)] == [(0, [2.0])]
    here.told(1, Finding(1, 0, is_final=False), floats(3.0))
    agreed = here.agreed(0)
    assert agreed is not None
    assert agreed.tolist() == [1.0, 3.0]
    assert not here.missing()


def test_a_hub_tells_what_it_collected_although_the_last_to_introduce_itself_has_nothing_to_tell():
    hub = Sharing([blocks([5], COLLECTED_HERE), blocks([9])], peers=[1, 2])
    one, two = (
        Sharing([blocks([5], COLLECTED_ELSEWHERE), blocks([])], peers=[0]),
        Sharing([blocks([]), blocks([9])], peers=[0]),
    )
    hub.met(1, one.introduction)
    hub.begin(1)
    hub.found(0, floats(2.0))
    hub.told(1, Finding(1, 0, is_final=False), floats(3.0))
    assert [finding.is_final for finding, _ in hub.due(1)] == []
    hub.met(2, two.introduction)
    assert [(finding, values.tolist()) for finding, values in hub.due(1)] == [(Finding(1, 0, is_final=True), [3.0])]


def test_two_hubs_of_a_matrix_tell_each_other():
    """Both hold its first shard, one of them another one too."""
    here, there = (Sharing([blocks([5], COLLECTED_HERE)], peers=[other]) for other in (1, 0))
    for sharing, peer, other in ((here, 1, there), (there, 0, here)):
        sharing.met(peer, other.introduction)
        sharing.begin(1)
    here.found(0, floats(2.0))
    there.found(0, floats(7.0))
    for finding, values in there.due(0):
        here.told(1, finding, values)
    agreed = here.agreed(0)
    assert agreed is not None
    assert agreed.tolist() == [7.0]


def test_a_neighbour_may_be_a_version_ahead_and_never_behind():
    here, other = Sharing([blocks([5])], peers=[1]), Sharing([blocks([5])], peers=[0])
    here.met(1, other.introduction)
    here.begin(1)
    here.told(1, Finding(2, 0, is_final=False), floats(8.0))
    here.told(1, Finding(1, 0, is_final=False), floats(4.0))  # version 1 was given up there
    here.found(0, floats(1.0))
    assert here.agreed(0) is None
    here.begin(2)
    here.found(0, floats(1.0))
    agreed = here.agreed(0)
    assert agreed is not None
    assert agreed.tolist() == [8.0]


def test_what_was_not_planned_is_refused():
    here = Sharing([blocks([5])], peers=[1])
    with pytest.raises(ProtocolError, match="not as planned"):  # before it has introduced itself
        here.told(1, Finding(1, 0, is_final=False), floats(1.0))
    here.met(1, Sharing([blocks([5])], peers=[]).introduction)
    for group, is_final, values in ((0, False, floats(1.0, 2.0)), (3, False, floats(1.0)), (0, True, floats(1.0))):
        with pytest.raises(ProtocolError, match="not as planned"):
            here.told(1, Finding(1, group, is_final), values)


@pytest.mark.parametrize(
    ("first", "count", "role"),
    [([5], [0], [0]), ([5], [1 << 50], [0]), ([-1], [1], [0]), ([5, 6], [2, 1], [0, 0]), ([5, 6], [1], [0])],
    ids=["empty", "huge", "negative", "twice", "columns"],
)
def test_blocks_that_make_no_sense_are_refused(first, count, role):
    columns = {"first": np.array(first), "count": np.array(count), "role": np.array(role)}
    with pytest.raises(ProtocolError):
        Sharing([blocks([5])], peers=[1]).met(1, squeeze(columns))
