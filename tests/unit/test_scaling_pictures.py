"""The rows of `weft bench scaling` as pictures and tables."""

from __future__ import annotations

from typing import Any

import pytest

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
