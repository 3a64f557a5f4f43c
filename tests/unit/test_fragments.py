"""Fragments of control messages: whole messages come out again, whatever else is refused."""

from __future__ import annotations

import random

import pytest

from weft.runtime.control.fragments import (
    FRAGMENT_BYTES,
    HEADER,
    Assembly,
    FragmentError,
    Frame,
    FrameKind,
    GapError,
    cut,
    parse,
)

FULL = bytes(FRAGMENT_BYTES)
SIZES = [0, 1, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 3 * FRAGMENT_BYTES, 3 * FRAGMENT_BYTES + 7]


def frames_of(message: bytes, first: int = 0) -> list[Frame]:
    frames = [parse(data) for data in cut(message, protocol=5, greeting=9, first=first)]
    assert None not in frames
    return frames


def take_all(assembly: Assembly, frames: list[Frame]) -> None:
    for frame in frames:
        assembly.take(frame)


@pytest.mark.parametrize("size", SIZES)
def test_messages_come_out_as_they_went_in(size):
    assembly = Assembly(max_bytes=1 << 20)
    first = 0
    for seed in range(3):
        message = random.Random(seed).randbytes(size)
        *some, last = frames_of(message, first)
        assert all(assembly.take(frame) is None for frame in some)
        assert assembly.is_unfinished == bool(some)
        assert assembly.take(last) == message
        assert not assembly.is_unfinished
        first += len(some) + 1


def test_frames_are_small():
    sizes = [len(data) for data in cut(bytes(10 * FRAGMENT_BYTES + 1), protocol=1, greeting=0, first=0)]
    assert sizes == [FRAGMENT_BYTES + HEADER.size] * 10 + [1 + HEADER.size]


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_fragment_is_noticed(missing):
    frames = [
        *frames_of(bytes(2 * FRAGMENT_BYTES)),
        *frames_of(bytes(2 * FRAGMENT_BYTES), first=2),
        *frames_of(b"x", 4),
    ]
    assembly = Assembly(max_bytes=1 << 20)
    del frames[missing]
    with pytest.raises(GapError):
        take_all(assembly, frames)


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([(0, (1 << 20) - FRAGMENT_BYTES + 1, FULL)], "exceeds the limit"),
        ([(0, 1 << 63, FULL)], "exceeds the limit"),
        ([(0, 10, FULL), (1, 10, b"x")], "11 bytes of a message are left, expected 10"),
        ([(0, 10, FULL), (1, 0, b"x")], "are left"),
        ([(0, 10, b"")], "fragment has 0 bytes"),
        ([(0, 1000, b"xy")], "fragment has 2 bytes"),
        ([(0, FRAGMENT_BYTES + 9, FULL), (1, 10, FULL[1:])], "fragment has 65535 bytes, expected 65536"),
    ],
)
def test_contradictions_are_refused(frames, match):
    assembly = Assembly(max_bytes=1 << 20)
    with pytest.raises(FragmentError, match=match):
        take_all(assembly, [Frame(FrameKind.DATA, 5, 9, number, left, payload) for number, left, payload in frames])


def test_numbers_wrap():
    assembly = Assembly(max_bytes=1024)
    assembly._next = (1 << 32) - 1
    (last,) = frames_of(b"a", first=(1 << 32) - 1)
    (first,) = frames_of(b"b", first=1 << 32)
    assert (assembly.take(last), assembly.take(first)) == (b"a", b"b")


def test_junk_is_not_a_frame():
    rng = random.Random(0)
    good = cut(b"hello", protocol=5, greeting=9, first=0)[0]
    assert parse(good) == Frame(FrameKind.DATA, 5, 9, 0, 0, b"hello")
    for size in range(HEADER.size):
        assert parse(good[:size]) is None
    assert parse(good + bytes(FRAGMENT_BYTES)) is None
    for _ in range(10_000):
        assert parse(rng.randbytes(rng.randrange(60))) is None
