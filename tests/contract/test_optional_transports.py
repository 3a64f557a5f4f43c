"""The contract over transports that need extra packages: `mooncake` with real processes where it can be imported;
of `uccl`, which needs a GPU and an RDMA network card, only what it says where it cannot work."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from weft import native
from weft.errors import ConfigError, PeerLost, RegistrationError, TransportError, TransportUnavailable
from weft.transport.base import Batch, Endpoint
from weft.transport.chunked import CHUNK_BYTES
from weft.transport.mooncake import PIECES_PER_CALL, MooncakeTransport, at_most, merge_overlaps
from weft.transport.uccl import UcclTransport

pytestmark = pytest.mark.engines

NUM_BYTES = 1 << 20
SOON_S = 20.0
ANSWER_S = 60.0


def column(*values):
    return np.array(values, dtype=np.uint64)


def _serve(pipe: Any, num_bytes: int) -> None:
    """The target process: registers ordinary memory, then answers questions until told to stop."""
    array = np.zeros(num_bytes, dtype=np.uint8)
    with MooncakeTransport("engine 0") as transport:
        _, descriptor = transport.register(array.ctypes.data, num_bytes)
        pipe.send((transport.endpoint, descriptor))
        while (request := pipe.recv()) is not None:
            if request == "bytes":
                pipe.send(array.tobytes())
            elif request == "spin":
                pipe.send("spinning")
                while not pipe.poll():
                    pass
            else:
                pipe.send(transport.arrived(request[0], writer=request[1]))


class Target:
    """A member that is written to, in a process of its own."""

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, num_bytes), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint, self.descriptor = self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the target does not answer"
        return self._pipe.recv()

    def ask(self, request: Any) -> Any:
        self._pipe.send(request)
        return self._answer()

    def arrived(self, tag: int, writer: int = 0) -> int:
        return self.ask((tag, writer))

    def bytes(self) -> bytes:
        return self.ask("bytes")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(ANSWER_S)
        self._process.kill()
        self._pipe.close()


class Pair:
    """A writer here and a target, connected."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0).integers(0, 256, NUM_BYTES, dtype=np.uint8)
        self.target = Target()
        self.writer = self.new_writer(0)
        self.peer = self.writer.connect(self.target.endpoint, [self.target.descriptor])

    def new_writer(self, number: int) -> MooncakeTransport:
        writer = MooncakeTransport(f"trainer {number}", writer=number)
        writer.register(self.source.ctypes.data, NUM_BYTES)
        return writer

    def rows(self, offset, length, to=None):
        offset = np.asarray(offset, dtype=np.uint64)
        to = offset if to is None else np.asarray(to, dtype=np.uint64)
        src = offset + np.uint64(self.source.ctypes.data)
        dst = to + np.uint64(self.target.descriptor.address)
        return src, dst, np.asarray(length, dtype=np.uint64)

    def close(self) -> None:
        self.writer.close()
        self.target.close()


@pytest.fixture
def mooncake():
    reason = "mooncake cannot be imported: pip install mooncake-transfer-engine-non-cuda; apt install libibverbs1"
    return pytest.importorskip("mooncake.engine", reason=reason, exc_type=ImportError)


@pytest.fixture
def pair(mooncake):
    made = Pair()
    yield made
    made.close()


def test_rows_land_where_they_should_and_nowhere_else(pair):
    starts = np.arange(0, NUM_BYTES - 1000, 1000)
    length = np.full(len(starts), 300)
    batch = pair.writer.prepare(pair.peer, *pair.rows(starts, length, to=starts[::-1]))
    assert pair.writer.post(batch, tag=1).wait(SOON_S).num_bytes == batch.num_bytes == 300 * len(starts)
    expected = np.zeros(NUM_BYTES, dtype=np.uint8)
    for start, to in zip(starts, starts[::-1], strict=True):
        expected[to : to + 300] = pair.source[start : start + 300]
    assert pair.target.bytes() == expected.tobytes()


def test_more_rows_than_one_call_takes(pair):
    starts = np.arange(0, 8 * (3 * PIECES_PER_CALL + 5), 8)
    batch = pair.writer.prepare(pair.peer, *pair.rows(starts, np.full(len(starts), 3)))
    pair.writer.post(batch, tag=1).wait(SOON_S)
    expected = np.zeros(NUM_BYTES, dtype=np.uint8)
    for offset in range(3):
        expected[starts + offset] = pair.source[starts + offset]
    assert pair.target.bytes() == expected.tobytes()
    assert pair.target.arrived(1) == 3 * len(starts)


def test_a_batch_is_posted_again_for_every_version(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    for version in (1, 2, 3):
        pair.source[:] = version
        pair.writer.post(batch, tag=version).wait(SOON_S)
        assert pair.target.arrived(version) == NUM_BYTES
        assert pair.target.bytes() == bytes([version]) * NUM_BYTES


def test_arrivals_are_counted_per_tag_and_writer(pair):
    other = pair.new_writer(1)
    other.connect(pair.target.endpoint, [pair.target.descriptor])
    mine = pair.writer.prepare(pair.peer, *pair.rows([0], [1000]))
    theirs = other.prepare(pair.peer, *pair.rows([5000], [77]))
    pair.writer.post(mine, tag=9).wait(SOON_S)
    assert pair.target.arrived(9) == 1000
    other.post(theirs, tag=9).wait(SOON_S)
    pair.writer.post(mine, tag=9).wait(SOON_S)
    assert pair.target.arrived(9, 0) == 2000
    assert pair.target.arrived(9, 1) == 77
    assert pair.target.arrived(8) == 0
    other.close()


def test_a_target_whose_interpreter_is_busy_receives_all_the_same(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    assert pair.target.ask("spin") == "spinning"
    pair.writer.post(batch, tag=2).wait(SOON_S)
    assert pair.target.arrived(2) == NUM_BYTES


def test_the_digest_of_what_was_written_comes_with_the_ticket(pair):
    starts, length = np.arange(3, NUM_BYTES - 1000, 1000), 311
    rows = pair.rows(starts, np.full(len(starts), length))
    batch = pair.writer.prepare(pair.peer, *rows, (starts + 7_000).astype(np.uint64))
    written = pair.writer.post(batch, tag=1).wait(SOON_S)
    landed = np.frombuffer(pair.target.bytes(), dtype=np.uint8)
    parts = [native.digest_bytes(landed[s : s + length], int(s) + 7_000) for s in starts]
    assert written.digest == sum(parts) % (1 << 64) != 0


def test_memory_that_is_not_registered_is_refused_on_either_side(pair):
    stranger = np.zeros(100, dtype=np.uint8)
    src, dst, length = pair.rows([0], [100])
    with pytest.raises(RegistrationError, match="trainer 0"):
        pair.writer.prepare(pair.peer, column(stranger.ctypes.data), dst, length)
    for bad in ([NUM_BYTES - 50], [-1 & (2**64 - 1)], [NUM_BYTES]):
        with pytest.raises(RegistrationError, match="engine 0"):
            pair.writer.prepare(pair.peer, src, pair.rows([0], [100], to=bad)[1], length)


def test_memory_the_target_took_back_is_refused_by_its_engine(mooncake):
    array, source = np.zeros(64, dtype=np.uint8), np.ones(64, dtype=np.uint8)
    with MooncakeTransport("engine 0") as target, MooncakeTransport("trainer 0") as writer:
        handle, descriptor = target.register(array.ctypes.data, 64)
        writer.register(source.ctypes.data, 64)
        writer.connect(target.endpoint, [descriptor])
        batch = writer.prepare("engine 0", column(source.ctypes.data), column(array.ctypes.data), column(64))
        target.deregister(handle)
        with pytest.raises(TransportError, match=r"could not write to engine 0 \(0 of 64 bytes written\)"):
            writer.post(batch, tag=1).wait(SOON_S)
        assert not array.any()
        assert target.arrived(1, writer=0) == 0


def test_registrations_may_overlap_though_the_engine_refuses_that(mooncake):
    """Tied weights: one tensor, registered twice, and a part of it once more."""
    array, source = np.zeros(1000, dtype=np.uint8), np.ones(1000, dtype=np.uint8)
    with MooncakeTransport("engine 0") as target, MooncakeTransport("trainer 0") as writer:
        parts = [(0, 600), (0, 600), (400, 600)]
        made = [target.register(array.ctypes.data + start, size) for start, size in parts]
        writer.register(source.ctypes.data, 1000)
        writer.connect(target.endpoint, [descriptor for _, descriptor in made])

        def write(offset: int, size: int, tag: int) -> None:
            rows = column(source.ctypes.data + offset), column(array.ctypes.data + offset), column(size)
            writer.post(writer.prepare("engine 0", *rows), tag=tag).wait(SOON_S)

        write(0, 400, 1)
        write(400, 600, 2)
        assert array.all()
        target.deregister(made[0][0])
        write(0, 400, 3)  # registered once more
        target.deregister(made[1][0])
        write(400, 600, 4)  # the part is still registered
        with pytest.raises(TransportError, match="engine 0"):
            write(0, 400, 5)


def test_a_lost_peer_is_an_error_within_seconds(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    pair.writer.post(batch, tag=1).wait(SOON_S)
    pair.target.kill()
    started = time.monotonic()
    with pytest.raises(PeerLost, match=rf"engine 0 at .* is gone \(0 of {NUM_BYTES} bytes written\)"):
        pair.writer.post(batch, tag=2).wait(SOON_S)
    with pytest.raises(PeerLost, match="engine 0"):
        pair.writer.connect(pair.target.endpoint, [pair.target.descriptor])
    assert time.monotonic() - started < SOON_S


def test_a_peer_killed_while_it_is_written_to_is_an_error_within_seconds(mooncake):
    num_bytes = 256 << 20
    source, target = np.ones(num_bytes, dtype=np.uint8), Target(num_bytes)
    with MooncakeTransport("trainer 0") as writer:
        writer.register(source.ctypes.data, num_bytes)
        writer.connect(target.endpoint, [target.descriptor])
        columns = [column(n) for n in (source.ctypes.data, target.descriptor.address, num_bytes)]
        ticket = writer.post(writer.prepare("engine 0", *columns), tag=1)
        while target.arrived(1) == 0:
            time.sleep(0.001)
        target.kill()
        started = time.monotonic()
        with pytest.raises(PeerLost, match=rf"engine 0 .* of {num_bytes} bytes written"):
            ticket.wait(SOON_S)
        assert time.monotonic() - started < SOON_S
    target.close()


def test_a_peer_that_came_back_is_reached_by_connecting_again(pair):
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    pair.writer.post(batch, tag=3).wait(SOON_S)
    pair.target.kill()
    pair.target.close()
    pair.target = Target()
    pair.writer.connect(pair.target.endpoint, [pair.target.descriptor])
    batch = pair.writer.prepare(pair.peer, *pair.rows([0], [NUM_BYTES]))
    pair.writer.post(batch, tag=4).wait(SOON_S)
    assert pair.target.bytes() == pair.source.tobytes()
    assert pair.target.arrived(4) == NUM_BYTES


def test_a_stranger_at_the_peers_address_is_recognised(pair):
    with MooncakeTransport("engine 0") as stranger:
        expected = stranger.endpoint
        stranger._control[0] ^= 1
        with pytest.raises(PeerLost, match="its cookie does not match"):
            pair.writer.connect(expected, [])
    assert pair.writer.prepare(pair.peer, *pair.rows([0], [8])).num_bytes == 8  # what was known stays


def test_a_cancelled_write_stops_between_chunks(mooncake, monkeypatch):
    num_bytes = 3 * CHUNK_BYTES
    array, source = np.zeros(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    with MooncakeTransport("engine 0") as target, MooncakeTransport("trainer 0") as writer:
        _, descriptor = target.register(array.ctypes.data, num_bytes)
        writer.register(source.ctypes.data, num_bytes)
        writer.connect(target.endpoint, [descriptor])
        columns = [column(n) for n in (source.ctypes.data, array.ctypes.data, num_bytes)]
        gate = threading.Event()
        monkeypatch.setattr(writer, "_check_alive", lambda _: gate.wait(SOON_S))
        ticket = writer.post(writer.prepare("engine 0", *columns), tag=1)
        ticket.cancel()
        gate.set()
        with pytest.raises(TransportError, match=f"was stopped .* of {num_bytes} bytes written"):
            ticket.wait(SOON_S)
        assert target.arrived(1, writer=0) < num_bytes


def test_a_closed_transport_does_not_listen_any_more(mooncake):
    array = np.zeros(64, dtype=np.uint8)
    transport = MooncakeTransport("engine 0")
    transport.register(array.ctypes.data, 64)
    port = msgspec.msgpack.decode(transport.endpoint.data)["port"]
    socket.create_connection(("127.0.0.1", port), timeout=SOON_S).close()
    transport.close()
    transport.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=SOON_S)
    with pytest.raises(TransportError, match="closed"):
        transport.register(array.ctypes.data, 64)


def test_mooncake_refuses_what_it_cannot_do(mooncake):
    with pytest.raises(TransportUnavailable, match="cuda:0"):
        MooncakeTransport("engine 0", device="cuda:0")
    with pytest.raises(ConfigError, match="pigeon"):
        MooncakeTransport("engine 0", protocol="pigeon")
    with MooncakeTransport("trainer 0") as writer, MooncakeTransport("engine 0") as target:
        far = target.endpoint.data.replace(_boot_id(), b"x" * len(_boot_id()))
        with pytest.raises(TransportUnavailable, match="another host") as caught:
            writer.connect(Endpoint(transport="mooncake", member="engine 0", data=far), [])
        assert "host=" in caught.value.hint


def _boot_id() -> bytes:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().strip()


def test_mooncake_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match="mooncake cannot be imported") as caught:
        MooncakeTransport("engine 0")
    assert "mooncake-transfer-engine-non-cuda" in caught.value.hint
    assert "libibverbs1" in caught.value.hint


def test_uccl_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uccl", None)
    monkeypatch.setitem(sys.modules, "uccl.p2p", None)
    with pytest.raises(TransportUnavailable, match=r"uccl\.p2p cannot be imported") as caught:
        UcclTransport("engine 0", device="cuda:0")
    assert "pip install uccl==0.1.1" in caught.value.hint
    with pytest.raises(TransportUnavailable, match="GPU memory"):
        UcclTransport("engine 0", device="cpu")


def test_ranges_that_overlap_become_one_and_such_that_touch_stay_apart():
    spans = merge_overlaps([(20, 30), (5, 20), (0, 10), (0, 10), (40, 50), (42, 44)])
    assert [(span.start, span.end) for span in spans] == [(0, 20), (20, 30), (40, 50)]
    assert [span.members for span in spans] == [[(0, 10), (0, 10), (5, 20)], [(20, 30)], [(40, 50), (42, 44)]]
    assert merge_overlaps([]) == []


def test_batches_are_cut_by_rows():
    rows = np.arange(5, dtype=np.uint64)
    batch = Batch(peer="engine 0", src=rows, dst=rows + np.uint64(10), length=rows + np.uint64(1), position=rows)
    parts = list(at_most(batch, 2))
    assert [part.src.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.dst.tolist() for part in parts] == [[10, 11], [12, 13], [14]]
    assert [part.position.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert sum(part.num_bytes for part in parts) == batch.num_bytes
