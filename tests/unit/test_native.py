"""The C module and its fallback: same results, and a digest that adds up however the bytes are cut."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import native


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.fixture(params=["native", "fallback"])
def either(request, monkeypatch):
    """Run a test with the C module and without it."""
    if request.param == "fallback":
        monkeypatch.setattr(native, "_native", None)
        monkeypatch.setattr(native, "_said", True)
    return request.param


def test_the_c_module_is_built_here():
    assert native.is_native


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_copy_moves_exactly_the_given_rows(either, num_threads):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 5 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    starts = np.arange(0, len(source), 100_003, dtype=np.uint64)
    length = np.minimum(100_003, len(source) - starts).astype(np.uint64) // np.uint64(2)
    copied = native.copy(starts + target.ctypes.data, starts + source.ctypes.data, length, num_threads=num_threads)
    assert copied == length.sum()
    expected = np.zeros_like(source)
    for start, size in zip(starts.tolist(), length.tolist(), strict=True):
        expected[start : start + size] = source[start : start + size]
    assert np.array_equal(target, expected)


@given(data=st.binary(max_size=2000), position=st.integers(0, 1 << 50), num_threads=st.sampled_from([1, 3]))
def test_digest_equals_the_reference(data, position, num_threads):
    array = np.frombuffer(data, dtype=np.uint8)
    where = column(position)
    found = native.digest(column(array.ctypes.data), where, column(len(data)), num_threads=num_threads)
    assert found == native.digest_bytes(array, position)


@given(data=st.binary(min_size=1, max_size=3000), cuts=st.lists(st.integers(0, 3000), max_size=6))
def test_digests_of_parts_add_up_however_the_bytes_are_cut(data, cuts):
    array = np.frombuffer(data, dtype=np.uint8)
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    starts, ends = np.array(borders[:-1], dtype=np.uint64), np.array(borders[1:], dtype=np.uint64)
    parts = native.digest(starts + np.uint64(array.ctypes.data), starts, ends - starts)
    assert parts == native.digest_bytes(array, 0)


@given(data=st.binary(min_size=1, max_size=600), at=st.integers(0, 599), flip=st.integers(1, 255))
def test_any_single_changed_byte_changes_the_digest(data, at, flip):
    array = np.frombuffer(data, dtype=np.uint8).copy()
    before = native.digest_bytes(array, 0)
    array[at % len(array)] ^= flip
    assert native.digest_bytes(array, 0) != before


def test_swapped_words_change_the_digest():
    words = np.arange(1000, dtype=np.uint32)
    swapped = words.copy()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert native.digest_bytes(words.view(np.uint8), 0) != native.digest_bytes(swapped.view(np.uint8), 0)


def test_large_digest_with_threads_equals_one_thread():
    data = np.random.default_rng(1).integers(0, 256, (3 << 20) + 5, dtype=np.uint8)
    column_of = (column(data.ctypes.data), column(12345), column(len(data)))
    assert native.digest(*column_of, num_threads=4) == native.digest(*column_of) == native.digest_bytes(data, 12345)


def test_writing_into_a_process(either):
    source = np.arange(5000, dtype=np.uint8)
    target = np.zeros(5000, dtype=np.uint8)
    rows = np.arange(0, 5000, 2, dtype=np.uint64)
    ones = np.ones(len(rows), dtype=np.uint64)
    written = native.write_process(os.getpid(), rows + target.ctypes.data, rows + source.ctypes.data, ones)
    assert written == 2500
    assert np.array_equal(target[::2], source[::2])
    assert not target[1::2].any()


def test_writing_into_a_process_and_digesting_what_was_written(either):
    lengths = [0, 700_001, 3, 0, 64, 5000, 0]  # more than a call's share, parts of words, empty rows
    source = np.random.default_rng(2).integers(0, 256, sum(lengths), dtype=np.uint8)
    target = np.zeros(len(source) + 16 * len(lengths), dtype=np.uint8)
    length = np.array(lengths, dtype=np.uint64)
    begin = np.cumsum(length) - length
    apart = begin + np.arange(len(lengths), dtype=np.uint64) * np.uint64(16)
    position = begin * np.uint64(3) + np.uint64(5)
    columns = apart + np.uint64(target.ctypes.data), begin + np.uint64(source.ctypes.data), position, length
    assert native.write_process_digest(os.getpid(), *columns) == native.digest(columns[1], position, length)
    for to, start, size in zip(apart.tolist(), begin.tolist(), lengths, strict=True):
        assert np.array_equal(target[to : to + size], source[start : start + size])
    assert int(target.sum()) == int(source.sum())


def test_writing_to_unmapped_memory_is_an_error(either):
    source = np.zeros(16, dtype=np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        native.write_process(os.getpid(), column(8), column(source.ctypes.data), column(16))


def test_reading_a_process():
    cookie = np.frombuffer(os.urandom(16), dtype=np.uint8)
    assert native.read_process(os.getpid(), cookie.ctypes.data, 16) == cookie.tobytes()
    with pytest.raises(OSError, match="Bad address"):
        native.read_process(os.getpid(), 8, 16)


def test_arrival_cells_count_per_tag(either):
    cells = np.zeros((4, 2), dtype=np.uint64)
    base = cells.ctypes.data
    native.publish(base, 7, 100)
    native.publish(base, 7, 50)
    native.publish(base + 16, 7, 1)
    native.publish(base + 32, 6, 1000)
    assert native.arrived(base, 4, 7) == 151
    native.publish(base, 8, 5)
    assert native.arrived(base, 4, 7) == 1
    assert native.arrived(base, 4, 8) == 5


def test_columns_of_another_kind_are_refused():
    with pytest.raises(TypeError):
        native._native.copy(np.zeros(1, np.uint32), column(0), column(0), 1)
    with pytest.raises(ValueError, match="different lengths"):
        native._native.copy(column(0, 0), column(0), column(0), 1)
