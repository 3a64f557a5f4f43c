"""FP8: equal to the stated torch reference bit for bit, however a matrix is cut."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fp8_reference
from weft.codec import fp8
from weft.codec.fp8 import Box, Grid
from weft.core.geometry.scaling import Scaling
from weft.errors import CodecError


def reference(x: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in plain torch."""
    codes, scale = fp8_reference.quantized(x, grid.scaling)
    return codes.view(torch.uint8), scale


def box_of(x: torch.Tensor, first: tuple[int, int] = (0, 0)) -> Box:
    return Box(
        address=x.data_ptr(),
        stride=x.stride(0) * x.element_size(),
        width=x.element_size(),
        first=first,
        rows=x.shape[0],
        columns=x.shape[1],
    )


def quantized(
    parts: list[tuple[torch.Tensor, tuple[int, int]]], grid: Grid, *, is_bounded: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Each part by a holder of its own, who knows of the others only the largest magnitudes."""
    partial = []
    for part, first in parts:
        amax = grid.zeros()
        fp8.add_amax(box_of(part, first), grid, amax)
        partial.append(amax)
    scale = fp8.scales(np.maximum.reduce(partial))
    codes = np.zeros((grid.rows, grid.columns), dtype=np.uint8)
    for part, (row, column) in parts:
        dst = codes.ctypes.data + row * grid.columns + column
        fp8.quantize(box_of(part, (row, column)), grid, scale, dst, grid.columns, is_bounded=is_bounded)
    return codes, scale


@pytest.mark.parametrize("compiled", [True, False])
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scaling=st.sampled_from(list(Scaling)),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
    seed=st.integers(0, 2**31),
    cuts=st.lists(st.integers(0, 300), max_size=3),
    is_bounded=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_by_rows_gives_the_reference(
    compiled: bool,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    scaling: Scaling,
    spread: float,
    seed: int,
    cuts: list[int],
    is_bounded: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator) * spread)
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    x = x.to(dtype)
    grid = Grid(rows=rows, columns=columns, scaling=scaling)
    borders = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    parts = [(x[a:b], (a, 0)) for a, b in itertools.pairwise(borders)]
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(fp8, "_codec", None)
        codes, scale = quantized(parts, grid, is_bounded=is_bounded)
    wanted_codes, wanted_scale = reference(x, grid)
    assert (torch.from_numpy(codes) == wanted_codes).all()
    assert (torch.from_numpy(scale) == wanted_scale).all()


def test_every_bf16_number_rounds_as_torch_does() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    x = torch.where(bits.isfinite() & (bits.abs() <= 448), bits, 0.0)
    grid = Grid(rows=256, columns=256)
    codes = np.zeros((256, 256), dtype=np.uint8)
    fp8.quantize(box_of(x), grid, np.ones(grid.shape, dtype=np.float32), codes.ctypes.data, 256)
    assert (torch.from_numpy(codes) == x.float().to(torch.float8_e4m3fn).view(torch.uint8)).all()
    assert (torch.from_numpy(fp8.to_e4m3(x.float().numpy())) == torch.from_numpy(codes)).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_not_finite_names_the_tensor_unless_allowed(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(fp8, "_codec", None)
    x = torch.ones(130, 200, dtype=torch.bfloat16)
    x[3, 7], x[129, 199], x[5, 5] = float("nan"), float("inf"), float("-inf")
    grid, amax = Grid(rows=130, columns=200), Grid(rows=130, columns=200).zeros()
    with pytest.raises(CodecError, match=r"`model\.q` has 3 elements that are not finite"):
        fp8.add_amax(box_of(x), grid, amax, tensor="model.q")
    amax = grid.zeros()
    fp8.add_amax(box_of(x), grid, amax, allow_nonfinite=True)
    assert (amax == 1.0).all()
    codes = np.zeros((130, 200), dtype=np.uint8)
    fp8.quantize(box_of(x), grid, fp8.scales(amax), codes.ctypes.data, 200)
    assert (torch.from_numpy(codes) == reference(x, grid)[0]).all()
    assert (codes[3, 7], codes[129, 199], codes[5, 5]) == (0x7F, 0x7E, 0xFE)


def test_a_box_outside_its_matrix_is_refused() -> None:
    x = torch.ones(10, 10)
    with pytest.raises(CodecError, match="invalid box of 10×10 at"):
        fp8.add_amax(box_of(x, (1, 0)), Grid(rows=10, columns=10), Grid(rows=10, columns=10).zeros())
    with pytest.raises(CodecError, match="expected one FP32 number"):
        fp8.add_amax(box_of(x), Grid(rows=10, columns=10), np.zeros((2, 2), dtype=np.float32))
