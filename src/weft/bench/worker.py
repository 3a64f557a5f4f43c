"""One member of a benchmark, in its own process: it answers the parent's requests over a pipe.

Times are `time.monotonic()`, which all processes of a host share.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from weft.bench import baselines, gathering, limits, payload
from weft.bench.fleet import Fleet, answer_requests, free_port
from weft.bench.limited import LimitedShm
from weft.events import busy_seconds
from weft.integrations.torch import weights_of
from weft.runtime.control.security import Security
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.pipeline import run, run_in_turn
from weft.runtime.send.sender import Publication, Sender
from weft.runtime.weights import Weights

WAIT_S = 120.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a worker."""

    side: str
    rank: int
    num_trainers: int
    num_engine_ranks: int
    num_parts: int
    """Ranks of one engine."""
    model: str
    port: int
    """Where the torch process group of all workers meets."""
    master: str = "127.0.0.1"
    """The address of that port."""
    precision: str = "bf16"
    """Of engines: `bf16` or `fp8`, where matrices come with the scales of their blocks."""
    layout: str = "fsdp"
    """Of trainers: `fsdp`, each has its shards; `ddp`, each has everything."""
    shares_experts: bool = False
    """Whether the ranks of an engine share experts, instead of cutting every tensor."""


class BenchMember:
    """What trainers and engine ranks share."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = payload.load_payload(setup.model)
        torch.set_num_threads(1)
        world = setup.num_trainers + setup.num_engine_ranks
        number = setup.rank if setup.side == "trainer" else setup.num_trainers + setup.rank
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"tcp://{setup.master}:{setup.port}", rank=number, world_size=world)
        self.trainers_mesh = DeviceMesh("cpu", list(range(setup.num_trainers)))
        self.groups = baselines.Groups.make(setup.num_trainers, setup.num_engine_ranks)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class BenchTrainer(BenchMember):
    """A trainer rank: FSDP2 shards of the model, or all of it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.module = payload.module_of(payload.whole_shapes(self.model), "meta")
        if setup.layout == "fsdp":
            fully_shard(self.module, mesh=self.trainers_mesh)
        self.module.to_empty(device="cpu")
        self.weights = weights_of(self.module)
        payload.fill(self.weights, 0)
        self.sender: Sender | None = None
        self.gathered: gathering.QuantizedShare | None = None
        self._last: Publication | None = None

    def advance(self) -> None:
        """The next version's contents."""
        payload.advance(self.weights)

    def advance_some(self, step: int) -> None:
        """The next version's contents, one percent of which is new."""
        payload.advance_some(self.weights, step)

    def open(self, address: str, security: Security | None = None) -> None:
        """Become a weft sender."""
        self.sender = Sender(address, rank=self.setup.rank, weights=self.weights, timeout_s=WAIT_S, security=security)

    def publish(self, version: int, start: float) -> tuple[float, float, float]:
        """Publish at a given time and wait until every engine serves it: begin, end, seconds of writing."""
        assert self.sender is not None
        sleep_until(start)
        began = time.monotonic()
        self._last = publication = self.sender.publish(version=version)
        publication.wait_committed(WAIT_S)
        return began, time.monotonic(), publication.write_s or 0.0

    def fill_normal(self) -> None:
        """Numbers like those of a trained model."""
        payload.fill_normal(self.module)

    def advance_normal(self, version: int) -> None:
        """The next version of them."""
        payload.advance_normal(self.module, version)

    def advance_some_normal(self, step: int) -> None:
        """The next version of them, one percent of which is new."""
        payload.advance_some_normal(self.module, self.model, step)

    def last_sending(self) -> dict[str, Any]:
        """Of the last version: seconds each stage was busy, and the most bytes that were staged."""
        assert self._last is not None
        return {"stages": busy_seconds(self._last.events), "peak_staging_bytes": self._last.peak_staging_bytes}

    def open_limited(self, address: str, bytes_per_s: float, *, in_turn: bool) -> None:
        """Become a weft sender behind a slow link; its stages overlap, or are run in turn."""
        link = LimitedShm(f"trainer {self.setup.rank}", writer=self.setup.rank, bytes_per_s=bytes_per_s)
        self.sender = Sender(address, rank=self.setup.rank, weights=self.weights, transport=link, timeout_s=WAIT_S)
        self.sender._run_stages = run_in_turn if in_turn else run

    def open_quantized(self, address: str) -> None:
        """Become a sender of what `gather_and_quantize` makes."""
        self.gathered = gathering.QuantizedShare(self.module, self.model, self.groups)
        self.sender = Sender(address, rank=self.setup.rank, weights=self.gathered.weights, timeout_s=WAIT_S)

    def gather_and_publish(self, version: int, start: float) -> tuple[float, float, float]:
        """Gather full tensors, quantise this rank's share of them, publish it: begin, end, seconds before sending."""
        assert self.sender is not None
        assert self.gathered is not None
        dist.barrier(group=self.groups.trainers)
        sleep_until(start)
        began = time.monotonic()
        self.gathered.make()
        made = time.monotonic()
        self.sender.publish(version=version).wait_committed(WAIT_S)
        return began, time.monotonic(), made - began

    def shut(self) -> None:
        """Stop being a sender."""
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    def copy_limit(self, num_bytes: int, start: float) -> tuple[float, float]:
        """Copy as many bytes as this trainer sends, inside its own memory."""
        return limits.copy(num_bytes, lambda: sleep_until(start))

    def check_limit(self, num_bytes: int, start: float) -> tuple[float, float]:
        """Copy as many bytes as this trainer sends, and digest them where they are."""
        return limits.copy_and_digest(num_bytes, lambda: sleep_until(start))

    def digest_rate(self, num_bytes: int) -> float:
        """Bytes per second one process digests."""
        return limits.digest_rate(num_bytes)

    def kernel_limit(self, num_bytes: int, pid: int, address: int, start: float) -> tuple[float, float]:
        """Write one large piece into another process with process_vm_writev."""
        return limits.kernel_write(num_bytes, pid, address, lambda: sleep_until(start))

    def bare_nixl(self, start: float) -> tuple[float, float]:
        """The rows this trainer sends, posted with bare NIXL."""
        assert self.sender is not None
        return limits.bare_nixl(self.sender, lambda: sleep_until(start))

    def broadcast(self, start: float, *, gather: bool) -> tuple[float, float]:
        """Rank 0's weights to all engines by broadcast; gathered from all trainers first, or already there."""
        full = None if gather else baselines.full_tensors(self.module, self.groups)
        dist.barrier()
        sleep_until(start)
        began = time.monotonic()
        baselines.send_broadcast(self.module, full, self.groups)
        dist.barrier()
        return began, time.monotonic()

    def save_file(self, path: str, start: float) -> tuple[float, float]:
        """Gather to rank 0, which writes a safetensors file; engines read their part of it."""
        dist.barrier()
        sleep_until(start)
        began = time.monotonic()
        baselines.save_file(self.module, path, self.groups)
        dist.barrier()
        dist.barrier()
        return began, time.monotonic()


class BenchEngine(BenchMember):
    """An engine rank: its part of the model."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.part = setup.rank % setup.num_parts
        parts = payload.expert_parts if setup.shares_experts else payload.engine_parts
        self.parts = parts(self.model, num_parts=setup.num_parts, part=self.part)
        if setup.precision == "fp8":
            self.module, self.parts = gathering.quantized_engine(self.model)
        else:
            self.module = payload.module_of({name: extent for name, (_, extent) in self.parts.items()}, "cpu")
        for parameter in self.module.parameters():
            parameter.view(torch.uint8).zero_()
        self.receiver: Receiver | None = None
        self._buffer: np.ndarray[Any, Any] | None = None

    def live_weights(self) -> Weights:
        """The weights where they lie now; receiving in place may have moved them."""
        return weights_of(self.module, parts={name: part for name, (part, _) in self.parts.items()})

    def open(self, address: str, security: Security | None = None) -> None:
        """Become a weft receiver, with weights in ordinary memory: another method may have moved them."""
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()
        self.receiver = Receiver(address, rank=self.setup.rank, weights=self.live_weights(), security=security)

    def receive(self) -> float:
        """Wait for a version and commit it; returns the pause in seconds."""
        assert self.receiver is not None
        self.receiver.take(WAIT_S)
        return self.receiver.last_pause_s

    def shut(self) -> None:
        """Stop being a receiver."""
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None

    def verify(self, version: int, steps: int = 0) -> bool:
        """Whether the live weights are exactly a version, after some small steps."""
        return payload.is_version(self.live_weights(), version, steps)

    def verify_fp8(self, version: int, steps: int = 0) -> bool:
        """Whether everything is exactly what quantising whole tensors gives."""
        return gathering.is_quantized(self.module, self.model, version, steps)

    def spoil(self) -> None:
        """Forget the weights, so that a method that moves nothing cannot pass."""
        for parameter in self.module.parameters():
            parameter.view(torch.uint8).fill_(0xBF)

    def buffer(self, num_bytes: int) -> tuple[int, int]:
        """Ordinary memory another process may write to: the process and the address."""
        self._buffer = np.ones(num_bytes, dtype=np.uint8)
        return os.getpid(), int(self._buffer.ctypes.data)

    def broadcast(self) -> None:
        """Take part in a broadcast from trainer 0."""
        dist.barrier()
        baselines.receive_broadcast(self.module, self.parts, self.groups)
        dist.barrier()

    def load_file(self, path: str) -> None:
        """Read this rank's part of a safetensors file."""
        dist.barrier()
        dist.barrier()
        baselines.load_file(self.module, self.parts, path)
        dist.barrier()


def sleep_until(moment: float) -> None:
    """Wait for a moment of the shared clock."""
    left_s = moment - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def serve(pipe: Connection, setup: Setup) -> None:
    """The process."""
    try:
        member = BenchTrainer(setup) if setup.side == "trainer" else BenchEngine(setup)
        answer_requests(pipe, member)
        member.shut()
        member.close()
    except Exception as error:
        pipe.send((False, f"{setup.side} {setup.rank}: {type(error).__name__}: {error}"))


def start_fleet(
    *, num_trainers: int, num_engine_ranks: int, num_parts: int, model: str, precision: str = "bf16"
) -> Fleet:
    """Processes for one case."""
    port = free_port()
    counts = {"trainer": num_trainers, "engine": num_engine_ranks}
    setups = {
        (side, rank): Setup(
            side=side,
            rank=rank,
            num_trainers=num_trainers,
            num_engine_ranks=num_engine_ranks,
            num_parts=num_parts,
            model=model,
            port=port,
            precision=precision,
        )
        for side, count in counts.items()
        for rank in range(count)
    }
    return Fleet(serve, setups)
