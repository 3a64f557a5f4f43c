"""The `weft` command: parsing, streams, exit codes. Every command delegates.

Data goes to stdout (a table, or one JSON object with `--json`), everything else to stderr. Exit codes: 0 done,
1 a validation row that was asked for does not pass, 2 wrong input (`error:` and `hint:` on stderr), 130 interrupted.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft import __version__
from weft.config import load_settings
from weft.core import plan_file
from weft.core.bound import balance
from weft.core.case import Case, plan_case
from weft.core.catalog import load_model, model_names
from weft.core.explain import Explanation, explain
from weft.core.plan import Plan
from weft.core.topology import PRESETS as TOPOLOGIES
from weft.errors import ConfigError, WeftError
from weft.observe.matrix import write_picture
from weft.observe.trace import write_trace
from weft.sim.presets import PRESETS, Preset
from weft.sim.simulator import Options, simulate
from weft.sim.validation import Row, passed_ids, validate

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Move fresh policy weights from the GPUs that train a model to the GPUs that serve it.",
)
_out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
_err = Console(stderr=True, highlight=False)

Name = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]",
        help="A preset (`weft presets`), a model (`weft models`), or the path of a config.json.",
    ),
]
Trainer = Annotated[
    str, typer.Option(help="Trainer layout: ddp8, fsdp128, hsdp8x16, pp2.ep8.fsdp16, tp4.pp4.cp2.ep16.")
]
Engine = Annotated[str, typer.Option(help="Engine layout: tp8, ep8, tp32.ep32, tp4.dp8.ep32.")]
Replicas = Annotated[int, typer.Option(help="Number of identical engines.")]
Dtype = Annotated[str, typer.Option(help="Engine precision: bf16, fp16, fp32, fp8-block128.")]
TrainerDtype = Annotated[str, typer.Option(help="Trainer precision: bf16, fp16, fp32 (default: as the model says).")]
TopologyName = Annotated[str, typer.Option("--topology", help="Cluster preset (`weft topologies`) or a .toml file.")]
Placement = Annotated[str, typer.Option(help="separate: engines on other hosts than trainers; packed: on the same.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Who sends: balanced, greedy, round_robin, rank0.")]
GatherName = Annotated[str, typer.Option("--gather", help="Plan like systems that gather first: none, mesh, world.")]
Load = Annotated[Path | None, typer.Option(help="Use a saved plan file instead of planning.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with a [weft] table of settings.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command("plan")
def plan_command(
    name: Name = "",
    trainer: Trainer = "",
    engine: Engine = "",
    replicas: Replicas = 0,
    dtype: Dtype = "",
    trainer_dtype: TrainerDtype = "",
    topology: TopologyName = "",
    placement: Placement = "",
    policy: PolicyName = "",
    gather: GatherName = "",
    load: Load = None,
    config: ConfigFile = None,
    tensor: Annotated[str, typer.Option("--explain", help="Show how one tensor travels, by name.")] = "",
    svg: Annotated[Path | None, typer.Option(help="Draw the routing matrix into a .svg or .html file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan to a file.")] = None,
    diff: Annotated[Path | None, typer.Option(help="Compare with a saved plan file.")] = None,
    as_json: Json = False,
) -> None:
    """Make a routing plan that provably writes every destination byte exactly once."""
    asked = _Asked(name, trainer, engine, replicas, dtype, trainer_dtype, topology, placement, policy, gather)
    plan, plan_s = _plan(asked, load, config)
    if svg is not None:
        write_picture(plan, svg)
        _err.print(f"drew {svg}")
    if save is not None:
        plan_file.save(plan, save)
        _err.print(f"saved {save}")
    if tensor:
        _show_explanations(explain(plan, tensor), tensor, as_json=as_json)
    elif diff is not None:
        _show_difference(plan_file.compare(plan_file.load(diff), plan), diff, as_json=as_json)
    else:
        _show_plan(plan, plan_s, as_json=as_json)


@app.command("simulate")
def simulate_command(
    name: Name = "",
    trainer: Trainer = "",
    engine: Engine = "",
    replicas: Replicas = 0,
    dtype: Dtype = "",
    trainer_dtype: TrainerDtype = "",
    topology: TopologyName = "",
    placement: Placement = "",
    policy: PolicyName = "",
    gather: GatherName = "",
    load: Load = None,
    config: ConfigFile = None,
    mode: Annotated[str, typer.Option(help="Receiver mode: shadow or in_place.")] = "shadow",
    offloaded: Annotated[bool | None, typer.Option(help="Trainer weights start in host memory.")] = None,
    skew_ms: Annotated[float, typer.Option(help="Senders start spread over this many milliseconds.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    as_json: Json = False,
) -> None:
    """Predict how long one update takes, and how long the engines pause."""
    if mode not in ("shadow", "in_place"):
        raise ConfigError(f"unknown mode `{mode}`", hint="use shadow or in_place")
    if not 0 <= skew_ms <= 3_600_000:
        raise ConfigError(f"skew of {skew_ms} ms", hint="give 0 to 3600000 milliseconds")
    asked = _Asked(name, trainer, engine, replicas, dtype, trainer_dtype, topology, placement, policy, gather)
    plan, _ = _plan(asked, load, config)
    preset = PRESETS.get(name)
    if offloaded is None:
        offloaded = preset is not None and preset.offloaded
    options = Options(mode=mode, offloaded=offloaded, skew_s=skew_ms / 1e3)
    with _progress() as on_stage:
        on_stage("simulating")
        prediction = simulate(plan, options=options, record=trace is not None)
    if trace is not None and prediction.recorder is not None:
        num_spans = write_trace(prediction.recorder.events, trace)
        _err.print(f"wrote {num_spans} spans to {trace}: open it at ui.perfetto.dev")
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
    if as_json:
        _print_json(result)
    else:
        _show_prediction(plan, result, preset)


@app.command("validate")
def validate_command(
    only: Annotated[
        str, typer.Option(help="Test ids that must pass, such as T1,T2: exit code 1 if one does not.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Compare planner and simulator with other systems' published results."""
    with _progress() as on_stage:
        rows = validate(on_stage)
    passed = passed_ids(rows)
    wanted = [part.strip().upper() for part in only.split(",") if part.strip()]
    unknown = [row_id for row_id in wanted if row_id not in passed]
    if unknown:
        raise ConfigError(f"unknown test `{unknown[0]}`", hint=f"tests: {', '.join(passed)}")
    if as_json:
        _print_json([row.to_json() for row in rows])
    else:
        _show_rows(rows, passed)
    if any(not passed[row_id] for row_id in wanted):
        raise typer.Exit(1)


@app.command("models")
def models_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="List the tensors of one model (or config.json).")] = "",
    as_json: Json = False,
) -> None:
    """List the model catalog, or the exact tensors of one model's checkpoint."""
    if name:
        tensors = [(t.name, t.dtype, list(t.shape), t.policy) for t in load_model(name).tensors]
        keys = ("name", "dtype", "shape", "policy")
        _show_table(f"{name}: {len(tensors)} checkpoint tensors", keys, tensors, as_json=as_json)
        return
    with _progress() as on_stage:
        rows = []
        for known in model_names():
            on_stage(known)
            model = load_model(known)
            rows.append((known, model.family, len(model.tensors), round(model.num_params / 1e9, 3)))
    _show_table("models", ("name", "family", "tensors", "params_b"), rows, as_json=as_json)


@app.command("presets")
def presets_command(as_json: Json = False) -> None:
    """List the published runs that can be planned and simulated by name."""
    if as_json:
        _print_json([asdict(preset) for preset in PRESETS.values()])
        return
    rows = [
        (p.name, p.model, f"{p.trainer} → {p.num_replicas} × {p.engine}", _range(p), p.system) for p in PRESETS.values()
    ]
    _show_table("published runs", ("name", "model", "layouts", "published_s", "system"), rows, as_json=False)


@app.command("topologies")
def topologies_command(as_json: Json = False) -> None:
    """List the cluster presets."""
    rows = [
        (
            cluster.name,
            cluster.host.devices,
            sum(nic.gbps for nic in cluster.host.nics) / cluster.host.devices,
            cluster.host.link_gb_per_s,
            cluster.host.domain_hosts,
        )
        for cluster in TOPOLOGIES.values()
    ]
    keys = ("name", "devices_per_host", "network_gbps_per_device", "link_gb_per_s", "hosts_per_domain")
    _show_table("topologies", keys, rows, as_json=as_json)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        _out.print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; never shows a traceback for wrong input."""
    try:
        app()
    except WeftError as error:
        _err.print(f"[bold red]error:[/] {escape(str(error))}")
        if error.hint:
            _err.print(f"[bold]hint:[/] {escape(error.hint)}")
        sys.exit(2)
    except KeyboardInterrupt:
        _err.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The case as typed; empty means: as the preset says, or the default."""

    name: str
    trainer: str
    engine: str
    num_replicas: int
    dtype: str
    trainer_dtype: str
    topology: str
    placement: str
    policy: str
    gather: str

    def case(self) -> Case:
        """The case, with the preset's values where nothing was typed."""
        if not self.name:
            raise ConfigError(
                "no model given", hint="name a preset, a model or a config.json: weft plan chen-qwen3-235b"
            )
        typed = {key: value for key, value in asdict(self).items() if value and key != "name"}
        if self.num_replicas < 0:
            raise ConfigError(f"{self.num_replicas} engine replicas", hint="at least one replica is needed")
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


def _plan(asked: _Asked, load: Path | None, config: Path | None) -> tuple[Plan, float]:
    started = time.perf_counter()
    with _progress() as on_stage:
        if load is not None:
            on_stage(f"loading {load}")
            plan = plan_file.load(load)
        else:
            plan = plan_case(asked.case(), settings=load_settings(config), on_stage=on_stage)
    return plan, time.perf_counter() - started


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is being done, on a terminal only."""
    with _err.status("starting") as status:
        yield lambda stage: status.update(f"{stage} …")


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def _spread(values: Any) -> dict[str, float]:
    return {"min": int(values.min()), "mean": float(values.mean()), "max": int(values.max())}


def _plan_result(plan: Plan, plan_s: float) -> dict[str, Any]:
    measured = balance(plan)
    digest = plan_file.digest(plan)
    return {
        "model": plan.model,
        "policy": plan.policy,
        "trainer": plan.trainer.text,
        "engine": plan.recipe.engine.text,
        "num_replicas": plan.recipe.num_replicas,
        "topology": plan.topology.cluster.name,
        "num_trainers": plan.topology.num_trainers,
        "num_engines": plan.topology.num_engines,
        "total_bytes": plan.total_bytes,
        "tx_bytes": _spread(plan.tx_bytes),
        "rx_bytes": _spread(plan.rx_bytes),
        "amax_bytes": plan.amax_bytes,
        "num_routes": plan.num_routes,
        "num_writes": plan.num_writes,
        "zero_copy_bytes": int(plan.row_bytes[plan.path == 0] @ plan.fan_out[plan.path == 0]),
        "bound_s": measured.bound_s,
        "bound_by": measured.bound_by,
        "makespan_s": measured.makespan_s,
        "bottleneck": measured.bottleneck,
        "makespan_over_bound": measured.over_bound,
        "busy_s": measured.busy_s,
        "bounds_s": measured.bounds_s,
        "exact_cover": True,
        "plan_s": plan_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "digest": digest,
    }


def _show_plan(plan: Plan, plan_s: float, *, as_json: bool) -> None:
    result = _plan_result(plan, plan_s)
    if as_json:
        _print_json(result)
        return
    sent, received = result["tx_bytes"], result["rx_bytes"]
    busiest, over = sent["max"] / max(sent["mean"], 1), result["makespan_over_bound"]
    zero_copy = result["zero_copy_bytes"] / max(result["total_bytes"], 1)
    facts = {
        "from": f"{result['num_trainers']} trainer ranks, {result['trainer']}",
        "to": f"{result['num_engines']} engine ranks, {result['num_replicas']} × {result['engine']}",
        "over": result["topology"],
        "bytes": f"{_gb(result['total_bytes'])} in {result['num_routes']:,} routes and {result['num_writes']:,} writes",
        "each trainer sends": f"{_gb(sent['min'])} to {_gb(sent['max'])}, busiest {busiest:.4f} × mean",
        "each engine receives": f"{_gb(received['min'])} to {_gb(received['max'])}",
        "zero-copy": f"{zero_copy:.1%} of the bytes; the rest is packed or converted",
        "busiest": f"{result['bottleneck']}, {result['makespan_s']:.3f} s at line rate",
        "lower bound": f"{result['bound_s']:.3f} s ({result['bound_by']}); this plan needs {over:.4f} × that",
        "proven": "every destination byte is written exactly once",
        "planned in": f"{plan_s:.1f} s, {result['peak_rss_bytes'] / 2**30:.2f} GiB",
        "digest": result["digest"][:16] + "…",
    }
    _show_facts(f"{plan.model}: {plan.policy} plan", facts)


def _show_explanations(found: list[Explanation], name: str, *, as_json: bool) -> None:
    if as_json:
        _print_json([asdict(row) for row in found])
        return
    print(f"{name}: {len(found)} rows of the plan")
    for row in found[:40]:
        how = f"{row.num_writes} write(s)" if row.num_writes else "shares a slot with other small rows"
        print(
            f"  {row.tensor}{_box(row.dst_lo, row.extent)} on engine {_ranks(row.receivers)}\n"
            f"    ← {row.op} of {row.source} from {list(row.src_lo)}, sent by trainer "
            f"{_ranks(tuple(sorted(set(row.senders))))} (held by {_ranks(row.holders)})\n"
            f"    {row.num_bytes:,} bytes to each, {row.path.replace('_', '-')}, {how}"
        )
    if len(found) > 40:
        _err.print(f"these are the first 40 of {len(found)} rows; --json prints all")


def _show_difference(found: plan_file.Difference, old: Path, *, as_json: bool) -> None:
    if as_json:
        _print_json(asdict(found))
        return
    facts = {
        "same digest": "yes" if found.same_digest else "no",
        "routes unchanged": f"{found.num_same:,}",
        "routes with another sender": f"{found.num_moved:,} ({_gb(found.moved_bytes)})",
        "routes removed": f"{found.num_removed:,} ({_gb(found.removed_bytes)})",
        "routes added": f"{found.num_added:,} ({_gb(found.added_bytes)})",
        "first tensors concerned": ", ".join(found.tensors[:3]) or "none",
    }
    _show_facts(f"changes since {old}", facts)


def _show_prediction(plan: Plan, result: dict[str, Any], preset: Preset | None) -> None:
    facts = {
        "predicted": f"{result['predicted_s']:.3f} s from publish to the last commit",
        "pause": f"{result['pause_s'] * 1e3:.1f} ms per engine",
        "on the wire": f"{_gb(result['wire_bytes'])} in {result['num_chunks']:,} chunks",
        **{f"stage {name}": f"{seconds * 1e3:.1f} ms" for name, seconds in result["stages"].items()},
    }
    if preset is not None:
        facts["published"] = f"{_range(preset)} s by {preset.system}"
        facts["  stated"] = preset.published
        facts["  assumed"] = preset.assumed
    _show_facts(f"{plan.model}: one update, simulated (stages overlap)", facts)


def _show_rows(rows: list[Row], passed: dict[str, bool]) -> None:
    table = Table(title="published results, predicted", title_justify="left")
    for column in ("test", "quantity", "published", "predicted", "error", "rule", "split", "result"):
        table.add_column(
            column,
            overflow="fold",
            justify="right" if column in ("published", "predicted", "error") else "left",
        )
    for row in rows:
        result = "[green]pass[/]" if row.passed else "[bold red]NOT PASSED[/]"
        cells = (
            row.id,
            row.quantity,
            _number(row.published),
            _number(row.predicted),
            f"{row.error:+.1%}",
            row.rule,
            row.split,
        )
        table.add_row(*(escape(cell) for cell in cells), result)
    _out.print(table)
    for row in rows:
        if not row.passed:
            _out.print(f"[bold]{row.id}[/] not passed: {escape(row.quantity)}. {escape(row.note)}")
    whole = [row_id for row_id, good in passed.items() if good]
    _out.print(
        f"{sum(row.passed for row in rows)} of {len(rows)} rows pass; all rows of {', '.join(whole)}. Constants "
        "are fitted on the rows marked fit (micro-benchmarks and stage costs); the others are held out."
    )


def _show_facts(title: str, facts: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    _out.print(table)


def _show_table(title: str, keys: tuple[str, ...], rows: list[tuple[Any, ...]], *, as_json: bool) -> None:
    if as_json:
        _print_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    _out.print(table)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


def _number(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value


def _range(preset: Preset) -> str:
    low, high = preset.published_s
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def _box(lo: tuple[int, ...], extent: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(lo, extent, strict=True)) + "]"


def _ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as short ranges: 0–7, 16."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}–{b}" for a, b in parts]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], "…"])
