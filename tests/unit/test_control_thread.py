"""A member's thread for messages: what it posts while it handles one, and what other threads post."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.runtime.control.member import ControlThread, Duties
from weft.runtime.control.messages import PROTOCOL, Beat, Expect, Paused, ToController, Unknown, Want, Welcome
from weft.runtime.control.server import Server

WAIT_S = 20.0


class Member:
    """A member that has joined, and the server it talks to."""

    def __init__(self, server: Server, handle: Callable[[Any], None]) -> None:
        self.server, self.failures = server, []  # type: ignore[var-annotated]
        self.thread = ControlThread(
            server.address,
            "trainer 0",
            Duties(
                join_message=lambda: Want(version=0),  # this server takes anything for one
                handle=handle,
                controller_lost=self.failures.append,
                refused=self.failures.append,
                failed=self.failures.append,
            ),
        )
        self.thread.start()
        self.connection = ""
        self.receive(Want(version=0))
        self.welcome()

    def welcome(self) -> None:
        settings = TransferSettings(beat_s=0.1)
        self.tell(Welcome(controller="c", incarnation=1, settings=settings, ranks_per_engine=1, num_trainers=1))

    def tell(self, message: Any) -> None:
        assert self.server.send(self.connection, message)

    def next_message(self) -> Any:
        received = self.server.receive(WAIT_S)
        assert received is not None
        self.connection = received.sender
        return received.message

    def receive(self, expected: Any) -> None:
        """The next message that is no heartbeat is this one."""
        message = Beat()
        while message == Beat():
            message = self.next_message()
        assert message == expected


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("tcp://127.0.0.1:*", messages=ToController, protocol=PROTOCOL) as made:
        yield made


def test_what_is_posted_while_a_message_is_handled_leaves_before_that_ends(server):
    may_end, has_ended = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        member.thread.post(Paused(version=message.version))
        member.thread.post(Paused(version=message.version + 1))
        may_end.wait(WAIT_S)
        has_ended.set()

    member = Member(server, handle)
    try:
        member.tell(Expect(version=7))
        member.receive(Paused(version=7))
        member.receive(Paused(version=8))
        assert not has_ended.is_set()
    finally:
        may_end.set()
        member.thread.close()
    assert has_ended.wait(WAIT_S)
    assert not member.failures


def test_messages_of_all_threads_leave_in_the_order_in_which_they_were_posted(server):
    def handle(message: Any) -> None:
        other = threading.Thread(target=member.thread.post, args=(Paused(version=1),))
        other.start()
        other.join()
        member.thread.post(Paused(version=2))

    member = Member(server, handle)
    try:
        for _ in range(5):
            member.tell(Expect(version=7))
            member.receive(Paused(version=1))
            member.receive(Paused(version=2))
    finally:
        member.thread.close()
    assert not member.failures


def test_what_is_posted_before_a_controller_answers_waits_for_it(server):
    told: list[int] = []

    def handle(message: Any) -> None:
        told.append(message.version)
        member.thread.post(Paused(version=message.version))

    member = Member(server, handle)
    try:
        member.tell(Unknown(controller="another"))  # it has to join again
        member.tell(Expect(version=7))
        member.receive(Want(version=0))
        wait_until(lambda: told == [7], WAIT_S, "the message is handled")
        assert member.next_message() == Beat(), "it is no member now: nothing else leaves"
        member.welcome()
        member.receive(Paused(version=7))
    finally:
        member.thread.close()
