"""Peers that flood, send junk, do not read, or claim to be somebody else: they are dropped, the others go on."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.process.runtime_members import Fleet, Process
from tests.support.raw_member import join_message
from weft.config import TransferSettings
from weft.runtime.control.client import Client
from weft.runtime.control.fragments import FRAGMENT_BYTES, HEADER, FrameKind, cut, pack_frame
from weft.runtime.control.held import HeldTable
from weft.runtime.control.messages import PROTOCOL, Alive, Beat, ToController, ToMember, Welcome
from weft.runtime.control.server import Server
from weft.runtime.controller.controller import Controller
from weft.transport.registry import place_here

BOUND_S = 60.0
FLOOD_S = 2.0
"""Long enough to fill every buffer on the way back to a peer that does not read."""
BEAT = msgspec.msgpack.encode(Beat())
PLACE = place_here()


def deaf_socket(address: str, name: str) -> tuple[zmq.Context[Any], zmq.Socket[bytes]]:
    """A peer that never reads, and has little room for what it is sent."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, f"{name} {os.getpid():08x}".encode())
    made.setsockopt(zmq.RCVHWM, 1)
    made.setsockopt(zmq.RCVBUF, 4096)
    made.connect(address)
    return context, made


def flood(pipe: Any, address: str, how: str) -> None:
    """Sends beats as fast as it can, for ever; says so when many are under way."""
    name = "stranger" if how == "strange" else "trainer 1"
    _, sending = deaf_socket(address, name)
    if how == "bare":  # what members sent before there were greetings
        frames = itertools.repeat(BEAT)
    else:
        if how in ("greets", "joins"):
            sending.send(pack_frame(FrameKind.HELLO, protocol=PROTOCOL, greeting=1))
        number = itertools.count()
        if how == "joins":
            join = join_message("trainer", 1, held=HeldTable.of([]).packed())
            (frame,) = cut(msgspec.msgpack.encode(join), protocol=PROTOCOL, greeting=1, first=next(number))
            sending.send(frame)
        frames = (cut(BEAT, protocol=PROTOCOL, greeting=1, first=n)[0] for n in number)
    for sent, frame in enumerate(frames):
        sending.send(frame)
        if sent == 50_000:
            pipe.send("flooding")


@pytest.mark.parametrize("how", ["bare", "strange", "greets"])
def test_a_flood_of_a_peer_that_does_not_read_stops_nobody(how):
    """Killed in the middle, several times: versions commit meanwhile, nobody is lost, and the controller lives."""
    fleet = Fleet()
    try:
        version = 0
        for _ in range(2):
            flooding = Process(flood, fleet.address, how)
            assert flooding.answer(BOUND_S) == "flooding"
            until = time.monotonic() + FLOOD_S
            while time.monotonic() < until:
                version += 1
                assert fleet.publish(version) == ["committed", "committed"]
            flooding.kill()
            flooding.close()
            version += 1
            assert fleet.publish(version) == ["committed", "committed"]
        fleet.check(version)
        assert fleet.statistics().lost == {}
    finally:
        fleet.close()


def test_a_member_that_does_not_read_is_lost_by_name():
    settings = TransferSettings(silence_s=1.0)
    with Controller(num_trainers=2, num_engine_ranks=1, settings=settings) as controller:
        flooding = Process(flood, controller.address, "joins")
        try:
            lost = wait_for(lambda: controller.statistics().lost.get("trainer 1"))
            assert lost == "does not read its messages"
        finally:
            flooding.kill()
            flooding.close()


def wait_for(look: Any) -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def serve(pipe: Any) -> None:
    """A server in a process of its own; answers pings until it is told to stop."""
    with Server("tcp://127.0.0.1:*", messages=ToController, protocol=PROTOCOL) as server:
        pipe.send(server.address)
        while not pipe.poll():
            received = server.receive(0.1)
            if received is not None:
                server.send(received.sender, Beat())
        pipe.send(server.statistics().num_malformed)


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("frame_bytes", [255 << 20, HEADER.size + FRAGMENT_BYTES])
def test_strangers_with_large_frames_cost_little_memory(frame_bytes):
    """Ten strangers offer a quarter of a gigabyte each, as one frame or as many; a member is answered meanwhile."""
    process = Process(serve)
    context = zmq.Context()
    try:
        address = process.answer()
        before = peak_bytes(process.pid)
        strangers = [context.socket(zmq.DEALER) for _ in range(10)]
        for number, stranger in enumerate(strangers):
            stranger.setsockopt(zmq.IDENTITY, f"trainer {number} 00000000".encode())
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(address)
        frame = zmq.Frame(pack_frame(FrameKind.DATA, protocol=PROTOCOL, greeting=1) + bytes(frame_bytes - HEADER.size))
        with Client(address, member="trainer 0", messages=ToController, protocol=PROTOCOL) as client:
            for _ in range(0, 255 << 20, frame_bytes):
                for stranger in strangers:
                    stranger.send(frame, copy=False)
                client.send(Beat())
                assert client.receive(BOUND_S) == Beat()
        assert peak_bytes(process.pid) - before < 60 << 20
        process.ask(None)
        process.answer()
    finally:
        for stranger in strangers:
            stranger.close()
        context.term()
        process.close()


def test_a_connection_that_does_not_read_holds_up_nobody_else():
    large = join_message(
        "trainer", 0, held=HeldTable.of([]).packed(), place=msgspec.structs.replace(PLACE, host="h" * 10**6)
    )
    with (
        Server("tcp://127.0.0.1:*", messages=ToController, protocol=PROTOCOL) as server,
        Client(server.address, member="engine 0", messages=ToController, protocol=PROTOCOL) as reading,
        Client(server.address, member="engine 1", messages=ToController, protocol=PROTOCOL) as deaf,
    ):
        deaf.send(Beat())
        stuck = server.receive(BOUND_S).sender
        while not server.stuck(0.2):
            assert server.send(stuck, large)
            reading.send(Beat())
            server.send(server.receive(BOUND_S).sender, Beat())
            assert reading.receive(BOUND_S) == Beat()
        assert server.stuck(0.2) == [stuck]
        assert server.stuck(BOUND_S) == []
        server.forget(stuck)
        assert server.stuck(0.0) == []
        assert not server.send(stuck, large)


def test_a_member_with_an_invalid_message_is_refused_by_name_and_the_others_stay():
    with (
        Controller(num_trainers=2, num_engine_ranks=1) as controller,
        Client(controller.address, member="trainer 0", messages=ToMember, protocol=PROTOCOL) as good,
        Client(controller.address, member="trainer 1", messages=ToMember, protocol=PROTOCOL) as bad,
    ):
        for rank, client in enumerate((good, bad)):
            client.send(join_message("trainer", rank, held=HeldTable.of([]).packed()))
            assert isinstance(client.receive(BOUND_S), Welcome)
        bad.send({"type": "Nonsense"})
        assert "sent an invalid message" in bad.receive(BOUND_S).reason
        good.send(Beat())
        assert isinstance(good.receive(BOUND_S), Alive)
        found = controller.statistics()
        assert found.members == ("trainer 0",)
        assert "invalid message" in found.lost["trainer 1"]


def test_a_member_that_joins_under_another_name_is_refused():
    with Controller(num_trainers=2, num_engine_ranks=1) as controller:
        with Client(controller.address, member="trainer 0", messages=ToMember, protocol=PROTOCOL) as client:
            client.send(join_message("trainer", 1, held=HeldTable.of([]).packed()))
            assert "trainer 0 wants to join as trainer 1" in client.receive(BOUND_S).reason
        assert controller.statistics().members == ()
