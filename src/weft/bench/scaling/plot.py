"""The rows of `weft bench scaling` as pictures: rate over the number of sending hosts, beside what the NICs carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.observe.charts import Curve, line_chart
from weft.web.page_file import Chart

METHODS = (
    "plain sockets",
    "weft",
    "rank 0 sends to each in turn (Gloo)",
    "broadcast from rank 0 (Gloo)",
    "gather to rank 0, broadcast (Gloo)",
)
LIMIT = "raw rate of the NICs"
X_NAME, Y_NAME = "sending hosts", "MB/s"
Rows = Sequence[Mapping[str, Any]]


def scaling_svg(rows: Rows) -> str:
    """Rows as `--json` prints them, for the most receivers."""
    return line_chart(_curves(rows, max(_receivers(rows))), x_name=X_NAME, y_name=Y_NAME)


def scaling_charts(rows: Rows) -> list[Chart]:
    """The same for a page: one chart for every number of receivers."""
    return [
        Chart(
            title=f"Rate over sending hosts, to {num_receivers} receiver{'s' * (num_receivers != 1)}",
            spec={
                "kind": "lines",
                "x_name": X_NAME,
                "y_name": Y_NAME,
                "series": [
                    {"name": curve.name, "points": curve.points, "is_dashed": curve.name == LIMIT}
                    for curve in _curves(rows, num_receivers)
                ],
            },
        )
        for num_receivers in _receivers(rows)
    ]


def _receivers(rows: Rows) -> list[int]:
    return sorted({row["num_receivers"] for row in rows})


def _curves(rows: Rows, num_receivers: int) -> list[Curve]:
    """MB/s of every method, and what the NICs of the senders, or of fewer receivers, carry."""
    drawn = [row for row in rows if row["num_receivers"] == num_receivers and row["method"] in METHODS]
    limits = {
        row["num_senders"]: min(row["num_senders"], num_receivers) * row["nic_gb_per_s"] * row["num_nics"] * 1e3
        for row in drawn
    }
    curves = [Curve(name=LIMIT, points=sorted(limits.items()))]
    for method in METHODS:
        points = [(row["num_senders"], row["gb_per_s"] * 1e3) for row in drawn if row["method"] == method]
        if points:
            curves.append(Curve(name=method, points=sorted(points)))
    return curves
