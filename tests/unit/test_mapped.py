"""Writes of several batches through memory that is mapped: what is in flight when, and whose error is whose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.core.geometry.planes import Planes, rows_as_planes
from weft.errors import PeerLost, TransportError
from weft.transport.base import Descriptor, Endpoint
from weft.transport.capabilities import CAPABILITIES
from weft.transport.mapped import DirectBatch, MappedTransport

WAIT_S = 10.0


class Peer:
    """One that may be gone, or whose copies fail."""

    def __init__(self, name: str) -> None:
        self.name, self.is_gone = name, False
        self.fails_at: int | None = None
        self.bug: Exception | None = None

    def close(self) -> None:
        pass


class Device(MappedTransport[Peer]):
    """Copies nothing; says what was started, waited for and counted, in order."""

    capabilities = CAPABILITIES["cuda_ipc"]

    def __init__(self, peers: dict[str, Peer], *, num_ahead: int) -> None:
        super().__init__("trainer 0")
        self.peers, self._num_ahead = peers, num_ahead
        self.events: list[str] = []
        self.num_in_flight = self.most_in_flight = 0
        self.on_start: Callable[[str], None] = lambda _: None

    def _known(self, peer: str) -> Peer:
        return self.peers[peer]

    def _start_planes(self, peer: Peer, planes: Planes) -> Callable[[], int]:
        number = int(planes.src[0])
        name = f"{peer.name}{number}"
        self.on_start(name)
        if peer.bug is not None:
            raise peer.bug
        self.events.append(f"start {name}")
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)

        def wait() -> int:
            self.num_in_flight -= 1
            self.events.append(f"wait {name}")
            if number == peer.fails_at:
                raise TransportError(f"copying to {peer.name} failed")
            return number

        return wait

    def _check_alive(self, peer: Peer) -> None:
        if peer.is_gone:
            raise PeerLost(f"{peer.name} is gone")

    def _count(self, peer: Peer, tag: int, num_bytes: int) -> None:
        self.events.append(f"count {peer.name} {num_bytes}")

    @property
    def endpoint(self) -> Endpoint:
        raise NotImplementedError

    def _describe(self, address: int, num_bytes: int) -> Descriptor:
        raise NotImplementedError

    def _open(self, endpoint: Endpoint, descriptors: Any) -> Peer:
        raise NotImplementedError

    def _write_chunk(self, peer: Peer, chunk: Any) -> int:
        raise NotImplementedError

    def _copy_planes(self, peer: Peer, planes: Planes) -> int:
        raise NotImplementedError

    def arrived(self, tag: int, *, writer: int) -> int:
        raise NotImplementedError

    def forget_arrivals(self) -> None:
        raise NotImplementedError


def chunk(number: int, num_bytes: int) -> Planes:
    column = [np.array([value], dtype=np.uint64) for value in (0, number, num_bytes)]
    return rows_as_planes(dst=column[0], src=column[1], length=column[2])


def batch(peer: str, *sizes: int, num_there: int = 0) -> DirectBatch:
    return DirectBatch(peer=peer, chunks=tuple(chunk(n + 1, size) for n, size in enumerate(sizes)), num_there=num_there)


@pytest.fixture
def peers():
    return {name: Peer(name) for name in "abc"}


def test_the_next_batch_begins_before_the_last_one_has_ended(peers):
    with Device(peers, num_ahead=2) as device:
        tickets = device.post_direct([batch("a", 5, 6, 7), batch("b", 8, 9)], tag=1)
        assert [ticket.wait(WAIT_S).num_bytes for ticket in tickets] == [18, 17]
        assert [ticket.wait(WAIT_S).digest for ticket in tickets] == [6, 3]
    order = [event for event in device.events if not event.startswith("count")]
    assert order.index("start b1") < order.index("wait a2") < order.index("start b2")
    assert device.most_in_flight == 3
    assert device.num_in_flight == 0


def test_without_any_ahead_every_chunk_is_counted_before_the_next_is_started(peers):
    with Device(peers, num_ahead=0) as device:
        for ticket in device.post_direct([batch("a", 5, 6), batch("b", 7, num_there=3)], tag=1):
            ticket.wait(WAIT_S)
    assert device.most_in_flight == 1
    expected = "start a1, wait a1, count a 5, start a2, wait a2, count a 6, count b 3, start b1, wait b1, count b 7"
    assert ", ".join(device.events) == expected


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_the_error_of_one_batch_does_not_stop_the_others(peers, num_ahead):
    peers["a"].fails_at = 2
    with Device(peers, num_ahead=num_ahead) as device:
        first, second = device.post_direct([batch("a", 5, 6, 7, 8, 9), batch("b", 4)], tag=1)
        with pytest.raises(TransportError, match=r"copying to a failed \((5|20) of 35 bytes written\)"):
            first.wait(WAIT_S)
        assert second.wait(WAIT_S).num_bytes == 4
    assert "start a5" not in device.events, "what is left of a batch that failed is not begun"
    assert device.num_in_flight == 0


def test_a_peer_that_is_gone_at_the_end_is_lost(peers):
    with Device(peers, num_ahead=2) as device:
        device.on_start = lambda name: setattr(peers["a"], "is_gone", name == "b1" or peers["a"].is_gone)
        first, second = device.post_direct([batch("a", 5), batch("b", 4, 4, 4)], tag=1)
        with pytest.raises(PeerLost, match=r"a is gone \(5 of 5 bytes written\)"):
            first.wait(WAIT_S)
        assert second.wait(WAIT_S).num_bytes == 12


def test_what_is_stopped_is_not_begun(peers):
    with Device(peers, num_ahead=1) as device:
        held = threading.Event()
        device.on_start = lambda name: None if name != "a1" else (held.wait(WAIT_S), None)[1]
        first, second, third = device.post_direct([batch("a", 5), batch("b", 4), batch("c", 3)], tag=1)
        second.cancel()
        held.set()
        with pytest.raises(TransportError, match="writing to b was stopped"):
            second.wait(WAIT_S)
        assert first.wait(WAIT_S).num_bytes == 5
        assert third.wait(WAIT_S).num_bytes == 3
    assert "start b1" not in device.events


def test_a_bug_ends_every_write_and_nothing_is_in_flight(peers):
    peers["b"].bug = ValueError("of the test")
    with Device(peers, num_ahead=2) as device:
        tickets = device.post_direct([batch("a", 5, 6), batch("b", 4), batch("c", 3)], tag=1)
        for ticket in tickets:
            with pytest.raises(TransportError, match=r"ValueError while writing to .: of the test"):
                ticket.wait(WAIT_S)
            assert device.num_in_flight == 0
