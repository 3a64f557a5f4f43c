"""Who may still write: incarnations that joined, settled, ended, or are cut off by closing."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from weft.runtime.control.messages import Writer
from weft.runtime.receive.exposure import Exposure, has_ended
from weft.transport.host import ProcessIdentity, boot_id
from weft.transport.registry import is_cut_by_closing, place_here

HERE = place_here()
ELSEWHERE = msgspec.structs.replace(HERE, host="another")


def writer(incarnation: int, *, rank: int = 0, place=HERE, transport: str = "shm", pid: int | None = None) -> Writer:
    process = ProcessIdentity.of(pid or os.getpid())
    return Writer(rank=rank, incarnation=incarnation, process=process, place=place, transport=transport)


@pytest.fixture
def exposure() -> Exposure:
    return Exposure(HERE)


def test_those_that_joined_again_or_were_seen_to_stop_are_settled(exposure):
    exposure.offer([writer(1), writer(2, rank=1), writer(3, rank=2)])
    assert exposure.unsettled([writer(1), writer(9, rank=1)], settled={3}) == (writer(2, rank=1),)
    assert exposure.unsettled([writer(9, rank=1)], settled=set()) == (writer(2, rank=1),), "asked again, the same"
    exposure.forget_all()
    assert not exposure.unsettled([], settled=set())


def test_a_process_that_cannot_be_looked_at_may_still_write(exposure):
    """It lies about what it is; or no file descriptor is free."""
    liars = [
        msgspec.structs.replace(writer(number), process=ProcessIdentity(pid=pid, start_ticks=1, boot_id=boot))
        for number, pid, boot in ((1, -1, boot_id()), (2, 2**40, boot_id()), (3, 1, "another boot"))
    ]
    exposure.offer(liars)
    assert exposure.unsettled([], settled=set()) == tuple(liars)


def test_a_process_that_has_ended_cannot_write(exposure):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = writer(1, pid=child.pid)
    exposure.offer([mine])
    assert exposure.unsettled([], settled=set()) == (mine,)
    child.communicate(b"\n")
    assert not exposure.unsettled([], settled=set())
    assert has_ended(mine, HERE)
    assert not has_ended(msgspec.structs.replace(mine, place=ELSEWHERE), HERE), (
        "the end of a process elsewhere is not known"
    )


def test_a_zombie_has_ended(exposure):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    mine = writer(1, pid=child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(mine, HERE)
    child.wait()


def test_revoked_writers_stay_unsettled_whatever_they_do(exposure):
    exposure.offer([writer(1)])
    exposure.revoke({1, 5})
    assert exposure.unsettled([writer(1)], settled={1}) == (writer(1),)


@pytest.mark.parametrize(
    ("transport", "place", "is_cut"),
    [
        ("shm", HERE, False),
        ("cma", HERE, False),
        ("cuda_ipc", HERE, False),
        ("nixl", HERE, False),
        ("nixl", ELSEWHERE, True),
        ("nixl", msgspec.structs.replace(HERE, container="another"), True),
        ("uccl", ELSEWHERE, True),
        ("mooncake", HERE, True),
        ("local", HERE, True),
    ],
)
def test_whom_closing_keeps_out(exposure, transport, place, is_cut):
    assert is_cut_by_closing(transport, place, HERE) == is_cut
    beyond = exposure.beyond_reach([writer(1, place=place, transport=transport)], moved=False)
    assert bool(beyond) != is_cut
    assert bool(exposure.beyond_reach(beyond, moved=True)) == (not is_cut and transport != "shm")


def test_engines_tell_the_newest_trainers_they_know(exposure):
    exposure.offer([writer(5), writer(2, rank=1)])
    exposure.forget_all()
    exposure.offer([writer(3)])
    assert [(known.rank, known.incarnation) for known in exposure.newest] == [(0, 5), (1, 2)]
