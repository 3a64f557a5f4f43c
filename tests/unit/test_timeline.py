"""What the journal keeps of a version: both ends of every link agree, also where patches did not suffice."""

from __future__ import annotations

import json

from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import ArrivalReport, Committed, Decide, Want, Written
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.journal import Journal
from weft.runtime.controller.timeline import Timelines

TRAINER = MemberId.trainer(0)


def written(*sizes: tuple[int, int]) -> Written:
    reports = WriteReports.of(WriteReport(engine, size, 0, seconds=0.5) for engine, size in sizes)
    return Written(version=7, reports=reports, losses=[])


def test_a_link_that_was_written_twice_has_what_arrived(tmp_path):
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    timelines = Timelines(journal)
    timelines.heard(TRAINER, Want(version=7))
    timelines.heard(TRAINER, written((0, 10), (1, 20)))
    timelines.heard(TRAINER, written((1, 4000)))
    for engine, size in enumerate((10, 4000)):
        arrived = ArrivalReport(trainer=0, num_bytes=size, seconds=0.1)
        timelines.heard(MemberId.engine(engine), Committed(version=7, arrivals=[arrived]))
    timelines.told(TRAINER, Decide(version=7, commit=True))
    journal.close()
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["writes"] == [[0, 0, 10, 0.5], [0, 1, 4000, 0.5]]
    assert line["arrivals"] == [[0, 0, 10, 0.1], [0, 1, 4000, 0.1]]


def test_without_a_journal_nothing_is_kept():
    journal = Journal(None)
    timelines = Timelines(journal)
    timelines.heard(TRAINER, Want(version=7))
    timelines.told(TRAINER, Decide(version=7, commit=True))
    journal.write_due()
    assert not timelines._versions
    assert not journal._waiting


def test_lines_keep_their_order_and_wait_for_the_end_of_a_version(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.runtime.controller.journal.PATIENCE_S", 1e6)
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    timelines = Timelines(journal)
    timelines.heard(TRAINER, Want(version=7))
    journal.write_due()
    assert path.read_text() == "", "nobody looks at a version while its members wait"
    timelines.told(TRAINER, Decide(version=7, commit=False, reason="none"))
    journal.write(member="trainer 0", state="lost")
    timelines.heard(TRAINER, Want(version=8))
    journal.write_due()
    begun, ended, lost, next_begun = map(json.loads, path.read_text().splitlines())
    assert (begun["begun"], ended["outcome"], lost["state"], next_begun["begun"]) == (7, "aborted", "lost", 8)
    assert [moment[1] for moment in ended["moments"]] == ["Want", "Decide"]
    journal.close()


def test_what_waits_for_long_is_written(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    Timelines(journal).heard(TRAINER, Want(version=7))
    monkeypatch.setattr("weft.runtime.controller.journal.PATIENCE_S", -1.0)
    journal.write_due()
    assert json.loads(path.read_text())["begun"] == 7
    journal.close()


def test_an_entry_that_cannot_be_made_is_left_out(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal.add(lambda: [{"fine": 1}, {"bad": object()}], is_urgent=False)
    journal.write(after=2)
    journal.write_due()
    assert json.loads(path.read_text())["after"] == 2
    assert "internal error while recording" in caplog.text
    journal.close()
