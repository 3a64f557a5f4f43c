"""Everything that travels on the control plane. Version 1.

    member → controller   Join, Want, Written, Ready, Failed, Committed, Beat, Leave
    controller → member   Refused, SendPlan, ReceivePlan, Go, Verify, Decide

Columns of numbers travel as little-endian 8-byte integers.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from weft.transport.base import Column, Descriptor, Endpoint

PROTOCOL = 1


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class HeldShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One shard of a member, and where it lies in its memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    address: int


class Join(_Message, frozen=True):
    """A member is there, with these weights."""

    protocol: int
    side: Literal["trainer", "engine"]
    rank: int
    held: list[HeldShard]
    """For engines: with the address of the staging memory instead of the live one."""
    endpoint: Endpoint
    descriptors: list[Descriptor]


class Want(_Message, frozen=True):
    """A trainer wants to write a version."""

    version: int


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one trainer wrote to one engine rank."""

    engine: int
    num_bytes: int
    digest: int


class Written(_Message, frozen=True):
    """A trainer has written all it owes for a version."""

    version: int
    parts: list[Part]


class Ready(_Message, frozen=True):
    """An engine rank holds a version, whole and verified."""

    version: int


class Failed(_Message, frozen=True):
    """A member cannot do its part of a version."""

    version: int
    reason: str


class Committed(_Message, frozen=True):
    """An engine rank serves a version."""

    version: int


class Beat(_Message, frozen=True):
    """Still there."""


class Leave(_Message, frozen=True):
    """A member goes, on purpose."""


class Refused(_Message, frozen=True):
    """A member cannot take part."""

    reason: str
    hint: str = ""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows one trainer writes to one engine rank."""

    engine: int
    endpoint: Endpoint
    descriptors: list[Descriptor]
    src: bytes
    dst: bytes
    length: bytes
    position: bytes
    """Where each row lies in the engine rank's staging memory: the digest's space."""


class SendPlan(_Message, frozen=True):
    """A trainer's part of the plan."""

    plan_digest: str
    targets: list[Target]


class ReceivePlan(_Message, frozen=True):
    """An engine rank's part of the plan."""

    plan_digest: str
    num_bytes: int


class Go(_Message, frozen=True):
    """A trainer may write a version."""

    version: int


class Verify(_Message, frozen=True):
    """All trainers have written a version; this is what an engine rank should hold."""

    version: int
    num_bytes: int
    digest: int


class Decide(_Message, frozen=True):
    """The fate of a version."""

    version: int
    commit: bool
    reason: str = ""


ToController = Join | Want | Written | Ready | Failed | Committed | Beat | Leave
ToMember = Refused | SendPlan | ReceivePlan | Go | Verify | Decide


def pack(column: Column) -> bytes:
    """A column for the wire."""
    return np.ascontiguousarray(column, dtype="<u8").tobytes()


def unpack(data: bytes) -> Column:
    """A column from the wire."""
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)
