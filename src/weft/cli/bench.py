"""`weft bench`: measurements on this machine, each next to the limit measured in the same run."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from weft.cli.case_options import Json
from weft.cli.ending import clean_up_when_told_to_end
from weft.cli.output import err, out, print_json, progress
from weft.cli.report import ReportFile, save_report
from weft.config import ReceiverMode
from weft.core.topology import cluster_toml, load_topology
from weft.devices import memory_kind
from weft.errors import ConfigError, TransportUnavailable, WeftError
from weft.lab.commands import check_possible
from weft.runtime.controller.planning import DEFAULT_TOPOLOGY

if TYPE_CHECKING:
    from weft.bench.codec import CodecReport
    from weft.bench.on_gpu.measure import GpuReport
    from weft.bench.scaling.rows import ScalingReport
    from weft.bench.transfer import Report, TransferRow

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@bench_app.callback()
def _root() -> None:
    """Measure this machine."""


@bench_app.command("transfer")
def transfer_command(
    model: Annotated[str | None, typer.Option(help="Model whose tensor shapes are moved.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="CPU: tp or replicas. Default: both.")] = None,
    trainers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Trainers. Default: 2; always 1 on a GPU.")
    ] = None,
    engine_ranks: Annotated[
        int | None, typer.Option(min=1, max=64, help="Engine ranks. Default: 2, on a GPU 1.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda:0.")] = "cpu",
    host: Annotated[str | None, typer.Option(help="GPU: trainer or engine has its weights in CPU memory.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="GPU: move only this many first layers.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="GPU: bf16 or fp8. Default: both.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="in_place, shadow or patch. Default: all.")] = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Versions per method; medians are shown.")] = 5,
    baselines: Annotated[bool, typer.Option(help="Also measure the baselines: broadcast, gather, file.")] = True,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Move real tensor shapes between real processes by every method, verify every byte, compare with the limits."""
    modes = tuple(mode or ReceiverMode)
    if unknown := set(modes) - set(ReceiverMode):
        raise ConfigError(f"unknown mode `{unknown.pop()}`", hint=f"use {' or '.join(ReceiverMode)}")
    logging.disable(logging.WARNING)  # members that leave are expected here
    if memory_kind(device) == "cpu":
        if layers is not None or precision or host:
            raise ConfigError(
                "--layers, --precision and --host are for GPUs", hint="`weft bench fp8` measures FP8 on CPUs"
            )
        transfer = load_bench("transfer")
        wanted = transfer.cases(
            tuple(case or ("tp", "replicas")), num_trainers=trainers or 2, num_engine_ranks=engine_ranks or 2
        )
        with progress() as say:
            report = transfer.measure(
                model or "qwen2.5-0.5b", wanted, repeat=repeat, baseline=baselines, say=tell(say), modes=modes
            )
        show: Callable[[Any], None] = _show
    else:
        if case or trainers not in (None, 1):
            raise ConfigError(
                "--case and --trainers are for CPUs", hint="leave them out: one trainer and one engine share the GPU"
            )
        check_cuda()
        on_gpu = load_bench("on_gpu.measure")
        moved = on_gpu.GpuCase(
            model=model or on_gpu.DEFAULT_MODEL,
            num_layers=layers,
            num_parts=engine_ranks or 1,
            device=device,
            host_side=host,
        )
        with progress() as say:
            report = on_gpu.measure(
                moved,
                precisions=tuple(precision or on_gpu.PRECISIONS),
                modes=modes,
                repeat=repeat,
                baseline=baselines,
                say=tell(say),
            )
        show = _show_gpu
    save_report(report_file, "weft bench transfer", report.to_json())
    if as_json:
        print_json(report.to_json())
    else:
        show(report)
    wrong = [row.method for row in report.rows if row.verified is False]
    if wrong:
        raise WeftError(f"{wrong[0]} did not transfer every byte correctly")


@bench_app.command("scaling")
def scaling_command(
    senders: Annotated[
        list[int] | None, typer.Option(min=1, max=32, help="Sending hosts. Default: 1, 2, 4, 8.")
    ] = None,
    receivers: Annotated[
        list[int] | None, typer.Option(min=1, max=31, help="Receiving hosts: the ranks of one engine. Default: 8.")
    ] = None,
    nic: Annotated[str, typer.Option(help="Rate of every NIC.")] = "100mbit",
    nics: Annotated[int, typer.Option(min=1, max=4, help="NICs per host.")] = 1,
    model: Annotated[str, typer.Option(help="Model whose tensor shapes are moved.")] = "small",
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Versions per method; medians are shown.")] = 3,
    baselines: Annotated[bool, typer.Option(help="Also measure the baselines, from rank 0.")] = True,
    slow_host: Annotated[bool, typer.Option(help="Also measure with one sender at a tenth of its rate.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw rates over senders, as an .svg file.")] = None,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Measure how a version's rate grows with sending hosts, in a lab with rate-limited NICs (needs root)."""
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"`{plot}` is not an .svg file", hint="plots are written as .svg")
    check_possible()
    clean_up_when_told_to_end()
    logging.disable(logging.WARNING)  # members that leave are expected here
    case = load_bench("scaling.rows").ScalingCase(
        model=model,
        num_senders=tuple(senders or (1, 2, 4, 8)),
        num_receivers=tuple(receivers or (8,)),
        nic=nic,
        num_nics=nics,
        slow_host=slow_host,
    )
    with progress() as say:
        report = load_bench("scaling.measure").measure(case, repeat=repeat, baselines=baselines, say=tell(say))
    drawing, rows = load_bench("scaling.plot"), report.to_json()["rows"]
    if plot is not None:
        plot.write_text(drawing.scaling_svg(rows))
    save_report(report_file, "weft bench scaling", report.to_json(), charts=drawing.scaling_charts(rows))
    if as_json:
        print_json(report.to_json())
    else:
        _show_scaling(report)
    wrong = [row.method for row in report.rows if row.verified is False]
    if wrong:
        raise WeftError(f"{wrong[0]} did not transfer every byte correctly")


def _show_scaling(report: ScalingReport) -> None:
    title = f"{report.model}, {report.num_bytes / 1e6:.0f} MB, NICs of {report.nic}"
    table = Table(title=title, title_justify="left")
    for name in (
        "method",
        "senders",
        "receivers",
        "s",
        "predicted s",
        "bound s",
        "MB/s",
        "of NICs",
        "planned MB",
        "sent MB",
        "cores busy",
        "verified",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in report.rows:
        table.add_row(
            row.method,
            str(row.num_senders),
            str(row.num_receivers),
            f"{row.seconds:.2f}",
            "" if row.predicted_s is None else f"{row.predicted_s:.2f}",
            "" if row.bound_s is None else f"{row.bound_s:.2f}",
            f"{row.gb_per_s * 1e3:.1f}",
            f"{row.fraction_of_nics:.2f}",
            f"{row.planned_bytes / 1e6:.1f}",
            f"{row.sent_bytes / 1e6:.1f}",
            f"{row.cpu_share:.0%}",
            {None: "", True: "yes", False: "NO"}[row.verified],
        )
    out.print(table)


@bench_app.command("links")
def links_command(
    topology: Annotated[str, typer.Option(help="Preset or .toml file to put the costs into.")] = DEFAULT_TOPOLOGY,
    save: Annotated[Path | None, typer.Option(help="Write the topology with these costs to a .toml file.")] = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Runs per transport; medians are shown.")] = 9,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Measure what one write costs over each transport, which tells the planner which runs to pack."""
    if save is not None and save.suffix != ".toml":
        raise ConfigError(f"`{save}` is not a .toml file", hint="topologies are read from .toml files")
    cluster = load_topology(topology)
    with progress() as say:
        report = load_bench("links").measure(repeat=repeat, say=tell(say))
    if save is not None:
        save.write_text(cluster_toml(report.put_into(cluster)))
    save_report(report_file, "weft bench links", report.to_json())
    if as_json:
        print_json(report.to_json())
        return
    title = f"one core copies {report.cpu_gb_per_s:.1f} GB/s"
    title += "" if report.device_gb_per_s is None else f", the GPU {report.device_gb_per_s:.0f} GB/s"
    table = Table(title=title, title_justify="left")
    for name in ("transport", "memory", "µs a write", "GB/s", "of copy", "packs runs below"):
        table.add_column(name, justify="left" if name in ("transport", "memory") else "right")
    for row in report.rows:
        cells = f"{row.op_us:.2f}", f"{row.gb_per_s:.1f}", f"{row.of_copy:.2f}", f"{row.min_run_bytes} bytes"
        table.add_row(row.transport, row.memory, *cells)
    out.print(table)
    for name, why in report.missing.items():
        err.print(f"{name}: not measured: {escape(why)}")
    if save is not None:
        err.print(f"written to {escape(str(save))}; use it with --topology {escape(str(save))}")


@bench_app.command("codec")
def codec_command(
    device: Annotated[str, typer.Option(help="Device: cpu (one core) or cuda:0.")] = "cpu",
    megabytes: Annotated[int, typer.Option(min=1, max=1 << 16, help="Weights to work on, in MiB.")] = 256,
    density: Annotated[float, typer.Option(min=0.0, max=1.0, help="Fraction of elements that change.")] = 0.01,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Runs per kernel; medians are shown.")] = 9,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compare patches, FP8 and digests with a plain copy; check each against its reference."""
    with progress() as say:
        report = _codec_report(device, megabytes << 20, density, repeat, tell(say))
    save_report(report_file, "weft bench codec", report.to_json())
    if as_json:
        print_json(report.to_json())
        return
    table = Table(title=f"on {report.device}", title_justify="left")
    for name in ("kernel", "MB", "ms", "GB/s", "of copy", "bytes touched, of copy", "result", "exact"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for row in report.rows:
        table.add_row(
            row.kernel,
            f"{row.bytes / 1e6:.0f}",
            f"{row.seconds * 1e3:.2f}",
            f"{row.gb_per_s:.1f}",
            f"{row.fraction_of_limit:.2f}",
            "" if row.touched is None else f"{row.touched:.2f}",
            "" if row.result_bytes is None else f"{row.bytes / row.result_bytes:.0f}× smaller",
            {None: "", True: "yes", False: "NO"}[row.exact],
        )
    out.print(table)


@bench_app.command("fp8")
def fp8_command(
    model: Annotated[str, typer.Option(help="Model whose tensor shapes are quantised and moved.")] = "qwen2.5-0.5b",
    trainers: Annotated[int, typer.Option(min=1, max=64, help="FSDP2 ranks.")] = 4,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Versions per method; medians are shown.")] = 5,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Move BF16 shards to an FP8 engine: exchange magnitudes, or gather full tensors."""
    measure = load_bench("fp8").measure
    logging.disable(logging.WARNING)  # members that leave are expected here
    with progress() as say:
        report = measure(model, num_trainers=trainers, repeat=repeat, say=tell(say))
    save_report(report_file, "weft bench fp8", report.to_json())
    if as_json:
        print_json(report.to_json())
        return
    title = f"{report.model}, {report.num_trainers} trainers, {report.source_bytes / 1e6:.0f} MB of BF16 to FP8"
    table = Table(title=title, title_justify="left")
    for name in ("method", "ms", "before sending ms", "between trainers MB", "to the engine MB", "exact"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in report.rows:
        table.add_row(
            row.method,
            f"{row.seconds * 1e3:.0f}",
            f"{row.before_sending_s * 1e3:.0f}",
            f"{row.exchanged_bytes / 1e6:.3f}",
            f"{row.wire_bytes / 1e6:.0f}",
            "yes" if row.exact else "NO",
        )
    out.print(table)


@bench_app.command("pipeline")
def pipeline_command(
    model: Annotated[str, typer.Option(help="Model whose tensor shapes are quantised and moved.")] = "qwen2.5-0.5b",
    chunk_mib: Annotated[int, typer.Option(min=1, max=1024, help="Chunk size in MiB.")] = 8,
    staging_mib: Annotated[int, typer.Option(min=4, max=1 << 20, help="Staging watermark in MiB.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Versions per method; medians are shown.")] = 5,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compare the stages of sending over a slow link, one after the other and overlapped."""
    measure = load_bench("pipeline").measure
    logging.disable(logging.WARNING)  # members that leave are expected here
    with progress() as say:
        report = measure(model, repeat=repeat, chunk_mib=chunk_mib, staging_mib=staging_mib, say=tell(say))
    save_report(report_file, "weft bench pipeline", report.to_json())
    if as_json:
        print_json(report.to_json())
        return
    table = Table(title=f"{report.model}, one trainer, one engine", title_justify="left")
    for name in (
        "what",
        "link GB/s",
        "stages alone, ms",
        "in turn ms",
        "overlapped ms",
        "of slowest",
        "staged",
        "exact",
    ):
        table.add_column(name, justify="left" if name in ("what", "stages alone, ms") else "right")
    for row in report.rows:
        table.add_row(
            row.what,
            f"{row.link_gb_per_s:.2f}",
            ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in row.stages_s.items()),
            f"{row.serial_s * 1e3:.0f}",
            f"{row.overlapped_s * 1e3:.0f}",
            f"{row.of_slowest_stage:.2f}",
            f"{row.peak_staging_bytes / 2**20:.1f} of {row.watermark_bytes / 2**20:.0f} MiB",
            "yes" if row.exact else "NO",
        )
    out.print(table)


def _codec_report(device: str, num_bytes: int, density: float, repeat: int, say: Callable[[str], None]) -> CodecReport:
    report: CodecReport
    if memory_kind(device) == "cpu":
        report = load_bench("codec").measure_cpu(num_bytes, density=density, repeat=repeat, say=say)
    else:
        check_cuda()
        report = load_bench("codec_gpu").measure_gpu(device, num_bytes, density=density, repeat=repeat, say=say)
    return report


def load_bench(name: str) -> Any:
    """A module of `weft.bench`, loaded late: some need torch."""
    return _load(f"weft.bench.{name}")


def check_cuda() -> None:
    """Raise where PyTorch has no GPU."""
    if not _load("torch").cuda.is_available():
        raise ConfigError("no CUDA device on this machine", hint="use --device cpu")


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise TransportUnavailable(f"the benchmark needs {error.name}", hint="pip install 'weft[bench]'") from error


def tell(say: Callable[[str], None]) -> Callable[[str], None]:
    """Progress: a status line on a terminal, plain lines elsewhere."""
    if err.is_terminal:
        return say
    return lambda text: err.print(escape(text))


def _show_gpu(report: GpuReport) -> None:
    title = f"{report.model}, {report.num_layers} layers, {report.num_tensors:,} tensors, {report.engine}"
    table = Table(title=f"{title}, on {report.device}", title_justify="left")
    for name in ("method", "to", "GB", "ms", "limit ms", "of limit", "write ms", "pause ms", "verified"):
        table.add_column(name, justify="left" if name in ("method", "to") else "right")
    for row in report.rows:
        table.add_row(
            row.method,
            row.precision,
            f"{row.trainer_bytes / 1e9:.1f}",
            f"{row.seconds * 1e3:.1f}",
            f"{row.limit_s * 1e3:.1f}",
            f"{row.fraction_of_limit:.2f}",
            "" if row.write_s is None else f"{row.write_s * 1e3:.1f}",
            "" if row.pause_s is None else f"{row.pause_s * 1e3:.1f}",
            "yes" if row.verified else "NO",
        )
    out.print(table)
    out.print(f"the device's own copy reads and writes {report.copy_gb_per_s / 1e3:.2f} TB/s")
    if report.bus_gb_per_s is not None:
        out.print(f"the bus carries {report.bus_gb_per_s:.1f} GB/s to or from pinned memory")
    for name, why in report.missing.items():
        err.print(f"{name}: not measured: {escape(why)}")


def _show(report: Report) -> None:
    table = Table(title=f"{report.model} on CPUs", title_justify="left")
    for name in (
        "case",
        "method",
        "transport",
        "GB",
        "on the wire",
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


def _cells(row: TransferRow) -> list[str]:
    def shown(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    return [
        row.case,
        row.method,
        row.transport,
        f"{row.bytes / 1e9:.3f}",
        "" if row.wire_bytes is None else f"{row.bytes / row.wire_bytes:.0f}× less",
        shown(row.seconds, 1, 1e3),
        shown(row.gb_per_s, 2),
        shown(row.fraction_of_limit, 2),
        shown(row.fraction_of_engine_limit, 2),
        shown(row.write_ms, 1),
        shown(row.predicted_s, 1, 1e3),
        shown(row.pause_ms, 1),
        {None: "", True: "yes", False: "NO"}[row.verified],
    ]
