"""What a controller believes: tables of messages that members of good will never send."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import msgspec
import numpy as np
import pytest

from weft.core.version import MAX_STEP
from weft.errors import LayoutError, ProtocolError
from weft.runtime.compile.member_plans import Opening, Owed
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import (
    ArrivalReport,
    Beat,
    Committed,
    Join,
    Loss,
    MagnitudeServer,
    Offer,
    Offered,
    Opened,
    Paused,
    Ready,
    Want,
    Written,
)
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.admission import (
    check_committed,
    check_join,
    check_magnitudes,
    check_opened,
    check_side,
    check_written,
    unbelievable,
)
from weft.transport.base import Descriptor, Endpoint
from weft.transport.host import ProcessIdentity
from weft.transport.registry import place_here

TRAINER, ENGINE = MemberId.trainer(0), MemberId.engine(0)
SHARD = HeldShard(name="w", dtype="bf16", shape=(8, 4), lo=(0, 0), extent=(8, 4), strides=(4, 1))


def join(side: str = "engine", held: list[HeldShard] | None = None, **facts: Any) -> Join:
    return Join(
        side=side,
        rank=0,
        held=HeldTable.of([SHARD] if held is None else held).packed(),
        place=facts.pop("place", None) or place_here(),
        process=ProcessIdentity.of(os.getpid()),
        age_s=facts.pop("age_s", 1.0),
        **facts,
    )


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("trainer", Ready(version=1)),
        ("trainer", Committed(version=1)),
        ("trainer", Paused(version=1)),
        ("engine", Want(version=1)),
        ("engine", Written(version=1, reports=WriteReports(), losses=[])),
    ],
)
def test_each_side_has_its_messages(side, message):
    check_side(side, Beat())
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} is not a message of a {side}"):
        check_side(side, message)


@pytest.mark.parametrize(
    ("side", "facts"),
    [
        ("trainer", {"pending": 3}),
        ("trainer", {"ready": 3}),
        ("trainer", {"holds": 3}),
        ("trainer", {"seen": 3}),
        ("trainer", {"offered": [Offered(rank=0, incarnation=1)]}),
        ("trainer", {"last": -1}),
        ("engine", {"last": 2**63}),
        ("engine", {"pending": -5}),
        ("engine", {"age_s": -1.0}),
        ("engine", {"age_s": float("nan")}),
        ("engine", {"incarnation": -1}),
        ("engine", {"place": msgspec.structs.replace(place_here(), device="tpu")}),
        ("engine", {"place": msgspec.structs.replace(place_here(), nic_gbps=float("inf"))}),
        ("trainer", {"place": msgspec.structs.replace(place_here(), nic_gbps=-1.0)}),
        ("trainer", {"place": msgspec.structs.replace(place_here(), nic_gbps=1e9)}),
    ],
)
def test_a_member_joins_with_a_story_that_makes_sense(side, facts):
    check_join(join(side, last=3))
    with pytest.raises(ProtocolError, match=f"{side} 0 joined with"):
        check_join(join(side, **facts))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"name": ""}, "no name"),
        ({"dtype": "int3"}, "unknown dtype"),
        ({"shape": (0, 4)}, "impossible shape"),
        ({"shape": (2**40, 4)}, "impossible shape"),
        ({"shape": (2**30, 2**30), "extent": (2**30, 2**30)}, "impossible shape"),
        ({"strides": (2**40, 2**40)}, "one address"),
        ({"lo": (1, 0)}, "outside"),
        ({"lo": (-1, 0)}, "outside"),
        ({"extent": (8, 5)}, "outside"),
        ({"strides": (4, 0)}, "numbers from 1"),
        ({"strides": (1, 1)}, "one address"),
        ({"strides": (3, 1)}, "one address"),
    ],
)
def test_a_shard_is_a_box_in_memory_of_its_own(changes, what):
    with pytest.raises(LayoutError, match=what):
        check_join(join(held=[dataclasses.replace(SHARD, **changes)]))


def test_engines_name_each_tensor_once_and_trainers_may_hold_several_boxes():
    halves = [dataclasses.replace(SHARD, lo=(4 * half, 0), extent=(4, 4)) for half in range(2)]
    check_join(join("trainer", held=halves))
    with pytest.raises(LayoutError, match="w: named twice"):
        check_join(join("engine", held=halves))


def test_transposed_weights_are_refused_before_they_cost_memory():
    shape = (4096, 4096)
    square = HeldShard(name="w", dtype="bf16", shape=shape, lo=(0, 0), extent=shape, strides=(4096, 1))
    check_join(join(held=[square]))
    with pytest.raises(LayoutError, match="w and those like it: 16777216 pieces"):
        check_join(join(held=[dataclasses.replace(square, strides=(1, 4096))]))


def test_who_knows_of_versions_that_nobody_else_does():
    assert not unbelievable({TRAINER: join("trainer", last=7), ENGINE: join(last=6, pending=7)})
    assert not unbelievable({TRAINER: join("trainer"), ENGINE: join(last=10**12)})
    assert list(unbelievable({TRAINER: join("trainer", last=2**62), ENGINE: join(last=7)})) == [TRAINER]
    assert list(unbelievable({TRAINER: join("trainer", last=2**62), ENGINE: join()})) == [TRAINER]
    assert not unbelievable({TRAINER: join("trainer", last=MAX_STEP), ENGINE: join(last=0)})


def opened(**changes: Any) -> Opened:
    name = changes.pop("name", "shm")
    offer = Offer(
        endpoint=Endpoint(transport=name, member=changes.pop("member", "engine 0"), data=b""),
        descriptors=[Descriptor(transport=changes.pop("spoken", name), address=4096, num_bytes=64, data=b"")],
    )
    facts = {"round": 1, "offers": {name: offer}, "live": np.array([4096], dtype="<u8").tobytes()} | changes
    return Opened(**facts)


@pytest.mark.parametrize(
    "changes",
    [
        {"offers": {}},
        {"name": "cma"},
        {"member": "engine 1"},
        {"spoken": "cma"},
        {"live": b""},
        {"live": bytes(16)},
        {"live": bytes(7)},
        {"live": np.array([2**63], dtype="<u8").tobytes()},
        {"landing": -1},
        {"patches": 2**63},
    ],
)
def test_what_was_opened_is_what_was_asked_for(changes):
    needed = Opening(is_live=True, landing_bytes=0, patch_bytes=0)
    check_opened(join(), opened(), {"shm"}, needed)
    with pytest.raises(ProtocolError):
        check_opened(join(), opened(**changes), {"shm"}, needed)


@pytest.mark.parametrize(
    ("needed", "good", "bad"),
    [
        ({"landing_bytes": 64}, {"landing": 4096}, {}),
        ({"landing_bytes": 64}, {"landing": 4096}, {"landing": 2**63}),
        ({"patch_bytes": 64}, {"patches": 4096}, {"landing": 4096}),
        ({"patch_bytes": 64, "landing_bytes": 64}, {"patches": 4096, "landing": 8192}, {"patches": 4096}),
    ],
)
def test_memory_beside_the_weights_is_opened_where_it_was_asked_for(needed, good, bad):
    wanted = Opening(**({"is_live": False, "landing_bytes": 0, "patch_bytes": 0} | needed))
    check_opened(join(), opened(live=b"", **good), {"shm"}, wanted)
    with pytest.raises(ProtocolError):
        check_opened(join(), opened(live=b"", **bad), {"shm"}, wanted)


KEY = "k" * 40


@pytest.mark.parametrize(
    ("has_keys", "good", "bad"),
    [
        (False, ("tcp://127.0.0.1:7071", ""), None),
        (False, ("tcp://127.0.0.1:7071", ""), ("tcp://127.0.0.1:*", "")),
        (False, ("tcp://[::1]:7071", ""), ("tcp://127.0.0.1:70710", "")),
        (False, ("tcp://127.0.0.1:7071", ""), ("ipc:///tmp/socket", "")),
        (False, ("tcp://127.0.0.1:7071", ""), ("tcp://127.0.0.1:7071", KEY)),
        (True, ("tcp://10.0.0.1:7071", KEY), ("tcp://10.0.0.1:7071", "")),
        (True, ("tcp://10.0.0.1:7071", KEY), ("tcp://10.0.0.1:7071", "short")),
    ],
)
def test_trainers_listen_where_others_can_connect(has_keys, good, bad):
    def server(place: tuple[str, str] | None) -> Opened:
        made = None if place is None else MagnitudeServer(address=place[0], key=place[1])
        return Opened(round=1, offers={}, magnitudes=made)

    check_magnitudes(3, server(good), is_asked=True, has_keys=has_keys)
    check_magnitudes(3, server(bad), is_asked=False, has_keys=has_keys)
    with pytest.raises(ProtocolError, match="trainer 3"):
        check_magnitudes(3, server(bad), is_asked=True, has_keys=has_keys)


def written(*reports: WriteReport, **others: Any) -> Written:
    return Written(**({"version": 1, "reports": WriteReports.of(reports), "losses": []} | others))


RIGHT = WriteReport(peer=1, num_bytes=64, digest=5)
OWED = Owed.of([1], [64])


@pytest.mark.parametrize(
    "wrong",
    [
        written(RIGHT._replace(peer=7)),
        written(RIGHT, RIGHT),
        written(RIGHT, losses=[Loss(engine=1, reason="")]),
        written(losses=[Loss(engine=9, reason="")]),
        written(RIGHT._replace(num_bytes=63)),
        written(RIGHT._replace(num_bytes=-1)),
        written(RIGHT, late_s=float("inf")),
        written(reports=msgspec.structs.replace(WriteReports.of([RIGHT]), digests=b"")),
        written(reports=msgspec.structs.replace(WriteReports.of([RIGHT]), seconds=b"12345678" * 2)),
        written(reports=msgspec.structs.replace(WriteReports.of([RIGHT]), num_bytes=b"")),
        written(reports=msgspec.structs.replace(WriteReports.of([RIGHT]), peers=b"1", digests=b"1", seconds=b"1")),
        written(reports=msgspec.structs.replace(WriteReports.of([RIGHT]), sizes={7: (64,)})),
    ],
)
def test_a_trainer_speaks_of_what_it_was_told_to_write(wrong):
    assert check_written(0, written(RIGHT), {0, 1}, OWED)
    assert not check_written(0, written(losses=[Loss(engine=1, reason="")]), {0, 1}, OWED)
    with pytest.raises(ProtocolError, match=r"trainer 0|were reported for"):
        check_written(0, wrong, {0, 1}, OWED)
    with pytest.raises(ProtocolError, match="expected a subset"):
        check_written(0, written(RIGHT), {0}, OWED)  # an engine rank that was dropped


def test_whole_versions_are_asked_for_only_where_patches_are_sent():
    """In a dense version, or in the second round, there is nothing else: what would be written again is not there."""
    asked = written(whole=[1])
    assert not check_written(0, asked, {0, 1}, None)
    with pytest.raises(ProtocolError, match="trainer 0 wants to write whole versions"):
        check_written(0, asked, {0, 1}, OWED)
    for wrong in ([7], [1, 1]):
        with pytest.raises(ProtocolError, match="expected a subset of"):
            check_written(0, written(whole=wrong), {0, 1}, None)


def arrived(trainer: int = 0, num_bytes: int = 8, seconds: float = 0.1) -> ArrivalReport:
    return ArrivalReport(trainer=trainer, num_bytes=num_bytes, seconds=seconds)


@pytest.mark.parametrize(
    ("pause_s", "arrivals"),
    [
        (-1.0, []),
        (float("nan"), []),
        (0.0, [arrived(seconds=float("inf"))]),
        (0.0, [arrived(seconds=-0.1)]),
        (0.0, [arrived(num_bytes=-1)]),
        (0.0, [arrived(trainer=2)]),
        (0.0, [arrived(trainer=-1)]),
        (0.0, [arrived(), arrived()]),
    ],
)
def test_arrivals_that_cannot_be(pause_s, arrivals):
    check_committed(0, Committed(version=1, pause_s=0.1, arrivals=[arrived(0), arrived(1)]), 2)
    with pytest.raises(ProtocolError, match="engine 0"):
        check_committed(0, Committed(version=1, pause_s=pause_s, arrivals=arrivals), 2)
