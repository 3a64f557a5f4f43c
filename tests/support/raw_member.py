"""A member made by hand: it joins as others do and then says whatever a test wants."""

from __future__ import annotations

import os
import time
from typing import Any, Self, TypeVar

from weft.errors import WeftError
from weft.runtime.control.client import Client
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.control.messages import PROTOCOL, Beat, Join, Offer, Open, Opened, ToMember
from weft.transport.base import Descriptor, Endpoint
from weft.transport.host import ProcessIdentity
from weft.transport.registry import place_here

Kind = TypeVar("Kind")
SOON_S = 10.0
WEIGHTS = HeldShard(name="w", dtype="fp32", shape=(500,), lo=(0,), extent=(500,), strides=(1,))


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

    def hear(self, kind: type[Kind], timeout_s: float = SOON_S) -> Kind:
        """The next message of a kind; others are skipped, and beats go on."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if time.monotonic() - self._last_beat > 0.3:
                self._last_beat = time.monotonic()
                self.send(Beat())
            message = self._client.receive(0.1)
            if isinstance(message, kind):
                return message
        raise WeftError(f"{self.name} heard no {kind.__name__}")

    def open(self, **changes: Any) -> Opened:
        """Answer Open as a member would whose memory nobody can reach."""
        opening = self.hear(Open)
        offers = {
            name: Offer(
                endpoint=Endpoint(transport=name, member=self.name, data=b"\x80garbage"),
                descriptors=[Descriptor(transport=name, address=4096, num_bytes=2000, data=b"")],
            )
            for name in opening.transports
        }
        facts = {"round": opening.round, "offers": offers, "landing": 4096 if opening.landing_bytes else 0}
        answer = Opened(**(facts | changes))
        self.send(answer)
        return answer

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
