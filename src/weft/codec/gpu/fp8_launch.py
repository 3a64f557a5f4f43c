"""How FP8 kernels are launched: those of squares and those of rows work through the same kind of table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.codec.gpu.fp8_arithmetic import ELEMENTS, has_fp8_cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Kernels:
    """The kernels for one kind of tiles; see `matrix_tiles` for their table. Launches go to the current stream."""

    quantize_kernel: Any
    quantize_steps: dict[str, int]
    """How much of a tile it works on at a time."""
    amax_kernel: Any
    amax_steps: dict[str, int]
    num_warps: int

    def quantize(
        self,
        table: torch.Tensor,
        image: int,
        amax: torch.Tensor,
        wild: torch.Tensor,
        *,
        width: int,
        allow_nonfinite: bool = False,
    ) -> None:
        """Quantise tiles of elements of `width` bytes into an image.

        `amax`: magnitudes of all blocks, given for tiles that are KNOWN and found for the others. `wild[0]` is nonzero
        afterwards if any number is not finite; `add_amax` counts them.
        """
        if len(table):
            self.quantize_kernel[(len(table),)](
                table,
                image,
                amax,
                wild,
                ELEMENT=ELEMENTS[width],
                IS_ALIGNED=image % 16 == 0,
                HAS_CAST=has_fp8_cast(table.device),
                IS_WILD=allow_nonfinite,
                num_warps=self.num_warps,
                **self.quantize_steps,
            )

    def add_amax(self, table: torch.Tensor, amax: torch.Tensor, wild: torch.Tensor, *, width: int) -> None:
        """Raise the magnitudes of blocks to what tiles hold of them.

        `wild`: raised by the number of non-finite elements, in total and in each grid.
        """
        if len(table):
            self.amax_kernel[(len(table),)](
                table,
                amax.view(torch.int32),
                wild,
                ELEMENT=ELEMENTS[width],
                num_warps=self.num_warps,
                **self.amax_steps,
            )
