"""What a checkpoint holds, read from the headers of its files: names, precisions and shapes, no values."""

from __future__ import annotations

from pathlib import Path

from weft.core.layout import Tensor
from weft.errors import LayoutError

_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3"}


def checkpoint_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a folder of safetensors files."""
    from safetensors import safe_open  # noqa: PLC0415

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LayoutError(
            f"`{folder}` has no safetensors files to read tensor names from",
            hint="load the engine from a checkpoint: with random weights the names of its tensors are unknown",
        )
    tensors = []
    for path in files:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                view = file.get_slice(name)
                dtype = view.get_dtype()
                tensors.append(Tensor(name=name, dtype=_DTYPES.get(dtype, dtype), shape=tuple(view.get_shape())))
    return tensors
