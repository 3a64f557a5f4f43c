"""`weft rl` and `weft demo`: train, transfer, generate."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from weft.cli.case_options import Json
from weft.cli.output import err, out, print_json, show_facts
from weft.errors import ConfigError
from weft.rl.settings import LoopSettings

DEFAULT = LoopSettings()
DEMO: dict[str, Any] = {"task": "sort", "model": "tiny", "num_engines": 2, "iterations": 200, "max_staleness": 1}


def demo_command(
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    iterations: Annotated[int, typer.Option("--iterations", "--rl-iterations", min=1, help="PPO iterations.")] = DEMO[
        "iterations"
    ],
    freeze_engines: Annotated[bool, typer.Option(help="For comparison: engines keep version 0.")] = False,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for report and logs.")] = None,
    as_json: Json = False,
) -> None:
    """Teach a tiny transformer to sort, from scratch, while weft keeps two engines fresh. Takes about a minute."""
    values = DEMO | {"seed": seed, "iterations": iterations, "freeze_engines": freeze_engines}
    _run(values, methods=["weft"], out_dir=out_dir, as_json=as_json)


def rl_command(
    context: typer.Context,
    task: Annotated[str, typer.Option(help="Task: sort, reverse, brackets, add, or my.module:task.")] = DEFAULT.task,
    model: Annotated[
        str, typer.Option("--model", "--model-name", help="Model: tiny, a catalog name, or a config.json.")
    ] = DEFAULT.model,
    weights: Annotated[str, typer.Option(help="Safetensors to start from, a file or folder. Default: random.")] = "",
    modules: Annotated[str, typer.Option(help="Modules: builtin, or transformers (Hugging Face).")] = DEFAULT.modules,
    dtype: Annotated[str, typer.Option(help="Trainer precision: bf16 (with FP32 masters) or fp32.")] = DEFAULT.dtype,
    num_trainers: Annotated[int, typer.Option("--trainers", "--num-training", help="Trainer ranks.")] = 1,
    trainer: Annotated[str, typer.Option(help="Trainer layout: ddp or fsdp2.")] = DEFAULT.trainer,
    num_engines: Annotated[int, typer.Option("--engines", "--num-inference", help="Engines, each a replica.")] = 1,
    ranks_per_engine: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks per engine.")] = 1,
    engine_dtype: Annotated[
        str | None, typer.Option(help="Engine precision: bf16, fp32 or fp8. Default: the trainers'.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "--transfer-method", help="weft, broadcast, gather or uccl; repeat to compare."),
    ] = None,
    mode: Annotated[str, typer.Option(help="weft only: shadow, in_place or patch.")] = DEFAULT.mode,
    delta: Annotated[bool, typer.Option(help="weft only: send only what changed.")] = False,
    transport: Annotated[str, typer.Option(help="weft only: auto, or one name for every link.")] = DEFAULT.transport,
    sync: Annotated[bool, typer.Option("--sync", help="Generate, train and transfer in turn.")] = False,
    max_staleness: Annotated[
        int, typer.Option(help="Most versions a sample may lag behind the policy.")
    ] = DEFAULT.max_staleness,
    freeze_engines: Annotated[bool, typer.Option(help="For comparison: engines keep version 0.")] = False,
    check_bits: Annotated[bool, typer.Option(help="Engines compare every version bit for bit.")] = False,
    iterations: Annotated[
        int, typer.Option("--iterations", "--rl-iterations", help="PPO iterations.")
    ] = DEFAULT.iterations,
    rollouts_per_rank: Annotated[
        int, typer.Option("--rollouts", "--rollouts-per-rank", "--rollouts-per-gpu", help="Samples per trainer rank.")
    ] = DEFAULT.rollouts_per_rank,
    ppo_epochs: Annotated[int, typer.Option(help="Passes over the samples of an iteration.")] = DEFAULT.ppo_epochs,
    minibatches: Annotated[int, typer.Option(help="Optimizer steps per pass.")] = DEFAULT.minibatches,
    lr: Annotated[float, typer.Option(help="Learning rate of the first iteration.")] = DEFAULT.lr,
    kl_coef: Annotated[
        float, typer.Option(help="Weight of the KL penalty towards the first policy.")
    ] = DEFAULT.kl_coef,
    entropy_coef: Annotated[float, typer.Option(help="Weight of the entropy bonus.")] = DEFAULT.entropy_coef,
    gamma: Annotated[
        float, typer.Option(help="Discount. 0: each token earns its own reward; 1: rewards at the end.")
    ] = DEFAULT.gamma,
    seed: Annotated[int, typer.Option(help="Random seed.")] = DEFAULT.seed,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = DEFAULT.device,
    checkpoint_dir: Annotated[str, typer.Option(help="Folder for checkpoints.")] = "",
    checkpoint_every: Annotated[int, typer.Option(help="Iterations between checkpoints; 0: none.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds a member waits for another.")] = DEFAULT.timeout_s,
    silence_s: Annotated[
        float, typer.Option(help="Seconds of silence after which an engine is lost.")
    ] = DEFAULT.silence_s,
    port: Annotated[int, typer.Option(help="Under torchrun: the controller's port; the next one is used too.")] = 7070,
    keys: Annotated[
        str, typer.Option(help="Under torchrun: folder with keys of `weft keys controller trainer engine`.")
    ] = "",
    tensorboard: Annotated[Path | None, typer.Option(help="Log figures to this folder, for TensorBoard.")] = None,
    wandb: Annotated[str, typer.Option(help="Log figures to this project of Weights & Biases.")] = "",
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for report and logs.")] = None,
    as_json: Json = False,
) -> None:
    """Run asynchronous PPO: trainer and engine processes connected by weft; under torchrun, on many nodes."""
    values = {name: value for name, value in context.params.items() if name in LoopSettings.__struct_fields__}
    del values["method"]
    logs = _Logs(tensorboard=tensorboard, wandb=wandb)
    _run(values, methods=method or [DEFAULT.method], out_dir=out_dir, as_json=as_json, port=port, keys=keys, logs=logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logs:
    """Where figures go besides the report."""

    tensorboard: Path | None = None
    wandb: str = ""


def _load(name: str) -> Any:
    """A module of the loop, which needs torch."""
    try:
        return importlib.import_module(f"weft.rl.{name}")
    except ImportError as error:
        raise ConfigError(f"the loop needs `{error.name}`", hint="pip install 'weft[torch]'") from error


def _run(
    values: dict[str, Any],
    *,
    methods: list[str],
    out_dir: Path | None,
    as_json: bool,
    port: int = 0,
    keys: str = "",
    logs: _Logs = _Logs(),
) -> None:
    """Run each method with the same seed and show the results."""
    runs = [LoopSettings.of(**values, method=method) for method in methods]
    launch = _load("run.launch")
    logging.getLogger("weft").setLevel(logging.ERROR)  # members that leave are expected here
    is_member = launch.under_torchrun()
    if is_member and len(runs) > 1:
        raise ConfigError("torchrun runs one method at a time", hint="start torchrun once for each --method")
    mark = os.environ["TORCHELASTIC_RUN_ID"] if is_member else time.strftime("%Y%m%d-%H%M%S")
    folder = out_dir or Path("runs") / f"{runs[0].task.replace(':', '.')}-{mark}"
    found = []
    for settings in runs:
        where = (folder if len(runs) == 1 else folder / settings.method.value).absolute()
        with _kept(settings, where, logs) as watch:
            if is_member:
                record = launch.run_as_member(settings, run_dir=where, port=port, keys=keys, watch=watch)
            else:
                record = launch.run_here(settings, run_dir=where, watch=watch)
        if record is not None:
            found.append(record.summary(report=str(where / "report.html")))
    if not found:
        return
    if as_json:
        print_json(found[0] if len(found) == 1 else {"runs": found})
    elif len(found) == 1:
        _show_one(found[0])
    else:
        _show(found)
        out.print("reports: " + ", ".join(one["report"] for one in found), soft_wrap=True)


@contextlib.contextmanager
def _kept(settings: LoopSettings, where: Path, logs: _Logs) -> Iterator[Callable[[Any], None]]:
    """Shows a run while it lasts, and keeps report and record however it ends."""
    newest = None
    folder = None if logs.tensorboard is None else logs.tensorboard / settings.method.value
    facts = msgspec.to_builtins(settings)

    def see(record: Any) -> None:
        nonlocal newest
        newest = record
        watch(record)
        for figures in loggers:
            figures.see(record)

    try:
        with (
            _load("view.loggers").figure_loggers(tensorboard=folder, wandb=logs.wandb, settings=facts) as loggers,
            _load("view.live").live_view(settings, err) as watch,
        ):
            yield see
    finally:
        if newest is not None:
            _load("view.report").write_report(newest, settings, where / "report.html")
            (where / "record.json").write_bytes(msgspec.json.encode(newest.to_json()))


def _show_one(one: dict[str, Any]) -> None:
    """The results of one run."""
    checked = "all verified" if one["all_verified"] else "not all verified"
    transfer, pause = one["transfer_ms"], one["pause_ms"]
    facts = {
        "reward": f"{one['reward_first']:.3f} → {one['reward_last']:.3f} in {one['iterations']} iterations",
        "took": f"{one['seconds']:.0f} s, {one['samples_per_s']:.0f} samples a second",
        "versions": f"{one['num_versions']}, {checked}, {one['bytes_per_version'] / 1e6:.2f} MB each",
        "transfer": f"{transfer['p50']:.1f} ms until every engine serves it (p95 {transfer['p95']:.1f})",
        "engines paused": f"{pause['p50']:.2f} ms (p95 {pause['p95']:.2f})",
        "samples were": f"{one['staleness']:.2f} versions old, {one['max_staleness']} at most",
        "links": ", ".join(f"{count} × {link}" for link, count in one["links"].items()) or one["method"],
        "report": one["report"],
    }
    if one["lost"]:
        facts["lost"] = ", ".join(f"{member} {how}" for member, how in one["lost"].items())
    show_facts("", facts)


def _show(found: list[dict[str, Any]]) -> None:
    """Several methods side by side."""
    table = Table(title="weft rl", title_justify="left")
    columns = ("method", "reward", "seconds", "versions", "verified", "transfer ms p50 / p95", "pause ms p50 / p95")
    for name in (*columns, "staleness", "samples/s", "MB a version"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for one in found:
        transfer, pause = one["transfer_ms"], one["pause_ms"]
        table.add_row(
            one["method"],
            f"{one['reward_first']:.3f} → {one['reward_last']:.3f}",
            f"{one['seconds']:.0f}",
            str(one["num_versions"]),
            "yes" if one["all_verified"] else "no",
            f"{transfer['p50']:.1f} / {transfer['p95']:.1f}",
            f"{pause['p50']:.2f} / {pause['p95']:.2f}",
            f"{one['staleness']:.2f} (most {one['max_staleness']})",
            f"{one['samples_per_s']:.0f}",
            f"{one['bytes_per_version'] / 1e6:.2f}",
        )
    out.print(table)
