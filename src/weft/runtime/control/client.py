"""The end of a channel that connects (`weft.runtime.control.channel`)."""

from __future__ import annotations

import errno
import secrets
import time
from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Any, Self

import msgspec
import zmq
import zmq.utils.monitor

from weft.errors import AuthError, ConfigError, ProtocolError
from weft.runtime.control.addresses import host_of
from weft.runtime.control.channel import (
    MAX_BACKLOG_BYTES,
    MAX_DROPS,
    MAX_MESSAGE_BYTES,
    SPIN_S,
    Alarm,
    Reset,
    bound_limits,
    encoded,
    left_ms,
    readable,
)
from weft.runtime.control.fragments import Assembly, FragmentError, Frame, FrameKind, GapError, cut, pack_frame, parse
from weft.runtime.control.keys import ClientKeys

MAX_MEMBER_BYTES = 64
CUT_HANDSHAKES_S = 2.0
MAX_CUT_HANDSHAKES = 3
"""A server that hangs up this often while keys are checked does not hold the expected key."""


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
        host_of(address)
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
        self._spin_s = SPIN_S
        """How long to poll for the next message without sleeping."""
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

    def spin(self, spin_s: float) -> None:
        """Poll for so long for the next message, after each, without sleeping; may be called from any thread."""
        self._spin_s = spin_s
        self._spin_until = min(self._spin_until, time.monotonic() + spin_s)

    def wake(self) -> None:
        """Make a waiting `receive` return at once; may be called from any thread."""
        self._alarm.ring()

    def send(self, message: Any) -> None:
        """Queue a message; it leaves as soon as the server can be reached. Never waits."""
        self._spin_until = time.monotonic() + self._spin_s
        data = encoded(self._encoder, message, self._server, self._max_message_bytes)
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
        num_frames = 0
        while True:
            ready = self._wait(deadline)
            if self._monitor in ready:
                self._see(zmq.utils.monitor.recv_monitor_message(self._monitor))
            if self._has_arrived(ready):
                self._spin_until = time.monotonic() + self._spin_s
                message = self._take(self._socket.recv_multipart())
                num_frames += 1
                if message is not None or (num_frames >= MAX_DROPS and time.monotonic() > deadline):
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
        return readable(sources, deadline, self._spin_until)

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
                hint="check its public key: a wrong one ends the handshake; both sides must use keys, or neither",
            )

    def drain(self, timeout_s: float) -> None:
        """Send as much of the backlog as the server reads in time; the last frames get a moment to leave."""
        deadline = time.monotonic() + timeout_s
        while self._backlog and time.monotonic() < deadline:
            self._socket.poll(left_ms(deadline), zmq.POLLOUT)
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
        bound_limits(made)
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
