"""NIXL between hosts: writes travel beside each other, whatever becomes of one of them."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest

from tests.contract.targets import NIXL_CARDS, ProcessTarget, make_transport
from tests.support.waiting import wait_until
from weft.errors import PeerLost, TransportError
from weft.transport import nixl
from weft.transport.base import Endpoint, digest_of
from weft.transport.nixl import LONGEST_LOOK_S, SHORTEST_LOOK_S, look_s

pytest.importorskip("nixl_cu13")
NUM_BYTES = 256 << 20
"""More than the sockets of a connection hold."""
SMALL_BYTES = 1 << 20
SOON_S = 20.0


@pytest.mark.parametrize("kind", NIXL_CARDS)
def test_a_write_does_not_wait_for_one_to_a_peer_that_stands_still(kind):
    """Posted one after the other, as packed Chunks are: the second arrives although the first cannot."""
    stopped = ProcessTarget(kind, NUM_BYTES)
    other = ProcessTarget(kind, SMALL_BYTES, member="engine 1")
    writer = make_transport(kind, "trainer 0")
    try:
        source = np.random.default_rng(0).integers(0, 256, NUM_BYTES, dtype=np.uint8)
        writer.register(source.ctypes.data, NUM_BYTES)
        batches = [
            writer.prepare(writer.connect(target.endpoint, [target.descriptor]), *_row(source, target, num_bytes))
            for target, num_bytes in ((stopped, NUM_BYTES), (other, SMALL_BYTES))
        ]
        stopped.stop()
        first = writer.post(batches[0], 1)
        second = writer.post(batches[1], 1)
        wait_until(lambda: other.arrived(1) == SMALL_BYTES, SOON_S, "the second write arrives")
        assert second.wait(SOON_S).num_bytes == SMALL_BYTES
        assert not first.done
        with pytest.raises(TransportError, match="still being written"):
            writer.post(batches[0], 2).wait(SOON_S)
        assert not first.done
        first.cancel()
        with pytest.raises(PeerLost, match="did not accept"):
            first.wait(SOON_S)
        assert other.bytes() == source[:SMALL_BYTES].tobytes()
    finally:
        stopped.resume()
        for end in (writer, stopped, other):
            end.close()


def _row(source: np.ndarray, target: ProcessTarget, num_bytes: int) -> list[np.ndarray]:
    columns = source.ctypes.data, target.descriptor.address, num_bytes
    return [np.array([column], dtype=np.uint64) for column in columns]


def test_a_peer_without_an_agent_is_refused():
    writer = make_transport("nixl", "trainer 0")
    try:
        endpoint = Endpoint(transport="nixl", member="engine 0", data=msgspec.msgpack.encode({"agents": []}))
        with pytest.raises(TransportError, match="engine 0 has no NIXL agent"):
            writer.connect(endpoint, [])
    finally:
        writer.close()


def test_a_card_that_cannot_write_fails_the_write_once_the_others_have_ended(monkeypatch):
    target = ProcessTarget("nixl 2 cards", SMALL_BYTES)
    writer = make_transport("nixl 2 cards", "trainer 0")
    try:
        source = np.random.default_rng(0).integers(0, 256, SMALL_BYTES, dtype=np.uint8)
        writer.register(source.ctypes.data, SMALL_BYTES)
        batch = writer.prepare(writer.connect(target.endpoint, [target.descriptor]), *_row(source, target, SMALL_BYTES))

        def fail(*_):
            raise OSError("no such card")

        with monkeypatch.context() as broken:
            broken.setattr(writer._agents[1].agent, "transfer", fail)
            with pytest.raises(TransportError, match="no such card"):
                writer.post(batch, 1).wait(SOON_S)
        half = SMALL_BYTES // 2
        assert target.bytes() == source[:half].tobytes() + bytes(half)
        assert writer.post(batch, 2).wait(SOON_S).num_bytes == SMALL_BYTES
        wait_until(lambda: target.arrived(2) == SMALL_BYTES, SOON_S, "the next write arrives")
        assert target.bytes() == source.tobytes()
    finally:
        for end in (writer, target):
            end.close()


@pytest.mark.parametrize(("ours", "theirs"), [("nixl tcp", "nixl 2 cards"), ("nixl 2 cards", "nixl tcp")])
def test_members_with_unlike_cards_use_the_first_and_say_so(ours, theirs, caplog):
    target = ProcessTarget(theirs, SMALL_BYTES)
    writer = make_transport(ours, "trainer 0")
    try:
        source = np.random.default_rng(0).integers(0, 256, SMALL_BYTES, dtype=np.uint8)
        writer.register(source.ctypes.data, SMALL_BYTES)
        batch = writer.prepare(writer.connect(target.endpoint, [target.descriptor]), *_row(source, target, SMALL_BYTES))
        assert "network cards: the first are used" in caplog.text
        assert writer.post(batch, 1).wait(SOON_S).num_bytes == SMALL_BYTES
        assert target.bytes() == source.tobytes()
    finally:
        for end in (writer, target):
            end.close()


def test_a_write_that_takes_long_is_looked_at_less_often():
    assert look_s(0.0) == SHORTEST_LOOK_S
    assert look_s(0.0256) == pytest.approx(0.0001)
    assert look_s(100.0) == LONGEST_LOOK_S


def test_replicas_share_a_digest(monkeypatch):
    """The same bytes at the same positions, for two engine ranks, are digested once; others on their own."""
    digested = []

    def counted(batch, work, **options):
        digested.append(batch.peer)
        return digest_of(batch, work, **options)

    monkeypatch.setattr(nixl, "digest_of", counted)
    targets = [ProcessTarget("nixl tcp", SMALL_BYTES, member=f"engine {rank}") for rank in range(3)]
    writer = make_transport("nixl tcp", "trainer 0")
    try:
        source = np.random.default_rng(0).integers(0, 256, SMALL_BYTES, dtype=np.uint8)
        writer.register(source.ctypes.data, SMALL_BYTES)
        batches = []
        for target, position in zip(targets, (0, 0, 4096), strict=True):
            peer = writer.connect(target.endpoint, [target.descriptor])
            columns = _row(source, target, SMALL_BYTES)
            batches.append(writer.prepare(peer, *columns, position=np.array([position], dtype=np.uint64)))
        done = [ticket.wait(SOON_S) for ticket in writer.post_all(batches, 1)]
        assert digested == ["engine 0", "engine 2"]
        assert done[0].digest == done[1].digest != done[2].digest
        assert all(target.bytes() == source.tobytes() for target in targets)
    finally:
        for end in (writer, *targets):
            end.close()


@pytest.mark.parametrize("kind", NIXL_CARDS)
def test_a_write_that_is_cut_ends_its_agents(kind):
    """Only that keeps NIXL from reading the source: nothing may hold them, and least of all the error itself."""
    target = ProcessTarget(kind, NUM_BYTES)
    writer = make_transport(kind, "trainer 0")
    try:
        source = np.random.default_rng(0).integers(0, 256, NUM_BYTES, dtype=np.uint8)
        writer.register(source.ctypes.data, NUM_BYTES)
        batch = writer.prepare(writer.connect(target.endpoint, [target.descriptor]), *_row(source, target, NUM_BYTES))
        agents = [weakref.ref(each.agent) for each in writer._agents]
        target.stop()
        ticket = writer.post(batch, 1)
        wait_until(lambda: batch.transfer.under_way, SOON_S, "the write has begun")
        gc.disable()  # as trainers do
        ticket.cancel()
        with pytest.raises(PeerLost, match="did not accept"):
            ticket.wait(SOON_S)
        wait_until(lambda: not any(agent() for agent in agents), SOON_S, "the agents are gone")
    finally:
        gc.enable()
        target.resume()
        for end in (writer, target):
            end.close()
