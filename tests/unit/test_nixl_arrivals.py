"""Notes of arrivals: they overtake each other, come over several cards, and outlive the versions they are of."""

from __future__ import annotations

import random

from weft.transport.nixl_arrivals import Announcements, Announcer

OLD, NEW = 3, 5
SIZES = (4096, 1, 70_000, 12, 800)


def notes_of(announcer: Announcer, tag: int, sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    return [announcer.note(1, tag, size) for size in sizes]


def test_bytes_count_up_to_the_first_gap():
    notes = notes_of(Announcer(), NEW)
    arrivals = Announcements()
    for number, expected in ((1, 0), (2, 0), (0, 4096 + 1 + 70_000), (4, 74_097), (3, sum(SIZES))):
        arrivals.count(notes[number])
        assert arrivals.num_bytes(NEW, 1) == expected
    assert arrivals.num_bytes(NEW, 2) == 0


def test_notes_of_an_aborted_version_do_not_disturb_the_next_whatever_their_order():
    """Each card's notes come in order, but all of one card may be read before those of another."""
    for seed in range(50):
        announcer, order = Announcer(), random.Random(seed)
        cards: list[list[bytes]] = [[], []]
        for tag in (OLD, NEW):
            for note in notes_of(announcer, tag):
                order.choice(cards).append(note)
        arrivals = Announcements()
        for note in cards[0] + cards[1]:
            arrivals.count(note)
        assert arrivals.num_bytes(NEW, 1) == sum(SIZES)


def test_each_writer_has_a_newest_version_of_its_own():
    arrivals = Announcements()
    arrivals.count(Announcer().note(1, NEW, 10))
    arrivals.count(Announcer().note(2, OLD, 20))
    assert (arrivals.num_bytes(NEW, 1), arrivals.num_bytes(OLD, 2), arrivals.num_bytes(NEW, 2)) == (10, 20, 0)


def test_what_is_no_note_is_ignored():
    arrivals = Announcements()
    for note in (b"", b"\xc1", b"hello"):
        arrivals.count(note)
    assert arrivals.num_bytes(NEW, 0) == 0
