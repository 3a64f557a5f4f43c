"""Rehearsals run the real control plane: what is counted is what was planned, and losses cost no planning."""

from __future__ import annotations

import json

from tests.process.test_cli import weft

SMALL = (
    "rehearse",
    "qwen3-0.6b",
    "--trainer",
    "fsdp3",
    "--engine",
    "tp2",
    "--replicas",
    "2",
    "--dtype",
    "fp8-block128",
)


def test_a_rehearsal_counts_what_was_planned_and_keeps_the_plan_when_members_return():
    done = weft(*SMALL, "--versions", "2", "--kill", "2", "--json", timeout_s=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["num_trainers"], report["num_engine_ranks"]) == (3, 4)
    printed = json.loads(weft("plan", *SMALL[1:], "--json").stdout)
    assert report["num_writes"] == report["planned_writes"] == printed["num_writes"] > 0
    assert report["num_killed"] == 2
    assert report["is_plan_kept"]
    assert report["magnitude_bytes"] > 0
    assert 0 < report["max_shipped_bytes"] <= report["shipped_bytes"]
    assert report["controller_rss_bytes"] < report["peak_rss_bytes"] < report["bytes_per_version"]
    for name in ("planned_s", "longest_silence_s", "controller_cpu_ms_per_version"):
        assert name in report


def test_more_losses_than_members_are_refused():
    done = weft(*SMALL, "--kill", "4")
    assert done.returncode == 2
    assert "4 of 7 members cannot be killed" in done.stderr
