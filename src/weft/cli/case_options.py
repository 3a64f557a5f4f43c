"""The options that describe a transfer, shared by the commands that plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.output import progress
from weft.config import DeltaPolicy, Settings, load_settings
from weft.core.case import Case, plan_case
from weft.core.layouts.layout_file import is_layout_file
from weft.core.models.catalog import load_model
from weft.core.plans import plan_file
from weft.core.plans.plan import Plan
from weft.errors import ConfigError
from weft.sim.presets import PRESETS

Name = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]",
        help="A preset (`weft presets`), a model (`weft models`), or the path of a config.json.",
    ),
]
Model = Annotated[str, typer.Option("--model", "--preset", help="The same as NAME.")]
Trainer = Annotated[
    str,
    typer.Option(help="Trainer layout: ddp8, fsdp128, hsdp8x16, pp2.ep8.fsdp16, tp4.pp4.cp2.ep16, or a .json file."),
]
Engine = Annotated[str, typer.Option(help="Engine layout: tp8, ep8, tp32.ep32, tp4.dp8.ep32, or a .json file.")]
Replicas = Annotated[int | None, typer.Option(help="Number of identical engines.")]
Dtype = Annotated[str, typer.Option(help="Engine precision: bf16, fp16, fp32, fp8-block128.")]
TrainerDtype = Annotated[str, typer.Option(help="Trainer precision: bf16, fp16, fp32. Default: the model's.")]
TopologyName = Annotated[str, typer.Option("--topology", help="Cluster preset (`weft topologies`) or a .toml file.")]
Placement = Annotated[
    str, typer.Option(help="separate (engines on their own hosts) or packed (engines continue where trainers end).")
]
PolicyName = Annotated[str, typer.Option("--policy", help="Choice of senders: balanced, greedy, round_robin, rank0.")]
GatherName = Annotated[str, typer.Option("--gather", help="Plan like systems that gather first: none, mesh, world.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(help="Trainer tensor that no engine uses, by name or pattern such as 'visual.*'; may be repeated."),
]
Memory = Annotated[
    str, typer.Option(help="Where members have their weights: cuda (default) or cpu; cpu,cuda: trainers, engines.")
]
Mode = Annotated[str, typer.Option(help="Receiver mode: shadow (default), in_place, or patch (needs --delta).")]
Delta = Annotated[
    bool | None, typer.Option("--delta/--no-delta", help="Send only what changed since the version each engine serves.")
]
TransportName = Annotated[str, typer.Option("--transport", help="Transport: auto (default), or one for every link.")]
Load = Annotated[Path | None, typer.Option(help="Use a saved plan file instead of planning.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with a [weft] table of settings.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """The case as typed. Empty: the preset's value, or the default."""

    name: str
    trainer: str
    engine: str
    num_replicas: int | None
    dtype: str
    trainer_dtype: str
    topology: str
    placement: str
    policy: str
    gather: str
    ignore: tuple[str, ...] = ()
    memory: str = ""

    def typed(self) -> dict[str, Any]:
        """What was given besides the name."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None, ()) and key != "name"}

    def case(self) -> Case:
        """The case, with the preset's values where nothing was typed."""
        if not self.name:
            raise ConfigError(
                "no model given", hint="name a preset, a model or a config.json: weft plan chen-qwen3-235b"
            )
        typed = self.typed()
        if self.num_replicas is not None and self.num_replicas < 1:
            raise ConfigError(f"replicas is {self.num_replicas}", hint="give at least one replica")
        if is_layout_file(self.engine) and self.dtype:
            raise ConfigError(
                "--dtype with an engine file", hint="leave it out: the file gives the dtype of every tensor"
            )
        preset = PRESETS.get(self.name)
        if preset is not None:
            return Case(**{**asdict(preset.case()), **typed})
        for side in ("trainer", "engine"):
            if side not in typed:
                load_model(self.name)
                raise ConfigError(
                    f"no {side} layout given for `{self.name}`",
                    hint=f"add --{side}, for example --{side} " + ("fsdp8" if side == "trainer" else "tp2"),
                )
        return Case(model=self.name, **typed)


def one_name(name: str, model: str) -> str:
    """The name to plan, given as NAME or as --model."""
    if name and model:
        raise ConfigError(f"two names to plan, `{name}` and `{model}`", hint="give one name")
    return name or model


def typed_settings(*, mode: str = "", delta: bool | None = None, transport: str = "") -> dict[str, Any]:
    """Settings as typed; what was not typed is left out."""
    policy = None if delta is None else DeltaPolicy.ON if delta else DeltaPolicy.OFF
    given = {"mode": mode or None, "delta": policy, "transport": transport or None}
    return {name: value for name, value in given.items() if value is not None}


def make_or_load(
    asked: CaseOptions, load: Path | None, config: Path | None, given: Mapping[str, Any]
) -> tuple[Plan, float]:
    """The plan that was asked for, with the settings given, and the seconds it took."""
    started = time.perf_counter()
    with progress() as on_progress:
        if load is not None:
            if asked.name or asked.typed() or given or config is not None:
                raise ConfigError("--load together with a case", hint="a plan file already contains its whole case")
            on_progress(f"loading {load}")
            plan = plan_file.load(load)
        else:
            plan = plan_case(
                asked.case(), settings=load_settings(Settings, config, given=given), on_progress=on_progress
            )
    return plan, time.perf_counter() - started
