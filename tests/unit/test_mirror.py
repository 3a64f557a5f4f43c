"""Offloaded weights are copied in the order in which they are read, and every reader knows how many pieces it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.codec.memory import memory_view
from weft.core.geometry.alignment import ALIGN
from weft.runtime.send import mirror as mirrors
from weft.runtime.send.mirror import Mirror
from weft.runtime.weights import Weights

SIZES = (100, 7, 64, 250, 1, 90)
"""Elements of the weights; a piece has 64."""


@pytest.fixture
def mirror(monkeypatch) -> Mirror:
    monkeypatch.setattr(mirrors, "PIECE_BYTES", 256)
    rng = np.random.default_rng(0)
    arrays = {f"w.{n}": rng.random(size, dtype=np.float32) for n, size in enumerate(SIZES)}
    return Mirror(Weights.from_arrays(arrays), "cpu")


def spans(mirror: Mirror, *parts: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Some elements of some weights: number, first, count."""
    held = mirror.weights.held
    address = np.array([held[n].address + 4 * first for n, first, _ in parts], dtype=np.int64)
    return address, np.array([4 * count for *_, count in parts], dtype=np.int64)


def copied(mirror: Mirror, address: np.ndarray, num_bytes: np.ndarray) -> bool:
    """Whether memory of the device has what the host has."""
    is_there = True
    for begin, count in zip(address.tolist(), num_bytes.tolist(), strict=True):
        for src, dst, length in mirror._rows.tolist():
            lo, hi = max(dst, begin), min(dst + length, begin + count)
            if lo < hi:
                is_there &= np.array_equal(memory_view(lo, hi - lo), memory_view(src + lo - dst, hi - lo))
    return is_there


def test_readers_get_what_they_need_from_the_first_pieces(mirror):
    readers = [
        spans(mirror, (5, 0, 90)),
        spans(mirror, (3, 60, 10), (3, 200, 1)),
        spans(mirror, (0, 0, 100), (5, 80, 10)),
        spans(mirror),
    ]
    pieces, needs = mirror.pieces(readers)
    assert sum(piece.num_bytes for piece in pieces) == 4 * sum(SIZES), "also what nobody reads"
    memory_view(mirror._memory.address, mirror._memory.num_bytes)[:] = 0xFF
    done = 0
    for number, reader in enumerate(readers):
        while done < needs[number]:
            assert not copied(mirror, *reader), "not more than it needs"
            mirror.copy(pieces[done])
            done += 1
        assert copied(mirror, *reader)
    assert needs[0] <= 2
    assert needs[3] == 0
    for piece in pieces[done:]:
        mirror.copy(piece)
    assert copied(mirror, *spans(mirror, *((n, 0, size) for n, size in enumerate(SIZES))))


def test_without_readers_all_is_copied_in_the_order_of_memory(mirror):
    pieces, needs = mirror.pieces([])
    assert needs == []
    begins = np.concatenate([piece.dst for piece in pieces])
    assert (np.diff(begins.astype(np.int64)) > 0).all()
    assert max(piece.num_bytes for piece in pieces) < 2 * 256


def test_weights_without_elements_and_in_any_order_of_memory_are_moved():
    memory = np.arange(64, dtype=np.float32)
    arrays = {"late": memory[40:50], "none": memory[:0], "early": memory[8:24]}
    mirror = Mirror(Weights.from_arrays(arrays), "cpu")
    for piece in mirror.pieces([])[0]:
        mirror.copy(piece)
    found = {held.tensor.name: memory_view(held.address, held.span_bytes) for held in mirror.weights.held}
    assert {name: part.view(np.float32).tolist() for name, part in found.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def filled(weights: Weights) -> dict[str, list[float]]:
    """What the shards have on the device."""
    mirror = Mirror(weights, "cpu")
    for piece in mirror.pieces([])[0]:
        mirror.copy(piece)
    ranges = [(begin, begin + num_bytes) for begin, num_bytes in mirror.weights.ranges]
    for shard in mirror.weights.held:
        assert any(lo <= shard.address and shard.address + shard.span_bytes <= hi for lo, hi in ranges)
    shards = {shard.tensor.name: memory_view(shard.address, shard.span_bytes) for shard in mirror.weights.held}
    return {name: part.view(np.float32).tolist() for name, part in shards.items()}


def test_shards_in_ranges_that_overlap_are_moved():
    memory = np.arange(256, dtype=np.float32)
    arrays = {"all": memory[:64], "inside": memory[20:24], "behind": memory[32:40], "next": memory[60:80]}
    arrays |= {"again": memory[:64], "apart": memory[200:210]}
    weights = Weights.from_arrays(arrays)
    assert filled(weights) == {name: array.tolist() for name, array in arrays.items()}
    ranges = ((memory.ctypes.data, 0), (memory.ctypes.data, 1024), (memory.ctypes.data + 80, 16))
    assert filled(replace(weights, ranges=ranges)) == {name: array.tolist() for name, array in arrays.items()}


def test_every_byte_is_copied_once():
    memory = np.zeros(64, dtype=np.float32)
    mirror = Mirror(Weights.from_arrays({"all": memory, "inside": memory[8:16], "end": memory[60:]}), "cpu")
    assert [piece.num_bytes for piece in mirror.pieces([])[0]] == [256]


def test_ranges_that_only_touch_are_aligned_each():
    memory = np.zeros(64, dtype=np.float32)
    mirror = Mirror(Weights.from_arrays({"first": memory[:10], "second": memory[10:20]}), "cpu")
    assert (np.diff(mirror.weights.addresses) % ALIGN).tolist() == [0]


def test_weights_without_memory_have_a_mirror():
    mirror = Mirror(Weights.of((), ()), "cpu")
    assert mirror.pieces([]) == ([], [])
    assert (len(mirror.weights.held), mirror.weights.ranges) == (0, ())
    none = Mirror(Weights.from_arrays({"none": np.zeros(0, dtype=np.float32)}), "cpu")
    assert none.pieces([spans(none)]) == ([], [0])
