"""What pages show, from lines of an events file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.web.following import FollowedFile
from weft.web.page_file import Chart, Page, Table, render, write_page
from weft.web.reports import comparison, report_of
from weft.web.story import MAX_VERSIONS, Story

PLAN = {
    "at": 3.0,
    "plan": "abc",
    "bytes": 3000,
    "writes": 2,
    "plan_s": 0.1,
    "ship_s": 0.1,
    "wire_s": {"trainer NICs": 0.5, "engine NICs": 0.25, "links inside a domain": 9.0},
    "links": [[0, 0, 1000, "nixl", 4000.0], [1, 0, 2000, "nixl", 4000.0]],
}


def started(name: str = "a", at: float = 1.0) -> dict[str, Any]:
    return {"at": at, "controller": name, "trainers": 2, "engine_ranks": 1, "mode": "shadow"}


def joined(member: str, at: float = 2.0, **facts: Any) -> dict[str, Any]:
    return {"at": at, "member": member, "state": "joined", "host": "h", "device": "cpu", "served": None, **facts}


def ended(version: int, seconds: float = 1.0, *, outcome: str = "committed", at: float = 10.0) -> dict[str, Any]:
    moments = [
        [0.0, "Want", "trainer 0"],
        [0.01, "Go", "trainer 0"],
        [0.8 * seconds, "Written", "trainer 0"],
        [0.9 * seconds, "Committed", "engine 0"],
        [seconds, "Decide", "trainer 0"],
    ]
    return {
        "at": at,
        "version": version,
        "outcome": outcome,
        "reason": "" if outcome == "committed" else "engine 0 failed",
        "seconds": seconds,
        "moments": moments,
        "writes": [[0, 0, 1000, 0.5], [1, 0, 2000, 0.25]],
        "arrivals": [[0, 0, 1000, 0.4], [1, 0, 2000, 0.2]],
        "stages": {},
        "pauses": {"engine 0": 0.02},
    }


def story(*lines: dict[str, Any]) -> Story:
    made = Story()
    for line in lines:
        made.take(line)
    return made


FLEET = (started(), joined("trainer 0"), joined("trainer 1"), joined("engine 0"), PLAN)


def test_a_version_from_begin_to_end():
    made = story(*FLEET, {"at": 9.0, "begun": 7})
    assert made.state()["under_way"] == [{"version": 7, "since": 9.0}]
    made.take(ended(7))
    found = made.state()
    assert found["under_way"] == []
    assert (found["committed"], found["num_committed"], found["num_aborted"]) == (7, 1, 0)
    assert found["plan"]["predicted_s"] == 0.5, "network cards, not what stays inside a host"
    assert found["versions"][0]["bytes"] == 3000
    assert found["versions"][0]["pause_s"] == 0.02
    assert found["versions"][0]["sentence"].startswith("version 7 took 1.00 s")
    engine = next(member for member in found["members"] if member["name"] == "engine 0")
    assert (engine["version"], engine["staleness"], engine["state"]) == (7, 0, "joined")


def test_both_ends_of_every_link():
    found = story(*FLEET, ended(7)).version(7)
    assert found is not None
    first, second = found["links"]
    assert (first["planned"], first["sent"], first["sent_s"], first["arrived"], first["arrived_s"]) == (
        1000,
        1000,
        0.5,
        1000,
        0.4,
    )
    assert (second["trainer"], second["engine"], second["transport"], second["limit"]) == (1, 0, "nixl", 4000.0)
    assert found["busiest"] == {"member": "engine 0", "busy": pytest.approx(0.75)}
    assert sum(cause["seconds"] for cause in found["chain"]) == pytest.approx(1.0)


def test_a_version_that_is_not_known():
    assert story(*FLEET).version(3) is None


def test_engines_that_lag_and_members_that_are_lost():
    made = story(*FLEET, ended(7), {"at": 11.0, "member": "trainer 1", "state": "lost", "reason": "left"})
    late = ended(8)
    late["moments"] = [moment for moment in late["moments"] if moment[1] != "Committed"]
    made.take(late)
    found = {member["name"]: member for member in made.state()["members"]}
    assert (found["engine 0"]["version"], found["engine 0"]["staleness"]) == (7, 1)
    assert (found["trainer 1"]["state"], found["trainer 1"]["reason"]) == ("lost", "left")
    assert [failure["what"] for failure in made.state()["failures"]] == ["trainer 1 left"]


def test_a_restarted_controller_keeps_the_history():
    made = story(*FLEET, ended(7), {"at": 12.0, "begun": 8}, started("b", at=13.0))
    found = made.state()
    assert found["under_way"] == []
    assert {member["state"] for member in found["members"]} == {"away"}
    assert [version["version"] for version in found["versions"]] == [7]
    assert found["failures"][-1]["what"] == "the controller was restarted"
    made.take(joined("engine 0", at=14.0, served=7))
    engine = next(member for member in made.state()["members"] if member["name"] == "engine 0")
    assert (engine["state"], engine["version"], engine["staleness"]) == ("joined", 7, 0)


def test_aborted_versions_are_failures():
    made = story(*FLEET, ended(7, outcome="aborted"))
    assert made.state()["num_aborted"] == 1
    assert made.state()["failures"][-1]["what"] == "version 7 was aborted: engine 0 failed"


def test_old_versions_are_forgotten():
    made = story(*FLEET)
    for version in range(MAX_VERSIONS + 50):
        made.take(ended(version))
    assert len(made.state()["versions"]) == MAX_VERSIONS
    assert made.state()["num_committed"] == MAX_VERSIONS + 50
    assert made.version(3) is None
    assert made.version(MAX_VERSIONS) is not None


def test_a_file_that_grows_is_damaged_and_is_replaced(tmp_path):
    path = tmp_path / "events.jsonl"
    followed = FollowedFile(path)
    assert followed.state()["versions"] == [], "it does not exist yet"
    lines = [json.dumps(line) + "\n" for line in (*FLEET, ended(7))]
    path.write_text("".join(lines[:-1]) + lines[-1][:30])
    assert followed.state()["versions"] == [], "the last line is not complete"
    with path.open("a") as file:
        file.write(lines[-1][30:] + "{damaged\n[1]\n" + json.dumps({"member": 3}) + "\n" + json.dumps(ended(8)) + "\n")
    assert [version["version"] for version in followed.state()["versions"]] == [7, 8]
    assert followed.num_invalid == 2
    path.unlink()
    path.write_text("".join(lines))
    assert [version["version"] for version in followed.state()["versions"]] == [7]


def test_pages_escape_what_they_are_given(tmp_path):
    nasty = "</script><script>alert(1)</script>"
    page = Page(
        title=nasty,
        lead=nasty,
        cards={nasty: nasty},
        parts=[
            Chart(title=nasty, note=nasty, spec={"kind": "bars", "unit": "", "rows": [nasty], "series": []}),
            Table(title=nasty, columns=[nasty], rows=[[nasty]]),
        ],
    )
    assert nasty not in render(page)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(page, tmp_path)


def test_a_report_of_a_run_needs_no_other_file(tmp_path):
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(line) + "\n" for line in (*FLEET, ended(7), ended(8, 2.0))))
    text = render(report_of(events))
    assert "2 versions committed, 0 aborted" in text
    assert "version 8 took 2.00 s" in text
    assert not [word for word in ('src="http', 'href="http', "@import", "url(http") if word in text]


def test_two_results_are_compared_row_by_row(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps({"rows": [{"method": "a", "seconds": 2.0}, {"method": "b", "seconds": 1.0}]}))
    new.write_text(json.dumps({"rows": [{"method": "a", "seconds": 1.0}, {"method": "c", "seconds": 1.0}]}))
    page = comparison(old, new)
    tables = [part for part in page.parts if isinstance(part, Table)]
    assert tables[0].columns == ["", "old.json", "new.json", "ratio"]
    assert tables[0].rows == [["a", 2.0, 1.0, 0.5]]


def scaling_rows() -> list[dict[str, Any]]:
    """Rows as `weft bench scaling` prints them; the last two are about the same."""
    methods = "weft", "weft, 1% changed, NICs at 1%"
    cases = [(*case, method) for case in ((1, 8, 1), (8, 8, 1), (8, 4, 1), (8, 4, 2)) for method in methods]
    cases.append(cases[-1])
    return [
        {
            "method": method,
            "num_senders": senders,
            "num_receivers": receivers,
            "num_nics": nics,
            "seconds": number + 1.0,
        }
        for number, (senders, receivers, nics, method) in enumerate(cases)
    ]


@pytest.mark.parametrize("result", [{"rows": scaling_rows()}, {"sweep": {"model": "small", "rows": scaling_rows()}}])
def test_a_result_is_the_same_as_itself_in_every_row(tmp_path, result):
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps(result))
    page = comparison(path, path)
    (table,) = [part for part in page.parts if isinstance(part, Table)]
    assert [row[1] for row in table.rows] == [row["seconds"] for row in scaling_rows()]
    assert {row[3] for row in table.rows} == {1.0}
    assert table.rows[0][0] == "weft · 1 sender · 8 receivers · 1 NIC"
    assert len({row[0] for row in table.rows}) == len(table.rows) - 1


def test_two_runs_are_compared(tmp_path):
    for name, seconds in (("a", 1.0), ("b", 3.0)):
        lines = (*FLEET, *(ended(version, seconds) for version in range(1, 4)))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = comparison(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    table = next(part for part in page.parts if isinstance(part, Table))
    assert ["update, median", "1000.0 ms", "3000.0 ms"] in [list(row) for row in table.rows]


@pytest.mark.parametrize(
    ("contents", "what"),
    [
        (("{}", '{"at": 1}\n{"at": 2}'), "not of the same kind"),
        (('{"rows": []}', "[]"), "no rows in common"),
        (('{"at": 1}\n', '{"at": 1}\n'), "has no version"),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path, contents, what):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    with pytest.raises(ConfigError, match=what):
        comparison(*paths)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        report_of(tmp_path / "none.json")
