"""One engine rank's versions: what all its trainers send lands at the rate of its NIC, is digested and committed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from weft.bench.slice.link import PacedTransport
from weft.bench.slice.members import bytes_at, layout_weights, member_plans
from weft.bench.slice.trainer import VERSION_S, SliceVersion
from weft.config import TransferSettings
from weft.core.plans.plan import Plan
from weft.devices import CPU, device_work
from weft.errors import TransferTimeout
from weft.runtime.control.messages import Opened
from weft.runtime.memory import own_memory
from weft.runtime.receive.arrivals import Arrivals
from weft.runtime.receive.landing import ArrivingLink, Landing
from weft.runtime.receive.modes import MODES
from weft.runtime.transports import OpenTransports

LOOK_S = 0.0002
_MASK = (1 << 64) - 1


class EngineSlice:
    """One engine rank of a plan, ready to receive in mode `shadow`."""

    def __init__(self, plan: Plan, rank: int, settings: TransferSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self._work = device_work(device)
        self._weights = layout_weights(plan.recipe.engine, rank, device)
        linked = np.flatnonzero(plan.pair_bytes[:, rank]).tolist()
        trainers = {trainer: layout_weights(plan.trainer, trainer, "meta") for trainer in linked}
        parts = member_plans(plan, settings, device, trainers=trainers, engines={rank: self._weights})
        no_offers = Opened(round=1, offers={})
        found = parts.receive_plan(rank, dict.fromkeys(range(plan.topology.num_trainers), no_offers))
        self._memory = own_memory(device, parts.opening(rank).landing_bytes)
        self._landing = Landing(found.sources, self._weights, landing=self._memory)
        largest = max(chunk.num_bytes for link in self._landing.arriving for chunk in link.chunks)
        self._arriving = own_memory(device, largest)
        self._transport = PacedTransport(f"engine {rank}", self._work)
        self._transports = OpenTransports(
            f"engine {rank}", rank=rank, device=device, controller="tcp://127.0.0.1:1", given=self._transport
        )
        self._mode = MODES[settings.mode](self._work)
        self._mode.plan(self._landing.steps)
        self._version = 0
        self._has_landed = False
        """Whether everything of the last version has been written."""
        self.is_exact = True
        """Whether every version so far was committed as it landed."""

    def fill(self) -> None:
        """Different bytes at every place."""
        for memory in (self._memory, self._arriving):
            bytes_at(memory.address, memory.num_bytes, self._device).random_(0, 256)

    def receive(self, bytes_per_s: float = float("inf")) -> SliceVersion:
        """Receive a version over a NIC of this rate, and commit it."""
        self._version += 1
        self._transport.pace.bytes_per_s = bytes_per_s
        arrivals = Arrivals(
            self._version,
            self._landing.arriving,
            self._transports,
            self._work,
            self._settings.digest,
            tag=self._version,
            is_on_gpu=self._device != CPU,
        )
        self._work.synchronize()
        self._has_landed = False
        writer = threading.Thread(target=self._land, args=(self._version,), daemon=True)
        began = time.monotonic()
        writer.start()
        verify_s = 0.0
        while not arrivals.is_whole:
            if began + VERSION_S < time.monotonic() or not (writer.is_alive() or self._has_landed):
                raise TransferTimeout(f"only {arrivals.num_bytes} of {arrivals.total_bytes} bytes have landed")
            looked = time.monotonic()
            if arrivals.follow():
                verify_s += time.monotonic() - looked
            else:
                time.sleep(LOOK_S)
        writer.join()
        verified = time.monotonic()
        self._mode.make_visible(self._version, whole=True)
        self._work.synchronize()
        ended = time.monotonic()
        self.is_exact &= arrivals.digest == self._live_digest()
        return SliceVersion(
            seconds=ended - began,
            stages={"verify": verify_s, "commit": ended - verified},
            num_bytes=arrivals.total_bytes,
        )

    def _land(self, tag: int) -> None:
        """The NIC: Chunks of all trainers in turn."""
        for writer, address, num_bytes in self._order():
            self._transport.land(tag, writer, address, self._arriving.address, num_bytes)
        self._has_landed = True

    def _order(self) -> Iterator[tuple[int, int, int]]:
        """Trainer, address and bytes of every Chunk, one of each trainer after the other."""
        rounds = itertools.zip_longest(*(_pieces(link) for link in self._landing.arriving))
        return (piece for turn in rounds for piece in turn if piece is not None)

    def _live_digest(self) -> int:
        """Digest of the live weights, read where the version belongs."""
        step = self._landing.steps[0]
        live = replace(step.back, position=step.position, position_stride=step.position_stride)
        return self._work.digest_planes(live) & _MASK

    def close(self) -> None:
        """Close its transport."""
        self._transports.close_all()


def _pieces(link: ArrivingLink) -> Iterator[tuple[int, int, int]]:
    """Trainer, address and bytes of each Chunk of a link, in order."""
    for chunk in link.chunks:
        yield link.trainer, int(chunk.planes.src.min()), chunk.num_bytes
