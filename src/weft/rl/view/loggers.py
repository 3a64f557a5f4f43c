"""A run's figures in TensorBoard or Weights & Biases, if the user has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.rl.run.record import Record

Log = Callable[[Mapping[str, float], int], None]
"""Takes figures by name, and the step they belong to."""


class Figures:
    """Logs what is new in a record, each time it is seen."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._num_iterations, self._num_versions = 0, 0

    def see(self, record: Record) -> None:
        """A run, as far as it has come."""
        iterations, self._num_iterations = record.iterations[self._num_iterations :], len(record.iterations)
        for iteration in iterations:
            figures = {"reward": iteration.reward, "staleness": iteration.staleness, **iteration.metrics}
            self._log({f"rl/{name}": value for name, value in figures.items()}, iteration.number)
        versions, self._num_versions = record.committed[self._num_versions :], len(record.committed)
        pauses: dict[int, float] = {}
        for commit in record.commits:
            pauses[commit.version] = max(pauses.get(commit.version, 0.0), commit.pause_ms)
        for version in versions:
            figures = {
                "transfer_ms": version.transfer_ms,
                "write_ms": version.write_ms,
                "pause_ms": pauses.get(version.number, 0.0),
                "bytes": float(version.num_bytes),
            }
            self._log({f"weft/{name}": value for name, value in figures.items()}, version.number)


@contextlib.contextmanager
def figure_loggers(*, tensorboard: Path | None, wandb: str, settings: Mapping[str, Any]) -> Iterator[list[Figures]]:
    """Loggers that were asked for: a folder for TensorBoard, a project of Weights & Biases."""
    with contextlib.ExitStack() as stack:
        found = []
        if tensorboard is not None:
            found.append(Figures(stack.enter_context(_tensorboard(tensorboard))))
        if wandb:
            found.append(Figures(stack.enter_context(_wandb(wandb, settings))))
        yield found


@contextlib.contextmanager
def _tensorboard(folder: Path) -> Iterator[Log]:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("--tensorboard needs tensorboard", hint="pip install tensorboard") from error
    writer = SummaryWriter(log_dir=str(folder))

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    try:
        yield log
    finally:
        writer.close()


@contextlib.contextmanager
def _wandb(project: str, settings: Mapping[str, Any]) -> Iterator[Log]:
    try:
        import wandb  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("--wandb needs wandb", hint="pip install wandb") from error
    run = wandb.init(project=project, config=dict(settings))

    def log(figures: Mapping[str, float], step: int) -> None:
        axis = "rl/iteration" if any(name.startswith("rl/") for name in figures) else "weft/version"
        run.log({**figures, axis: step})

    try:
        yield log
    finally:
        run.finish()
