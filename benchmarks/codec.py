"""Patches, FP8 and digests on one core of this machine; writes results/codec.json."""

from __future__ import annotations

from recording import record

if __name__ == "__main__":
    report = record("codec", "codec", "--megabytes", "512", "--repeat", "15", timeout_s=900)
    for row in report["rows"]:
        print(f"{row['kernel']}: {row['gb_per_s']:.1f} GB/s, {row['fraction_of_limit']:.2f} of a copy")
