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

import errno
import ipaddress
import os
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Self

import msgspec
import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from weft.errors import AuthError, ConfigError, ProtocolError
from weft.runtime.control.fragments import (
    MAX_FRAME_BYTES,
    Assembly,
    FragmentError,
    Frame,
    FrameKind,
    GapError,
    cut,
    pack_frame,
    parse,
)
from weft.runtime.control.keys import REREAD_S, ClientKeys, KeyRing, ServerKeys
from weft.runtime.control.member_id import MemberId

MAX_MESSAGE_BYTES = 256 << 20
MAX_BACKLOG_BYTES = 2 * MAX_MESSAGE_BYTES
"""Per connection. What does not fit is not accepted: the peer does not read."""
MAX_MEMBER_BYTES, MAX_SENDER_BYTES = 64, 80
MAX_FRAMES = 64
"""High-water mark of a connection, in each direction: 4 MiB."""
MAX_CONNECTIONS_PER_MEMBER = 4
"""Processes that may connect under one name: a member, and those that would replace it."""
MAX_STRANGERS = 1024
"""Strangers whose last answer is remembered; more are not answered."""
MAX_REASON_BYTES = 1024
MAX_DROPS = 1000
"""Frames dropped before a caller that does not wait gets its turn."""
ANSWER_S = 0.25
"""How often a stranger is answered."""
FLUSH_S = 0.002
"""How often a full connection is tried again."""
UNFINISHED_S = 10.0
"""How long the rest of a message may be missing."""
HANDSHAKE_MS, DEAD_MS = 5_000, 10_000
CUT_HANDSHAKES_S = 2.0
MAX_CUT_HANDSHAKES = 3
"""A server that hangs up this often while keys are checked does not hold the expected key."""
SPIN_S = 0.001 if len(os.sched_getaffinity(0)) >= 8 else 0.0
"""How long to poll for the next message without sleeping: they come in bursts, and waking up takes longer."""
BURST_SPIN_S = 100 * SPIN_S
"""The same for a caller that expects a message soon."""
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5}|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message and its sender."""

    sender: str
    """Name of the connection: the member, and a random suffix that tells its processes apart."""
    message: Any
    """A message of the union, or `Invalid`."""
    key: str = ""
    """The public key the connection was authenticated with; empty without keys."""


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


@dataclass(slots=True, kw_only=True)
class _Admitted:
    """A connection that was admitted."""

    key: str
    greeting: int
    inbound: Assembly
    heard_at: float
    next_number: int = 0
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0
    moved_at: float = 0.0
    """When a frame of the backlog was last sent, or the backlog began."""


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


class Server:
    """The end that many connect to. Used by one thread; `wake` is for others."""

    def __init__(
        self,
        address: str,
        *,
        messages: Any,
        protocol: int = 0,
        objection: Callable[[str], str | None] = lambda _: None,
        keys: ServerKeys | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """`objection`: why a member of this name is not admitted; None if it is. `context`: the caller's, if shared."""
        _check_bind(address, has_keys=keys is not None)
        self._protocol, self._objection = protocol, objection
        self._allowed = None if keys is None else keys.allowed
        self._max_message_bytes = max_message_bytes
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self._statistics = ChannelStatistics()
        self._peers: dict[str, _Admitted] = {}
        self._connections: dict[str, deque[str]] = {}
        """Member → its admitted connections, oldest first."""
        self._blocked: set[str] = set()
        """Connections with a backlog."""
        self._flushed_at, self._checked_keys_at, self._tidied_at = 0.0, 0.0, 0.0
        self._answered: OrderedDict[tuple[str, FrameKind], float] = OrderedDict()
        """When a stranger last got an answer of this kind, oldest first."""
        self._alarm = Alarm()
        self._context, self._owns_context = context or zmq.Context(), context is None
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            if keys is not None:
                self._authenticate(keys)
            _bound(self._socket)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a process that reconnects keeps its identity
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"listening on `{address}` failed: {error.strerror}", hint="is the port in use?"
            ) from error
        self._sources: list[Any] = [(self._socket, zmq.POLLIN), (self._alarm.descriptor, zmq.POLLIN)]
        self.spin_s = SPIN_S
        """How long to poll for the next message without sleeping."""
        self._spin_until = 0.0
        bound: Any = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        self.address: str = bound.decode().rstrip("\0")

    def _authenticate(self, keys: ServerKeys) -> None:
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_AllowList(keys.allowed))
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.own.public.encode()
        self._socket.curve_secretkey = keys.own.secret.encode()

    def wake(self) -> None:
        """Make a waiting `receive` return at once; may be called from any thread."""
        self._alarm.ring()

    def receive(self, timeout_s: float) -> Received | None:
        """The next message, or None if there is none in time or `wake` was called."""
        deadline = time.monotonic() + timeout_s
        self._forget_unfinished()
        num_dropped = 0
        while self._is_readable(deadline):
            received = self._take()
            if received is not None:
                self._statistics.num_received += 1
                self._spin_until = time.monotonic() + self.spin_s
                return received
            num_dropped += 1
            if num_dropped >= MAX_DROPS and time.monotonic() > deadline:
                break
        return None

    def _is_readable(self, deadline: float) -> bool:
        """Wait for a frame; full connections are retried meanwhile."""
        while self._blocked:
            self._flush()
            ready = _ready(self._sources, min(deadline, time.monotonic() + FLUSH_S), self._spin_until)
            if ready:
                return self._has_frame(ready)
            if time.monotonic() >= deadline:
                return False
        return self._has_frame(_ready(self._sources, deadline, self._spin_until))

    def _has_frame(self, ready: set[Any]) -> bool:
        """Whether the network ended the wait."""
        if self._alarm.descriptor in ready:
            self._alarm.silence()
        return self._socket in ready

    def _forget_unfinished(self) -> None:
        """Free the memory of messages whose rest does not arrive."""
        now = time.monotonic()
        if now - self._tidied_at > UNFINISHED_S / 4:
            self._tidied_at = now
            late = now - UNFINISHED_S
            for connection in [c for c, p in self._peers.items() if p.inbound.is_unfinished and p.heard_at < late]:
                self.forget(connection)

    def _take(self) -> Received | None:
        """Read one ZeroMQ message; None unless it completes a message of an admitted peer."""
        sender, data, key = self._read()
        frame = parse(data) if data is not None else None
        if frame is not None and frame.kind is FrameKind.HELLO:
            self._hear(sender, frame, key)
            return None
        peer = self._peers.get(sender)
        if peer is not None and peer.key == key and (frame is None or frame.greeting == peer.greeting):
            return self._message(sender, peer, frame)
        self._statistics.num_malformed += 1
        if frame is not None:
            self._answer(sender, FrameKind.WHO, frame.greeting)
        return None

    def _read(self) -> tuple[str, bytes | None, str]:
        """Sender, the frame (None if there is not exactly one, or the sender has no name), and the sender's key."""
        if self._allowed is None:
            name, *parts = self._socket.recv_multipart()
            key = ""
        else:  # only an uncopied message knows its key
            frames: list[Any] = self._socket.recv_multipart(copy=False)
            name, key = frames[0].bytes, frames[-1]["User-Id"]
            parts = [frame.bytes for frame in frames[1:]]
        if not 0 < len(name) <= MAX_SENDER_BYTES or not name.isascii():
            return "", None, ""
        return name.decode("ascii"), parts[0] if len(parts) == 1 else None, key

    def _message(self, sender: str, peer: _Admitted, frame: Frame | None) -> Received | None:
        peer.heard_at = time.monotonic()
        try:
            if frame is None or frame.kind is not FrameKind.DATA or frame.protocol != self._protocol:
                raise FragmentError("a frame is not part of a message")
            whole = peer.inbound.take(frame)
            message = self._decoder.decode(whole) if whole is not None else None
        except GapError:  # the connection was cut in between: the member must learn that something was lost
            self.forget(sender)
            self._answer(sender, FrameKind.WHO, peer.greeting)
            return None
        except FragmentError as error:
            self._statistics.num_malformed += 1
            return Received(sender=sender, message=Invalid(reason=str(error)), key=peer.key)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._statistics.num_malformed += 1
            return Received(sender=sender, message=Invalid(reason=f"{type(error).__name__}: {error}"), key=peer.key)
        return Received(sender=sender, message=message, key=peer.key) if message is not None else None

    def _hear(self, sender: str, hello: Frame, key: str) -> None:
        """Admit a peer that greets, or say why not."""
        self.forget(sender)
        member = member_of(sender)
        refusal = self._refusal(member, hello.protocol, key)
        if refusal is None:
            inbound = Assembly(self._max_message_bytes)
            peer = _Admitted(key=key, greeting=hello.greeting, inbound=inbound, heard_at=time.monotonic())
            self._admit(sender, member, peer)
        else:
            kind, reason, hint = refusal
            self._answer(sender, kind, hello.greeting, f"{reason}\0{hint}".encode()[:MAX_REASON_BYTES])

    def _refusal(self, member: str, protocol: int, key: str) -> tuple[FrameKind, str, str] | None:
        """Why a member is not admitted, with a hint; None if it is."""
        if protocol != self._protocol:
            reason = f"it speaks protocol {protocol}, the other side protocol {self._protocol}"
            return FrameKind.REFUSED, reason, "install the same version of weft on both sides"
        if self._allowed is not None:
            named = MemberId.parse(member)
            reason = "its name has no side and rank" if named is None else self._allowed.objection(key, *named) or ""
            if reason:
                return FrameKind.DENIED, reason, "see `weft keys`; a controller picks up changes in its folder of keys"
        objection = self._objection(member)
        if objection is not None:
            return FrameKind.REFUSED, objection, "check the rank, and the number of members the controller expects"
        return None

    def _admit(self, sender: str, member: str, peer: _Admitted) -> None:
        """Accept messages from this peer from now on."""
        mine = self._connections.setdefault(member, deque())
        if len(mine) >= MAX_CONNECTIONS_PER_MEMBER:
            self.forget(mine[0])
        mine.append(sender)
        self._peers[sender] = peer

    def forget(self, connection: str) -> None:
        """Stop accepting messages of a connection; its owner may greet again."""
        if self._peers.pop(connection, None) is None:
            return
        self._blocked.discard(connection)
        member = member_of(connection)
        self._connections[member].remove(connection)
        if not self._connections[member]:
            del self._connections[member]

    def _answer(self, stranger: str, kind: FrameKind, greeting: int, payload: bytes = b"") -> None:
        """Send a small answer to a peer that is not admitted: rate-limited, and dropped if it does not fit."""
        now, answer = time.monotonic(), (stranger, kind)
        if not self._has_room_for_an_answer(now) or answer in self._answered:
            return
        self._answered[answer] = now
        self._post(stranger, pack_frame(kind, protocol=self._protocol, greeting=greeting, payload=payload))

    def _has_room_for_an_answer(self, now: float) -> bool:
        """Whether one more answer can be remembered; old ones are forgotten."""
        while self._answered and now - next(iter(self._answered.values())) >= ANSWER_S:
            self._answered.popitem(last=False)
        return len(self._answered) < MAX_STRANGERS

    def send(self, receiver: str, message: Any) -> bool:
        """Send to an admitted connection, now or as soon as it reads; False if it is gone. Never waits."""
        peer = self._peers.get(receiver)
        if peer is None:
            self._statistics.num_unreachable += 1
            return False
        data = _encoded(self._encoder, message, receiver, self._max_message_bytes)
        frames = cut(data, protocol=self._protocol, greeting=peer.greeting, first=peer.next_number)
        peer.next_number += len(frames)
        for frame in frames:
            posted = None if peer.backlog else self._post(receiver, frame)
            if posted is False:  # if the peer ever comes back, the gap in the numbers tells it
                self._statistics.num_unreachable += 1
                return False
            if posted is None:
                self._keep(receiver, peer, frame)
        self._statistics.num_sent += 1
        return True

    def _keep(self, connection: str, peer: _Admitted, frame: bytes) -> None:
        """Send a frame later."""
        if not peer.backlog:
            self._blocked.add(connection)
            peer.moved_at = time.monotonic()
        peer.backlog.append(frame)
        peer.backlog_bytes += len(frame)

    def _push(self, connection: str, peer: _Admitted) -> None:
        """Hand as much of a backlog to ZeroMQ as fits; the backlog of a peer that is gone is dropped."""
        while peer.backlog:
            posted = self._post(connection, peer.backlog[0])
            if posted is None:
                return
            if posted is False:
                break
            peer.moved_at = time.monotonic()
            peer.backlog_bytes -= len(peer.backlog.popleft())
        peer.backlog.clear()
        peer.backlog_bytes = 0
        self._blocked.discard(connection)

    def _post(self, connection: str, frame: bytes) -> bool | None:
        """Hand one frame to ZeroMQ: True if accepted, None if it does not fit now, False if the peer is gone."""
        try:
            self._socket.send_multipart([connection.encode(), frame], flags=zmq.DONTWAIT)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return False
        return True

    def _flush(self) -> None:
        now = time.monotonic()
        if now - self._flushed_at >= FLUSH_S / 2:
            self._flushed_at = now
            for connection in list(self._blocked):
                self._push(connection, self._peers[connection])

    def stuck(self, silence_s: float) -> list[str]:
        """Connections that have not read anything for this long, or whose backlog is far too large."""
        limit = time.monotonic() - silence_s
        peers = [(connection, self._peers[connection]) for connection in self._blocked]
        return [name for name, peer in peers if peer.moved_at < limit or peer.backlog_bytes > MAX_BACKLOG_BYTES]

    @property
    def has_keys(self) -> bool:
        """Whether connections are authenticated."""
        return self._allowed is not None

    def key_of(self, connection: str) -> str:
        """The public key an admitted connection was authenticated with; empty without keys."""
        peer = self._peers.get(connection)
        return peer.key if peer is not None else ""

    def revoked(self) -> dict[str, str]:
        """Connections whose key no longer permits them, and why."""
        allowed, now = self._allowed, time.monotonic()
        if allowed is None or now - self._checked_keys_at < REREAD_S:
            return {}
        self._checked_keys_at = now
        found = {}
        for connection, peer in self._peers.items():
            named = MemberId.parse(member_of(connection))
            reason = allowed.objection(peer.key, *named) if named is not None else None
            if reason is not None:
                found[connection] = reason
        return found

    @property
    def is_blocked(self) -> bool:
        """Whether messages are waiting for a member to read."""
        return bool(self._blocked)

    @property
    def sources(self) -> Sequence[Any]:
        """What to poll, for callers that wait for more than this channel."""
        return (self._socket,)

    def statistics(self) -> ChannelStatistics:
        """A snapshot of the counters."""
        return replace(self._statistics)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Stop listening; messages still unsent after `linger_s` are dropped."""
        self._alarm.close()
        self._socket.close(linger=ceil(linger_s * 1e3))
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._owns_context:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _AllowList:
    """Decides, for the authenticator, which public keys may connect."""

    def __init__(self, allowed: KeyRing) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with the raw or printable key, depending on its version."""
        del domain
        printable = key if len(key) == 40 else zmq.utils.z85.encode(key)
        return self._allowed.knows(printable.decode())


class Client:
    """The end of a member that connects. Used by one thread."""

    def __init__(
        self,
        address: str,
        *,
        member: str,
        messages: Any,
        protocol: int = 0,
        keys: ClientKeys | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        server: str = "the controller",
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """`server`: its name in errors. `context`: the caller's, if shared."""
        _host_of(address)
        if not 0 < len(member.encode()) <= MAX_MEMBER_BYTES or not member.isascii():
            raise ConfigError(f"invalid member name `{member}`", hint=f"1 to {MAX_MEMBER_BYTES} ASCII characters")
        self.member = member
        self._server = f"{server} at `{address}`"
        self._protocol, self._max_message_bytes = protocol, max_message_bytes
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self._greeting = 0
        self._next_number = 0
        self._inbound = Assembly(max_message_bytes)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._may_be_wrong_key = keys is not None
        """Whether no handshake has succeeded yet. Without keys, or later, a server that hangs up is merely absent."""
        self.num_connections = 0
        """Number of connections so far: one more each time the connection is cut and made again."""
        self._first_cut: float | None = None
        self._num_cut_handshakes = 0
        self._context, self._owns_context = context or zmq.Context(), context is None
        try:
            self._socket, self._monitor = _connected(self._context, address, member, keys)
        except zmq.ZMQError as error:
            if self._owns_context:
                self._context.term()
            raise ConfigError(f"{member} cannot connect to {self._server}: {error.strerror}") from error
        self._alarm = Alarm()
        self.spin_s = SPIN_S
        """How long to poll for the next message without sleeping; may be set from any thread."""
        self._spin_until = 0.0
        self._sources: list[Any] = [
            (source, zmq.POLLIN) for source in (self._socket, self._monitor, self._alarm.descriptor)
        ]
        self._greet()

    @property
    def is_blocked(self) -> bool:
        """Whether new messages have to wait until the server reads."""
        return bool(self._backlog)

    @property
    def sources(self) -> Sequence[Any]:
        """What to poll, for callers that wait for more than this channel."""
        return self._socket, self._monitor

    def wake(self) -> None:
        """Make a waiting `receive` return at once; may be called from any thread."""
        self._alarm.ring()

    def send(self, message: Any) -> None:
        """Queue a message; it leaves as soon as the server can be reached. Never waits."""
        self._spin_until = time.monotonic() + self.spin_s
        data = _encoded(self._encoder, message, self._server, self._max_message_bytes)
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            raise ProtocolError(
                f"{self.member} cannot send: {self._server} does not accept messages",
                hint="is it running?",
            )
        frames = cut(data, protocol=self._protocol, greeting=self._greeting, first=self._next_number)
        self._next_number += len(frames)
        self._queue(frames)

    def _queue(self, frames: list[bytes]) -> None:
        for frame in frames:
            if self._backlog or not self._post(frame):
                self._backlog.append(frame)
                self._backlog_bytes += len(frame)

    def _push(self) -> None:
        """Hand as much of the backlog to ZeroMQ as fits."""
        while self._backlog and self._post(self._backlog[0]):
            self._backlog_bytes -= len(self._backlog.popleft())

    def _post(self, frame: bytes) -> bool:
        """Hand one frame to ZeroMQ; False if it does not fit now."""
        try:
            self._socket.send(frame, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _greet(self) -> None:
        """Start again in both directions; unfinished messages are forgotten."""
        self._greeting = (self._greeting + 1) % (1 << 32)
        self._next_number, self._inbound = 0, Assembly(self._max_message_bytes)
        self._backlog.clear()
        self._backlog_bytes = 0
        self._queue([pack_frame(FrameKind.HELLO, protocol=self._protocol, greeting=self._greeting)])

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, or None if there is none in time or `wake` was called.

        `Reset` when messages may have been lost. Raises AuthError or ProtocolError if the server refuses this client.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready = self._wait(deadline)
            if self._monitor in ready:
                self._see(zmq.utils.monitor.recv_monitor_message(self._monitor))
            if self._has_arrived(ready):
                self._spin_until = time.monotonic() + self.spin_s
                message = self._take(self._socket.recv_multipart())
                if message is not None:
                    return message
            elif self._alarm.descriptor in ready:
                self._alarm.silence()
                return None
            elif time.monotonic() >= deadline:
                return None

    def _wait(self, deadline: float) -> set[Any]:
        """Wait for an event; sends the backlog as soon as the server reads."""
        self._push()
        sources = self._sources
        if self._backlog:
            sources = [(self._socket, zmq.POLLIN | zmq.POLLOUT), *sources[1:]]
        return _ready(sources, deadline, self._spin_until)

    def _has_arrived(self, ready: set[Any]) -> bool:
        """Whether a frame has arrived, rather than only room for one."""
        return self._socket in ready and (not self._backlog or self._socket.poll(0, zmq.POLLIN) != 0)

    def _take(self, parts: list[bytes]) -> Any | None:
        """A message, if this frame completes one."""
        frame = parse(parts[0]) if len(parts) == 1 else None
        if frame is None:
            raise ProtocolError(f"{self._server} sent an invalid frame", hint="does it run another version of weft?")
        if frame.greeting != self._greeting:
            return None  # an answer to an earlier greeting
        match frame.kind:
            case FrameKind.WHO:
                self._greet()
                return Reset()
            case FrameKind.REFUSED | FrameKind.DENIED:
                self._raise_refusal(frame)
            case FrameKind.DATA:
                return self._decode(frame)
        return None

    def _decode(self, frame: Frame) -> Any | None:
        try:
            whole = self._inbound.take(frame)
            return self._decoder.decode(whole) if whole is not None else None
        except GapError:
            self._greet()
            return Reset()
        except (FragmentError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"{self._server} sent an invalid message: {error}") from error

    def _raise_refusal(self, frame: Frame) -> None:
        reason, _, hint = frame.payload.decode(errors="replace").partition("\0")
        kind = AuthError if frame.kind is FrameKind.DENIED else ProtocolError
        raise kind(f"{self._server} refused {self.member}: {reason}", hint=hint or None)

    def _see(self, event: Any) -> None:
        """How a handshake ended. A server that never answers, or is restarted, is no reason to give up."""
        match event["event"]:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._may_be_wrong_key = False
                self.num_connections += 1
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise AuthError(
                    f"{self._server} refused {self.member}",
                    hint="both sides must use keys, and the server must admit this public key (see `weft keys`)",
                )
            case _ if self._may_be_wrong_key and event["value"] in (errno.EPIPE, errno.ECONNRESET):
                self._count_cut_handshake()

    def _count_cut_handshake(self) -> None:
        """A proxy without its server hangs up as well, so this must persist for a while."""
        now = time.monotonic()
        self._first_cut = self._first_cut or now
        self._num_cut_handshakes += 1
        if self._num_cut_handshakes >= MAX_CUT_HANDSHAKES and now - self._first_cut >= CUT_HANDSHAKES_S:
            raise AuthError(
                f"{self._server} ends every handshake with {self.member}",
                hint="is this its public key? it hangs up on a wrong one; both sides must use keys, or neither",
            )

    def drain(self, timeout_s: float) -> None:
        """Send as much of the backlog as the server reads in time; the last frames get a moment to leave."""
        deadline = time.monotonic() + timeout_s
        while self._backlog and time.monotonic() < deadline:
            self._socket.poll(_left_ms(deadline), zmq.POLLOUT)
            self._push()
        time.sleep(max(deadline - time.monotonic(), 0.0))

    def close(self, *, linger_s: float = 0.0) -> None:
        """Disconnect; messages still unsent after `linger_s` are dropped."""
        self._alarm.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=ceil(linger_s * 1e3))
        if self._owns_context:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _connected(context: zmq.Context[Any], address: str, member: str, keys: ClientKeys | None) -> tuple[Any, Any]:
    """A client's socket, and a monitor that tells how its handshakes end; neither leaks if this fails."""
    made = context.socket(zmq.DEALER)
    monitor = None
    try:
        made.setsockopt(zmq.IDENTITY, f"{member} {secrets.token_hex(4)}".encode())
        if keys is not None:
            made.curve_serverkey = keys.server_public.encode()
            made.curve_publickey = keys.own.public.encode()
            made.curve_secretkey = keys.own.secret.encode()
        _bound(made)
        monitor = made.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        made.connect(address)
    except zmq.ZMQError:
        if monitor is not None:
            made.disable_monitor()
            monitor.close(linger=0)
        made.close(linger=0)
        raise
    return made, monitor


def wait_any(channels: Sequence[Server | Client], alarm: Alarm, timeout_s: float) -> None:
    """Wait until one of these may have something to receive, or the alarm rings."""
    if any(channel.is_blocked for channel in channels):
        timeout_s = min(timeout_s, FLUSH_S)
    sources = [(source, zmq.POLLIN) for channel in channels for source in channel.sources]
    sources.append((alarm.descriptor, zmq.POLLIN))
    if alarm.descriptor in _ready(sources, time.monotonic() + timeout_s, 0.0):
        alarm.silence()


def _encoded(encoder: msgspec.msgpack.Encoder, message: Any, receiver: str, max_bytes: int) -> bytes:
    """A message encoded for the wire; raises if it cannot be sent."""
    name = type(message).__name__
    try:
        data = encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a {name} for {receiver} cannot be encoded: {error}") from error
    if len(data) > max_bytes:
        raise ProtocolError(f"a {name} of {len(data)} bytes for {receiver} exceeds the limit of {max_bytes}")
    return data


def own_address(server: str) -> str:
    """This host's address on the route to a server; nothing is sent."""
    host = _host_of(server)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _ready(sources: list[Any], deadline: float, spin_until: float) -> set[Any]:
    """The sources that can be read, as soon as one can; none once the deadline has passed."""
    ready = zmq.zmq_poll(sources, 0)
    while not ready and time.monotonic() < min(spin_until, deadline):
        ready = zmq.zmq_poll(sources, 0)
    return {source for source, _ in ready or zmq.zmq_poll(sources, _left_ms(deadline))}


def _left_ms(deadline: float) -> int:
    """Whole milliseconds until a deadline, rounded up; zero when it has passed."""
    return max(0, ceil((deadline - time.monotonic()) * 1e3))


def _bound(socket: zmq.Socket[bytes]) -> None:
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


def is_address(address: str) -> bool:
    """Whether a client can connect to this."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and match[2] != "*" and 0 < int(match[2]) < 65_536


def _check_bind(address: str, *, has_keys: bool) -> None:
    if not _is_loopback(_host_of(address)) and not has_keys:
        raise AuthError(
            f"listening on `{address}` without keys is refused: any process that reaches it could join",
            hint="make keys with `weft keys` and pass their folder, or listen on tcp://127.0.0.1",
        )


def _host_of(address: str) -> str:
    """The host of a tcp:// address; raises if it is not one."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[2] != "*" and not 0 < int(match[2]) < 65_536):
        raise ConfigError(f"invalid address `{address}`", hint="for example tcp://127.0.0.1:7070")
    return match[1].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
