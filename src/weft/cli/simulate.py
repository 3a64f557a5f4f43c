"""`weft simulate`: predict one update."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.case_options import (
    CaseOptions,
    ConfigFile,
    Dtype,
    Engine,
    GatherName,
    Ignore,
    Json,
    Load,
    Memory,
    Model,
    Name,
    Placement,
    PolicyName,
    Replicas,
    TopologyName,
    Trainer,
    TrainerDtype,
    TransportName,
    make_or_load,
    one_name,
    typed_settings,
)
from weft.cli.output import err, gb, print_json, progress, show_facts
from weft.cli.report import ReportFile, save_report
from weft.config import ReceiverMode
from weft.core.models.catalog import load_model
from weft.core.plans.plan import Plan
from weft.errors import ConfigError
from weft.observe.events_file import find_version
from weft.observe.trace import write_trace
from weft.sim.peers import beside_gather as gather_comparison
from weft.sim.presets import PRESETS, Preset
from weft.sim.simulator import Options, simulate
from weft.web.reports import timelines_beside


def simulate_command(
    name: Name = "",
    model: Model = "",
    trainer: Trainer = "",
    engine: Engine = "",
    replicas: Replicas = None,
    dtype: Dtype = "",
    trainer_dtype: TrainerDtype = "",
    topology: TopologyName = "",
    placement: Placement = "",
    policy: PolicyName = "",
    gather: GatherName = "",
    ignore: Ignore = None,
    memory: Memory = "",
    load: Load = None,
    config: ConfigFile = None,
    mode: Annotated[
        str, typer.Option(help="Receiver mode: shadow (default), in_place, or patch with --delta-density.")
    ] = "",
    transport: TransportName = "",
    delta_density: Annotated[
        float | None, typer.Option(help="Send patches; the fraction of the engine's elements that changes.")
    ] = None,
    beside_gather: Annotated[
        bool, typer.Option(help="For a published run: also predict gathering full tensors before quantising.")
    ] = False,
    offloaded: Annotated[bool | None, typer.Option(help="Trainer weights start in host memory.")] = None,
    skew_ms: Annotated[float, typer.Option(help="Spread the senders' starts over this many milliseconds.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    report_file: ReportFile = None,
    measured: Annotated[
        Path | None, typer.Option(help="With --report: an events file; its last version is shown, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict how long one update takes, and how long the engines pause."""
    _check_options(mode, delta_density, skew_ms)
    asked = CaseOptions(
        one_name(name, model),
        trainer,
        engine,
        replicas,
        dtype,
        trainer_dtype,
        topology,
        placement,
        policy,
        gather,
        tuple(ignore or ()),
        memory,
    )
    given = typed_settings(mode=mode, delta=None if delta_density is None else True, transport=transport)
    plan, _ = make_or_load(asked, load, config, {} if load is not None else given)
    preset = PRESETS.get(asked.name)
    if offloaded is None:
        offloaded = preset is not None and preset.offloaded
    if beside_gather and (preset is None or asked.typed()):
        raise ConfigError(
            "--beside-gather needs a published run without other options", hint=f"use one of {', '.join(PRESETS)}"
        )
    options = Options(
        mode=ReceiverMode(mode) if mode else None,
        offloaded=offloaded,
        skew_s=skew_ms / 1e3,
        delta_density=delta_density,
    )
    with progress() as on_progress:
        on_progress("simulating")
        prediction = simulate(plan, options=options, record=trace is not None or report_file is not None)
    if trace is not None and prediction.recorder is not None:
        num_spans = write_trace(prediction.recorder.events, trace)
        err.print(f"wrote {num_spans} spans to {trace}: open it at ui.perfetto.dev")
    result = {
        "model": plan.model,
        "predicted_s": prediction.predicted_s,
        "transfer_s": prediction.transfer_s,
        "pause_s": prediction.pause_s,
        "wire_bytes": prediction.wire_bytes,
        "stages": prediction.stages,
        "num_chunks": prediction.num_chunks,
        "published_s": list(preset.published_s) if preset else None,
        "published_system": preset.system if preset else None,
    }
    if beside_gather and preset is not None:
        with progress() as on_progress:
            on_progress("simulating a gather of full tensors")
            result["beside_gather"] = asdict(gather_comparison(preset, load_model(preset.model), plan))
    if report_file is not None and prediction.recorder is not None:
        seen = None if measured is None else find_version(measured, None)
        chart = timelines_beside(prediction.recorder.events, seen)
        save_report(report_file, f"{plan.model}: one update, predicted", result, charts=[chart])
    if as_json:
        print_json(result)
    else:
        _show_prediction(plan, result, preset)


def _check_options(mode: str, delta_density: float | None, skew_ms: float) -> None:
    """Raises ConfigError for options the simulator cannot take."""
    if mode and mode not in list(ReceiverMode):
        raise ConfigError(f"unknown mode `{mode}`", hint=f"use {' or '.join(ReceiverMode)}")
    if mode == ReceiverMode.PATCH and delta_density is None:
        raise ConfigError("mode `patch` without patches", hint="give the fraction that changes: --delta-density 0.01")
    if delta_density is not None and not 0 < delta_density <= 1:
        raise ConfigError(
            f"delta density is {delta_density}", hint="give more than 0 and at most 1: 0.01 is one percent"
        )
    if not 0 <= skew_ms <= 3_600_000:
        raise ConfigError(f"skew is {skew_ms} ms", hint="give 0 to 3600000 milliseconds")


def _show_prediction(plan: Plan, result: dict[str, Any], preset: Preset | None) -> None:
    facts = {
        "predicted": f"{result['predicted_s']:.3f} s from publish to the last commit",
        "pause": f"{result['pause_s'] * 1e3:.1f} ms per engine",
        "on the wire": f"{gb(result['wire_bytes'])} in {result['num_chunks']:,} chunks",
        **{f"stage {name}": f"{seconds * 1e3:.1f} ms" for name, seconds in result["stages"].items()},
    }
    if "beside_gather" in result:
        other = result["beside_gather"]
        facts["with a gather"] = (
            f"{other['predicted_s']:.3f} s; trainers would exchange {gb(other['gathered_bytes'])}, "
            f"not {gb(other['amax_bytes'])}"
        )
    if preset is not None:
        facts["published"] = f"{preset.published_range} s by {preset.system}"
        facts["  stated"] = preset.published
        facts["  assumed"] = preset.assumed
    show_facts(f"{plan.model}: one update, simulated (stages overlap)", facts)
