"""Tables of docs/lab.md: versions between hosts of a lab, from benchmarks/results/scaling.json."""

from __future__ import annotations

from typing import Any

Rows = list[tuple[str, ...]]
Table = tuple[tuple[str, ...], Rows]


def sweep(found: dict[str, Any]) -> Table:
    """Every method with every number of senders and receivers."""
    header = (
        "method",
        "senders",
        "receivers",
        "took",
        "predicted",
        "bound",
        "rate",
        "of plain sockets",
        "planned",
        "on the NICs",
        "cores busy",
        "checked",
    )
    rows = found["sweep"]["rows"]
    sockets = {_hosts(row): row["gb_per_s"] for row in rows if row["method"] == "plain sockets"}
    return header, [_sweep_row(row, sockets.get(_hosts(row))) for row in rows]


def _hosts(row: dict[str, Any]) -> tuple[int, int]:
    return row["num_senders"], row["num_receivers"]


def _sweep_row(row: dict[str, Any], sockets: float | None) -> tuple[str, ...]:
    return (
        row["method"],
        str(row["num_senders"]),
        str(row["num_receivers"]),
        f"{row['seconds']:.2f} s",
        _seconds(row.get("predicted_s")),
        _seconds(row.get("bound_s")),
        f"{row['gb_per_s'] * 1e3:.1f} MB/s",
        f"{row['gb_per_s'] / sockets:.2f}" if sockets is not None and "changed" not in row["method"] else "",
        f"{row['planned_bytes'] / 1e6:.1f} MB" if row["planned_bytes"] else "",
        f"{row['sent_bytes'] / 1e6:.1f} MB",
        f"{row['cpu_share']:.0%}",
        {None: "", True: "yes", False: "NO"}[row["verified"]],
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def nics(found: dict[str, Any]) -> Table:
    """One and two NICs per host."""
    header = ("method", "1 NIC", "2 NICs", "faster")
    one, two = ({row["method"]: row["seconds"] for row in run["rows"]} for run in found["nics"])
    return header, [
        (method, f"{one[method]:.2f} s", f"{two[method]:.2f} s", f"{one[method] / two[method]:.2f}×")
        for method in one
        if method in two
    ]


def cut_host(found: dict[str, Any]) -> str:
    """What a host that is cut off costs the others, in a sentence."""
    cut = found["cut_host"]
    gloo = "nobody's call had ended" if not any(cut["gloo_ended"]) else "some calls had ended"
    return (
        f"An engine's host is cut off in the middle of a version: with weft (`silence_s` {cut['silence_s']:.0f} s) the "
        f"version ended for everybody else after {cut['weft_ended_s']:.1f} s (“{cut['weft_said']}”), and a version was "
        f"committed everywhere {cut['weft_next_committed_s']:.1f} s after the host was back. With Gloo's broadcast "
        f"{gloo} after {cut['gloo_waited_s']:.0f} s."
    )


def summary(found: dict[str, Any]) -> str:
    """How rates to the most receivers grow, in a sentence."""
    receivers = max(row["num_receivers"] for row in found["sweep"]["rows"])
    rows = [row for row in found["sweep"]["rows"] if row["num_receivers"] == receivers]
    rate = {(row["method"], row["num_senders"]): row["gb_per_s"] for row in rows}
    senders = sorted(count for method, count in rate if method == "weft")
    most, gloo = senders[-1], "broadcast from rank 0 (Gloo)"
    grown = rate["weft", most] / rate["weft", senders[0]]
    return (
        f"{most} sending hosts are {grown:.1f} times as fast as one; each moves "
        f"{rate['weft', most] / rate['plain sockets', most]:.0%} of what plain sockets do between the same hosts. "
        f"Broadcasts from rank 0 stay at one host's NIC ({rate[gloo, most] / rate[gloo, senders[0]]:.1f} times)."
    )
