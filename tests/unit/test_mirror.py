"""Offloaded weights are copied in the order in which they are read, and every reader knows how many pieces it needs."""

from __future__ import annotations

import numpy as np
import pytest

from weft.codec.memory import memory_view
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
