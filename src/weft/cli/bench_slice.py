"""`weft bench slice`: the work of one rank of a large case, on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from weft.cli.bench import check_cuda, load_bench, tell
from weft.cli.case_options import (
    CaseOptions,
    Dtype,
    Engine,
    Ignore,
    Json,
    Name,
    Placement,
    PolicyName,
    Replicas,
    TopologyName,
    Trainer,
    TrainerDtype,
)
from weft.cli.output import out, print_json, progress
from weft.cli.report import ReportFile, save_report
from weft.core.case import plan_case
from weft.devices import CPU, memory_kind
from weft.errors import ConfigError, WeftError
from weft.sim.presets import PRESETS

if TYPE_CHECKING:
    from weft.bench.slice.measure import SliceReport

SIDES = ("trainer", "engine")


def slice_command(
    name: Name = "",
    trainer: Trainer = "",
    engine: Engine = "",
    replicas: Replicas = None,
    dtype: Dtype = "",
    trainer_dtype: TrainerDtype = "",
    topology: TopologyName = "",
    placement: Placement = "",
    policy: PolicyName = "",
    ignore: Ignore = None,
    side: Annotated[str, typer.Option(help="Whose work: trainer or engine.")] = "trainer",
    rank: Annotated[str, typer.Option(help="Which rank: a number, or busiest.")] = "busiest",
    delta: Annotated[
        bool, typer.Option("--delta", help="Trainers: send patches of versions in which 1% changes.")
    ] = False,
    offloaded: Annotated[bool | None, typer.Option(help="Trainer weights start in host memory.")] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda:0.")] = "cuda:0",
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Versions; medians are shown.")] = 5,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Do one rank's work of a large case on one device, beside the simulator's prediction for that rank."""
    if side not in SIDES:
        raise ConfigError(f"unknown side `{side}`", hint=f"use {' or '.join(SIDES)}")
    if rank != "busiest" and not rank.isdecimal():
        raise ConfigError(f"unknown rank `{rank}`", hint="use a number, or busiest")
    if memory_kind(device) != CPU:
        check_cuda()
    asked = CaseOptions(
        name, trainer, engine, replicas, dtype, trainer_dtype, topology, placement, policy, "", tuple(ignore or ())
    )
    preset = PRESETS.get(name)
    if offloaded is None:
        offloaded = preset is not None and preset.offloaded
    with progress() as say:
        plan = plan_case(asked.case(), on_progress=tell(say))
        report = load_bench("slice.measure").measure(
            plan,
            name=name,
            side=side,
            rank=None if rank == "busiest" else int(rank),
            device=device,
            offloaded=offloaded and side == "trainer",
            delta=delta,
            repeat=repeat,
            say=tell(say),
        )
    save_report(report_file, f"weft bench slice {name}: {side} {report.rank}", report.to_json())
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.exact:
        raise WeftError(f"{side} {report.rank} did not make every byte correctly")


def _show(report: SliceReport) -> None:
    patches = ", as patches" if report.delta else ""
    table = Table(title=f"{report.name}: {report.side} {report.rank} on {report.device}{patches}", title_justify="left")
    for column in ("stage", "measured ms", "predicted ms"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in report.stages:
        table.add_row(stage.stage, f"{stage.measured_ms:.2f}", f"{stage.predicted_ms:.2f}")
    out.print(table)
    out.print(
        f"{report.wire_bytes / 1e9:.2f} GB at {report.nic_gb_per_s:.1f} GB/s: {report.paced_s:.3f} s, "
        f"predicted {report.predicted_s:.3f} s; without the NIC {report.unpaced_s:.3f} s"
    )
    out.print(
        f"everything but the wire: {report.non_wire_ms:.1f} ms, {report.non_wire_ms / report.wire_ms:.1%} of it; "
        f"{'exact' if report.exact else 'WRONG'} in {report.checked_bytes / 1e9:.2f} GB that were compared"
    )
