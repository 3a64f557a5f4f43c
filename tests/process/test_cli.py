"""The `weft` command as a user runs it: a real process, its streams and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def weft(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


SMALL = ("qwen3-0.6b", "--trainer", "fsdp4", "--engine", "tp2", "--replicas", "2")


def test_plan_json_has_the_documented_fields():
    done = weft("plan", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {
        "model",
        "policy",
        "num_trainers",
        "num_engines",
        "total_bytes",
        "tx_bytes",
        "rx_bytes",
        "num_routes",
        "num_writes",
        "bound_s",
        "makespan_s",
        "makespan_over_bound",
        "plan_s",
        "peak_rss_bytes",
        "digest",
    } <= plan.keys()
    assert {"min", "mean", "max"} == plan["tx_bytes"].keys() == plan["rx_bytes"].keys()
    assert (plan["num_trainers"], plan["num_engines"]) == (4, 4)
    assert plan["makespan_over_bound"] >= 1


def test_simulate_json_has_the_documented_fields(tmp_path):
    trace = tmp_path / "trace.json"
    done = weft("simulate", *SMALL, "--trace", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    predicted = json.loads(done.stdout)
    assert {"predicted_s", "stages", "pause_s", "wire_bytes"} <= predicted.keys()
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_plan_is_saved_loaded_compared_explained_and_drawn(tmp_path):
    saved, picture, page = tmp_path / "a.plan", tmp_path / "a.svg", tmp_path / "a.html"
    first = weft("plan", *SMALL, "--save", str(saved), "--svg", str(picture), "--json")
    again = weft("plan", "--load", str(saved), "--svg", str(page), "--json")
    assert json.loads(first.stdout)["digest"] == json.loads(again.stdout)["digest"]
    assert picture.read_text().startswith("<svg")
    assert "trainer ${row}" in page.read_text()
    difference = weft("plan", *SMALL, "--trainer", "ddp4", "--diff", str(saved), "--json")
    assert json.loads(difference.stdout)["num_added"] > 0
    explained = weft("plan", "--load", str(saved), "--explain", "model.layers.0.mlp.gate_up_proj.weight")
    assert "copy of model.layers.0.mlp.up_proj.weight" in explained.stdout


def test_a_preset_can_be_overridden():
    done = weft("plan", "--preset", "rlwb-qwen2.5-0.5b", "--trainer", "ddp4", "--policy", "greedy", "--json")
    plan = json.loads(done.stdout)
    assert (plan["num_trainers"], plan["policy"]) == (4, "greedy")


@pytest.mark.parametrize("command", [("models",), ("presets",), ("topologies",), ("models", "gpt2")])
def test_listings(command):
    assert json.loads(weft(*command, "--json").stdout)


def test_a_listing_for_people():
    done = weft("topologies")
    assert done.returncode == 0
    assert "h100-ib400" in done.stdout


def test_validate_runs_the_tests_that_were_asked_for():
    passing = weft("validate", "--only", "T3,T4", "--json")
    assert passing.returncode == 0
    assert {row["id"] for row in json.loads(passing.stdout)} == {"T3", "T4"}
    assert weft("validate", "--only", "T11").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "qwen9", "--trainer", "fsdp2", "--engine", "tp2"), "unknown model `qwen9`"),
        (("plan",), "no model given"),
        (("plan", "gpt2", "--model", "qwen3-8b"), "two names to plan, `gpt2` and `qwen3-8b`"),
        (("plan", "qwen3-8b", "--engine", "tp2"), "no trainer layout"),
        (("plan", "qwen3-8b", "--trainer", "tp3", "--engine", "tp2"), "32 attention heads over 3 parts"),
        (("plan", "qwen3-8b", "--trainer", "fsdp2", "--engine", "tp3"), "32 attention heads over 3 parts"),
        (("plan", "qwen3-8b", "--trainer", "fsdp999999999", "--engine", "tp2"), "out of range"),
        (("plan", "qwen3-8b", "--trainer", "fsdp2", "--engine", "tp2", "--replicas", "-1"), "replicas"),
        (
            ("plan", "qwen3-8b", "--trainer", "fsdp60000", "--engine", "tp1", "--replicas", "60000"),
            "more pairs",
        ),
        (
            ("plan", "qwen3-8b", "--trainer", "fsdp2", "--engine", "tp2", "--policy", "magic"),
            "unknown policy",
        ),
        (
            ("plan", "qwen3-8b", "--trainer", "fsdp2", "--engine", "tp2", "--topology", "lan"),
            "unknown topology",
        ),
        (("plan", "--load", "/nonexistent.plan"), "`/nonexistent.plan` cannot be read"),
        (("plan", "--load", "/nonexistent.plan", "--trainer", "fsdp2"), "--load together with a case"),
        (("plan", "qwen3-8b", "--trainer", "fsdp2", "--engine", "tp2", "--replicas", "0"), "replicas is 0"),
        (("plan", "qwen3-8b", "--trainer", "fsdp" + "9" * 5000, "--engine", "tp2"), "cannot read"),
        (("plan", "qwen3-8b", "--trainer", "fsdp2", "--engine", "x.json", "--dtype", "bf16"), "--dtype with"),
        (("plan", *SMALL, "--ignore", "visual.*"), "ignore: `visual.*` matches no trainer tensor"),
        (("simulate", *SMALL, "--ignore", "model.norm.weight"), "ignored: model.norm.weight"),
        (("plan", "--load", "/nonexistent.plan", "--ignore", "w"), "--load together with a case"),
        (("plan", *SMALL, "--explain", "nothing"), "no tensor `nothing`"),
        (("plan", *SMALL, "--svg", "picture.jpg"), "is neither .svg nor .html"),
        (("plan", *SMALL, "--save", "/nonexistent/a.plan"), "cannot be written"),
        (("plan", *SMALL, "--config", "/nonexistent.toml"), "cannot be read"),
        (("simulate", *SMALL, "--mode", "magic"), "unknown mode `magic`"),
        (("simulate", *SMALL, "--mode", "patch"), "give the fraction that changes: --delta-density"),
        (("simulate", *SMALL, "--delta-density", "2"), "delta density is 2.0"),
        (("simulate", *SMALL, "--beside-gather"), "--beside-gather needs a published run"),
        (("simulate", *SMALL, "--skew-ms", "-3"), "skew"),
        (("validate", "--nonsense"), "No such option"),
        (("validate", "--only", "T99"), "unknown test `T99`"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    done = weft(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    shown = " ".join(done.stderr.split())
    assert message in shown
    assert "Traceback" not in done.stderr


def test_tensors_no_engine_has_are_left_out_by_name_or_pattern(tmp_path):
    norm = {"name": "model.norm.weight", "dtype": "bf16", "shape": [1024]}
    view = {"shape": [1024], "dst_offset": 0, "dst_strides": [1], "src_offset": 0, "src_strides": [1]}
    pieces = [{"dst": norm["name"], "source": norm["name"], **view}]
    engine = tmp_path / "engine.json"
    engine.write_text(json.dumps({"ranks": [{"tensors": [norm], "pieces": pieces}]}))
    case = ("qwen3-0.6b", "--trainer", "fsdp2", "--engine", str(engine), "--json")
    refused = weft("plan", *case)
    assert refused.returncode == 2
    assert "leave out with `ignore`" in " ".join(refused.stderr.split())
    left_out = ("--ignore", "model.layers.*", "--ignore", "model.embed_tokens.weight")
    assert json.loads(weft("plan", *case, *left_out).stdout)["total_bytes"] == 2048
    assert json.loads(weft("simulate", *case, *left_out).stdout)["wire_bytes"] == 2048


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m weft models deepseek-v3 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_errors_come_with_a_hint():
    assert "hint:" in weft("plan", "qwen3-235", "--trainer", "fsdp2", "--engine", "tp2").stderr


def test_keys_are_made_once(tmp_path):
    done = weft("keys", "controller", "trainer", "--folder", str(tmp_path / "k"), "--json")
    assert [path.rpartition("/")[2] for path in json.loads(done.stdout)] == ["controller.key", "trainer.key"]
    again = weft("keys", "trainer", "--folder", str(tmp_path / "k"))
    assert again.returncode == 2
    assert "already exists" in again.stderr
