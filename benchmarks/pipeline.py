"""Stages of sending over a link of limited rate, in turn and overlapped; writes results/pipeline.json."""

from __future__ import annotations

from recording import record

if __name__ == "__main__":
    report = record("pipeline", "pipeline", "--repeat", "7", timeout_s=900)
    for row in report["rows"]:
        print(f"{row['what']}: {row['of_slowest_stage']:.2f} × the slowest stage, {row['of_serial']:.2f} × in turn")
