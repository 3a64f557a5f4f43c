"""Frames of the control plane: a fixed header, and messages cut into fragments. Pure; no socket.

    offset   0        4      5          7          11       15     23
             "weft"   kind   protocol   greeting   number   left   payload, at most 64 KiB

Every frame is one ZeroMQ message. Any two versions of weft can read the header and every kind but DATA, so that an
incompatible version is refused by name. All integers are little-endian.

    HELLO      a client greets the server, before its first message; `greeting` tells its greetings apart
    WHO        the server does not know this connection, or a frame was lost: greet again
    REFUSED    the server does not admit the client: reason, zero byte, hint. DENIED: the same, because of its key
    DATA       a fragment of a message: `number` counts DATA frames since the greeting, in each direction; `left` is how
               many bytes of the message follow

    frames = cut(b"…", protocol=5, greeting=0, first=0)
    assembly = Assembly(max_bytes=1 << 20)
    for data in frames:
        whole = assembly.take(parse(data))      # bytes with the last fragment, None before
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"weft"
HEADER = struct.Struct("<4sBHIIQ")
FRAGMENT_BYTES = 64 << 10
CURVE_BYTES = 64
"""What encryption may add to a frame."""
MAX_FRAME_BYTES = HEADER.size + FRAGMENT_BYTES + CURVE_BYTES
_WRAP = 1 << 32


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WHO = 2
    REFUSED = 3
    DENIED = 4
    DATA = 5


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """A parsed frame."""

    kind: FrameKind
    protocol: int
    greeting: int
    number: int
    left: int
    payload: bytes


class GapError(Exception):
    """A fragment is missing: the connection was cut in between."""


class FragmentError(Exception):
    """A fragment contradicts the one before, or its message is too long."""


def pack_frame(kind: FrameKind, *, protocol: int, greeting: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame that is not part of a message."""
    return HEADER.pack(MAGIC, kind, protocol, greeting, 0, 0) + payload


def parse(data: bytes) -> Frame | None:
    """A frame from the network; None if it is not a frame."""
    if not HEADER.size <= len(data) <= HEADER.size + FRAGMENT_BYTES:
        return None
    magic, kind, protocol, greeting, number, left = HEADER.unpack_from(data)
    known = _KINDS.get(kind)
    if magic != MAGIC or known is None:
        return None
    return Frame(known, protocol, greeting, number, left, data[HEADER.size :])


def cut(message: bytes, *, protocol: int, greeting: int, first: int) -> list[bytes]:
    """A message as DATA frames, numbered from `first`."""
    if len(message) <= FRAGMENT_BYTES:
        return [HEADER.pack(MAGIC, FrameKind.DATA, protocol, greeting, first % _WRAP, 0) + message]
    view = memoryview(message)
    frames = []
    for number, begin in enumerate(range(0, len(message), FRAGMENT_BYTES), first):
        payload = view[begin : begin + FRAGMENT_BYTES]
        left = len(message) - begin - len(payload)
        frames.append(b"".join((HEADER.pack(MAGIC, FrameKind.DATA, protocol, greeting, number % _WRAP, left), payload)))
    return frames


class Assembly:
    """Reassembles the fragments of one direction of one connection."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._next = 0
        self._parts: list[bytes] = []
        self._left = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether the rest of a message is missing."""
        return bool(self._parts)

    def take(self, frame: Frame) -> bytes | None:
        """The message this fragment completes, if any."""
        if frame.number != self._next:
            raise GapError(f"fragment {frame.number} arrived, expected {self._next}")
        size = len(frame.payload) + frame.left
        if self._parts and size != self._left:
            raise FragmentError(f"{size} bytes of a message are left, expected {self._left}")
        if not self._parts and size > self._max_bytes:
            raise FragmentError(f"message of {size} bytes exceeds the limit of {self._max_bytes}")
        if frame.left and len(frame.payload) != FRAGMENT_BYTES:  # many small ones would cost far more than they carry
            raise FragmentError(f"fragment has {len(frame.payload)} bytes, expected {FRAGMENT_BYTES}")
        self._next = (self._next + 1) % _WRAP
        if not frame.left and not self._parts:
            return frame.payload
        self._parts.append(frame.payload)
        self._left = frame.left
        if frame.left:
            return None
        whole = b"".join(self._parts)
        self._parts = []
        return whole
