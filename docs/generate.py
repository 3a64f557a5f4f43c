"""Fills the generated tables of README.md and docs/ from benchmarks/results/*.json.

python docs/generate.py            # rewrite the files
python docs/generate.py --check    # fail if they are not up to date
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

import scaling_tables
from settings_tables import settings_table

ROOT = Path(__file__).parent.parent
PLANNING = json.loads((ROOT / "benchmarks/results/planning.json").read_text())
VALIDATION = json.loads((ROOT / "benchmarks/results/validation.json").read_text())
TRANSFER = json.loads((ROOT / "benchmarks/results/transfer.json").read_text())
SLICES = json.loads((ROOT / "benchmarks/results/slice_h200.json").read_text())
TRANSFER_GPU = json.loads((ROOT / "benchmarks/results/transfer_h200.json").read_text())
CODEC = json.loads((ROOT / "benchmarks/results/codec.json").read_text())
CODEC_GPU = json.loads((ROOT / "benchmarks/results/codec_h200.json").read_text())
FP8 = json.loads((ROOT / "benchmarks/results/fp8.json").read_text())
PIPELINE = json.loads((ROOT / "benchmarks/results/pipeline.json").read_text())
RL = json.loads((ROOT / "benchmarks/results/rl.json").read_text())
RL_GPU = json.loads((ROOT / "benchmarks/results/rl_h200.json").read_text())
VLLM = json.loads((ROOT / "benchmarks/results/vllm.json").read_text())
COMPILE = json.loads((ROOT / "benchmarks/results/compile.json").read_text())
SCALING = json.loads((ROOT / "benchmarks/results/scaling.json").read_text())
OBSERVING = json.loads((ROOT / "benchmarks/results/observing.json").read_text())
MANY_TENSORS_GPU = json.loads((ROOT / "benchmarks/results/many_tensors_h200.json").read_text())
MANY_TENSORS = json.loads((ROOT / "benchmarks/results/many_tensors.json").read_text())
REHEARSALS = json.loads((ROOT / "benchmarks/results/rehearsals.json").read_text())
SPARSITY = json.loads((ROOT / "benchmarks/results/sparsity.json").read_text())
FILES = (
    "README.md",
    "docs/engines.md",
    "docs/rl.md",
    "docs/planning.md",
    "docs/validation.md",
    "docs/transfer.md",
    "docs/codec.md",
    "docs/settings.md",
    "docs/lab.md",
    "docs/rehearse.md",
    "docs/watching.md",
)


def machine() -> str:
    found = PLANNING["machine"]
    return (
        f"Measured on {found['cores']} cores of {found['cpu']}, {found['memory_gib']} GiB, Python {found['python']}, "
        f"NumPy {found['numpy']}."
    )


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def planning() -> str:
    rows = [_plan_row(row["model"], row) for row in PLANNING["scaling"]]
    rows += [_plan_row(f"`{row['case']}`", row) for row in PLANNING["cases"]]
    header = ("case", "trainers → engines", "routes", "planned in", "memory", "busiest sender", "over the bound")
    growth = f"Over the first three sizes the time grows as routes^{PLANNING['growth_exponent']:.2f}. {machine()}"
    return f"{table(header, rows)}\n\n{growth}"


def compiled() -> str:
    """What members get of a plan."""
    header = ("case", "trainers → engines", "runs", "writes", "boxes", "shipped", "compiled in")
    rows = [
        (
            f"`{row['case']}`",
            f"{row['trainer']} → {row['engine']}",
            f"{row['num_runs']:,}",
            f"{row['num_writes']:,}",
            f"{row['trainer_boxes']:,} / {row['engine_boxes']:,}",
            f"{row['trainer_shipped_bytes'] / 1e3:.0f} / {row['engine_shipped_bytes'] / 1e3:.0f} kB",
            f"{row['trainer_compile_s']:.2f} / {row['engine_compile_s']:.2f} s",
        )
        for row in COMPILE["rows"]
    ]
    found = COMPILE["machine"]
    where = f"{found['cores']} cores of {found['cpu']}"
    note = f"Boxes, bytes and processor time of the busiest trainer / engine rank; {where}."
    return f"{table(header, rows)}\n\n{note}"


def slices() -> str:
    """One rank of published runs, on one GPU."""
    header = ("run", "rank", "stages, measured (predicted)", "at the NIC's rate", "predicted", "checked")
    cells = [
        (
            run["name"],
            f"{run['side']} {run['rank']}",
            ", ".join(
                f"{stage['stage']} {stage['measured_ms']:.0f} ({stage['predicted_ms']:.0f}) ms"
                for stage in run["stages"]
            ),
            f"{run['paced_s']:.3f} s",
            f"{run['predicted_s']:.3f} s",
            f"{run['checked_bytes'] / 1e9:.1f} GB",
        )
        for run in SLICES["runs"]
    ]
    return f"{table(header, cells)}\n\nMeasured on one {SLICES['machine']['gpu']}; medians of five versions."


def _plan_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{row['num_trainers']} → {row['num_engines']}",
        f"{row['num_routes']:,}",
        f"{row['plan_s']:.1f} s",
        f"{row['peak_rss_bytes'] / 2**30:.2f} GiB",
        f"{row['tx_bytes']['max'] / row['tx_bytes']['mean']:.3f} × mean",
        f"{row['makespan_over_bound']:.4f} ×",
    )


def plan_example() -> str:
    """What `weft plan chen-qwen3-235b` says, shortened."""
    row = next(row for row in PLANNING["cases"] if row["case"] == "chen-qwen3-235b")
    sent, received = row["tx_bytes"], row["rx_bytes"]
    facts = {
        "from": f"{row['num_trainers']} trainer ranks, {row['trainer']}",
        "to": f"{row['num_engines']} engine ranks, {row['num_replicas']} × {row['engine']}",
        "bytes": f"{row['total_bytes'] / 1e9:.3f} GB in {row['num_routes']:,} routes and {row['num_writes']:,} writes",
        "each trainer sends": f"{sent['min'] / 1e9:.3f} GB to {sent['max'] / 1e9:.3f} GB, "
        f"busiest {sent['max'] / sent['mean']:.4f} × mean",
        "each engine receives": f"{received['min'] / 1e9:.3f} GB to {received['max'] / 1e9:.3f} GB",
        "lower bound": f"{row['bound_s']:.3f} s for direct sends ({row['bound_by']}); this plan needs "
        f"{row['makespan_over_bound']:.4f} × that",
        "proven": "every destination byte is written exactly once",
        "planned in": f"{row['plan_s']:.1f} s, {row['peak_rss_bytes'] / 2**30:.2f} GiB",
    }
    lines = [f"{name:22s}{value}" for name, value in facts.items()]
    return "\n".join(["```", "$ weft plan chen-qwen3-235b", *lines, "```"])


def predictions() -> str:
    rows = []
    for row in PLANNING["predictions"]:
        low, high = row["published_s"]
        published = f"{low:g} s" if low == high else f"{low:g}–{high:g} s"
        rows.append(
            (
                f"`{row['case']}`",
                f"{row['wire_bytes'] / 1e12:.2f} TB",
                f"{published}, {row['published_system']}",
                f"{row['predicted_s']:.2f} s",
                f"{row['pause_s'] * 1e3:.0f} ms",
            )
        )
    return table(("run", "on the wire", "published", "weft, predicted", "pause, predicted"), rows)


def validation_summary() -> str:
    rows = VALIDATION["rows"]
    ids = list(dict.fromkeys(row["id"] for row in rows))
    passed = [i for i in ids if all(row["pass"] for row in rows if row["id"] == i)]
    partly = [i for i in ids if i not in passed]
    held_out = [row for row in rows if row["split"] == "held-out"]
    return (
        f"{sum(row['pass'] for row in rows)} of {len(rows)} rows pass, {sum(row['pass'] for row in held_out)} of "
        f"{len(held_out)} held-out ones; every row of {', '.join(passed)}. Rows of {', '.join(partly)} that do not "
        "pass are shown with the reason."
    )


def validation_rows() -> str:
    rows = [
        (
            row["id"],
            row["quantity"],
            row["source"],
            _figure(row["published"]),
            _figure(row["predicted"]),
            f"{row['error']:+.1%}",
            row["rule"],
            row["split"],
            "pass" if row["pass"] else f"**not passed**: {row['note']}",
        )
        for row in VALIDATION["rows"]
    ]
    header = ("test", "quantity", "source", "published", "predicted", "error", "rule", "split", "result")
    return table(header, rows)


def _figure(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def transfer() -> str:
    """Every method of the CPU benchmark."""
    found = TRANSFER["machine"]
    where = f"{found['cores']} cores of {found['cpu']}, {found['memory_gib']} GiB"
    control = f"A version of a few bytes between 2 trainers and 2 engines takes {TRANSFER['control_ms']:.1f} ms."
    return f"{_transfer_table(TRANSFER['rows'])}\n\n{TRANSFER['model']}, BF16, measured on {where}. {control}"


def transfer_gpu() -> str:
    """Two processes on one GPU."""
    header = (
        "model, engine",
        "method",
        "to",
        "GB",
        "time",
        "limit",
        "of the limit",
        "writes alone",
        "pause",
        "verified",
    )
    cells = [
        (
            f"{run['model']}, {run['num_tensors']:,} tensors, {run['engine']}",
            row["method"],
            row["precision"].upper(),
            f"{row['trainer_bytes'] / 1e9:.1f}",
            f"{row['seconds'] * 1e3:.1f} ms",
            f"{row['limit_s'] * 1e3:.1f} ms",
            f"{row['fraction_of_limit']:.2f}",
            "" if row["write_s"] is None else f"{row['write_s'] * 1e3:.1f} ms",
            "" if row["pause_s"] is None else f"{row['pause_s'] * 1e3:.1f} ms",
            {True: "yes", False: "**no**"}[row["verified"]],
        )
        for run in TRANSFER_GPU["runs"]
        for row in run["rows"]
    ]
    found, rate = TRANSFER_GPU["machine"], TRANSFER_GPU["runs"][0]["copy_gb_per_s"] / 1e3
    where = f"One trainer and one engine process, measured on one {found['gpu']}; {found['cpu']}."
    limit = f"The limit: what a perfect pass reads and writes, at the {rate:.2f} TB/s of the device's own copy."
    return f"{table(header, cells)}\n\n{where} {limit}"


def _transfer_table(rows: list[dict[str, Any]]) -> str:
    header = (
        "case",
        "method",
        "transport",
        "GB",
        "on the wire",
        "time",
        "of a plain copy",
        "of the bare engine",
        "writes alone",
        "pause",
        "verified",
    )
    cells = [
        (
            row["case"],
            row["method"],
            row["transport"],
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['bytes'] / row['wire_bytes']:.0f}× less" if row.get("wire_bytes") else "",
            f"{row['seconds'] * 1e3:.0f} ms",
            f"{row['fraction_of_limit']:.2f}",
            "" if row["fraction_of_engine_limit"] is None else f"{row['fraction_of_engine_limit']:.2f}",
            "" if row["write_ms"] is None else f"{row['write_ms']:.0f} ms",
            "" if row["pause_ms"] is None else f"{row['pause_ms']:.0f} ms",
            {True: "yes", False: "**no**", None: ""}[row["verified"]],
        )
        for row in rows
    ]
    return table(header, cells)


def transfer_summary() -> str:
    """The fastest way beside the usual one."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in TRANSFER["rows"]):
        mine = {(row["method"], row["transport"]): row for row in TRANSFER["rows"] if row["case"] == case}
        fast, safe = mine["weft in_place, digest off", "shm"], mine["weft in_place", "shm"]
        usual = mine["broadcast from rank 0", "gloo"]
        lines.append(
            (
                case,
                f"{usual['bytes'] / 1e9:.2f} GB",
                f"{usual['seconds'] * 1e3:.0f} ms",
                f"{safe['seconds'] * 1e3:.0f} ms ({usual['seconds'] / safe['seconds']:.0f}×)",
                f"{fast['seconds'] * 1e3:.0f} ms ({usual['seconds'] / fast['seconds']:.0f}×)",
                f"{fast['fraction_of_limit']:.2f}",
            )
        )
    header = ("case", "moved", "Gloo broadcast", "weft, verified", "weft, digest off", "of a plain copy")
    return table(header, lines)


def codec() -> str:
    """Kernels on one core."""
    found = CODEC["machine"]
    return f"{_codec_table(CODEC['rows'])}\n\nOne core of {found['cpu']}, measured."


def codec_gpu() -> str:
    """Kernels on one GPU."""
    return f"{_codec_table(CODEC_GPU['rows'])}\n\nOne {CODEC_GPU['machine']['gpu']}, measured."


def _codec_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["kernel"],
            f"{row['gb_per_s']:.1f}",
            f"{row['fraction_of_limit']:.2f}",
            "" if row["touched"] is None else f"{row['touched']:.2f}",
            "" if row["result_bytes"] is None else f"{row['bytes'] / row['result_bytes']:.0f}× smaller",
            {True: "yes", False: "**no**", None: ""}[row["exact"]],
        )
        for row in rows
    ]
    return table(("kernel", "GB/s of weights", "of a copy", "touched", "result", "exact"), cells)


def fp8() -> str:
    """FP8 with and without a gather."""
    cells = [
        (
            row["method"],
            f"{row['seconds'] * 1e3:.0f} ms",
            f"{row['exchanged_bytes'] / 1e6:,.2f} MB",
            f"{row['wire_bytes'] / 1e6:.0f} MB",
            "yes" if row["exact"] else "**no**",
        )
        for row in FP8["rows"]
    ]
    header = ("way", "until committed", "between trainers", "to the engine", "bit-equal")
    found = FP8["machine"]
    measured = (
        f"Measured: {FP8['num_trainers']} FSDP2 trainers whose borders cut blocks, one FP8 engine, the shapes of "
        f"{FP8['model']} ({FP8['source_bytes'] / 1e6:.0f} MB of BF16 become FP8), "
        f"{found['cores']} cores of {found['cpu']}."
    )
    predicted = "; ".join(
        f"`{row['preset']}` {row['predicted_s']:.2f} s instead of {row['beside_gather']['predicted_s']:.2f} s "
        f"with a gather ({row['beside_gather']['amax_bytes'] / 1e6:.0f} MB between trainers instead of "
        f"{row['beside_gather']['gathered_bytes'] / 1e12:.1f} TB)"
        for row in FP8["simulated"]
    )
    return f"{table(header, cells)}\n\n{measured} Predicted: {predicted}."


def pipeline() -> str:
    """Stages in turn and overlapped."""
    cells = [
        (
            row["what"],
            f"{row['link_gb_per_s']:.2f} GB/s",
            ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in row["stages_s"].items()),
            f"{row['serial_s'] * 1e3:.0f} ms",
            f"{row['overlapped_s'] * 1e3:.0f} ms",
            f"{row['of_slowest_stage']:.2f} ×",
            f"{row['peak_staging_bytes'] / 2**20:.1f} of {row['watermark_bytes'] / 2**20:.0f} MiB",
        )
        for row in PIPELINE["rows"]
    ]
    header = ("what", "link", "stages alone, ms", "in turn", "overlapped", "of the slowest stage", "staged at most")
    found = PIPELINE["machine"]
    return (
        f"{table(header, cells)}\n\nMeasured: one trainer, one FP8 engine, the shapes of {PIPELINE['model']}, a "
        f"link as slow as all other stages together; {found['cores']} cores of {found['cpu']}."
    )


def sparsity() -> str:
    """What changes at RL learning rates."""
    cells = [
        (
            f"{row['learning_rate']:g}",
            f"{row['changed']:.2%}",
            f"{row['bytes_per_change']:.2f}",
            f"{row['reduction']:.0f}×",
            f"{row['reduction_zstd']:.0f}×",
        )
        for row in SPARSITY["rows"]
    ]
    one = SPARSITY["one_percent"]
    cells.append(
        (
            "1% at random",
            "1.00%",
            f"{one['bytes_per_change']:.2f}",
            f"{one['reduction']:.0f}×",
            f"{one['reduction_zstd']:.0f}×",
        )
    )
    header = ("learning rate", "BF16 weights changed in a step", "bytes a change", "smaller by", "with zstd")
    published = "; ".join(
        f"{name}: {found['changed']} changed, {found['bytes']}" for name, found in SPARSITY["published"].items()
    )
    model = (
        f"{SPARSITY['rows'][0]['elements'] / 1e6:.1f} M parameters, AdamW with FP32 master weights, medians of 40 steps"
    )
    return f"{table(header, cells)}\n\nMeasured: a transformer of {model}. Published: {published}."


def vllm_stall() -> str:
    """How long vLLM stands still for a version."""
    found = VLLM["machine"]
    rows = []
    for name, row in VLLM["rows"].items():
        stalls, latencies = row["stalls_s"], row.get("latencies_s")
        rows.append(
            (
                name,
                _ms(median(stalls)),
                _ms(max(stalls)),
                f"{sum(stalls):.2f} s",
                _ms(median(latencies)) if latencies else "",
                f"{row['staged_bytes'] / 1e6:.0f} MB" if "staged_bytes" in row else "",
            )
        )
    header = ("", "stall, median", "longest", f"all {VLLM['num_versions']} versions", "publish → served", "staged")
    step_s = next(iter(VLLM["rows"].values()))["step_s"]
    words = (
        f"A dense model of {VLLM['num_bytes'] / 1e6:.0f} MB (FP32) generates without a pause; "
        f"{VLLM['num_versions']} versions arrive. *Stall*: how much longer the longest step around a version takes "
        f"than the median step ({1e3 * step_s:.0f} ms); for vLLM's own `reload_weights`, from a file in memory, how "
        "long it takes. *Plain linears*: computing with parameters instead of packed copies, as GPUs do. The weights "
        "after the last version are equal, by vLLM's own checksums. Measured on "
        f"{found['cores']} cores of {found['cpu']}; engine and trainer share them."
    )
    return f"{table(header, rows)}\n\n{words}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def rl_summary() -> str:
    """What the demo shows, in a sentence."""
    demos, frozen = RL["demo"], RL["frozen"]
    reached = ", ".join(f"{run['reward_first']:.2f} → {run['reward_last']:.2f}" for run in demos)
    spent = [run["seconds"] for run in demos]
    transfer_ms, pause_ms = demos[0]["transfer_ms"]["p50"], demos[0]["pause_ms"]["p50"]
    checked = "all verified" if all(run["all_verified"] for run in demos) else "**not all verified**"
    return (
        f"Measured on {RL['machine']['cores']} cores of {RL['machine']['cpu']}: {len(demos)} seeds, "
        f"{min(spent):.0f}–{max(spent):.0f} s each, reward {reached}; {demos[0]['num_versions']} versions each, "
        f"{checked}, {transfer_ms:.0f} ms from `publish` until both engines serve one, engines paused for "
        f"{pause_ms:.2f} ms. With engines frozen at version 0: {frozen['reward_first']:.2f} → "
        f"{frozen['reward_last']:.2f}."
    )


def rl_demo() -> str:
    """The demo with three seeds, and without fresh weights."""
    rows = [(f"`weft demo --seed {seed}`", run) for seed, run in enumerate(RL["demo"])]
    rows.append(("`weft demo --freeze-engines`", RL["frozen"]))
    return f"{_rl_table('run', rows)}\n\n{_rl_machine(RL)}"


def rl_methods() -> str:
    """Weft beside collectives, and the same policy by both."""
    rows = [(run["method"], run) for run in RL["methods"]]
    same = "equal in every iteration" if RL["same_policy"] else "**not equal**"
    number = RL["in_turn"][0]["iterations"]
    return (
        f"{_rl_table('method', rows)}\n\n2 FSDP2 trainers → 2 engines, the same seed, asynchronous. In turn (`--sync`) "
        f"the rewards of weft and broadcast are {same} over {number} iterations: the same policy, other plumbing. "
        f"{_rl_machine(RL)}"
    )


def rl_gpu() -> str:
    """A larger model, trainer and engine on one GPU."""
    cells = [
        (
            run["name"],
            f"{run['bytes_per_version'] / 1e6:.0f} MB",
            f"{run['transfer_ms']['p50']:.1f} ms",
            f"{run['write_ms']['p50']:.1f} ms",
            f"{run['pause_ms']['p50']:.1f} ms",
            f"{run['copy_ms']:.2f} ms",
            f"{run['fraction_of_copy']:.2f}",
            "yes" if run["all_verified"] else "no",
        )
        for run in RL_GPU["runs"]
    ]
    header = ("run", "on the wire", "published to served", "writes", "pause", "plain copy", "copy / writes", "verified")
    return (
        f"{table(header, cells)}\n\nThe shapes of {RL_GPU['model']} with random weights, "
        f"{RL_GPU['runs'][0]['iterations']} iterations, medians; one {RL_GPU['machine']['gpu']}, which training, "
        "generating and the transfer share: the writes wait for their turn, and verify as they go."
    )


def _rl_table(first: str, rows: list[tuple[str, dict[str, Any]]]) -> str:
    cells = [
        (
            name,
            f"{run['reward_first']:.3f} → {run['reward_last']:.3f}",
            f"{run['seconds']:.0f} s",
            str(run["num_versions"]),
            "yes" if run["all_verified"] else "not checked",
            f"{run['transfer_ms']['p50']:.1f} / {run['transfer_ms']['p95']:.1f} ms",
            f"{run['pause_ms']['p50']:.2f} / {run['pause_ms']['p95']:.2f} ms",
            f"{run['staleness']:.2f} ({run['max_staleness']})",
            f"{run['samples_per_s']:.0f}",
        )
        for name, run in rows
    ]
    columns = ("reward", "took", "versions", "verified", "transfer p50 / p95", "pause p50 / p95", "staleness (most)")
    return table((first, *columns, "samples/s"), cells)


def _rl_machine(report: dict[str, Any]) -> str:
    found = report["machine"]
    return f"Measured on {found['cores']} cores of {found['cpu']}."


def scaling() -> str:
    """Rates over the number of sending hosts."""
    found = SCALING["sweep"]
    what = f"{found['model']} model, {found['num_bytes'] / 1e6:.0f} MB a version, NICs of {found['nic']}"
    return f"{table(*scaling_tables.sweep(SCALING))}\n\nMeasured: {what}. {_rl_machine(SCALING)}"


def observing() -> str:
    """What watching costs, in a sentence."""
    parts = [
        f"{row['case']}: {row['off_ms']:.2f} ms a version, {row['on_ms']:.2f} ms with events and metrics "
        f"({row['ratio']:.3f}×), {row['dashboard_ms']:.2f} ms with the dashboard as well"
        for row in OBSERVING["rows"]
    ]
    return f"{'; '.join(parts)}; medians of versions in turn. {_rl_machine(OBSERVING)}"


def rehearsals() -> str:
    """Control planes of large runs, on one machine."""
    header = ("case", "members", "ready after", "longest silence", "shipped to one member", "CPU per version", "memory")
    cells = [
        (
            f"`{row['name']}`",
            f"{row['num_trainers']} → {row['num_engine_ranks']}",
            f"{row['planned_s']:.0f} s",
            f"{row['longest_silence_s']:.2f} s",
            f"{row['max_shipped_bytes'] / 2**20:.2f} MiB",
            f"{row['controller_cpu_ms_per_version']:.0f} ms",
            f"{row['peak_rss_bytes'] / 2**30:.1f} GiB",
        )
        for row in REHEARSALS["rows"]
    ]
    return f"{table(header, cells)}\n\nCPU time is the controller's. {_rl_machine(REHEARSALS)}"


def many_tensors() -> str:
    """Small tensors, by number."""
    header = ("tensors", "engines hold", "trainers → engines", "first commit", "a version", "per tensor")
    cells = [
        (
            f"{row['tensors']:,}",
            row["precision"].upper(),
            f"{row['trainers']} → {row['engines']}",
            f"{row['first_commit_s']:.1f} s",
            f"{row['version_s'] * 1e3:.0f} ms",
            f"{row['version_us_per_tensor']:.2f} µs",
        )
        for row in MANY_TENSORS["rows"]
    ]
    return f"{table(header, cells)}\n\n{_rl_machine(MANY_TENSORS)}"


def many_tensors_gpu() -> str:
    """What a version costs on a GPU beyond the device's passes, by number of tensors."""
    header = ("tensors", "method", "to", "GB", "time", "limit", "beyond the limit", "versions")
    cells = [
        (
            f"{row['num_tensors']:,}",
            row["method"],
            row["precision"].upper(),
            f"{row['trainer_bytes'] / 1e9:.1f}",
            f"{row['seconds'] * 1e3:.1f} ms",
            f"{row['limit_s'] * 1e3:.1f} ms",
            f"{row['beyond_s'] * 1e3:.1f} ms",
            str(row["num_versions"]),
        )
        for row in sorted(
            MANY_TENSORS_GPU["rows"], key=lambda row: (row["precision"], row["method"], row["num_tensors"])
        )
    ]
    return f"{table(header, cells)}\n\nMedians, measured on one NVIDIA H200; {MANY_TENSORS_GPU['machine']['cpu']}."


BLOCKS = {
    "scaling": scaling,
    "scaling-summary": lambda: scaling_tables.summary(SCALING),
    "scaling-nics": lambda: table(*scaling_tables.nics(SCALING)),
    "cut-host": lambda: scaling_tables.cut_host(SCALING),
    "observing": observing,
    "rehearsals": rehearsals,
    "many-tensors": many_tensors,
    "many-tensors-gpu": many_tensors_gpu,
    "rl-demo": rl_demo,
    "rl-gpu": rl_gpu,
    "rl-methods": rl_methods,
    "rl-summary": rl_summary,
    "codec": codec,
    "codec-gpu": codec_gpu,
    "fp8": fp8,
    "pipeline": pipeline,
    "sparsity": sparsity,
    "transfer": transfer,
    "transfer-gpu": transfer_gpu,
    "transfer-summary": transfer_summary,
    "plan-example": plan_example,
    "compiled": compiled,
    "planning": planning,
    "slices": slices,
    "predictions": predictions,
    "settings-transfer": lambda: settings_table("config.py", "Settings", "TransferSettings"),
    "settings-engine": lambda: settings_table("config.py", "EngineSettings", prefix="WEFT_"),
    "settings-loop": lambda: settings_table("rl/settings.py", "LoopSettings"),
    "vllm-stall": vllm_stall,
    "validation-summary": validation_summary,
    "validation-rows": validation_rows,
}


def filled(text: str) -> str:
    """The text with every `<!-- generated: NAME -->` block renewed."""

    def renew(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n{wrapped(BLOCKS[match[1]]())}\n<!-- end -->"

    return re.sub(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end -->", renew, text, flags=re.DOTALL)


def wrapped(block: str) -> str:
    """A block whose prose has no long lines; rows of tables stay as they are."""
    lines = []
    for line in block.split("\n"):
        is_prose = not line.lstrip().startswith(("|", "<", "!"))
        lines += (
            textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False) if is_prose and line else [line]
        )
    return "\n".join(lines)


def main() -> None:
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        if filled(text) != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(filled(text))
    if stale and "--check" in sys.argv:
        sys.exit(f"error: {', '.join(stale)} not up to date\nhint: run `make docs`")
    print("up to date" if not stale else f"renewed {', '.join(stale)}")


if __name__ == "__main__":
    main()
