"""FP8 arithmetic of Triton kernels: the same results as the C module, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = {2: tl.bfloat16, 4: tl.float32}
WIDTHS = tuple(ELEMENTS)
"""Bytes of the elements that are quantised."""


@triton.jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """Bits of magnitudes: as integers they order like the numbers, and NaN is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale(largest):  # type: ignore[no-untyped-def]
    """The scale of a block, by its largest magnitude."""
    return tl.div_rn(tl.maximum(largest, 1e-10), 448.0)


@triton.jit
def to_e4m3(values, HAS_CAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers as e4m3, infinities as ±448: with the GPU's own cast, or as weft.codec.fp8.to_e4m3 does it."""
    if HAS_CAST:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        inside = tl.minimum(size, 0x43E00000)  # 448
        small = (inside.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
        large = (inside + 0x7FFFF + ((inside >> 20) & 1) - (120 << 23)) >> 20
        code = tl.where(inside < 0x3C800000, small, large)
        code = tl.where(size > 0x7F800000, 0x7F, code)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


def has_fp8_cast(device: torch.device) -> bool:
    """Whether a device casts to e4m3 by itself, rounding to nearest even and saturating."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
