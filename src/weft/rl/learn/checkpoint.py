"""Checkpoints of a run: each trainer rank's masters and moments, complete or absent.

    runs/a/iteration-000050/trainer-0.pt …      written first
    runs/a/iteration-000050/complete.json       written last, by the first trainer

A run resumes with the same number of trainers, wrapped in the same way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from weft.errors import ConfigError
from weft.rl.learn.optimizer import MasterAdamW
from weft.rl.settings import LoopSettings

KEPT = 2


def save(settings: LoopSettings, optimizer: MasterAdamW, rank: int, iteration: int) -> None:
    """Called by all trainers after the same iteration."""
    folder = Path(settings.checkpoint_dir) / f"iteration-{iteration:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(optimizer.state(), folder / f"trainer-{rank}.pt")
    except OSError as error:
        raise ConfigError(f"the checkpoint `{folder}` cannot be written: {error.strerror}") from error
    dist.barrier()
    if rank == 0:
        (folder / "complete.json").write_text(json.dumps(_meta(settings) | {"iteration": iteration}))
        for old in _complete(settings)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def load(settings: LoopSettings, optimizer: MasterAdamW, rank: int) -> int:
    """Continue from the newest complete checkpoint; returns its iteration."""
    folder, iteration = newest(settings)
    optimizer.load(torch.load(folder / f"trainer-{rank}.pt", weights_only=True))
    return iteration


def check(settings: LoopSettings) -> None:
    """Raise unless there is something to resume from, or a folder without another run's checkpoints."""
    if settings.resume:
        newest(settings)
    elif settings.checkpoint_every and _complete(settings):
        raise ConfigError(
            f"`{settings.checkpoint_dir}` already has checkpoints", hint="add --resume, or choose another folder"
        )


def newest(settings: LoopSettings) -> tuple[Path, int]:
    """The newest complete checkpoint and its iteration; raises if there is none, or if it belongs to another run."""
    found = _complete(settings)
    if not found:
        raise ConfigError(f"no complete checkpoint in `{settings.checkpoint_dir}`", hint="leave out --resume")
    meta = json.loads((found[-1] / "complete.json").read_text())
    wanted = _meta(settings)
    different = [
        f"{name} is {meta.get(name)!r}, not {value!r}" for name, value in wanted.items() if meta.get(name) != value
    ]
    if different:
        raise ConfigError(f"`{found[-1]}` belongs to another run: {', '.join(different)}")
    return found[-1], int(meta["iteration"])


def _meta(settings: LoopSettings) -> dict[str, str | int]:
    return {
        "model": settings.model,
        "task": settings.task,
        "dtype": settings.dtype.value,
        "trainer": settings.trainer.value,
        "num_trainers": settings.num_trainers,
    }


def _complete(settings: LoopSettings) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    return sorted(path.parent for path in Path(settings.checkpoint_dir).glob("iteration-*/complete.json"))
