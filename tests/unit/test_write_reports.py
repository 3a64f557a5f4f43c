"""What trainers report of their links, as columns, and what each engine rank is told of its own."""

from __future__ import annotations

import msgspec
import pytest

from weft.errors import ProtocolError
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.written_links import WrittenLinks

LINKS = {
    0: [WriteReport(2, 10, 2**64 - 1, (4, 6), 0.5), WriteReport(0, 20, 7, (20,), 0.1)],
    1: [WriteReport(0, 30, 8, (), 0.2), WriteReport(5, 40, 9, (1,), 0.3)],
    2: [],
}


def written() -> WrittenLinks:
    return WrittenLinks.of([(trainer, WriteReports.of(links)) for trainer, links in LINKS.items()])


def test_columns_hold_what_was_reported_in_the_order_of_peers():
    for links in LINKS.values():
        assert list(WriteReports.of(links)) == sorted(links)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(WriteReports.of(LINKS[0])), type=WriteReports)
    assert list(sent) == sorted(LINKS[0])
    assert len(sent) == 2


@pytest.mark.parametrize("change", [{"digests": b""}, {"seconds": bytes(24)}, {"peers": b"x"}, {"num_bytes": bytes(7)}])
def test_columns_of_different_lengths_are_refused(change):
    wrong = msgspec.structs.replace(WriteReports.of(LINKS[0]), **change)
    with pytest.raises(ProtocolError, match="were reported for"):
        list(wrong)
    with pytest.raises(ProtocolError, match="were reported for"):
        WrittenLinks.of([(0, wrong)])


def test_every_engine_rank_is_told_of_its_own_links():
    told = written().by_engine([0, 2, 3, 5])
    for engine, reports in told.items():
        expected = [each._replace(peer=trainer) for trainer in LINKS for each in LINKS[trainer] if each.peer == engine]
        assert list(reports) == expected
    assert written().total_bytes == 100


def test_engine_ranks_that_are_written_again_are_left_out():
    assert list(WriteReports.of(LINKS[0]).without({0})) == [LINKS[0][0]]


def test_without_reports_there_are_no_links():
    assert WrittenLinks.of([]).total_bytes == 0
    assert list(WrittenLinks.of([]).by_engine([3])[3]) == []


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_times_that_cannot_be_do_not_count(seconds):
    links = WrittenLinks.of([(0, WriteReports.of([WriteReport(0, 1, 2, seconds=seconds), WriteReport(1, 1, 2)]))])
    assert links.seconds.tolist() == [0.0, 0.0]
