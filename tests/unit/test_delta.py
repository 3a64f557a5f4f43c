"""What the format of patches promises, case by case."""

import numpy as np
import pytest

from weft.codec import delta
from weft.errors import CodecError


def encoded(now: np.ndarray, old: np.ndarray | None, *, capacity: int | None = None) -> np.ndarray:
    width = now.itemsize
    out = np.zeros(capacity or delta.max_bytes(len(now), width), dtype=np.uint8)
    size = delta.encode(
        now.ctypes.data,
        None if old is None else old.ctypes.data,
        width=width,
        num_elements=len(now),
        out=out.ctypes.data,
        capacity=len(out),
        base=4,
        version=5,
    )
    return out[:size]


def check(patch: np.ndarray, *, base: int | None = 4, version: int = 5, num_elements: int = 1000) -> None:
    delta.check(patch.ctypes.data, len(patch), width=2, num_elements=num_elements, base=base, version=version)


def test_one_percent_of_bf16_costs_less_than_two_and_a_half_bytes_each() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 4 << 20, dtype=np.uint16)
    hit = rng.random(len(old)) < 0.01
    now = old.copy()
    now[hit] += rng.choice([1, 0xFFFF], hit.sum()).astype(np.uint16)
    assert len(encoded(now, old)) / hit.sum() <= 2.5


def test_what_changed_everywhere_is_sent_as_it_is() -> None:
    old, now = np.zeros(100_000, dtype=np.uint16), np.ones(100_000, dtype=np.uint16)
    assert 200_000 < len(encoded(now, old)) < 200_200


def test_the_wrong_base_is_refused_by_name() -> None:
    old, now = np.zeros(1000, dtype=np.uint16), np.ones(1000, dtype=np.uint16)
    now[3:] = 0
    patch = encoded(now, old)
    check(patch)
    with pytest.raises(CodecError, match="applies to version 4, but the base is 3"):
        check(patch, base=3)
    with pytest.raises(CodecError, match="applies to version 4, but the base is None"):
        check(patch, base=None)
    with pytest.raises(CodecError, match="for version 5, expected 6"):
        check(patch, version=6)
    with pytest.raises(CodecError, match="another number of elements"):
        check(patch, num_elements=999)


def test_an_anchor_needs_no_base() -> None:
    now = np.arange(1000, dtype=np.uint16)
    check(encoded(now, None), base=None)
    check(encoded(now, None), base=17)


def test_a_patch_that_names_no_base_but_needs_one_is_refused() -> None:
    old, now = np.zeros(1000, dtype=np.uint16), np.zeros(1000, dtype=np.uint16)
    now[5] = 1
    patch = encoded(now, old)
    patch[24:32] = 0xFF
    with pytest.raises(CodecError, match="needs a base but names none"):
        check(patch)


def test_what_does_not_fit_is_an_error() -> None:
    now = np.arange(1000, dtype=np.uint16)
    with pytest.raises(CodecError, match="does not fit into 500 bytes"):
        encoded(now, None, capacity=500)


def test_rows_that_do_not_hold_the_image_are_refused() -> None:
    now = np.arange(1000, dtype=np.uint16)
    patch, target = encoded(now, None), np.zeros(999, dtype=np.uint16)
    with pytest.raises(CodecError, match="do not hold 1000 elements"):
        delta.apply(
            patch.ctypes.data,
            len(patch),
            width=2,
            num_elements=1000,
            rows=delta.ImageRows.contiguous(target.ctypes.data, target.nbytes),
        )


@pytest.mark.parametrize("width", [3, 8])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(CodecError, match=f"elements of {width} bytes"):
        delta.encode(1, 1, width=width, num_elements=1, out=1, capacity=100, base=0, version=1)
