"""Control channels over real sockets: messages, keys, strangers, restarts."""

from __future__ import annotations

import itertools
import random
import resource
import socket
import threading
import time
from unittest.mock import ANY

import msgspec
import pytest
import zmq

from weft.errors import AuthError, ConfigError, ProtocolError, WeftError
from weft.runtime.control.channel import MAX_DROPS, Invalid, Reset
from weft.runtime.control.client import Client
from weft.runtime.control.fragments import FrameKind, cut, pack_frame
from weft.runtime.control.keys import KeyRing, load_grant, load_keys, load_public, make_keys
from weft.runtime.control.security import Security, client_keys, server_keys
from weft.runtime.control.server import Server

ANYWHERE = "tcp://127.0.0.1:*"
SOON_S = 20.0


class Ping(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    number: int


class Pong(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    number: int
    names: list[str] = []


MESSAGES = Ping | Pong


@pytest.fixture
def server():
    with Server(ANYWHERE, messages=MESSAGES, max_message_bytes=1 << 20) as made:
        yield made


def test_messages_go_both_ways(server):
    with Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        client.send(Ping(number=1))
        received = server.receive(SOON_S)
        assert received.message == Ping(number=1)
        assert received.sender.startswith("trainer 0 ")
        assert server.send(received.sender, Pong(number=1, names=["a"]))
        assert client.receive(SOON_S) == Pong(number=1, names=["a"])


def test_waiting_has_a_deadline_on_both_ends(server):
    with Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        started = time.monotonic()
        assert server.receive(0.1) is None
        assert client.receive(0.1) is None
        assert time.monotonic() - started < SOON_S


def test_sending_to_a_member_that_is_not_there_says_so(server):
    assert not server.send("engine 9", Ping(number=1))
    assert server.statistics().num_unreachable == 1


def test_two_processes_of_one_name_are_told_apart(server):
    with (
        Client(server.address, member="engine 0", messages=MESSAGES) as first,
        Client(server.address, member="engine 0", messages=MESSAGES) as second,
    ):
        first.send(Ping(number=1))
        one = server.receive(SOON_S)
        second.send(Ping(number=2))
        two = server.receive(SOON_S)
        assert one.sender != two.sender
        assert server.send(one.sender, Pong(number=1))
        assert server.send(two.sender, Pong(number=2))
        assert first.receive(SOON_S) == Pong(number=1)
        assert second.receive(SOON_S) == Pong(number=2)


def test_a_waiting_client_can_be_woken(server):
    with Client(server.address, member="engine 0", messages=MESSAGES) as client:
        threading.Timer(0.1, client.wake).start()
        started = time.monotonic()
        assert client.receive(SOON_S) is None
        assert time.monotonic() - started < SOON_S / 2


def test_a_client_may_come_before_its_server():
    with Server(ANYWHERE, messages=MESSAGES) as early:
        address = early.address
    with Client(address, member="trainer 0", messages=MESSAGES) as client:
        client.send(Ping(number=3))
        with Server(address, messages=MESSAGES) as server:
            assert server.receive(SOON_S).message == Ping(number=3)


def test_strangers_frames_are_dropped_and_counted(server):
    """100,000 random and mutated frames: nothing crashes, nothing grows, members are still served."""
    rng = random.Random(0)
    good = msgspec.msgpack.encode(Ping(number=7))
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(server.address)
    num_good = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(100_000):
        if i % 3:
            frame = rng.randbytes(rng.randrange(40))
        else:
            mutated = bytearray(good)
            mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
            frame = bytes(mutated)
        stranger.send_multipart([frame] if i % 7 else [frame, b"", frame])
        while (received := server.receive(0.0)) is not None:
            assert isinstance(received.message, Ping | Pong)
            num_good += 1
    deadline = time.monotonic() + 30
    while server.statistics().num_malformed + num_good < 100_000 and time.monotonic() < deadline:
        num_good += server.receive(0.01) is not None
    stranger.close(linger=0)
    context.term()
    statistics = server.statistics()
    assert statistics.num_malformed + num_good == 100_000
    assert statistics.num_malformed > 60_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    with Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        client.send(Ping(number=8))
        assert server.receive(SOON_S).message == Ping(number=8)


def test_oversized_messages_are_an_error_for_their_sender_and_never_arrive(server):
    too_long = Pong(number=1, names=["x" * (2 << 20)])
    with Client(server.address, member="trainer 0", messages=MESSAGES, max_message_bytes=1 << 20) as client:
        with pytest.raises(ProtocolError, match=r"a Pong of \d+ bytes .* exceeds the limit of 1048576"):
            client.send(too_long)
        client.send(Ping(number=1))
        sender = server.receive(SOON_S).sender
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            server.send(sender, too_long)
    with Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        client.send(too_long)
        assert server.receive(SOON_S).message == Invalid(reason=ANY)


def test_what_is_no_message_is_an_error_for_a_client(server):
    with Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        client.send(Ping(number=1))
        sender = server.receive(SOON_S).sender
        server._socket.send_multipart([sender.encode(), b"\xc1"])
        with pytest.raises(ProtocolError, match="invalid frame"):
            client.receive(SOON_S)


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path, ["controller", "trainer"])
    make_keys(tmp_path / "elsewhere", ["trainer"])
    return tmp_path


def secured(keys, **more):
    return Server(ANYWHERE, messages=MESSAGES, keys=server_keys(Security(keys=keys)), **more)


def client_with(keys, address, *, key="trainer", member="trainer 0"):
    """A client with a key of the folder."""
    return Client(address, member=member, messages=MESSAGES, keys=client_keys(Security(keys=keys, key=key), "trainer"))


def test_members_with_an_allowed_key_are_served(keys):
    with secured(keys) as server, client_with(keys, server.address) as client:
        client.send(Ping(number=1))
        assert server.receive(SOON_S).message == Ping(number=1)


def test_a_key_that_is_not_allowed_is_refused_within_seconds(keys):
    with secured(keys) as server, client_with(keys, server.address, key="elsewhere/trainer") as client:
        client.send(Ping(number=1))
        with pytest.raises(AuthError, match="refused trainer 0"):
            client.receive(SOON_S)
        assert server.receive(0.2) is None


def test_a_client_without_a_key_is_not_heard(keys):
    with secured(keys) as server, Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        client.send(Ping(number=1))
        assert server.receive(0.5) is None


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:7070", "tcp://10.1.2.3:7070", "tcp://[::]:7070"])
def test_listening_beyond_loopback_needs_keys(address):
    with pytest.raises(AuthError, match="without keys"):
        Server(address, messages=MESSAGES)


@pytest.mark.parametrize("address", ["", "127.0.0.1:70", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:70000"])
def test_impossible_addresses(address):
    with pytest.raises(ConfigError):
        Server(address, messages=MESSAGES)


def test_a_port_in_use_is_named(server):
    with pytest.raises(ConfigError, match="listening on"):
        Server(server.address, messages=MESSAGES)


def test_key_files(keys, tmp_path):
    assert (keys / "trainer.key").stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(load_keys(keys / "trainer.key"))
    with pytest.raises(ConfigError, match="already exists"):
        make_keys(keys, ["engine", "trainer"])
    assert not (keys / "engine.key").exists()
    with pytest.raises(ConfigError, match="invalid key name"):
        make_keys(keys, ["../evil"])
    (keys / "trainer.key").chmod(0o644)
    with pytest.raises(AuthError, match="read by others"):
        load_keys(keys / "trainer.key")
    with pytest.raises(AuthError, match=r"no usable `\.pub` file"):
        KeyRing(tmp_path / "nothing")


def test_what_a_key_permits_comes_from_its_name_or_the_options(tmp_path):
    make_keys(tmp_path, ["trainer", "engine3", "engine-east", "controller.a"])
    make_keys(tmp_path, ["bob"], side="engine", ranks="0-7,9")
    sides = {path.stem: load_grant(path).side for path in tmp_path.glob("*.pub")}
    assert sides == {
        "trainer": "trainer",
        "engine3": "engine",
        "engine-east": "engine",
        "controller.a": "controller",
        "bob": "engine",
    }
    assert 'side = "engine"' in (tmp_path / "bob.key").read_text()
    bob = load_grant(tmp_path / "bob.pub")
    assert [rank for rank in range(12) if bob.objection("engine", rank) is None] == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    for name in ("member", "trainers", "enginex"):
        with pytest.raises(ConfigError, match=f"the key `{name}` needs a side") as found:
            make_keys(tmp_path, [name])
        assert "--side" in found.value.hint
    with pytest.raises(ConfigError, match="unknown side"):
        make_keys(tmp_path, ["alice"], side="boss")
    with pytest.raises(WeftError, match="not a list of ranks"):
        make_keys(tmp_path, ["alice"], side="engine", ranks="1-")
    with pytest.raises(ConfigError, match="invalid key name"):
        make_keys(tmp_path, ["../evil"], side="engine")


def greeted(server, keys, member, key):
    """What comes of a greeting: the message, or what the client is told."""
    with client_with(keys, server.address, key=key, member=member) as client:
        client.send(Ping(number=1))
        received = server.receive(0.5)
        if received is not None:
            return received
        with pytest.raises(AuthError) as found:
            client.receive(SOON_S)
        return str(found.value)


def test_a_key_permits_its_own_side_and_ranks_only(keys):
    make_keys(keys, ["engine-a"], ranks="2-3")
    (keys / "old.pub").write_text(f'public = "{load_public(keys / "elsewhere" / "trainer.pub")}"\n')
    (keys / "elsewhere" / "trainer.key").rename(keys / "old.key")
    with secured(keys) as server:
        received = greeted(server, keys, "trainer 0", "trainer")
        assert received.key == load_public(keys / "trainer.pub")
        assert greeted(server, keys, "engine 3", "engine-a").message == Ping(number=1)
        assert "is for the trainer side, not for engine 0" in greeted(server, keys, "engine 0", "trainer")
        assert "is for engine ranks 2-3, not for rank 4" in greeted(server, keys, "engine 4", "engine-a")
        assert "is for the controller side" in greeted(server, keys, "trainer 0", "controller")
        told = greeted(server, keys, "trainer 0", "old")
        assert "old.pub` names no side" in told
        assert 'side = "trainer"' in told


def test_keys_come_and_go_while_the_server_runs(keys, caplog):
    with secured(keys) as server, client_with(keys, server.address) as client:
        client.send(Ping(number=1))
        sender = server.receive(SOON_S).sender
        assert server.revoked() == {}
        (keys / "trainer.pub").unlink()
        assert greeted(server, keys, "trainer 0", "trainer").endswith("refused trainer 0")
        deadline = time.monotonic() + SOON_S
        while not (gone := server.revoked()):
            assert time.monotonic() < deadline
        assert gone == {sender: "its key was removed"}
        (keys / "bad.pub").write_text('public = "short"')
        make_keys(keys, ["engine"])
        assert greeted(server, keys, "engine 0", "engine").message == Ping(number=1)
        assert "bad.pub` holds no public key" in caplog.text


def test_another_protocol_is_refused_by_name():
    with (
        Server(ANYWHERE, messages=MESSAGES, protocol=7) as server,
        Client(server.address, member="trainer 0", messages=MESSAGES, protocol=6) as client,
    ):
        client.send(Ping(number=1))
        assert server.receive(0.5) is None
        with pytest.raises(ProtocolError, match="it speaks protocol 6, the other side protocol 7"):
            client.receive(SOON_S)


def test_a_wrong_controller_key_is_an_error_within_seconds(keys):
    make_keys(keys / "elsewhere", ["controller"])
    with secured(keys) as server, client_with(keys / "elsewhere", server.address, key=str(keys / "trainer")) as client:
        client.send(Ping(number=1))
        with pytest.raises(AuthError, match=f"the controller at `{server.address}` ends every handshake") as found:
            client.receive(SOON_S)
        assert "public key" in found.value.hint


def test_a_controller_that_restarts_again_and_again_or_is_slow_is_waited_for(keys):
    """Neither connections that break in the handshake now and then, nor a server that is silent, are a wrong key."""
    with secured(keys) as server:
        address = server.address
    with client_with(keys, address) as client:
        client.send(Ping(number=1))
        port = int(address.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)) as silent:
            silent.settimeout(SOON_S)
            connection, _ = silent.accept()
            assert client.receive(0.5) is None
            connection.close()
            assert client.receive(0.1) is None
        for number in range(5):
            with Server(address, messages=MESSAGES, keys=server_keys(Security(keys=keys))) as server:
                heard = None
                deadline = time.monotonic() + SOON_S
                while heard is None and time.monotonic() < deadline:
                    client.send(Ping(number=number))
                    client.receive(0.05)
                    heard = server.receive(0.05)
                assert heard is not None


def test_a_proxy_without_its_controller_is_waited_for():
    """It accepts connections and hangs up; without keys that says nothing about them."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"tcp://127.0.0.1:{proxy.getsockname()[1]}"
        proxy.settimeout(SOON_S)
        with Client(address, member="trainer 0", messages=MESSAGES) as client:
            client.send(Ping(number=1))
            for _ in range(10):
                proxy.accept()[0].close()
                assert client.receive(0.01) is None
            proxy.close()
            with Server(address, messages=MESSAGES) as server:
                deadline = time.monotonic() + SOON_S
                while (heard := server.receive(0.05)) is None and time.monotonic() < deadline:
                    client.receive(0.05)
                assert heard is not None


def test_a_large_message_arrives_in_both_directions_and_small_ones_keep_their_place():
    large = Pong(number=1, names=["x" * (40 << 20)])
    with (
        Server(ANYWHERE, messages=MESSAGES) as server,
        Client(server.address, member="trainer 0", messages=MESSAGES) as client,
    ):
        sent = [Ping(number=0), large, Ping(number=2)]
        there = [lambda: server.receive(0.01), lambda: client.receive(0.01)]
        for message in sent:
            client.send(message)
        got = []
        deadline = time.monotonic() + 30.0
        while len(got) < 3 and time.monotonic() < deadline:
            received, _ = (look() for look in there)
            got += [received] if received is not None else []
        assert [received.message for received in got] == sent
        for message in sent:
            assert server.send(got[0].sender, message)
        back = []
        while len(back) < 3 and time.monotonic() < deadline:
            _, received = (look() for look in there)
            back += [received] if received is not None else []
        assert back == sent


def test_a_client_learns_that_its_server_was_started_anew():
    with Server(ANYWHERE, messages=MESSAGES) as first:
        address = first.address
        client = Client(address, member="trainer 0", messages=MESSAGES)
        client.send(Ping(number=1))
        assert first.receive(SOON_S).message == Ping(number=1)
    with client, Server(address, messages=MESSAGES) as second:
        deadline = time.monotonic() + SOON_S
        while (answer := client.receive(0.05)) is None:
            assert time.monotonic() < deadline
            client.send(Ping(number=2))
            assert second.receive(0.05) is None
        assert answer == Reset()
        client.send(Ping(number=3))
        assert second.receive(SOON_S).message == Ping(number=3)


def test_a_server_that_lost_a_message_asks_for_a_new_greeting(server):
    with Client(server.address, member="trainer 0", messages=MESSAGES) as client:
        client.send(Ping(number=1))
        sender = server.receive(SOON_S).sender
        client._next_number += 1  # as if a frame had been lost with its connection
        client.send(Ping(number=2))
        assert server.receive(0.2) is None
        assert client.receive(SOON_S) == Reset()
        client.send(Ping(number=3))
        assert server.receive(SOON_S).message == Ping(number=3)
        server._peers[sender].next_number += 1
        assert server.send(sender, Pong(number=4))
        assert client.receive(SOON_S) == Reset()


def test_unfinished_messages_are_forgotten(monkeypatch):
    monkeypatch.setattr("weft.runtime.control.server.UNFINISHED_S", 0.2)
    with (
        Server(ANYWHERE, messages=MESSAGES) as server,
        Client(server.address, member="trainer 0", messages=MESSAGES) as client,
    ):
        client.send(Ping(number=1))
        sender = server.receive(SOON_S).sender
        client._socket.send(cut(bytes(1 << 20), protocol=0, greeting=1, first=1)[0])
        deadline = time.monotonic() + SOON_S
        while sender in server._peers:
            assert server.receive(0.01) is None
            assert time.monotonic() < deadline


def test_a_server_that_floods_leaves_its_client_time_for_others(server, monkeypatch):
    """Frames that belong to an earlier greeting, one after the other, without an end."""
    left = itertools.repeat([pack_frame(FrameKind.WHO, protocol=0, greeting=99)], 2 * MAX_DROPS)

    class Flood:
        def recv_multipart(self) -> list[bytes]:
            return next(left)  # StopIteration if it is read to its end

    with Client(server.address, member="trainer 0", messages=MESSAGES) as client, monkeypatch.context() as flooded:
        flooded.setattr(client, "_socket", Flood())
        flooded.setattr(client, "_wait", lambda _: set())
        flooded.setattr(client, "_has_arrived", lambda _: True)
        assert client.receive(0.0) is None
    assert next(left)
