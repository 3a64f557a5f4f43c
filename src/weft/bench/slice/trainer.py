"""One trainer's versions: its shards, its boxes, its stages, into landing areas on the same device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from weft.bench.on_gpu import contents
from weft.bench.slice.link import STANDS_FOR, PacedTransport
from weft.bench.slice.members import layout_weights, member_plans
from weft.config import DeltaPolicy, TransferSettings
from weft.core.geometry.alignment import aligned
from weft.core.plans.plan import Plan
from weft.devices import CPU, device_work
from weft.errors import WeftError
from weft.events import busy_seconds
from weft.runtime.compile.link_boxes import LinkBoxes
from weft.runtime.compile.link_stream import LinkStream
from weft.runtime.control.messages import EngineTarget, Go, Offer, Opened, SendPlan
from weft.runtime.memory import own_memory
from weft.runtime.send.job import Job, Sent
from weft.runtime.send.mirror import Mirror
from weft.runtime.send.program import SendProgram
from weft.runtime.send.stages import send_version, send_whole
from weft.runtime.transports import OpenTransports
from weft.transport.base import Endpoint, Memory

VERSION_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceVersion:
    """How one version went."""

    seconds: float
    """From its begin to the last byte written; on engine ranks, until it is committed."""
    stages: dict[str, float]
    """Seconds each stage was busy."""
    num_bytes: int
    """Bytes on the wire."""


class TrainerSlice:
    """One trainer of a plan, ready to send."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        settings: TransferSettings,
        device: str,
        *,
        is_offloaded: bool = False,
        most_bytes: float = float("inf"),
        planned_for: str = "",
    ) -> None:
        """`is_offloaded`: its weights are in host memory. `most_bytes`: engine ranks beyond these are left out.

        `planned_for`: the device the plan is made for, if it is another one.
        """
        self._settings, self._device = settings, device
        self._planned_for = planned_for or device
        home = CPU if is_offloaded else device
        self._own = layout_weights(plan.trainer, rank, home, is_pinned=is_offloaded and device != CPU)
        self._mirror = Mirror(self._own, device) if is_offloaded else None
        weights = self._own if self._mirror is None else self._mirror.weights
        self._work = device_work(device)
        self._transport = PacedTransport(f"trainer {rank}", self._work)
        self._landing: dict[int, Memory] = {}
        self._streams: dict[int, LinkStream] = {}
        found = self._send_plan(plan, rank)
        targets = [self._landed(target) for target in found.targets if self._has_room(target, most_bytes)]
        transports = OpenTransports(
            f"trainer {rank}", rank=rank, device=device, controller="tcp://127.0.0.1:1", given=self._transport
        )
        self._program = SendProgram(
            msgspec.structs.replace(found, targets=targets), transports, settings, weights, mirror=self._mirror
        )
        self._version = 0
        self._held: int | None = None

    def _send_plan(self, plan: Plan, rank: int) -> SendPlan:
        """The trainer's part of the plan; addresses of engine ranks are filled in later."""
        linked = np.flatnonzero(plan.pair_bytes[rank]).tolist()
        engines = {engine: layout_weights(plan.recipe.engine, engine, "meta") for engine in linked}
        parts = member_plans(plan, self._settings, self._planned_for, trainers={rank: self._own}, engines=engines)
        opened = {}
        for engine in linked:
            endpoint = Endpoint(transport=STANDS_FOR, member=f"engine {engine}", data=b"")
            opened[engine] = Opened(round=1, offers={STANDS_FOR: Offer(endpoint=endpoint, descriptors=[])})
        no_offers = Opened(round=1, offers={})
        return parts.send_plan(rank, opened, dict.fromkeys(range(plan.topology.num_trainers), no_offers))

    def _has_room(self, target: EngineTarget, most_bytes: float) -> bool:
        """Reserve the landing area of an engine rank, if all of them do not become too large."""
        stream = LinkStream(LinkBoxes.decode(target.boxes), target.carriage)
        num_bytes = aligned(stream.num_bytes)
        if self._landing and self.landed_bytes + num_bytes > most_bytes:
            return False
        self._landing[target.engine] = own_memory(self._device, num_bytes + target.patch_bytes)
        self._streams[target.engine] = stream
        return True

    def _landed(self, target: EngineTarget) -> EngineTarget:
        """A target whose stream, and whose patches, land in the area reserved for it."""
        memory = self._landing[target.engine]
        _, descriptor = self._transport.register(memory.address, memory.num_bytes)
        return msgspec.structs.replace(
            target,
            stream=memory.address,
            patches=memory.address + memory.num_bytes - target.patch_bytes,
            offer=Offer(endpoint=target.offer.endpoint, descriptors=[descriptor]),
        )

    @property
    def landed_bytes(self) -> int:
        """Bytes of a whole version on all links, gaps included."""
        return sum(stream.num_bytes for stream in self._streams.values())

    def fill(self, device: torch.device) -> None:
        """Finite numbers, made on a device."""
        for held, memory in zip(self._own.held, self._own.keep, strict=True):
            contents.fill(_numbers(memory), f"{held.tensor.name} {held.lo}", 1, device)

    def copy_from(self, other: TrainerSlice) -> None:
        """Take over the weights of the same trainer on another device."""
        for mine, theirs in zip(self._own.keep, other._own.keep, strict=True):
            mine.copy_(theirs)

    def change(self, step: int) -> None:
        """Change one weight in a hundred."""
        for memory in self._own.keep:
            contents.change_some(_numbers(memory), step)

    def send(self, bytes_per_s: float = float("inf"), *, also_whole: bool = False) -> SliceVersion:
        """Send the weights as they are, over a NIC of this rate: whole, or as patches of the version before.

        `also_whole`: after patches, too.
        """
        self._transport.pace.bytes_per_s = bytes_per_s
        self._version += 1
        self._work.synchronize()
        began = time.monotonic()
        job, sent = self._round(whole=False)
        if any(each.needs_whole for each in sent.values()) or (also_whole and self._is_delta):
            job, sent = self._round(whole=True)
        seconds = time.monotonic() - began
        if losses := [each.loss for each in sent.values() if each.loss]:
            raise WeftError(f"the slice could not be sent: {losses[0]}")
        self._program.committed(self._version)
        self._held = self._version
        return SliceVersion(
            seconds=seconds,
            stages=busy_seconds(job.flow.recorder.events),
            num_bytes=sum(each.num_bytes for each in sent.values()),
        )

    def _round(self, *, whole: bool) -> tuple[Job, dict[int, Sent]]:
        engines = list(self._landing)
        go = Go(version=self._version, engines=engines, holds=[self._held] * len(engines), whole=whole)
        job = Job(go, time.monotonic() + VERSION_S, member="trainer", on_released=lambda: None)
        if whole:
            return job, send_whole(self._program, job)
        return job, send_version(self._program, job, job.agree)  # no other trainer is asked for magnitudes

    @property
    def _is_delta(self) -> bool:
        return self._settings.delta is DeltaPolicy.ON

    def equals(self, other: TrainerSlice) -> bool:
        """Whether the same bytes have landed on another device, for the engine ranks that both have."""
        shared = [engine for engine in self._landing if engine in other._landing]
        return bool(shared) and all(self._digest(engine) == other._digest(engine) for engine in shared)

    def _digest(self, engine: int) -> int:
        """Of what landed; the gaps between units have no meaning."""
        units = self._streams[engine].units
        at, size = units.offset.astype(np.uint64), units.num_bytes.astype(np.uint64)
        return self._work.digest(at + np.uint64(self._landing[engine].address), at, size)

    def close(self) -> None:
        """Release what was registered."""
        self._program.close()
        self._transport.close()


def _numbers(memory: torch.Tensor) -> torch.Tensor:
    """Bytes as BF16; pairs of them are finite FP32, too."""
    return memory[: memory.numel() // 2 * 2].view(torch.bfloat16)
