"""The rows of `weft bench scaling` as a picture: rate over the number of sending hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.observe.charts import Curve, line_chart

METHODS = ("plain sockets", "weft", "broadcast from rank 0 (Gloo)", "gather to rank 0, broadcast (Gloo)")


def scaling_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as `--json` prints them."""
    curves = []
    for method in METHODS:
        points = [(row["num_senders"], row["gb_per_s"] * 1e3) for row in rows if row["method"] == method]
        if points:
            curves.append(Curve(name=method, points=sorted(points)))
    return line_chart(curves, x_name="sending hosts", y_name="MB/s")
