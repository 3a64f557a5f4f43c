"""Senders and receivers of a rehearsal: the real ones, except that nothing touches the weights.

They take part as if each had a GPU of the cluster that is rehearsed. Magnitudes of FP8 blocks are exchanged at their
full size, all zero; Chunks are posted without being filled; what lands is digested to zero on both sides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from weft.codec.conversion import Converter
from weft.core.geometry.planes import Column, Planes
from weft.core.topology import Topology
from weft.devices import DeviceWork
from weft.rehearse.transport import STANDS_FOR, CountingTransport
from weft.runtime.control.messages import Join, ReceivePlan, SendPlan, TrainerSource
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights
from weft.transport.registry import Place

TURN_S = 600.0


@dataclass(slots=True)
class PartLog:
    """The parts of the plan a member received, and how it compiled them."""

    num_plans: int = 0
    """Parts that were compiled."""
    shipped_bytes: int = 0
    """Of the last one."""
    compile_s: float = 0.0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def compiled(self, compile_s: float) -> None:
        """One more part is compiled."""
        with self.changed:
            self.num_plans += 1
            self.compile_s = compile_s
            self.changed.notify_all()

    def wait(self, num_plans: int, timeout_s: float) -> bool:
        """Wait until so many parts are compiled."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_plans >= num_plans, timeout_s)


def rehearsed_place(topology: Topology, side: str, rank: int) -> Place:
    """The place a member reports: its GPU of the cluster."""
    devices = topology.trainer_device if side == "trainer" else topology.engine_device
    host, number = divmod(int(devices[rank]), topology.host.devices)
    return Place(
        host=f"rehearsed host {host}",
        container="rehearsed",
        user=os.getuid(),
        device=f"cuda:{number}",
        installed=(STANDS_FOR,),
        device_number=number,
    )


class RehearsedSender(Sender):
    """A trainer rank without memory behind its weights. Members of one process compile one after the other (`turn`)."""

    def __init__(
        self, address: str, *, rank: int, weights: Weights, transport: CountingTransport, place: Place, turn: Any
    ) -> None:
        self.log = PartLog()
        self._claimed, self._turn = place, turn
        super().__init__(address, rank=rank, weights=weights, transport=transport, timeout_s=TURN_S)

    def _join_message(self) -> Join | None:
        join = super()._join_message()
        return None if join is None else msgspec.structs.replace(join, place=self._claimed)

    def _follow(self, plan: SendPlan) -> None:
        self.log.shipped_bytes = len(msgspec.msgpack.encode(plan))
        with self._turn:
            began = time.monotonic()
            super()._follow(plan)
            assert self._program is not None
            _keep_still(self._program.converter)
            self.log.compiled(time.monotonic() - began)


class RehearsedReceiver(Receiver):
    """An engine rank without memory behind its weights."""

    def __init__(
        self, address: str, *, rank: int, weights: Weights, transport: CountingTransport, place: Place, turn: Any
    ) -> None:
        self.log = PartLog()
        self._claimed, self._turn = place, turn
        super().__init__(address, rank=rank, weights=weights, transport=transport)

    def _device_work(self, device: str) -> DeviceWork:
        return StillWork()

    def _join_message(self) -> Join | None:
        join = super()._join_message()
        return None if join is None else msgspec.structs.replace(join, place=self._claimed)

    def _follow_plan(self, sources: Sequence[TrainerSource]) -> None:
        self.log.shipped_bytes = len(msgspec.msgpack.encode(ReceivePlan(plan_digest="", sources=list(sources))))
        with self._turn:
            began = time.monotonic()
            super()._follow_plan(sources)
            self.log.compiled(time.monotonic() - began)


class StillWork:
    """Device work that does nothing."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def queued(self) -> Callable[[], None]:
        """The same."""
        return self.synchronize

    def copy(self, dst: Column, src: Column, length: Column, *, num_threads: int = 1) -> int:
        """Bytes that would be copied."""
        del dst, src, num_threads
        return int(length.sum())

    def digest(self, address: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Of nothing."""
        del address, position, length, num_threads
        return 0

    def copy_digest(self, dst: Column, src: Column, position: Column, length: Column, *, num_threads: int = 1) -> int:
        """Of nothing."""
        del dst, src, position, length, num_threads
        return 0

    def copy_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Bytes that would be copied."""
        del num_threads
        return planes.num_bytes

    def digest_planes(self, planes: Planes, *, num_threads: int = 1) -> int:
        """Of nothing."""
        del planes, num_threads
        return 0

    def digest_each(self, tables: Sequence[Planes]) -> list[int]:
        """Of nothing."""
        return [0] * len(tables)

    def copy_digest_planes(self, planes: Planes, *, num_groups: int = 1, num_threads: int = 1) -> list[int]:
        """Of nothing."""
        del planes, num_threads
        return [0] * num_groups


def _keep_still(converter: Converter) -> None:
    """Make a converter skip reading weights, making scales and filling Chunks; its messages keep their size."""
    for name in ("agree", "fill"):
        setattr(converter, name, _do_nothing)
    zeros = [np.zeros(len(blocks), dtype=np.float32) for blocks in converter.cut]
    setattr(converter, "find_amax", zeros.__getitem__)  # noqa: B010 - mypy does not allow assigning to a method


def _do_nothing(*_: object) -> None:
    """Instead of touching memory."""
