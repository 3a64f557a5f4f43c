"""What a person sees: the view in the terminal, the report, the summary, and the variables of `weft env`."""

from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from weft.cli.network_env import network_variables
from weft.errors import ConfigError
from weft.observe.charts import Curve, line_chart
from weft.rl.run.record import Commit, Iteration, Record, VersionRecord
from weft.rl.settings import LoopSettings
from weft.rl.view.live import curve, live_view, view
from weft.rl.view.loggers import Figures, figure_loggers
from weft.rl.view.report import page, write_report
from weft.web.page_file import Chart, render

SETTINGS = LoopSettings.of(num_engines=2, iterations=40, task="sort")


def record(num_iterations: int = 40) -> Record:
    made = Record(method="weft", verifies=True, ended_s=80.0, samples_of={0: 100, 1: 90}, example="52> 25")
    for n in range(num_iterations):
        made.iterations.append(
            Iteration(
                number=n,
                at_s=2.0 * n,
                reward=n / 40,
                staleness=0.5,
                max_staleness=1,
                mixed=0.1,
                num_samples=10,
                metrics={"train_s": 0.1},
            )
        )
    for n in range(num_iterations + 1):
        made.versions.append(
            VersionRecord(
                number=n,
                published_s=2.0 * n,
                released_s=2.0 * n + 0.004,
                committed_s=2.0 * n + 0.010,
                write_ms=3.0,
                num_bytes=5_000_000,
                reason="",
            )
        )
        made.commits += [
            Commit(engine_rank=rank, version=n, at_s=2.0 * n + 0.01, pause_ms=0.5, exact=None) for rank in range(2)
        ]
    return made


def test_the_summary_says_what_happened():
    found = record().summary(report="r.html")
    assert found["reward_first"] == pytest.approx(0.05)
    assert found["reward_last"] == pytest.approx(0.925)
    assert (found["num_versions"], found["all_verified"], found["max_staleness"]) == (41, True, 1)
    assert found["transfer_ms"]["p50"] == pytest.approx(10.0)
    assert found["pause_ms"] == {"p50": 0.5, "p95": 0.5}
    assert found["samples_per_s"] == pytest.approx(5.0)
    assert found["report"] == "r.html"


def test_a_run_that_was_not_verified_does_not_say_it_was():
    made = record()
    made.verifies = False
    assert not made.all_verified
    made.commits = [Commit(engine_rank=0, version=0, at_s=0.0, pause_ms=0.1, exact=True)]
    assert made.all_verified
    made.verifies, made.commits = True, [Commit(engine_rank=0, version=0, at_s=0.0, pause_ms=0.1, exact=False)]
    assert not made.all_verified
    assert not Record(method="weft", verifies=True).all_verified
    assert Record(method="weft", verifies=True).summary()["num_versions"] == 0


def test_the_view_shows_reward_versions_bytes_and_times():
    console = Console(file=io.StringIO(), width=100)
    made = record()
    made.lost["engine 1"] = "was killed"
    console.print(view(SETTINGS, made))
    text = console.file.getvalue()
    for part in (
        "iteration 40/40",
        "52> 25",
        "reward 0.000 → 0.975",
        "5.00 MB",
        "transfer 10.0 ms",
        "verified",
        "lost: was killed",
    ):
        assert part in text
    console.print(view(SETTINGS, Record(method="weft", verifies=True)))
    assert "waiting for the first version" in console.file.getvalue()


def test_without_a_terminal_there_are_lines(monkeypatch):
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr("weft.rl.view.live.LINE_S", 0.0)
    with live_view(SETTINGS, console) as watch:
        watch(Record(method="weft", verifies=True))
        watch(record())
    (line,) = console.file.getvalue().splitlines()
    assert "iteration 40/40" in line


def test_the_curve_rises_from_left_to_right():
    drawn = [line[6:] for line in curve([n / 99 for n in range(100)]).splitlines()]
    left = [max(x for x, sign in enumerate(line) if sign != "⠀") for line in drawn if line.strip("⠀")]
    assert left == sorted(left, reverse=True)
    assert len(drawn) == 8
    assert all(len(line) == 64 for line in drawn)
    assert curve([]).count("\n") == 7


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    path = write_report(record(), SETTINGS, tmp_path / "a" / "report.html")
    text = path.read_text()
    around = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'\b(src|href)="(?!data:)|@import|url\(', around)
    charts = [part for part in page(record(), SETTINGS).parts if isinstance(part, Chart)]
    assert [chart.spec["kind"] for chart in charts] == ["lines", "lines", "lines", "timeline"]
    assert text.count('<div class="chart"') == 4
    for part in ("0.050 → 0.925", "41, all verified", "1 trainer rank", "2 engines of 1 rank"):
        assert part in text
    assert render(page(Record(method="weft", verifies=True), SETTINGS))  # nothing has happened yet
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(record(), SETTINGS, tmp_path / "file" / "report.html")


def test_drawings_escape_what_they_are_told():
    drawn = line_chart([Curve(name="<a>", points=[(0, 0)]), Curve(name="b", points=[])], x_name="&", y_name="<")
    ET.fromstring(drawn)


def test_figures_are_logged_once_each(tmp_path):
    whole, logged = record(), []
    half = record(20)
    figures = Figures(lambda values, step: logged.append((dict(values), step)))
    for seen in (half, half, whole):
        figures.see(seen)
    rewards = [(step, values["rl/reward"]) for values, step in logged if "rl/reward" in values]
    assert rewards == [(n, n / 40) for n in range(40)]
    moved = [
        (step, values["weft/transfer_ms"], values["weft/pause_ms"]) for values, step in logged if "weft/bytes" in values
    ]
    assert moved == [(n, pytest.approx(10.0), 0.5) for n in range(41)]


def test_tensorboard_reads_what_was_logged(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with figure_loggers(tensorboard=tmp_path, wandb="", settings={}) as loggers:
        for figures in loggers:
            figures.see(record())
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("weft/transfer_ms")] == list(range(41))
    assert found.Scalars("rl/reward")[-1].value == pytest.approx(39 / 40)


def test_loggers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(ConfigError, match="--wandb needs wandb"),
        figure_loggers(tensorboard=None, wandb="project", settings={}),
    ):
        pass


def fake_machine(tmp_path, *, rdma: bool):
    net, infiniband = tmp_path / "net", tmp_path / "infiniband"
    for name in ("lo", "ens1"):
        (net / name).mkdir(parents=True)
        (net / name / "operstate").write_text("up\n")
    infiniband.mkdir()
    if rdma:
        device = tmp_path / "pci0"
        device.mkdir()
        (net / "ens1" / "device").symlink_to(device)
        port = infiniband / "mlx5_0" / "ports" / "1"
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (port / "gids").mkdir()
        for index, (kind, address) in enumerate(
            [
                ("IB/RoCE v1", "fe80::1"),
                ("RoCE v2", "fe80::1"),
                ("IB/RoCE v1", "::ffff:1"),
                ("RoCE v2", "::ffff:10.0.0.1"),
            ]
        ):
            (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
            (port / "gids" / str(index)).write_text(address + "\n")
        (infiniband / "mlx5_0" / "device").symlink_to(device)
    return {"net": net, "infiniband": infiniband}


def test_variables_for_a_plain_interface_and_for_rdma(tmp_path):
    plain = network_variables(None, **fake_machine(tmp_path / "a", rdma=False))
    assert plain["GLOO_SOCKET_IFNAME"] == plain["UCX_NET_DEVICES"] == "ens1"
    assert plain["NCCL_IB_DISABLE"] == "1"
    fast = network_variables("ens1", **fake_machine(tmp_path / "b", rdma=True))
    assert (fast["NCCL_IB_HCA"], fast["UCX_NET_DEVICES"], fast["NCCL_IB_DISABLE"]) == ("mlx5_0", "mlx5_0:1", "0")
    assert fast["NCCL_IB_GID_INDEX"] == fast["UCCL_IB_GID_INDEX"] == "3"
    with pytest.raises(ConfigError, match="unknown network interface `eth9`"):
        network_variables("eth9", **fake_machine(tmp_path / "c", rdma=False))
