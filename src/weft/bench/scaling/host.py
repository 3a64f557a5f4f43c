"""What runs on the hosts of a lab for `weft bench scaling`: `python -m weft.bench.scaling.host DESCRIPTOR`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch.distributed as dist

from weft.bench import baselines
from weft.bench.fleet import answer_requests
from weft.bench.scaling.sockets import Sink, Streams
from weft.bench.worker import BenchEngine, BenchTrainer, Setup, sleep_until
from weft.config import TransferSettings
from weft.runtime.control.security import Security
from weft.runtime.controller.controller import Controller


class ScalingTrainer(BenchTrainer):
    """A trainer on a host of its own."""

    _streams: Streams | None = None

    def send_to_each(self, start: float) -> tuple[float, float]:
        """Rank 0's weights, which are already there, to one engine rank after the other."""
        full = baselines.full_tensors(self.module, self.groups)
        dist.barrier()
        sleep_until(start)
        began = time.monotonic()
        baselines.send_to_each(full, self.groups)
        dist.barrier()
        return began, time.monotonic()

    def connect(self, sinks: Sequence[tuple[str, int]]) -> None:
        """Open plain sockets to these sinks."""
        self._streams = Streams(sinks)

    def stream(self, num_bytes: int, start: float) -> tuple[float, float]:
        """Send so many bytes to each sink."""
        assert self._streams is not None
        return self._streams.send(num_bytes, start)

    def disconnect(self) -> None:
        """Close them."""
        assert self._streams is not None
        self._streams.close()


class ScalingEngine(BenchEngine):
    """An engine rank on a host of its own."""

    _sinks: Sequence[Sink] = ()

    def receive_whole(self) -> None:
        """Take rank 0's weights from rank 0."""
        dist.barrier()
        baselines.receive_whole(self.module, self.parts)
        dist.barrier()

    def listen(self, addresses: Sequence[str]) -> list[tuple[str, int]]:
        """Take bytes from plain sockets, one for each NIC; returns where."""
        self._sinks = [Sink(address) for address in addresses]
        return [(address, sink.port) for address, sink in zip(addresses, self._sinks, strict=True)]

    def stop_listening(self) -> None:
        """Take no more."""
        for sink in self._sinks:
            sink.close()


class ScalingController:
    """The controller, on a host of its own."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._controller: Controller | None = None

    def open(self, settings: dict[str, Any], security: Security, *, rebalance: bool) -> str:
        """Listen for the members of this fleet; returns where."""
        self._controller = Controller(
            f"tcp://{os.environ['WEFT_LAB_ADDRESS']}:*",
            num_trainers=self._setup.num_trainers,
            num_engine_ranks=self._setup.num_engine_ranks,
            ranks_per_engine=self._setup.num_parts,
            settings=msgspec.convert(settings, TransferSettings),
            rebalance=rebalance,
            security=security,
        )
        return self._controller.address

    def wire_bytes(self) -> int:
        """Bytes of the last version on the wire."""
        assert self._controller is not None
        return self._controller.statistics().last_wire_bytes

    def shut(self) -> None:
        """Stop."""
        if self._controller is not None:
            self._controller.close()
        self._controller = None

    def close(self) -> None:
        """Nothing else is open."""


MEMBERS: dict[str, Callable[[Setup], ScalingTrainer | ScalingEngine | ScalingController]] = {
    "trainer": ScalingTrainer,
    "engine": ScalingEngine,
    "controller": ScalingController,
}


def serve(pipe: Connection) -> None:
    """The process; its setup comes first."""
    logging.disable(logging.WARNING)  # members that leave are expected here
    setup: Setup = pipe.recv()
    try:
        member = MEMBERS[setup.side](setup)
        answer_requests(pipe, member)
        member.shut()
        member.close()
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
