"""One contract, every transport: the same tests over `local`, `shm`, `cma` and `nixl`, with real processes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.contract.targets import LocalTarget, ProcessTarget, make_transport
from tests.support.waiting import wait_until
from weft import native
from weft.errors import PeerLost, RegistrationError, TransferTimeout, TransportError
from weft.transport.chunked import CHUNK_BYTES
from weft.transport.cma import CmaTransport
from weft.transport.local import Faults, LocalNetwork, LocalTransport
from weft.transport.shm import ShmTransport

NUM_BYTES = 1 << 20
SOON_S = 20.0
KINDS = ("local", "shm", "cma", "nixl", "nixl 2 cards")


class Pair:
    """A writer here and a target, connected."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = LocalNetwork()
        self.source = np.random.default_rng(0).integers(0, 256, NUM_BYTES, dtype=np.uint8)
        self.target = self.new_target()
        self.writer = self.new_writer(0)
        self.peer = self.writer.connect(self.target.endpoint, [self.target.descriptor])

    def new_target(self):
        return LocalTarget(self.network, NUM_BYTES) if self.kind == "local" else ProcessTarget(self.kind, NUM_BYTES)

    def new_writer(self, number: int):
        if self.kind == "local":
            writer = LocalTransport(f"trainer {number}", self.network, writer=number)
        else:
            writer = make_transport(self.kind, f"trainer {number}", writer=number)
        writer.register(self.source.ctypes.data, NUM_BYTES)
        return writer

    def has_arrived(self, tag: int, num_bytes: int, writer: int = 0) -> None:
        """NIXL's announcements may come a little after the bytes."""
        wait_until(
            lambda: self.target.arrived(tag, writer) == num_bytes, SOON_S, f"{num_bytes} bytes arrive under {tag}"
        )

    def rows(self, offset, length, to=None):
        offset = np.asarray(offset, dtype=np.uint64)
        to = offset if to is None else np.asarray(to, dtype=np.uint64)
        src = offset + np.uint64(self.source.ctypes.data)
        dst = to + np.uint64(self.target.descriptor.address)
        return src, dst, np.asarray(length, dtype=np.uint64)

    def close(self) -> None:
        self.writer.close()
        self.target.close()


@pytest.fixture(params=KINDS)
def pair(request):
    made = Pair(request.param)
    yield made
    made.close()


def test_rows_land_where_they_should_and_nowhere_else(pair):
    starts = np.arange(0, NUM_BYTES - 1000, 1000)
    length = np.full(len(starts), 300)
    batch = pair.writer.prepare(pair.peer, *pair.rows(starts, length, to=starts[::-1]))
    assert batch.num_bytes == 300 * len(starts)
    assert pair.writer.post(batch, tag=1).wait(SOON_S).num_bytes == batch.num_bytes
    expected = np.zeros(NUM_BYTES, dtype=np.uint8)
    for start, to in zip(starts, starts[::-1], strict=True):
        expected[to : to + 300] = pair.source[start : start + 300]
    assert pair.target.bytes() == expected.tobytes()


def test_a_batch_is_posted_again_for_every_version(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    for version in (1, 2, 3):
        pair.source[:] = version
        pair.writer.post(batch, tag=version).wait(SOON_S)
        pair.has_arrived(version, NUM_BYTES)
        assert pair.target.bytes() == bytes([version]) * NUM_BYTES


def test_arrivals_are_counted_per_tag_and_writer(pair):
    other = pair.new_writer(1)
    other.connect(pair.target.endpoint, [pair.target.descriptor])
    mine = pair.writer.prepare(pair.peer, *pair.rows([0], [1000]))
    theirs = other.prepare(pair.peer, *pair.rows([5000], [77]))
    pair.writer.post(mine, tag=9).wait(SOON_S)
    pair.has_arrived(9, 1000)
    other.post(theirs, tag=9).wait(SOON_S)
    pair.writer.post(mine, tag=9).wait(SOON_S)
    pair.has_arrived(9, 2000)
    pair.has_arrived(9, 77, writer=1)
    assert pair.target.arrived(8) == 0
    other.close()


def test_the_digest_of_what_was_written_comes_with_the_ticket(pair):
    starts, length = np.arange(3, NUM_BYTES - 1000, 1000), 311
    rows = pair.rows(starts, np.full(len(starts), length))
    position = starts + 7_000
    batch = pair.writer.prepare(pair.peer, *rows, position.astype(np.uint64))
    written = pair.writer.post(batch, tag=1).wait(SOON_S)
    landed = np.frombuffer(pair.target.bytes(), dtype=np.uint8)
    parts = [native.digest_bytes(landed[s : s + length], int(s) + 7_000) for s in starts]
    assert written.digest == sum(parts) % (1 << 64) != 0


def test_memory_that_is_not_registered_is_refused_on_either_side(pair):
    stranger = np.zeros(100, dtype=np.uint8)
    src, dst, length = pair.rows([0], [100])
    with pytest.raises(RegistrationError, match="trainer 0"):
        pair.writer.prepare(pair.peer, np.array([stranger.ctypes.data], np.uint64), dst, length)
    for bad in ([NUM_BYTES - 50], [-1 & (2**64 - 1)], [NUM_BYTES]):
        with pytest.raises(RegistrationError, match="engine 0"):
            pair.writer.prepare(pair.peer, src, pair.rows([0], [100], to=bad)[1], length)


def test_a_deregistered_source_cannot_be_prepared(pair):
    other = np.zeros(64, dtype=np.uint8)
    handle, _ = pair.writer.register(other.ctypes.data, 64)
    pair.writer.deregister(handle)
    rows = pair.rows([0], [64])
    with pytest.raises(RegistrationError):
        pair.writer.prepare(pair.peer, np.array([other.ctypes.data], np.uint64), rows[1], rows[2])


def test_a_lost_peer_is_an_error_within_seconds(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    pair.target.kill()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="engine 0"):
        pair.writer.post(batch, tag=1).wait(SOON_S)
    with pytest.raises(PeerLost, match="engine 0"):
        pair.writer.connect(pair.target.endpoint, [pair.target.descriptor])
    assert time.monotonic() - started < SOON_S


def test_a_peer_that_came_back_is_reached_by_connecting_again(pair):
    pair.target.kill()
    pair.target.close()
    pair.target = pair.new_target()
    pair.writer.connect(pair.target.endpoint, [pair.target.descriptor])
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    pair.writer.post(batch, tag=4).wait(SOON_S)
    assert pair.target.bytes() == pair.source.tobytes()


def test_unknown_peers_wrong_tags_and_closed_transports(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [8]))
    with pytest.raises(PeerLost, match="not connected"):
        pair.writer.prepare("engine 7", *pair.rows([0], [8]))
    for tag in (0, -1, 1 << 63):
        with pytest.raises(TransportError, match="tag"):
            pair.writer.post(batch, tag=tag)
    pair.writer.disconnect(pair.peer)
    with pytest.raises(PeerLost, match="not connected"):
        pair.writer.post(batch, tag=1).wait(SOON_S)
    pair.writer.close()
    pair.writer.close()
    with pytest.raises(TransportError, match="closed"):
        pair.writer.post(batch, tag=1)


def test_waiting_for_bytes_that_never_come_has_a_deadline(pair):
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match="trainer 0 has 0 of 10 bytes under tag 3"):
        pair.writer.wait_arrived(3, 10, writer=0, timeout_s=0.2)
    assert time.monotonic() - started < SOON_S


def test_another_transports_endpoint_is_refused(pair):
    wrong = type(pair.target.endpoint)(transport="pigeon", member="engine 0", data=b"")
    with pytest.raises(TransportError, match="pigeon"):
        pair.writer.connect(wrong, [])


@pytest.mark.parametrize("kind", ["shm", "cma"])
def test_the_target_runs_no_code_for_a_write(kind):
    """A stopped process, and one whose interpreter is busy, receive all the same."""
    pair = Pair(kind)
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    pair.target.stop()
    pair.writer.post(batch, tag=1).wait(SOON_S)
    pair.target.resume()
    assert pair.target.arrived(1) == NUM_BYTES
    pair.target.keep_busy()
    pair.writer.post(batch, tag=2).wait(SOON_S)
    assert pair.target.arrived(2) == NUM_BYTES
    pair.close()


def test_cma_refuses_a_process_that_does_not_know_the_cookie():
    with CmaTransport("engine 0") as target, CmaTransport("trainer 0") as writer:
        endpoint = target.endpoint
        target._cookie[0] ^= 1
        with pytest.raises(PeerLost, match="cookie"):
            writer.connect(endpoint, [])


def test_shm_destinations_must_be_shared():
    array = np.zeros(64, dtype=np.uint8)
    with ShmTransport("engine 0") as target, ShmTransport("trainer 0") as writer:
        _, descriptor = target.register(array.ctypes.data, 64)
        with pytest.raises(RegistrationError, match="is not shared"):
            writer.connect(target.endpoint, [descriptor])


def test_a_cancelled_write_stops_between_chunks_and_says_how_far_it_came():
    network, gate = LocalNetwork(), threading.Event()
    num_bytes = 3 * CHUNK_BYTES
    source = np.ones(num_bytes, dtype=np.uint8)
    with LocalTransport("engine 0", network) as target, LocalTransport("trainer 0", network) as writer:
        memory = target.allocate(num_bytes)
        _, descriptor = target.register(memory.address, num_bytes)
        writer.register(source.ctypes.data, num_bytes)
        writer.connect(target.endpoint, [descriptor])
        columns = [np.array([n], dtype=np.uint64) for n in (source.ctypes.data, memory.address, num_bytes)]
        network.faults["engine 0"] = Faults(stalled=gate)
        ticket = writer.post(writer.prepare("engine 0", *columns), tag=1)
        ticket.cancel()
        gate.set()
        with pytest.raises(TransportError, match=f"was stopped .* of {num_bytes} bytes written"):
            ticket.wait(SOON_S)
        assert target.arrived(1, writer=0) < num_bytes


def test_nested_and_repeated_registrations_hide_nothing(pair):
    base = pair.source.ctypes.data
    inner, _ = pair.writer.register(base + 100, 100)
    again, _ = pair.writer.register(base + 100, 100)
    pair.writer.prepare(pair.peer, *pair.rows([150], [300]))
    pair.writer.deregister(inner)
    pair.writer.deregister(again)


def test_nothing_to_write_is_fine():
    network = LocalNetwork()
    with LocalTransport("engine 0", network) as target, LocalTransport("trainer 0", network) as writer:
        writer.connect(target.endpoint, [])
        none = np.zeros(0, dtype=np.uint64)
        assert writer.prepare("engine 0", none, none, none).num_bytes == 0
