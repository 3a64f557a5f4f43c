"""Patches: exact for any change of any image, the same from C and NumPy, harmless when damaged."""

import contextlib
import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.codec import compress, delta
from weft.errors import CodecError

FENCE = 64


class Guarded:
    """An image between two fences of known bytes."""

    def __init__(self, image: NDArray[np.uint8]) -> None:
        self._all = np.full(len(image) + 2 * FENCE, 0xA5, dtype=np.uint8)
        self.image = self._all[FENCE : FENCE + len(image)]
        self.image[:] = image

    def is_whole(self) -> bool:
        return bool((self._all[:FENCE] == 0xA5).all() and (self._all[-FENCE:] == 0xA5).all())

    @property
    def rows(self) -> delta.ImageRows:
        return delta.ImageRows.contiguous(int(self.image.ctypes.data), len(self.image))


def patch_of(now: NDArray[np.uint8], old: NDArray[np.uint8] | None, width: int, version: int = 2) -> NDArray[np.uint8]:
    num_elements = len(now) // width
    out = np.zeros(delta.max_bytes(num_elements, width), dtype=np.uint8)
    size = delta.encode(
        int(now.ctypes.data),
        None if old is None else int(old.ctypes.data),
        width=width,
        num_elements=num_elements,
        out=int(out.ctypes.data),
        capacity=len(out),
        base=version - 1,
        version=version,
    )
    return out[:size].copy()


def applied(patch: NDArray[np.uint8], old: NDArray[np.uint8], width: int, version: int = 2) -> NDArray[np.uint8]:
    target = Guarded(old)
    num_elements = len(old) // width
    address = int(patch.ctypes.data)
    delta.check(address, len(patch), width=width, num_elements=num_elements, base=version - 1, version=version)
    delta.apply(address, len(patch), width=width, num_elements=num_elements, rows=target.rows)
    assert target.is_whole()
    return target.image


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, NDArray[np.uint8], NDArray[np.uint8]]:
    """A width, an image, and the same image with some elements changed: few, many, all, by a little or by a lot."""
    width = draw(st.sampled_from(delta.WIDTHS))
    num_elements = draw(st.one_of(st.integers(0, 700), st.sampled_from([16383, 16384, 16385, 40000])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 1 << (8 * width), num_elements, dtype=f"u{width}")
    density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 0.98, 1.0]))
    hit = rng.random(num_elements) < density
    reach = draw(st.sampled_from([1, 127, 128, 1 << (8 * width - 1)]))
    step = rng.integers(1, reach, hit.sum(), endpoint=True).astype(old.dtype) * rng.choice([1, -1], hit.sum()).astype(
        old.dtype
    )
    new = old.copy()
    new[hit] += step
    return width, old.view(np.uint8), new.view(np.uint8)


@given(changes())
@settings(max_examples=150, deadline=None)
def test_a_patch_gives_the_new_image_bit_for_bit(case: tuple[int, NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    width, old, new = case
    patch = patch_of(new, old, width)
    assert (applied(patch, old, width) == new).all()
    assert len(patch) <= delta.max_bytes(len(new) // width, width)


@given(changes())
@settings(max_examples=100, deadline=None)
def test_c_and_numpy_make_and_apply_the_same_patch(case: tuple[int, NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    assert delta._codec is not None, "the C module was not built"
    width, old, new = case
    fast = patch_of(new, old, width)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delta, "_codec", None)
        assert (patch_of(new, old, width) == fast).all()
        assert (applied(fast, old, width) == new).all()


@given(changes(), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_an_image_may_lie_in_rows(case: tuple[int, NDArray[np.uint8], NDArray[np.uint8]], num_rows: int) -> None:
    width, old, new = case
    borders = np.linspace(0, len(old) // width, num_rows + 1).astype(int) * width
    pieces = [Guarded(old[a:b]) for a, b in itertools.pairwise(borders)]
    rows = delta.ImageRows(
        begin=borders[:-1].astype(np.uint64),
        address=np.array([piece.image.ctypes.data for piece in pieces], dtype=np.uint64),
        length=np.diff(borders).astype(np.uint64),
    )
    patch = patch_of(new, old, width)
    delta.apply(int(patch.ctypes.data), len(patch), width=width, num_elements=len(old) // width, rows=rows)
    assert (np.concatenate([piece.image for piece in pieces]) == new).all()
    assert all(piece.is_whole() for piece in pieces)


@given(st.integers(0, 2**32 - 1), st.sampled_from(delta.WIDTHS))
@settings(max_examples=6, deadline=None)
def test_two_hundred_patches_with_anchors_arrive_where_the_weights_are(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    num_elements = 20_000
    weights = rng.integers(0, 1 << (8 * width), num_elements, dtype=f"u{width}")
    held = np.zeros(num_elements * width, dtype=np.uint8)
    sent = None
    for version in range(1, 201):
        hit = rng.random(num_elements) < rng.choice([0.0, 0.01, 0.2])
        weights[hit] += rng.integers(0, 3, hit.sum(), dtype=weights.dtype)
        now = weights.view(np.uint8).copy()
        patch = patch_of(now, None if version % 20 == 1 else sent, width, version)
        held = applied(patch, held, width, version)
        assert (held == now).all()
        sent = now


@given(changes(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_patch_is_refused_or_stays_inside(
    case: tuple[int, NDArray[np.uint8], NDArray[np.uint8]], data: st.DataObject
) -> None:
    width, old, new = case
    patch = patch_of(new, old, width)
    for _ in range(data.draw(st.integers(1, 4))):
        patch[data.draw(st.integers(0, len(patch) - 1))] = data.draw(st.integers(0, 255))
    patch = patch[: data.draw(st.integers(0, len(patch)))].copy()
    found = []
    for module in (delta._codec, None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(delta, "_codec", module)
            try:
                found.append(applied(patch, old, width).tobytes())  # asserts the fences
            except CodecError:
                found.append(b"refused")
    assert found[0] == found[1]


@given(st.binary(max_size=4096), st.sampled_from(delta.WIDTHS), st.integers(0, 70_000))
@settings(max_examples=200, deadline=None)
def test_anything_else_is_refused(noise: bytes, width: int, num_elements: int) -> None:
    buffer = ctypes.create_string_buffer(noise, max(len(noise), 1))
    with pytest.raises(CodecError):
        delta.check(ctypes.addressof(buffer), len(noise), width=width, num_elements=num_elements, base=1, version=2)


@given(changes())
@settings(max_examples=60, deadline=None)
def test_a_compressed_patch_is_the_same_patch(case: tuple[int, NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    width, old, new = case
    patch = patch_of(new, old, width)
    packed = compress.compress(patch)
    assert (compress.decompress(packed, width=width, num_elements=len(new) // width) == patch).all()


@given(changes(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_compressed_patch_is_refused_or_sound(
    case: tuple[int, NDArray[np.uint8], NDArray[np.uint8]], data: st.DataObject
) -> None:
    width, old, new = case
    packed = compress.compress(patch_of(new, old, width)).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    packed = packed[: data.draw(st.integers(0, len(packed)))].copy()
    with contextlib.suppress(CodecError):
        applied(compress.decompress(packed, width=width, num_elements=len(old) // width), old, width)
