"""Casts: as torch does them, compiled or not."""

from __future__ import annotations

import itertools

import pytest
import torch

from weft.codec import cast as cast_module
from weft.codec.cast import cast
from weft.errors import CodecError

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(KINDS, 2)))
def test_every_kind_of_number_is_cast_as_torch_does(src, dst, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cast_module, "_codec", None)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (300, 41), generator=generator, dtype=torch.int64)
    wide = bits.to(torch.int32).view(torch.float32)  # all magnitudes, NaN, infinities
    wide[0, :8] = torch.tensor([0.0, -0.0, 1.0, 1.0039062, 65519.0, 65520.0, 3.4e38, 1e-40])
    whole = wide.to(KINDS[src])
    part = whole[:, 3:38]
    found = torch.full((300, 40), 7.0, dtype=KINDS[dst])
    size, to = whole.element_size(), found.element_size()
    cast(part.data_ptr(), 41 * size, src, found.data_ptr() + to, 40 * to, dst, rows=300, columns=35)
    expected = part.to(KINDS[dst])
    is_nan = expected.isnan()
    assert torch.equal(found[:, 1:36].isnan(), is_nan)
    assert torch.equal(found[:, 1:36][~is_nan], expected[~is_nan])
    assert (found[:, 0] == 7.0).all()
    assert (found[:, 36:] == 7.0).all()


def test_other_kinds_are_refused():
    with pytest.raises(CodecError, match="fp8_e4m3 cannot be cast to bf16"):
        cast(0, 0, "fp8_e4m3", 0, 0, "bf16", rows=1, columns=1)
