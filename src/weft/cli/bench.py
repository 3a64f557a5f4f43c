"""`weft bench`: measurements on this machine, every figure beside the limit measured in the same run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from weft.cli.case_options import Json
from weft.cli.output import err, out, print_json, progress
from weft.config import ReceiverMode
from weft.devices import memory_kind
from weft.errors import ConfigError, TransportUnavailable

if TYPE_CHECKING:
    from weft.bench.transfer import Report, Row

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@bench_app.callback()
def _root() -> None:
    """Measure this machine."""


@bench_app.command("transfer")
def transfer_command(
    model: Annotated[str, typer.Option(help="Whose tensor shapes to move.")] = "qwen2.5-0.5b",
    case: Annotated[list[str] | None, typer.Option(help="tp, replicas; both by default.")] = None,
    trainers: Annotated[int, typer.Option(min=1, max=64)] = 2,
    engine_ranks: Annotated[int, typer.Option(min=1, max=64)] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda:0.")] = "cpu",
    mode: Annotated[list[str] | None, typer.Option(help="in_place, shadow; both by default.")] = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Versions per method; medians are shown.")] = 5,
    baselines: Annotated[bool, typer.Option(help="Also measure broadcast, gather and broadcast, file.")] = True,
    as_json: Json = False,
) -> None:
    """Move real tensor shapes between real processes by every method, verify every byte, compare with the limits."""
    cases, measure = _load()
    modes = tuple(mode or ReceiverMode)
    if not set(modes) <= set(ReceiverMode):
        raise ConfigError(f"unknown mode `{modes[0]}`", hint=f"use {' or '.join(ReceiverMode)}")
    wanted = cases(tuple(case or ("tp", "replicas")), num_trainers=trainers, num_engine_ranks=engine_ranks)
    if memory_kind(device) != "cpu":
        _check_cuda()
    logging.disable(logging.WARNING)  # members that leave are no news here
    with progress() as say:
        report = measure(model, wanted, device=device, repeat=repeat, baseline=baselines, say=_tell(say), modes=modes)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)


def _load() -> tuple[Callable[..., Any], Callable[..., Report]]:
    try:
        from weft.bench.transfer import cases, measure  # noqa: PLC0415 - torch only where it is needed
    except ModuleNotFoundError as error:
        raise TransportUnavailable(f"the benchmark needs {error.name}", hint="pip install weft[bench]") from error
    return cases, measure


def _check_cuda() -> None:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device on this machine", hint="use --device cpu")


def _tell(say: Callable[[str], None]) -> Callable[[str], None]:
    """Progress: a status line on a terminal, plain lines elsewhere."""
    if err.is_terminal:
        return say
    return lambda text: err.print(escape(text))


def _show(report: Report) -> None:
    table = Table(title=f"{report.model} on {report.device}", title_justify="left")
    for name in (
        "case",
        "method",
        "transport",
        "GB",
        "ms",
        "GB/s",
        "of limit",
        "of bare engine",
        "write ms",
        "predicted ms",
        "pause ms",
        "verified",
    ):
        table.add_column(name, justify="left" if name in ("case", "method", "transport") else "right")
    for row in report.rows:
        table.add_row(*_cells(row))
    out.print(table)
    out.print(f"control overhead: {report.control_ms:.2f} ms per version (2 trainers, 2 engines, a few bytes)")


def _cells(row: Row) -> list[str]:
    def shown(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    return [
        row.case,
        row.method,
        row.transport,
        f"{row.bytes / 1e9:.3f}",
        shown(row.seconds, 1, 1e3),
        shown(row.gb_per_s, 2),
        shown(row.fraction_of_limit, 2),
        shown(row.fraction_of_engine_limit, 2),
        shown(row.write_ms, 1),
        shown(row.predicted_s, 1, 1e3),
        shown(row.pause_ms, 1),
        {None: "", True: "yes", False: "NO"}[row.verified],
    ]
