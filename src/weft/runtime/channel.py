"""Control-plane channels: typed messages over ZeroMQ, authenticated, bounded in size, never pickled.

    consumes      frames from the network                  produces      decoded messages of one msgspec union
    waits for     a message, at most `timeout_s`           unblocked by  the network, or `close` from the same thread

A Server (the controller) talks to many Clients (members). Without keys a server listens on loopback only. What is not
a whole message of the expected union is counted and dropped, never raised: a stranger cannot stop the server.

    server = Server("tcp://127.0.0.1:7070", messages=Ping | Pong)
    client = Client(server.address, member="trainer 0", messages=Ping | Pong)
    client.send(Ping(number=1))
    received = server.receive(timeout_s=1.0)        # Received(sender="trainer 0 3f6a0c1e", message=Ping(number=1))
    server.send(received.sender, Pong(number=1))
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Self

import msgspec
import zmq
import zmq.auth.thread
import zmq.utils.monitor
import zmq.utils.z85

from weft.errors import AuthError, ConfigError, ProtocolError
from weft.runtime.keys import Keys

MAX_MESSAGE_BYTES = 256 << 20
MAX_MEMBER_BYTES, MAX_SENDER_BYTES = 64, 80
HEARTBEAT_MS, SILENCE_MS = 1_000, 5_000
SPIN_S = 0.001 if len(os.sched_getaffinity(0)) >= 8 else 0.0
"""How long after a message to look for the next without sleeping: they come in bursts, and waking up takes longer."""
BURST_SPIN_S = 100 * SPIN_S
"""The same for somebody who knows that a message will come soon."""
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5}|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message and who sent it."""

    sender: str
    """Names the connection: the member, and something random that tells its processes apart."""
    message: Any


@dataclass(slots=True, kw_only=True)
class ChannelStatistics:
    """What a server has seen."""

    num_received: int = 0
    num_sent: int = 0
    num_malformed: int = 0
    """Frames that were not a message; dropped."""
    num_unreachable: int = 0
    """Messages to members that are not connected; dropped."""


class Server:
    """The controller's end. Used by one thread."""

    def __init__(
        self,
        address: str,
        *,
        messages: Any,
        keys: Keys | None = None,
        allowed: Collection[str] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        _check_bind(address, keys)
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self._statistics = ChannelStatistics()
        self._context = zmq.Context()
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            if keys is not None:
                self._authenticate(keys, frozenset(allowed))
            _bound(self._socket, max_message_bytes)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a process that reconnects is the same one
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on `{address}`: {error.strerror}", hint="is the port in use?") from error
        self._sources = [(self._socket, zmq.POLLIN)]
        self.spin_s = SPIN_S
        """How long after a message to look for the next without sleeping."""
        self._spin_until = 0.0
        bound: Any = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        self.address: str = bound.decode().rstrip("\0")

    def _authenticate(self, keys: Keys, allowed: frozenset[str]) -> None:
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_AllowList(allowed))
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()

    def receive(self, timeout_s: float) -> Received | None:
        """The next message, or None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while _ready(self._sources, deadline, self._spin_until):
            received = self._decoded(self._socket.recv_multipart(copy=True))
            if received is not None:
                self._statistics.num_received += 1
                self._spin_until = time.monotonic() + self.spin_s
                return received
            self._statistics.num_malformed += 1
            if time.monotonic() > deadline:
                break
        return None

    def _decoded(self, frames: list[bytes]) -> Received | None:
        if len(frames) != 2 or not 0 < len(frames[0]) <= MAX_SENDER_BYTES:
            return None
        try:
            return Received(sender=frames[0].decode("ascii"), message=self._decoder.decode(frames[1]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def send(self, receiver: str, message: Any) -> bool:
        """Send to a connection; False if it is gone."""
        try:
            self._socket.send_multipart([receiver.encode(), self._encoder.encode(message)])
        except zmq.ZMQError:
            self._statistics.num_unreachable += 1
            return False
        self._statistics.num_sent += 1
        return True

    def statistics(self) -> ChannelStatistics:
        """A snapshot of the counters."""
        return replace(self._statistics)

    def close(self) -> None:
        """Stop listening; unsent messages are dropped."""
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _AllowList:
    """Decides, for the authenticator, which public keys may connect."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with the raw or printable key, depending on its version."""
        del domain
        printable = key if len(key) == 40 else zmq.utils.z85.encode(key)
        return printable.decode() in self._allowed


class Client:
    """A member's end. Used by one thread."""

    def __init__(
        self,
        address: str,
        *,
        member: str,
        messages: Any,
        keys: Keys | None = None,
        server_public: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        _host_of(address)
        if (keys is None) != (not server_public):
            raise AuthError(f"{member} needs both its own key and the controller's public key, or neither")
        if not 0 < len(member.encode()) <= MAX_MEMBER_BYTES or not member.isascii():
            raise ConfigError(f"`{member}` cannot name a member", hint=f"1 to {MAX_MEMBER_BYTES} ASCII characters")
        self.member = member
        self._server = address
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{member} {secrets.token_hex(4)}".encode())
        if keys is not None:
            self._socket.curve_serverkey = server_public.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        _bound(self._socket, max_message_bytes)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.spin_s = SPIN_S
        """How long after a message to look for the next without sleeping; may be set from any thread."""
        self._spin_until = 0.0
        self._sources: list[Any] = [(source, zmq.POLLIN) for source in (self._socket, self._monitor, self._wake)]
        self._socket.connect(address)

    def wake(self) -> None:
        """Make a waiting `receive` return at once; may be called from any thread."""
        os.eventfd_write(self._wake, 1)

    def send(self, message: Any) -> None:
        """Queue a message; it leaves as soon as the server can be reached."""
        self._spin_until = time.monotonic() + self.spin_s
        try:
            self._socket.send(self._encoder.encode(message), flags=zmq.DONTWAIT)
        except zmq.Again:
            raise ProtocolError(
                f"{self.member} cannot send: the controller at `{self._server}` does not take messages",
                hint="is the controller running?",
            ) from None

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, or None when there is none in time or `wake` was called. Raises AuthError if refused."""
        deadline = time.monotonic() + timeout_s
        while ready := _ready(self._sources, deadline, self._spin_until):
            if self._socket in ready:
                self._spin_until = time.monotonic() + self.spin_s
                return self._decode(self._socket.recv_multipart())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                return None
            self._refused(zmq.utils.monitor.recv_monitor_message(self._monitor))
        return None

    def _decode(self, frames: list[bytes]) -> Any:
        try:
            (frame,) = frames
            return self._decoder.decode(frame)
        except (ValueError, msgspec.DecodeError) as error:
            raise ProtocolError(f"the controller at `{self._server}` sent what is no message: {error}") from error

    def _refused(self, event: Any) -> None:
        if event["event"] in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            raise AuthError(
                f"the controller at `{self._server}` refused {self.member}",
                hint="its public key must be in the controller's folder of keys, and both sides must use keys",
            )

    def close(self) -> None:
        """Disconnect; unsent messages are dropped."""
        os.close(self._wake)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def own_address(server: str) -> str:
    """The address of this host on the way to a server; nothing is sent."""
    host = _host_of(server)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _ready(sources: list[Any], deadline: float, spin_until: float) -> set[Any]:
    """Which sources can be read, as soon as one can; none when the deadline has passed."""
    ready = zmq.zmq_poll(sources, 0)
    while not ready and time.monotonic() < min(spin_until, deadline):
        ready = zmq.zmq_poll(sources, 0)
    return {source for source, _ in ready or zmq.zmq_poll(sources, _left_ms(deadline))}


def _left_ms(deadline: float) -> int:
    """Whole milliseconds until a deadline, rounded up; zero when it has passed."""
    return max(0, ceil((deadline - time.monotonic()) * 1e3))


def _bound(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    """Limits that hold on both ends: message size, and how long silence may last."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)
    socket.setsockopt(zmq.LINGER, 0)


def _check_bind(address: str, keys: Keys | None) -> None:
    if not _is_loopback(_host_of(address)) and keys is None:
        raise AuthError(
            f"refusing to listen on `{address}` without keys: anyone who reaches it could join",
            hint="make keys with `weft keys`, or listen on tcp://127.0.0.1",
        )


def _host_of(address: str) -> str:
    """The host of a tcp:// address; raises if it is none."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[2] != "*" and not 0 < int(match[2]) < 65_536):
        raise ConfigError(f"`{address}` is not an address", hint="for example tcp://127.0.0.1:7070")
    return match[1].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
