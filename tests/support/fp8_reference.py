"""The FP8 reference of weft/codec/fp8.py, in plain torch, for whole matrices."""

from __future__ import annotations

import torch

from weft.core.geometry.scaling import Scaling, block_sides


def quantized(x: torch.Tensor, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix."""
    height, width = block_sides(tuple(x.shape), scaling)
    rows, columns = -(-x.shape[0] // height), -(-x.shape[1] // width)
    padded = torch.zeros(rows * height, columns * width)
    padded[: x.shape[0], : x.shape[1]] = x.float()
    blocks = padded.view(rows, height, columns, width)
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(dim=(1, 3))
    scale = amax.clamp(min=1e-10) / torch.tensor(448.0)
    factor = (1 / scale).repeat_interleave(height, 0).repeat_interleave(width, 1)[: x.shape[0], : x.shape[1]]
    return (x.float() * factor).clamp(-448, 448).to(torch.float8_e4m3fn), scale
