"""The end of a channel that many connect to (`weft.runtime.control.channel`)."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple, Self

import msgspec
import zmq
import zmq.auth.thread
import zmq.utils.z85

from weft.errors import ConfigError
from weft.runtime.control.addresses import check_bind
from weft.runtime.control.channel import (
    FLUSH_S,
    MAX_BACKLOG_BYTES,
    MAX_DROPS,
    MAX_MESSAGE_BYTES,
    SPIN_S,
    Alarm,
    ChannelStatistics,
    Invalid,
    Received,
    bound_limits,
    encoded,
    member_of,
    readable,
)
from weft.runtime.control.fragments import Assembly, FragmentError, Frame, FrameKind, GapError, cut, pack_frame, parse
from weft.runtime.control.keys import REREAD_S, KeyRing, ServerKeys
from weft.runtime.control.member_id import MemberId

MAX_SENDER_BYTES = 80
MAX_CONNECTIONS_PER_MEMBER = 4
"""Processes that may connect under one name: a member, and those that would replace it."""
MAX_STRANGERS = 1024
"""Strangers whose last answer is remembered; more are not answered."""
MAX_REASON_BYTES = 1024
ANSWER_S = 0.25
"""How often a stranger is answered."""
_NOW, _MORE_NOW = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
UNFINISHED_S = 10.0
"""How long the rest of a message may be missing."""


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


class _Unread(NamedTuple):
    """A ZeroMQ message that was not looked at yet."""

    sender: str
    data: bytes | None
    """Its frame; None if there is not exactly one, or the sender has no name."""
    key: str
    """The sender's."""
    spent_s: float
    """Processor time that taking it from the network took."""


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
        check_bind(address, has_keys=keys is not None)
        self._protocol, self._objection = protocol, objection
        self._allowed = None if keys is None else keys.allowed
        self._max_message_bytes = max_message_bytes
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_message: Any = None
        self._last_data = b""
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
            bound_limits(self._socket)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a process that reconnects keeps its identity
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"listening on `{address}` failed: {error.strerror}", hint="is the port in use?"
            ) from error
        self._aside: deque[_Unread] = deque()
        """What was received and not looked at yet."""
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

    def gather(self, count: int, timeout_s: float) -> None:
        """Put aside what arrives, until there is so much or the time has passed; `receive` then looks at all of it.

        While messages come one by one, other threads displace this one from the processor's caches in between, and
        looking at each takes several times as long.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._aside) < count and self._is_readable(deadline):
            self._aside.append(self._read())

    def receive(self, timeout_s: float) -> Received | None:
        """The next message, or None if there is none in time or `wake` was called."""
        deadline = time.monotonic() + timeout_s
        self._forget_unfinished()
        num_dropped = 0
        while self._aside or self._is_readable(deadline):
            received = self._take(self._aside.popleft() if self._aside else self._read())
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
            ready = readable(self._sources, min(deadline, time.monotonic() + FLUSH_S), self._spin_until)
            if ready:
                return self._has_frame(ready)
            if time.monotonic() >= deadline:
                return False
        return self._has_frame(readable(self._sources, deadline, self._spin_until))

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

    def _take(self, unread: _Unread) -> Received | None:
        """Look at one ZeroMQ message; None unless it completes a message of an admitted peer."""
        sender, data, key, spent_s = unread
        thread_s = time.thread_time() - spent_s
        frame = parse(data) if data is not None else None
        if frame is not None and frame.kind is FrameKind.HELLO:
            self._hear(sender, frame, key)
            return None
        peer = self._peers.get(sender)
        if peer is not None and peer.key == key and (frame is None or frame.greeting == peer.greeting):
            message = self._message(sender, peer, frame)
            return None if message is None else Received(sender, message, peer.key, thread_s)
        self._statistics.num_malformed += 1
        if frame is not None:
            self._answer(sender, FrameKind.WHO, frame.greeting)
        return None

    def _read(self) -> _Unread:
        """Take one ZeroMQ message from the network."""
        began_s = time.thread_time()
        name = self._socket.recv()
        data, key = self._payload() if self._allowed is None else self._signed_payload()
        is_alone = not self._socket.getsockopt(zmq.RCVMORE)
        if not is_alone:
            self._socket.recv_multipart()
        if not 0 < len(name) <= MAX_SENDER_BYTES or not name.isascii():
            return _Unread("", None, "", 0.0)
        return _Unread(name.decode("ascii"), data if is_alone else None, key, time.thread_time() - began_s)

    def _payload(self) -> tuple[bytes, str]:
        """A frame of the message being read; without keys."""
        return self._socket.recv(), ""

    def _signed_payload(self) -> tuple[bytes, str]:
        """The same, and the key of its sender, which only a frame that is not copied knows."""
        frame: Any = self._socket.recv(copy=False)
        return frame.bytes, frame["User-Id"]

    def _message(self, sender: str, peer: _Admitted, frame: Frame | None) -> Any:
        """The message a frame completes, if any."""
        peer.heard_at = time.monotonic()
        try:
            if frame is None or frame.kind is not FrameKind.DATA or frame.protocol != self._protocol:
                raise FragmentError("a frame is not part of a message")
            whole = peer.inbound.take(frame)
            return self._decoder.decode(whole) if whole is not None else None
        except GapError:  # the connection was cut in between: the member must learn that something was lost
            self.forget(sender)
            self._answer(sender, FrameKind.WHO, peer.greeting)
            return None
        except FragmentError as error:
            self._statistics.num_malformed += 1
            return Invalid(reason=str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._statistics.num_malformed += 1
            return Invalid(reason=f"{type(error).__name__}: {error}")

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
        if message is not self._last_message:  # the same message often goes to many
            self._last_data = encoded(self._encoder, message, receiver, self._max_message_bytes)
            self._last_message = message
        data = self._last_data
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
            self._socket.send(connection.encode("ascii"), _MORE_NOW)
            self._socket.send(frame, _NOW)
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
