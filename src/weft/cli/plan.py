"""`weft plan`: make, prove, explain, draw, save, load and compare routing plans."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.case_options import (
    CaseOptions,
    ConfigFile,
    Delta,
    Dtype,
    Engine,
    GatherName,
    Ignore,
    Json,
    Load,
    Memory,
    Mode,
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
from weft.cli.output import err, gb, print_json, show_facts
from weft.core.plans import plan_file
from weft.core.plans.bound import balance
from weft.core.plans.explain import Explanation, explain
from weft.core.plans.memory_cost import memory_cost
from weft.core.plans.plan import Plan
from weft.core.streams.stream import Path as StreamPath
from weft.observe.matrix import write_picture
from weft.observe.memory import peak_rss_bytes


def plan_command(
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
    mode: Mode = "",
    delta: Delta = None,
    transport: TransportName = "",
    load: Load = None,
    config: ConfigFile = None,
    tensor: Annotated[str, typer.Option("--explain", help="Show how the tensor of this name travels.")] = "",
    svg: Annotated[Path | None, typer.Option(help="Draw the routing matrix to a .svg or .html file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan to a file.")] = None,
    diff: Annotated[Path | None, typer.Option(help="Compare with a saved plan file.")] = None,
    as_json: Json = False,
) -> None:
    """Make a routing plan that provably writes every destination byte exactly once."""
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
    plan, plan_s = make_or_load(asked, load, config, typed_settings(mode=mode, delta=delta, transport=transport))
    if svg is not None:
        write_picture(plan, svg)
        err.print(f"drew {svg}")
    if save is not None:
        plan_file.save(plan, save)
        err.print(f"saved {save}")
    if tensor:
        _show_explanations(explain(plan, tensor), tensor, as_json=as_json)
    elif diff is not None:
        _show_difference(plan_file.compare(plan_file.load(diff), plan), diff, as_json=as_json)
    else:
        _show_plan(plan, plan_s, as_json=as_json)


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
        **{f"{path.name.lower()}_bytes": _carried(plan, path) for path in StreamPath},
        "bound_s": measured.bound_s,
        "bound_by": measured.bound_by,
        "bound_for": "direct sends",
        "makespan_s": measured.makespan_s,
        "bottleneck": measured.bottleneck,
        "makespan_over_bound": measured.over_bound,
        "busy_s": measured.busy_s,
        "bounds_s": measured.bounds_s,
        "memory": asdict(memory_cost(plan)),
        "exact_cover": True,
        "plan_s": plan_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "digest": digest,
    }


def _show_plan(plan: Plan, plan_s: float, *, as_json: bool) -> None:
    result = _plan_result(plan, plan_s)
    if as_json:
        print_json(result)
        return
    sent, received, memory = result["tx_bytes"], result["rx_bytes"], result["memory"]
    busiest, over = sent["max"] / max(sent["mean"], 1), result["makespan_over_bound"]
    total = max(result["total_bytes"], 1)
    shares = {name: result[f"{name.replace('-', '_')}_bytes"] / total for name in ("direct", "zero-copy", "packed")}
    facts = {
        "from": f"{result['num_trainers']} trainer ranks, {result['trainer']}",
        "to": f"{result['num_engines']} engine ranks, {result['num_replicas']} × {result['engine']}",
        "over": result["topology"],
        "bytes": f"{gb(result['total_bytes'])} in {result['num_routes']:,} routes and {result['num_writes']:,} writes",
        "each trainer sends": f"{gb(sent['min'])} to {gb(sent['max'])}, busiest {busiest:.4f} × mean",
        "each engine receives": f"{gb(received['min'])} to {gb(received['max'])}",
        "travels": ", ".join(f"{share:.1%} {name}" for name, share in shares.items() if share) or "nothing",
        "busiest": f"{result['bottleneck']}, {result['makespan_s']:.3f} s at line rate",
        "lower bound": (
            f"{result['bound_s']:.3f} s for direct sends ({result['bound_by']}); this plan needs {over:.4f} × that"
        ),
        "staging=cpu": (
            f"{gb(memory['staging_bytes'])} of host memory per trainer rank, "
            f"{gb(memory['staging_host_bytes'])} per host"
        ),
        "delta": f"{gb(memory['delta_bytes'])} per trainer rank, {gb(memory['patch_bytes'])} per engine rank",
        "landing": f"{gb(memory['landing_bytes'])} per engine rank in mode {plan.settings.mode}",
        "proven": "every destination byte is written exactly once",
        "planned in": f"{plan_s:.1f} s, {result['peak_rss_bytes'] / 2**30:.2f} GiB",
        "digest": result["digest"][:16] + "…",
    }
    show_facts(f"{plan.model}: {plan.policy} plan", facts)


def _show_explanations(found: list[Explanation], name: str, *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(row) for row in found])
        return
    print(f"{name}: {len(found)} rows of the plan")
    for row in found[:40]:
        walked = [axis for axis in row.axes if axis >= 0]
        turned = " transposed" if walked != sorted(walked) else ""
        how = f"{row.num_writes} write(s)" if row.num_writes else "without a write of its own"
        print(
            f"  {row.tensor}{_box(row.dst_lo, row.extent)} on engine {_ranks(row.receivers)}\n"
            f"    ← {row.op} of {row.source}{turned} from {list(row.src_lo)}, sent by trainer "
            f"{_ranks(tuple(sorted(set(row.senders))))} (held by {_ranks(row.holders)})\n"
            f"    {row.num_bytes:,} bytes to each, {row.path.replace('_', '-')}, {how}"
        )
    if len(found) > 40:
        err.print(f"these are the first 40 of {len(found)} rows; --json prints all")


def _show_difference(found: plan_file.Difference, old: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found))
        return
    facts = {
        "same digest": "yes" if found.same_digest else "no",
        "routes unchanged": f"{found.num_same:,}",
        "routes with another sender": f"{found.num_moved:,} ({gb(found.moved_bytes)})",
        "routes removed": f"{found.num_removed:,} ({gb(found.removed_bytes)})",
        "routes added": f"{found.num_added:,} ({gb(found.added_bytes)})",
        "first tensors concerned": ", ".join(found.tensors[:3]) or "none",
    }
    show_facts(f"changes since {old}", facts)


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


def _carried(plan: Plan, path: StreamPath) -> int:
    """Bytes of weights that travel by one path."""
    return int(plan.chunks.payload[plan.chunks.path == path].sum())
