"""FP8 from FSDP2 shards, by exchanging magnitudes and by gathering full tensors; writes results/fp8.json."""

from __future__ import annotations

from recording import record

if __name__ == "__main__":
    report = record("fp8", "fp8", "--trainers", "4", "--repeat", "9", timeout_s=900)
    for row in report["rows"]:
        print(f"{row['method']}: {row['seconds'] * 1e3:.0f} ms, {row['exchanged_bytes']} bytes between trainers")
