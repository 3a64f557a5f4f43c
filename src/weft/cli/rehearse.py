"""`weft rehearse`: the control plane of a case, at full size, on one machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

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
from weft.cli.output import print_json, progress, show_facts
from weft.cli.report import ReportFile, save_report
from weft.rehearse.rehearsal import RehearsalReport, rehearse


def rehearse_command(
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
    versions: Annotated[int, typer.Option(min=1, help="Versions to measure.")] = 3,
    kill: Annotated[int, typer.Option(min=0, help="Members to kill after the versions; they rejoin.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="Processes the members share; 0: one per core.")] = 0,
    events: Annotated[
        Path | None, typer.Option(help="Record members, plans and versions, for `weft dashboard`.")
    ] = None,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Run the real controller with all members of a case on this machine; weights are reserved, never touched."""
    asked = CaseOptions(
        name, trainer, engine, replicas, dtype, trainer_dtype, topology, placement, policy, "", tuple(ignore or ())
    )
    with progress() as on_progress:
        report = rehearse(
            asked.case(),
            num_versions=versions,
            num_killed=kill,
            num_processes=processes,
            events=events,
            on_progress=on_progress,
        )
    save_report(report_file, f"rehearsal of {name}", asdict(report))
    if as_json:
        print_json(asdict(report))
    else:
        _show(name, report)


def _show(name: str, report: RehearsalReport) -> None:
    facts = {
        "members": f"{report.num_trainers} trainers, {report.num_engine_ranks} engine ranks",
        "joined": f"{report.joined_s:.1f} s",
        "planned": f"{report.plan_s:.1f} s, then opened and shipped in {report.ship_s:.1f} s",
        "shipped": f"{_mib(report.shipped_bytes)}, at most {_mib(report.max_shipped_bytes)} to one member",
        "compiled": f"{report.compile_s:.2f} s on the slowest member",
        "all members ready": f"{report.planned_s:.1f} s after the first join",
        "longest silence": f"{report.longest_silence_s:.3f} s",
        "a version": (
            f"{report.controller_cpu_ms_per_version:.0f} ms of the controller's CPU time, "
            f"{_mib(report.magnitude_bytes)} of magnitudes, {report.version_s:.2f} s on this machine"
        ),
        "heartbeats": f"{report.heartbeat_cpu_share:.1%} of one core",
        "writes": f"{report.num_writes:,} counted, {report.planned_writes:,} planned",
        "memory": f"{_gib(report.peak_rss_bytes)}, of which the controller {_gib(report.controller_rss_bytes)}",
    }
    if report.num_killed:
        kept = "the plan was kept" if report.is_plan_kept else "planned anew"
        facts["losses"] = (
            f"{report.num_killed} members, noticed after {report.noticed_s:.1f} s, "
            f"back in the plan {report.returned_s:.1f} s after they joined again; {kept}"
        )
    show_facts(f"rehearsal of {name}", facts)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
