"""Trainers tell each other magnitudes over real sockets: with keys, through cut connections, and never a stranger."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from weft.errors import TransferTimeout, WeftError
from weft.runtime.compile.sharing import COLLECTED_ELSEWHERE, COLLECTED_HERE, DIRECT
from weft.runtime.control.client import Client
from weft.runtime.control.keys import ClientKeys, Keys, new_keys
from weft.runtime.control.messages import (
    PROTOCOL,
    Asking,
    BetweenTrainers,
    Go,
    Holder,
    Introduction,
    Magnitudes,
    MagnitudeServer,
)
from weft.runtime.control.server import Server
from weft.runtime.send.exchange import Exchange
from weft.runtime.send.job import Job
from weft.runtime.send.magnitudes import CutBlocks, Sharing

ROUND, SOON_S = 17, 20.0
NOWHERE = "tcp://127.0.0.1:9"
"""Of the controller: it takes no part."""


def blocks(keys: list[int], role: int = DIRECT) -> list[CutBlocks]:
    return [CutBlocks(np.array(keys, dtype=np.int64), np.full(len(keys), role, dtype=np.int64))]


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def job_of(version: int, *, seconds: float = SOON_S) -> Job:
    go = Go(version=version, engines=[], holds=[])
    return Job(go, time.monotonic() + seconds, member="trainer", on_released=lambda: None)


def made(rank: int, asking: dict[int, str], keys: Keys | None = None, silence_s: float = 5.0) -> Exchange:
    own = None if keys is None else ClientKeys(own=keys, server_public="unused")
    wanted = [Asking(trainer=other, key=key) for other, key in asking.items()]
    return Exchange(f"trainer {rank}", wanted, controller=NOWHERE, keys=own, silence_s=silence_s)


def at(exchange: Exchange) -> MagnitudeServer:
    assert exchange.server is not None
    return exchange.server


def agreed(exchange: Exchange, job: Job, values: np.ndarray) -> list[float]:
    """Find and wait, in the only group there is."""
    exchange.begin(job)
    exchange.found(0, values)
    return waited(job)


def waited(job: Job) -> list[float]:
    job.flow.wait(lambda: 0 in job.agreed, "magnitudes")
    return job.agreed[0].tolist()


@pytest.mark.parametrize("uses_keys", [False, True], ids=["no keys", "keys"])
def test_three_trainers_agree_version_after_version(uses_keys):
    """0 and 1 share block 5, 1 and 2 block 9; 1 is where the others connect."""
    pairs = [new_keys() if uses_keys else None for _ in range(3)]
    public = {rank: keys.public if keys is not None else "" for rank, keys in enumerate(pairs)}
    middle = made(1, {0: public[0], 2: public[2]}, pairs[1])
    ends = [made(0, {}, pairs[0]), made(2, {}, pairs[2])]
    with contextlib.ExitStack() as stack:
        for exchange in (middle, *ends):
            stack.callback(exchange.close)
        holder = [Holder(trainer=1, server=at(middle))]
        for exchange, held, holders in ((ends[0], [5], holder), (ends[1], [9], holder), (middle, [5, 9], [])):
            exchange.follow(ROUND, blocks(held), holders)
        for version in range(1, 6):
            jobs = [job_of(version) for _ in range(3)]
            found = ((ends[0], floats(version)), (middle, floats(3.0, 4.0)), (ends[1], floats(2.0 * version)))
            for (exchange, values), job in zip(found, jobs, strict=True):
                exchange.begin(job)
                exchange.found(0, values)
            low, high = max(version, 3.0), max(2.0 * version, 4.0)
            assert [waited(job) for job in jobs] == [[low], [low, high], [high]]
            assert all(job.magnitude_bytes >= told for job, told in zip(jobs, (4, 8, 4), strict=True))


def test_one_scale_is_collected_by_the_hub():
    hub = made(0, dict.fromkeys(range(1, 5), ""))
    others = [made(rank, {}) for rank in range(1, 5)]
    with contextlib.ExitStack() as stack:
        for exchange in (hub, *others):
            stack.callback(exchange.close)
        hub.follow(ROUND, blocks([5], COLLECTED_HERE), [])
        for exchange in others:
            exchange.follow(ROUND, blocks([5], COLLECTED_ELSEWHERE), [Holder(trainer=0, server=at(hub))])
        jobs = [job_of(1) for _ in range(5)]
        for rank, (exchange, job) in enumerate(zip((hub, *others), jobs, strict=True)):
            exchange.begin(job)
            exchange.found(0, floats(10.0 - abs(rank - 2)))
        assert [waited(job) for job in jobs] == [[10.0]] * 5


class Wire:
    """Carries bytes between a port of its own and a server, until it is cut; then again."""

    def __init__(self, address: str) -> None:
        self._to = int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                self.num_connections += 1
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    @staticmethod
    def _carry(near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    (far if source is near else near).sendall(data)

    def cut(self) -> None:
        """Break what is connected now."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@pytest.fixture
def pair() -> Iterator[tuple[Exchange, Exchange, Wire]]:
    """Two trainers that share a block, and the wire between them."""
    server, client = made(0, {1: ""}), made(1, {})
    wire = Wire(at(server).address)
    server.follow(ROUND, blocks([5]), [])
    client.follow(ROUND, blocks([5]), [Holder(trainer=0, server=MagnitudeServer(address=wire.address, key=""))])
    yield server, client, wire
    for end in (client, server, wire):
        end.close()


def test_a_cut_connection_loses_nothing(pair):
    server, client, wire = pair
    for version in range(1, 9):
        ours, theirs = job_of(version), job_of(version)
        server.begin(ours)
        server.found(0, floats(2.0))
        wire.cut()
        client.begin(theirs)
        client.found(0, floats(3.0))
        assert (waited(ours), waited(theirs)) == ([3.0], [3.0])
    assert wire.num_connections > 1


def test_what_was_said_in_vain_is_said_again(pair, monkeypatch):
    """Magnitudes are lost in a cut, and so is the word that something is missing. Trainer 1 has all it needs, and
    trainer 0 cannot ask."""
    server, client, wire = pair
    for exchange, job in ((server, first := job_of(1)), (client, job_of(1))):
        exchange.begin(job)
        exchange.found(0, floats(1.0))
    assert waited(first) == [1.0]
    channel, listening, lost = client._asked[0].client, server._server, []

    def post(frame, post=channel._post):
        lost.append("magnitudes")
        return True if lost == ["magnitudes"] else post(frame)

    def answer(*what, answer=listening._answer):
        lost.append("answer")
        return None if lost.count("answer") == 1 else answer(*what)

    monkeypatch.setattr(channel, "_post", post)
    monkeypatch.setattr(listening, "_answer", answer)
    ours, theirs = job_of(2), job_of(2)
    server.begin(ours)
    server.found(0, floats(2.0))
    client.begin(theirs)
    client.found(0, floats(3.0))
    assert waited(theirs) == [3.0]
    wire.cut()
    assert waited(ours) == [3.0]
    assert lost.count("answer") > 1


def test_who_is_missing_is_named_at_the_deadline(pair):
    server, client, _ = pair
    with pytest.raises(TransferTimeout, match=r"no magnitudes of FP8 blocks from trainer 1; can trainers reach"):
        agreed(server, job_of(1, seconds=0.2), floats(1.0))
    with pytest.raises(TransferTimeout, match=r"from trainer 0 at tcp://127\.0\.0\.1:\d+; can trainers reach"):
        agreed(client, job_of(2, seconds=0.2), floats(1.0))  # trainer 0 spoke of version 1 only


def test_strangers_and_those_of_another_round_are_not_heard(pair):
    server, client, _ = pair
    with Client(at(server).address, member="trainer 7", messages=BetweenTrainers, protocol=PROTOCOL) as stranger:
        stranger.send(Introduction(round=ROUND, blocks=b""))
        with pytest.raises(WeftError, match="trainer 7 shares no FP8 blocks with it"):
            stranger.receive(SOON_S)
    with Client(at(server).address, member="trainer 1", messages=BetweenTrainers, protocol=PROTOCOL) as old:
        old.send(Introduction(round=ROUND - 1, blocks=b"junk"))
        assert old.receive(0.3) is None
        old.send(Introduction(round=ROUND, blocks=b"junk"))
        ours, theirs = job_of(1), job_of(1)
        server.begin(ours)
        server.found(0, floats(1.0))
        assert agreed(client, theirs, floats(4.0)) == [4.0]
        assert waited(ours) == [4.0]


def test_a_forgotten_client_is_remembered():
    """A server that does not know a client any more says nothing; the client misses something, and asks again."""
    server, client = made(0, {1: ""}), made(1, {}, silence_s=0.2)
    with contextlib.closing(server), contextlib.closing(client):
        server.follow(ROUND, blocks([5]), [])
        client.follow(ROUND, blocks([5]), [Holder(trainer=0, server=at(server))])
        ours, theirs = job_of(1), job_of(1)
        assert agreed_both(server, client, ours, theirs) == ([3.0], [3.0])
        ours, theirs = job_of(2), job_of(2)
        client.begin(theirs)
        client.found(0, floats(3.0))
        for connection in list(server._server._peers):
            server._server.forget(connection)
        server.begin(ours)
        server.found(0, floats(2.0))
        assert (waited(ours), waited(theirs)) == ([3.0], [3.0])


def agreed_both(server: Exchange, client: Exchange, ours: Job, theirs: Job) -> tuple[list[float], list[float]]:
    for exchange, job, value in ((server, ours, 2.0), (client, theirs, 3.0)):
        exchange.begin(job)
        exchange.found(0, floats(value))
    return waited(ours), waited(theirs)


@pytest.mark.parametrize(("address", "key"), [("tcp://127.0.0.1:1", "short"), ("tcp://256.0.0.1:1", "k" * 40)])
def test_an_exchange_that_cannot_connect_can_be_closed(address, key):
    client = made(1, {}, new_keys())
    server = MagnitudeServer(address=address, key=key)
    with contextlib.suppress(WeftError):
        client.follow(ROUND, blocks([5]), [Holder(trainer=0, server=server)])
    client.close()


def test_a_wrong_key_is_refused():
    server_keys, other = new_keys(), new_keys()
    server = made(0, {1: new_keys().public}, server_keys)
    client = made(1, {}, other)
    try:
        server.follow(ROUND, blocks([5]), [])
        client.follow(ROUND, blocks([5]), [Holder(trainer=0, server=at(server))])
        with pytest.raises(WeftError, match=r"trainer 0 at .* refused trainer 1"):
            agreed(client, job_of(1), floats(1.0))
    finally:
        client.close()
        server.close()


def test_one_wrong_message_costs_one_version():
    """Of the trainer others connect to: nobody would be lost, and no new round would begin."""
    client, intro = made(1, {}), Sharing(blocks([5]), peers={1}).introduction
    with (
        contextlib.closing(client),
        Server("tcp://127.0.0.1:*", messages=BetweenTrainers, protocol=PROTOCOL) as holder,
    ):
        client.follow(ROUND, blocks([5]), [Holder(trainer=0, server=MagnitudeServer(address=holder.address, key=""))])
        received = holder.receive(SOON_S)
        assert received is not None
        holder.send(received.sender, Introduction(round=ROUND, blocks=intro, number=received.message.number))

        def say(version: int, values: bytes) -> None:
            final = Magnitudes(round=ROUND, version=version, group=0, is_final=False, values=values)
            holder.send(received.sender, final)

        wrong, right = job_of(1), job_of(2)
        client.begin(wrong)
        client.found(0, floats(1.0))
        say(1, b"123")
        with pytest.raises(WeftError, match="trainer 0 sent magnitudes of 3 bytes"):
            waited(wrong)
        client.begin(right)
        client.found(0, floats(1.0))
        say(2, floats(7.0).tobytes())
        assert waited(right) == [7.0]
