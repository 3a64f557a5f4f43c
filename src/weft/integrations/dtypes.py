"""Precisions: weft's names and torch's dtypes."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
