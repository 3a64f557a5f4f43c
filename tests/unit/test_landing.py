"""What an engine rank receives and where it belongs: addresses, Chunk by Chunk, from tables of a few numbers.

Trainer 3 sends tensor `a` (eight rows of four FP32 elements, 128 bytes) in two Chunks, trainer 5 sends `t` (two rows of
four, 32 bytes) in one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft import native
from weft.codec.conversion import DTYPES
from weft.core.geometry.planes import Planes
from weft.core.layout import Tensor
from weft.core.recipe import Op
from weft.core.streams.carriage import Carriage
from weft.errors import LayoutError, ProtocolError
from weft.runtime.compile.link_boxes import LinkBoxes
from weft.runtime.control.messages import TrainerSource
from weft.runtime.receive import landing as module
from weft.runtime.receive.landing import ArrivingLink, Landing, PatchedLink, check_contiguous
from weft.runtime.weights import Held, Weights
from weft.transport.base import Memory

A, T, BESIDE = 1 << 20, 2 << 20, 3 << 20
FP32 = DTYPES.index("fp32")
TWO_ROWS_APART = (8, 1)
NO_RUN_IS_SHORT, ALL_RUNS_ARE = 0, 1 << 62


def weights(*, a: int = A, t: int = T, strides: tuple[int, int] = (4, 1), keep: Any = None) -> Weights:
    held = [
        Held(tensor=Tensor(name="a", dtype="fp32", shape=(8, 4)), lo=(0, 0), extent=(8, 4), strides=(4, 1), address=a),
        Held(tensor=Tensor(name="t", dtype="fp32", shape=(2, 4)), lo=(0, 0), extent=(2, 4), strides=strides, address=t),
    ]
    return Weights.of(held, ranges=((a, 128), (t, held[1].span_bytes)), keep=keep)


def boxes(*parts: tuple[int, int, int]) -> bytes:
    """Boxes that begin at the first element of their tensors: number of the tensor, rows and columns."""
    tensor, rows, columns = np.array(parts).T
    tensors, dst = np.unique(tensor, return_inverse=True)
    number, none = np.arange(len(parts)), np.zeros(len(parts), dtype=np.int64)
    return LinkBoxes(
        extent=np.stack([rows, columns], axis=1),
        src_strides=np.stack([columns, none + 1], axis=1),
        dst_strides=np.array([[4, 1]] * len(parts)),
        what=np.array([[Op.COPY, FP32, FP32]] * len(parts)),
        tensors=tensors,
        kind=number,
        src=number,
        src_offset=none,
        dst=dst,
        dst_offset=none,
        first=np.zeros((len(parts), 2), dtype=np.int64),
        grid=none - 1,
        group=none - 1,
        place=number,
    ).encode()


def source(trainer: int, table: bytes, *, shortest: int = NO_RUN_IS_SHORT, **facts: Any) -> TrainerSource:
    """Chunks have room for 64 bytes."""
    carriage = Carriage(
        chunk_bytes=320,
        min_run_bytes=shortest,
        is_mapped=False,
        lands_in_stream=facts.pop("lands_in_stream", False),
        is_kept=facts.pop("is_kept", False),
        num_slots=facts.pop("num_slots", 0),
    )
    return TrainerSource(trainer=trainer, transport=f"way {trainer}", carriage=carriage, boxes=table, **facts)


def memory(address: int = BESIDE, num_bytes: int = 4096, keep: Any = None) -> Memory:
    return Memory(address=address, num_bytes=num_bytes, keep=keep)


def ways(planes: Planes) -> list[tuple[int, int, int]]:
    """From where, to where, and how many bytes of every row."""
    dst, src, length, _ = planes.runs
    return list(zip(src.tolist(), dst.tolist(), length.tolist(), strict=True))


def chunks(link: ArrivingLink) -> list[tuple[int, list[tuple[int, int, int]], bool]]:
    return [(chunk.num_bytes, ways(chunk.planes), chunk.is_drained) for chunk in link.chunks]


def positions(link: ArrivingLink) -> list[int]:
    return link.planes.position.tolist()


def test_in_place_everything_lands_where_it_belongs():
    landing = Landing([source(3, boxes((0, 8, 4))), source(5, boxes((1, 2, 4)))], weights())
    first, second = landing.arriving
    assert chunks(first) == [(64, [(A, A, 64)], False), (64, [(A + 64, A + 64, 64)], False)]
    assert chunks(second) == [(32, [(T, T, 32)], False)]
    assert [(link.trainer, link.transport) for link in landing.arriving] == [(3, "way 3"), (5, "way 5")]
    assert (positions(first), positions(second)) == ([0, 64], [256]), "shards begin at multiples of 256 in the digest"
    assert (first.total, second.total) == (128, 32)
    assert (first.has_window, first.num_slots, first.num_awaited) == (False, 0, 0)
    assert (landing.steps, landing.patched, landing.unreachable) == ((), [], "")


def test_versions_beside_the_weights_are_scattered_by_a_commit():
    sources = [
        source(5, boxes((1, 2, 4)), lands_in_stream=True, stream=512),
        source(3, boxes((0, 8, 4)), lands_in_stream=True, stream=1024),
    ]
    landing = Landing(sources, weights(), landing=memory())
    assert chunks(landing.arriving[0]) == [(32, [(BESIDE + 512, T, 32)], False)]
    assert chunks(landing.arriving[1]) == [
        (64, [(BESIDE + 1024, A, 64)], False),
        (64, [(BESIDE + 1088, A + 64, 64)], False),
    ]
    (step,) = landing.steps
    assert ways(step) == [
        (BESIDE + 1024, A, 64),
        (BESIDE + 1088, A + 64, 64),
        (BESIDE + 512, T, 32),
    ], "in the order of places"
    assert positions(landing.arriving[1]) == [0, 64], "digests do not depend on where a version lies"


def test_columns_of_a_tensor_lie_together_in_a_stream():
    """Two of four columns: rows of 8 bytes that belong 16 bytes apart."""
    landing = Landing([source(3, boxes((1, 2, 2)), lands_in_stream=True)], weights(), landing=memory())
    assert [ways(step) for step in landing.steps] == [[(BESIDE, T, 8), (BESIDE + 8, T + 16, 8)]]


def test_strided_weights_are_reached_in_two_steps_and_back():
    """A stream is row-major; what lies otherwise passes through memory in which it is row-major as well."""
    a, t = np.full((8, 4), -1, np.float32), np.full((2, 8), -1, np.float32)
    stream = np.arange(100, 148, dtype=np.float32)
    held = weights(a=a.ctypes.data, t=t.ctypes.data, strides=TWO_ROWS_APART, keep=(a, t))
    sources = [
        source(3, boxes((0, 8, 4)), lands_in_stream=True),
        source(5, boxes((1, 2, 4)), lands_in_stream=True, stream=128),
    ]
    landing = Landing(sources, held, landing=memory(stream.ctypes.data, stream.nbytes, stream))
    assert len(landing.steps) == 2
    for step in landing.steps:
        native.copy_planes(step)
    np.testing.assert_array_equal(a, stream[:32].reshape(8, 4))
    np.testing.assert_array_equal(t[:, :4], stream[32:40].reshape(2, 4))
    assert (t[:, 4:] == -1).all(), "the gaps are not weights"
    expected = stream.copy()
    stream[:40] = 0
    for step in reversed(landing.steps):
        native.copy_planes(step.back)
    np.testing.assert_array_equal(stream, expected)


@pytest.mark.parametrize(
    ("num_slots", "slots", "awaited", "num_awaited"),
    [(1, [0, 0], [True, False], 1), (2, [0, 256], [False, False], 0), (4, [0, 256], [False, False], 0)],
)
def test_packed_chunks_pass_a_window(num_slots, slots, awaited, num_awaited):
    """One slot after the other, then the first again: a Chunk waits until its predecessor there is drained."""
    packed = source(3, boxes((0, 8, 4)), shortest=ALL_RUNS_ARE, num_slots=num_slots, stream=1024)
    landing = Landing([packed], weights(), window=memory())
    (link,) = landing.arriving
    first, second = (BESIDE + 1024 + slot for slot in slots)
    assert chunks(link) == [(64, [(first, A, 64)], True), (64, [(second, A + 64, 64)], True)]
    assert positions(link) == [0, 64]
    assert (link.has_window, link.num_slots, link.is_ordered) == (True, num_slots, True)
    assert [link.frees_room(number) for number in range(2)] == awaited
    assert link.num_awaited == num_awaited
    assert landing.steps == ()


def test_what_needs_no_window_goes_first_and_straight():
    """Rows of `a` are written one by one; runs of 8 bytes are too short for that."""
    mixed = source(3, boxes((1, 2, 2), (0, 3, 4)), shortest=32, num_slots=1, stream=256)
    (link,) = Landing([mixed], weights(), window=memory()).arriving
    assert chunks(link) == [
        (48, [(A, A, 48)], False),
        (64, [(BESIDE + 256, T, 8), (BESIDE + 264, T + 16, 8)], True),
    ]
    assert (link.total, link.has_window, link.is_ordered) == (112, True, True)
    assert [link.frees_room(number) for number in range(2)] == [False, False], "only what lies in the window does"


@pytest.mark.parametrize(
    ("facts", "sizes", "is_ordered"),
    [
        ({}, [32], True),
        ({"lands_in_stream": True}, [32], True),
        ({"shortest": ALL_RUNS_ARE}, [32], False),
        ({"shortest": ALL_RUNS_ARE, "lands_in_stream": True}, [64], False),
        ({"shortest": ALL_RUNS_ARE, "num_slots": 2}, [64], True),
        ({"is_kept": True}, [32], False),
    ],
)
def test_the_order_of_packed_chunks_is_known_only_in_a_window(facts, sizes, is_ordered):
    """Others may be written in any order. Written as one, a packed Chunk travels with its gaps."""
    window = memory() if "num_slots" in facts else None
    beside = memory() if "lands_in_stream" in facts else None
    (link,) = Landing([source(5, boxes((1, 2, 4)), **facts)], weights(), landing=beside, window=window).arriving
    assert link.is_ordered is is_ordered
    assert [chunk.num_bytes for chunk in link.chunks] == sizes


def rows_of(link: PatchedLink) -> list[list[tuple[int, int, int]]]:
    """For every Chunk: position in its image, address and bytes of each row of its one section."""
    columns = [(rows.begin, rows.address, rows.length) for chunk in link.chunks for rows in chunk.rows]
    return [list(zip(*(column.tolist() for column in found), strict=True)) for found in columns]


PATCHES = {"patches": 192, "patch_bytes": 640, "is_kept": True}


def test_patches_of_weights_in_place_change_them():
    landing = Landing([source(3, boxes((0, 8, 4)), **PATCHES)], weights(), patches=memory(1 << 24))
    (link,) = landing.patched
    assert (link.trainer, link.transport, link.address, link.num_bytes) == (3, "way 3", (1 << 24) + 192, 640)
    assert rows_of(link) == [[(0, A, 64)], [(0, A + 64, 64)]]


def test_patches_of_a_staged_version_change_what_is_staged():
    sources = [source(3, boxes((0, 8, 4)), lands_in_stream=True, stream=512, **PATCHES)]
    landing = Landing(sources, weights(), landing=memory(), patches=memory(1 << 24))
    assert rows_of(landing.patched[0]) == [[(0, BESIDE + 512, 64)], [(0, BESIDE + 576, 64)]]
    assert [chunk.layout.num_bytes for chunk in landing.patched[0].chunks] == [64, 64]


def test_gaps_of_an_image_are_kept_away_from_the_weights():
    """Three of four columns are 24 bytes in a section of 32: the rest of it goes to memory that is never read."""
    landing = Landing([source(5, boxes((1, 2, 3)), **PATCHES)], weights(), patches=memory(1 << 24))
    ((first, second, gap),) = rows_of(landing.patched[0])
    assert (first, second) == ((0, T, 12), (12, T + 16, 12))
    assert (gap[0], gap[2]) == (24, 8)
    assert not T - gap[2] < gap[1] < T + 32


@pytest.mark.parametrize(
    ("sizes", "slots", "has_room"),
    [
        ([], [], True),
        ([1], [0], True),
        ([64, 64], [0, 64], True),
        ([1, 65, 1], [0, 64, 192], True),
        ([64, 64, 128], [0, 64, 128], True),
        ([64, 64, 129], [0, 64, 128], False),
        ([193, 1], [0, 256], False),
    ],
)
def test_where_patches_are_follows_from_their_sizes(sizes, slots, has_room):
    link = PatchedLink(trainer=3, transport="shm", address=BESIDE, num_bytes=256, chunks=())
    assert link.slots(sizes) == [BESIDE + slot for slot in slots]
    assert link.has_room(sizes) is has_room


def test_links_that_are_alike_are_compiled_once(monkeypatch):
    compiled = []

    class Counted(module.LinkStream):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            compiled.append(self)

    monkeypatch.setattr(module, "LinkStream", Counted)
    alike = [source(t, boxes((1, 2, 4)), lands_in_stream=True, stream=512 * t) for t in range(3)]
    other = [
        source(3, boxes((0, 8, 4)), lands_in_stream=True),
        source(4, boxes((1, 2, 4)), is_kept=True, lands_in_stream=True),
    ]
    landing = Landing([*alike, *other], weights(), landing=memory())
    assert len(compiled) == 3
    assert [ways(link.planes)[0][0] - BESIDE for link in landing.arriving[:3]] == [0, 512, 1024]


def test_a_rank_that_receives_nothing_has_nothing_to_do():
    assert Landing([], weights()).steps == ()
    assert Landing([], weights()).arriving == []


def test_tables_that_make_no_sense_are_refused():
    with pytest.raises(ProtocolError, match="table of a plan is inconsistent"):
        Landing([source(3, boxes((0, 0, 4)))], weights())
    with pytest.raises(ProtocolError, match="damaged"):
        Landing([source(3, b"garbage")], weights())


def test_strided_weights_cannot_be_written_in_place():
    check_contiguous(weights())
    with pytest.raises(LayoutError, match="weights that are not contiguous cannot be written in place") as raised:
        check_contiguous(weights(strides=TWO_ROWS_APART))
    assert raised.value.problems == ("t: extent [2, 4], strides [8, 1]",)
    assert raised.value.hint == "use mode shadow"
