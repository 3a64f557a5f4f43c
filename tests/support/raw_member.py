"""Members made by hand: they join as others do and then say whatever a test wants."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeVar

from weft.errors import WeftError
from weft.runtime.control.client import Client
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.control.messages import (
    PROTOCOL,
    Beat,
    Join,
    Loss,
    Offer,
    Open,
    Opened,
    ReceivePlan,
    SendPlan,
    ToMember,
    Written,
)
from weft.runtime.control.write_reports import WriteReport, WriteReports
from weft.runtime.controller.controller import Controller
from weft.transport.base import Descriptor, Endpoint
from weft.transport.host import ProcessIdentity
from weft.transport.registry import place_here

Kind = TypeVar("Kind")
SOON_S = 20.0
NUM_ELEMENTS = 500
WEIGHT_BYTES = 4 * NUM_ELEMENTS
WEIGHTS = HeldShard(name="w", dtype="fp32", shape=(NUM_ELEMENTS,), lo=(0,), extent=(NUM_ELEMENTS,), strides=(1,))


def part(rank: int, num_parts: int) -> HeldShard:
    """What one of several trainers holds of the weights."""
    extent = NUM_ELEMENTS // num_parts
    return HeldShard(
        name="w", dtype="fp32", shape=(NUM_ELEMENTS,), lo=(rank % num_parts * extent,), extent=(extent,), strides=(1,)
    )


def join_message(side: str, rank: int = 0, **changes: Any) -> Join:
    facts = {
        "side": side,
        "rank": rank,
        "held": HeldTable.of([WEIGHTS]).packed(),
        "place": place_here(),
        "process": ProcessIdentity.of(os.getpid()),
        "age_s": 0.0,
    }
    return Join(**(facts | changes))


class RawMember:
    """One connection to a controller."""

    def __init__(self, address: str, side: str, rank: int = 0) -> None:
        self.name, self.side, self.rank = f"{side} {rank}", side, rank
        self._client = Client(address, member=self.name, messages=ToMember, protocol=PROTOCOL)
        self._last_beat = 0.0

    def join(self, **changes: Any) -> Self:
        self.send(join_message(self.side, self.rank, **changes))
        return self

    def send(self, message: Any) -> None:
        self._client.send(message)

    def hear(self, *kinds: type[Kind], timeout_s: float = SOON_S) -> Kind:
        """The next message of a kind, or of some kinds; others are skipped, and beats go on."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if time.monotonic() - self._last_beat > 0.3:
                self._last_beat = time.monotonic()
                self.send(Beat())
            message = self._client.receive(0.1)
            if isinstance(message, kinds):
                return message
        raise WeftError(f"{self.name} heard no {' or '.join(kind.__name__ for kind in kinds)}")

    def open(self, **changes: Any) -> Opened:
        """Wait for Open, and answer it."""
        return self.answer(self.hear(Open), **changes)

    def answer(self, opening: Open, **changes: Any) -> Opened:
        """Answer Open as a member would whose memory nobody can reach."""
        offers = {
            name: Offer(
                endpoint=Endpoint(transport=name, member=self.name, data=b"\x80garbage"),
                descriptors=[Descriptor(transport=name, address=4096, num_bytes=WEIGHT_BYTES, data=b"")],
            )
            for name in opening.transports
        }
        landing, patches = (4096 if size else 0 for size in (opening.landing_bytes, opening.patch_bytes))
        facts = {"round": opening.round, "offers": offers, "landing": landing, "patches": patches}
        answer = Opened(**(facts | changes))
        self.send(answer)
        return answer

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextmanager
def fleet(controller: Controller, *names: str, num_parts: int = 1) -> Iterator[list[RawMember]]:
    """Members with their parts of the plan. `num_parts`: how many trainers share the weights."""
    with ExitStack() as stack:
        members = []
        for name in names:
            side, rank = name.split()
            held = part(int(rank), num_parts) if side == "trainer" else WEIGHTS
            member = stack.enter_context(RawMember(controller.address, side, int(rank)))
            members.append(member.join(held=HeldTable.of([held]).packed()))
        follow_plan(*members)
        yield members


def follow_plan(*members: RawMember) -> None:
    """All that have joined open what they are asked to, and hear their part of the plan."""
    for member in members:
        member.open()
    for member in members:
        member.hear(SendPlan if member.side == "trainer" else ReceivePlan)


def written(
    version: int,
    *engines: int,
    lost: Sequence[int] = (),
    whole: Sequence[int] = (),
    num_bytes: int = WEIGHT_BYTES,
) -> Written:
    """What a trainer says that has written its weights to some engine ranks, and no others."""
    reports = [WriteReport(engine, num_bytes, 0) for engine in engines]
    losses = [Loss(engine=engine, reason="nobody is there") for engine in lost]
    return Written(version=version, reports=WriteReports.of(reports), losses=losses, whole=list(whole))
