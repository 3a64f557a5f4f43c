"""Control-plane channels: typed messages over ZeroMQ, authenticated, bounded in size, never pickled.

    consumes      frames from the network                  produces      decoded messages of one msgspec union
    waits for     a message, at most `timeout_s`           unblocked by  the network, or `close` from the same thread

A Server (the controller, or a trainer that sends magnitudes to others) talks to many Clients (members). Without keys a
server listens on loopback only. A client greets first; the server admits it by its name and key, or refuses it with a
reason. Messages from any other peer are counted and dropped. A peer that floods, sends junk or does not read costs the
server a bounded amount of memory and blocks no other peer: no send waits, and both directions have high-water marks.

ZeroMQ's own heartbeats stay off. libzmq 4.3.5 aborts the process when a heartbeat is due on a connection that broke
while its inbound queue was full. Members send their own heartbeats; TCP notices a host that is gone.

    server = Server("tcp://127.0.0.1:7070", messages=Ping | Pong)
    client = Client(server.address, member="trainer 0", messages=Ping | Pong)
    client.send(Ping(number=1))
    received = server.receive(timeout_s=1.0)        # Received(sender="trainer 0 3f6a0c1e", message=Ping(number=1), …)
    server.send(received.sender, Pong(number=1))
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple, Protocol

import msgspec
import zmq

from weft.errors import ProtocolError
from weft.runtime.control.fragments import MAX_FRAME_BYTES

MAX_MESSAGE_BYTES = 256 << 20
MAX_BACKLOG_BYTES = 2 * MAX_MESSAGE_BYTES
"""Per connection. What does not fit is not accepted: the peer does not read."""
MAX_FRAMES = 64
"""High-water mark of a connection, in each direction: 4 MiB."""
FLUSH_S = 0.002
"""How often a full connection is tried again."""
MAX_DROPS = 1000
"""Frames that complete no message, before a caller that does not wait gets its turn."""
HANDSHAKE_MS, DEAD_MS = 5_000, 10_000
SPIN_S = 0.001 if len(os.sched_getaffinity(0)) >= 8 else 0.0
"""How long to poll for the next message without sleeping: they come in bursts, and waking up takes longer."""
BURST_SPIN_S = 100 * SPIN_S
"""The same for a caller that expects a message soon."""


class Received(NamedTuple):
    """A message and its sender."""

    sender: str
    """Name of the connection: the member, and a random suffix that tells its processes apart."""
    message: Any
    """A message of the union, or `Invalid`."""
    key: str = ""
    """The public key the connection was authenticated with; empty without keys."""
    thread_s: float = 0.0
    """The reading thread's processor time when it began to read the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """An admitted peer sent an invalid message."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Messages to or from a client may be lost: the server was restarted, or the connection was cut."""


@dataclass(slots=True, kw_only=True)
class ChannelStatistics:
    """What a server has seen."""

    num_received: int = 0
    num_sent: int = 0
    num_malformed: int = 0
    """Dropped frames: from strangers, or not part of a message."""
    num_unreachable: int = 0
    """Dropped messages to members that are not connected."""


def member_of(connection: str) -> str:
    """The member a connection claims to be; the claim is checked when it is admitted."""
    return connection.rpartition(" ")[0]


class Alarm:
    """Wakes a thread that waits on a socket, from any other thread."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock, self._is_open = threading.Lock(), True

    def ring(self) -> None:
        """Wake the waiting thread."""
        with self._lock:  # a closed descriptor may have been reused by now
            if self._is_open:
                os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        """Called by the thread once it has woken up."""
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Ringing has no effect from now on."""
        with self._lock:
            self._is_open = False
            os.close(self.descriptor)


class Channel(Protocol):
    """Either end, for callers that wait at several."""

    @property
    def is_blocked(self) -> bool:
        """Whether something waits until the other end reads."""

    @property
    def sources(self) -> Sequence[Any]:
        """What to wait at."""


def wait_any(channels: Sequence[Channel], alarm: Alarm, timeout_s: float) -> None:
    """Wait until one of these may have something to receive, or the alarm rings."""
    if any(channel.is_blocked for channel in channels):
        timeout_s = min(timeout_s, FLUSH_S)
    sources = [(source, zmq.POLLIN) for channel in channels for source in channel.sources]
    sources.append((alarm.descriptor, zmq.POLLIN))
    if alarm.descriptor in readable(sources, time.monotonic() + timeout_s, 0.0):
        alarm.silence()


def encoded(encoder: msgspec.msgpack.Encoder, message: Any, receiver: str, max_bytes: int) -> bytes:
    """A message encoded for the wire; raises if it cannot be sent."""
    name = type(message).__name__
    try:
        data = encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a {name} for {receiver} cannot be encoded: {error}") from error
    if len(data) > max_bytes:
        raise ProtocolError(f"a {name} of {len(data)} bytes for {receiver} exceeds the limit of {max_bytes}")
    return data


def readable(sources: list[Any], deadline: float, spin_until: float) -> set[Any]:
    """The sources that can be read, as soon as one can; none once the deadline has passed."""
    ready = zmq.zmq_poll(sources, 0)
    while not ready and time.monotonic() < min(spin_until, deadline):
        ready = zmq.zmq_poll(sources, 0)
    return {source for source, _ in ready or zmq.zmq_poll(sources, left_ms(deadline))}


def left_ms(deadline: float) -> int:
    """Whole milliseconds until a deadline, rounded up; zero when it has passed."""
    return max(0, ceil((deadline - time.monotonic()) * 1e3))


def bound_limits(socket: zmq.Socket[bytes]) -> None:
    """Limits on both ends: frame size, queued frames, and how long a host may be unreachable."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_FRAMES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_MAXRT, DEAD_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, DEAD_MS // 1000)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, DEAD_MS // 4000)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
    socket.setsockopt(zmq.LINGER, 0)
