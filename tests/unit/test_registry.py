"""Which transport a link takes, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from weft.devices import device_number
from weft.errors import ConfigError, TransportUnavailable
from weft.transport.registry import NAMES, Place, choose, open_transport, place_here

HERE = Place(host="a", container="c", user=0, device="cpu", installed=NAMES)


def at(**changes):
    return msgspec.structs.replace(HERE, **changes)


@pytest.mark.parametrize(
    ("src", "dst", "expected", "reason"),
    [
        (HERE, HERE, "shm", "one host, CPU memory"),
        (HERE, at(shareable=False), "cma", "cannot be moved"),
        (at(device="cuda:0"), at(device="cuda:1"), "cuda_ipc", "GPU"),
        (HERE, at(host="b"), "nixl", "different hosts"),
        (at(device="cuda:0"), at(device="cuda:0", host="b"), "nixl", "different hosts"),
        (HERE, at(container="d"), "nixl", "different containers"),
        (HERE, at(user=7), "nixl", "users"),
    ],
)
def test_the_default_of_every_kind_of_link(src, dst, expected, reason):
    choice = choose(src, dst)
    assert choice.transport == expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("dst", "wanted", "told", "hint"),
    [
        (at(host="b", installed=("shm", "cma")), "auto", "nixl is not installed on the engine side", "pip install"),
        (at(host="b"), "shm", "shm works only within one host", "nixl"),
        (at(shareable=False), "shm", "shm needs shareable memory", "cma"),
        (HERE, "cuda_ipc", "does not move cpu memory", "another transport"),
        (at(device="cuda:0"), "auto", "does not move between CPU and GPU memory", "one kind of memory"),
        (at(user=3), "cma", "one user", "nixl"),
    ],
)
def test_what_does_not_work_is_refused_with_a_hint_and_never_downgraded(dst, wanted, told, hint):
    with pytest.raises(TransportUnavailable) as caught:
        choose(HERE, dst, wanted=wanted)
    assert told in str(caught.value)
    assert hint in caught.value.hint


def test_falling_back_must_be_allowed_and_is_said():
    unshareable = at(shareable=False)
    with pytest.raises(TransportUnavailable):
        choose(HERE, unshareable, wanted="shm")
    choice = choose(HERE, unshareable, wanted="shm", allow_fallback=True)
    assert choice.transport == "cma"
    assert choice.reason == "fallback: shm needs shareable memory"
    with pytest.raises(TransportUnavailable):
        choose(HERE, at(host="b", installed=()), allow_fallback=True)


def test_unknown_names_list_what_there_is():
    with pytest.raises(ConfigError, match="pigeon"):
        choose(HERE, HERE, wanted="pigeon")
    with pytest.raises(ConfigError, match="pigeon"):
        open_transport("pigeon", "engine 0", writer=0, num_threads=1, device="cpu", nixl_devices="")


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cpu", None, None),
        ("cuda:3", None, 3),
        ("cuda:0", "5", 5),
        ("cuda:1", "2, 6", 6),
        ("cuda:0", "GPU-8f3a", None),
        ("cuda:1", "4", None),
        ("cuda:0", "", None),
    ],
)
def test_gpus_are_numbered_as_on_the_host(device, visible, expected):
    assert device_number(device, visible) == expected


def test_this_process_can_reach_itself():
    assert choose(place_here(), place_here()).transport == "shm"
