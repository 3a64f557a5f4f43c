"""Bit for bit: what trainers publish, kept in files, against what engines hold. Used by tests and `--check-bits`.

Independent of weft: trainers gather full tensors, engines load them as any loader would and compare all bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.rl.model.engine_model import EngineModel

KEPT = 4
"""Versions whose files are kept; engines are never further behind."""


class Expected:
    """The whole weights of recent versions, in a folder that all members of a machine share."""

    def __init__(self, run_dir: str) -> None:
        self._folder = Path(run_dir) / "expected"
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}.pt"

    def keep(self, version: int, tensors: Iterator[tuple[str, Tensor]], *, writes: bool) -> None:
        """All trainers gather, one writes."""
        whole = {name: tensor.cpu() for name, tensor in tensors}
        if writes:
            torch.save(whole, self._path(version))
            with contextlib.suppress(FileNotFoundError):
                self._path(version - KEPT).unlink()

    def equals(self, version: int, model: EngineModel, fresh: EngineModel) -> bool:
        """Whether a model holds exactly this version; `fresh` is a second model to load into."""
        whole = torch.load(self._path(version), weights_only=True)
        with torch.inference_mode(False):
            for name, tensor in whole.items():
                fresh.load(name, tensor)
        theirs = dict(fresh.named_parameters())
        return all(torch.equal(_bytes(parameter), _bytes(theirs[name])) for name, parameter in model.named_parameters())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)
