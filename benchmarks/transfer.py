"""Transfers between processes of this machine, beside its limits and the usual ways; writes results/transfer.json."""

from __future__ import annotations

from recording import record

if __name__ == "__main__":
    report = record("transfer", "transfer", "--repeat", "9", timeout_s=1800)
    for row in report["rows"]:
        print(f"{row['case']}, {row['method']}, {row['transport']}: {row['fraction_of_limit']:.2f} of a plain copy")
