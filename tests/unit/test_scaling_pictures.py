"""The rows of `weft bench scaling` as pictures and tables."""

from __future__ import annotations

from typing import Any

import pytest
from docs import scaling_tables

from weft.bench.scaling.plot import LIMIT, scaling_charts, scaling_svg


def row(method: str, num_senders: int, gb_per_s: float, *, num_receivers: int = 4) -> dict[str, Any]:
    return {
        "method": method,
        "num_senders": num_senders,
        "num_receivers": num_receivers,
        "nic_gb_per_s": 0.0125,
        "num_nics": 2,
        "gb_per_s": gb_per_s,
    }


ROWS = [
    row("weft", 8, 0.09),
    row("weft", 1, 0.02),
    row("weft, FP8 engines", 8, 0.08),
    row("broadcast from rank 0 (Gloo)", 1, 0.01),
    row("weft", 1, 0.021, num_receivers=1),
]


def test_a_page_draws_the_rates_of_methods_and_their_limit_for_every_number_of_receivers():
    one, four = scaling_charts(ROWS)
    assert [chart.title[-12:] for chart in (one, four)] == ["o 1 receiver", " 4 receivers"]
    curves = {each["name"]: each["points"] for each in four.spec["series"]}
    assert list(curves) == [LIMIT, "weft", "broadcast from rank 0 (Gloo)"]
    assert curves["weft"] == [(1, pytest.approx(20.0)), (8, pytest.approx(90.0))]
    assert curves[LIMIT] == [(1, pytest.approx(25.0)), (8, pytest.approx(100.0))], "four receivers bound eight senders"
    assert [each["is_dashed"] for each in four.spec["series"]] == [True, False, False]
    assert [each["points"] for each in one.spec["series"]] == [[(1, pytest.approx(25.0))], [(1, pytest.approx(21.0))]]


def test_a_document_shows_the_most_receivers():
    drawn = scaling_svg(ROWS)
    assert "broadcast from rank 0" in drawn
    assert drawn == scaling_svg([each for each in ROWS if each["num_receivers"] == 4])


def measured(method: str, num_senders: int, gb_per_s: float, **more: Any) -> dict[str, Any]:
    found = {"seconds": 2.0, "planned_bytes": 1, "sent_bytes": 1, "cpu_share": 0.5, "verified": None}
    return row(method, num_senders, gb_per_s, num_receivers=more.pop("num_receivers", 4)) | found | more


def test_tables_compare_with_sockets_between_as_many_hosts_and_leave_empty_what_is_not_known():
    rows = [
        measured("plain sockets", 2, 0.04),
        measured("plain sockets", 2, 0.02, num_receivers=1),
        measured("weft", 2, 0.03, predicted_s=1.5, bound_s=1.25),
        measured("weft", 2, 0.01, num_receivers=1),
    ]
    header, cells = scaling_tables.sweep({"sweep": {"rows": rows}})
    shown = [dict(zip(header, each, strict=True)) for each in cells]
    assert [(each["senders"], each["receivers"]) for each in shown] == [("2", "4"), ("2", "1"), ("2", "4"), ("2", "1")]
    assert [each["of plain sockets"] for each in shown] == ["1.00", "1.00", "0.75", "0.50"]
    assert [each["predicted"] for each in shown] == ["", "", "1.50 s", ""]
    assert [each["bound"] for each in shown] == ["", "", "1.25 s", ""]


def test_the_summary_is_about_the_most_receivers():
    rows = [
        measured(method, num_senders, rate * num_receivers, num_receivers=num_receivers)
        for num_receivers in (8, 1)
        for method, num_senders, rate in (
            ("plain sockets", 1, 0.010),
            ("weft", 1, 0.010),
            ("broadcast from rank 0 (Gloo)", 1, 0.002),
            ("plain sockets", 8, 0.100),
            ("weft", 8, 0.075 if num_receivers == 8 else 0.010),
            ("broadcast from rank 0 (Gloo)", 8, 0.002),
        )
    ]
    said = scaling_tables.summary({"sweep": {"rows": rows}})
    assert "8 sending hosts are 7.5 times as fast as one; each moves 75% of what plain sockets do" in said
    assert "(1.0 times)" in said
