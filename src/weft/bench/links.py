"""What one write costs on this machine: the figures in a topology for transports that take descriptors.

The planner packs runs that are shorter than a write costs (`op_us`) and sends longer ones straight from the weights.
One process writes into another, the same bytes once in one piece and once in many runs; the difference is the cost of
the runs. Writes between CPU memory, and between memory of a GPU where there is one, cost differently.

    report = measure(repeat=9, say=print)
    report.rows[0].op_us
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from weft.core.topology import Cluster
from weft.devices import CPU, device_work, memory_kind
from weft.errors import TransferTimeout, TransportUnavailable, WeftError
from weft.transport.base import Transport
from weft.transport.registry import is_installed, open_transport

TRANSPORTS = {"cpu": ("cma", "nixl", "mooncake"), "cuda": ("nixl",)}
"""Those that take descriptors and reach memory of this machine, by kind of memory."""
GPU = "cuda:0"
NUM_BYTES = 64 << 20
GPU_COPY_BYTES = 1 << 30
"""A GPU copies less than this in the time it takes to ask for it."""
RUN_BYTES = 4096
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One transport, between memory of one kind."""

    transport: str
    memory: str
    """`cpu` or `cuda`."""
    op_us: float
    """Cost of one write in a batch, beyond its bytes."""
    gb_per_s: float
    """Rate of one large write."""
    of_copy: float
    """The same as a fraction of a plain copy in the same run."""
    min_run_bytes: int
    """Runs shorter than this are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """All transports of this machine."""

    cpu_gb_per_s: float
    """One core copying CPU memory."""
    device_gb_per_s: float | None
    """A GPU copying its memory; None: there is none."""
    rows: list[LinkCost]
    missing: dict[str, str]
    """Transports that could not be measured, and why."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def put_into(self, cluster: Cluster) -> Cluster:
        """A kind of cluster with these costs."""
        costs = {transport: dict(of_memory) for transport, of_memory in cluster.host.op_us.items()}
        for row in self.rows:
            costs.setdefault(row.transport, {})[row.memory] = round(row.op_us, 3)
        host = replace(cluster.host, cpu_gb_per_s=round(self.cpu_gb_per_s, 2), op_us=costs)
        if self.device_gb_per_s is not None:
            host = replace(host, device_gb_per_s=round(self.device_gb_per_s, 2))
        return replace(cluster, host=host)


def measure(*, repeat: int, say: Callable[[str], None]) -> LinkReport:
    """Measure every transport that is installed, between CPU memory and, where there is one, between a GPU's."""
    rows, missing, copy_rate = [], {}, {}
    for device in (CPU, GPU) if _has_gpu() else (CPU,):
        kind = memory_kind(device)
        say(f"a plain copy, {kind}")
        copy_rate[kind] = _copy_rate(device, repeat)
        for name in TRANSPORTS[kind]:
            say(f"{name}, {kind}")
            try:
                rows.append(_measure(name, device, repeat, copy_rate[kind]))
            except (WeftError, OSError) as error:
                missing[f"{name}, {kind}"] = str(error)
    gpu_rate = copy_rate.get("cuda")
    return LinkReport(
        cpu_gb_per_s=copy_rate["cpu"] / 1e9,
        device_gb_per_s=None if gpu_rate is None else gpu_rate / 1e9,
        rows=rows,
        missing=missing,
    )


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415 - not installed everywhere

    return torch.cuda.is_available()


def _filled(device: str, num_bytes: int) -> tuple[Any, int]:
    """Memory of a device, and its address."""
    if device == CPU:
        array = np.ones(num_bytes, dtype=np.uint8)
        return array, array.ctypes.data
    import torch  # noqa: PLC0415 - not installed everywhere

    tensor = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return tensor, tensor.data_ptr()


def _copy_rate(device: str, repeat: int) -> float:
    """Bytes per second of a plain copy inside a device."""
    num_bytes = NUM_BYTES if device == CPU else GPU_COPY_BYTES
    (src, src_address), (dst, dst_address) = (_filled(device, num_bytes) for _ in range(2))
    columns = [np.array([n], dtype=np.uint64) for n in (dst_address, src_address, num_bytes)]
    work = device_work(device)

    def copy() -> None:
        if device == CPU:
            work.copy(*columns)
            return
        dst.copy_(src)
        work.synchronize()

    return num_bytes / _median(copy, repeat)


def _median(work: Callable[[], object], repeat: int) -> float:
    """Median seconds, without the first run."""
    work()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _measure(name: str, device: str, repeat: int, copy_rate: float) -> LinkCost:
    if not is_installed(name):
        raise TransportUnavailable(f"{name} is not installed")
    with _WrittenProcess(name, device) as target:
        source, address = _filled(device, NUM_BYTES)
        transport = _open(name, "trainer 0", device)
        try:
            transport.register_source(address, NUM_BYTES)
            peer = transport.connect(target.endpoint, [target.descriptor])
            writes = _Writes(transport, peer, address, target.descriptor.address)
            whole_s = _median(lambda: writes.post(NUM_BYTES, 1), repeat)
            num_runs = NUM_BYTES // RUN_BYTES // 2
            half_s = _median(lambda: writes.post(NUM_BYTES // 2, 1), repeat)
            runs_s = _median(lambda: writes.post(RUN_BYTES, num_runs), repeat)
        finally:
            transport.close()
            del source
    op_s = max(runs_s - half_s, 0.0) / num_runs
    return LinkCost(
        transport=name,
        memory=memory_kind(device),
        op_us=op_s * 1e6,
        gb_per_s=NUM_BYTES / whole_s / 1e9,
        of_copy=NUM_BYTES / whole_s / copy_rate,
        min_run_bytes=int(op_s * copy_rate / 2),
    )


def _open(name: str, member: str, device: str) -> Transport[Any]:
    return open_transport(name, member, writer=0, num_threads=1, device=device, nixl_devices="")


class _Writes:
    """Batches of equal runs, every second run of the memory."""

    def __init__(self, transport: Transport[Any], peer: str, src: int, dst: int) -> None:
        self._transport, self._peer, self._src, self._dst = transport, peer, src, dst
        self._batches: dict[tuple[int, int], Any] = {}
        self._tag = 0

    def post(self, run_bytes: int, num_runs: int) -> None:
        """Write, and wait for its arrival."""
        self._tag += 1
        self._transport.post_all([self._batch(run_bytes, num_runs)], self._tag)[0].wait(ANSWER_S)

    def _batch(self, run_bytes: int, num_runs: int) -> Any:
        key = run_bytes, num_runs
        if key not in self._batches:
            at = np.arange(num_runs, dtype=np.uint64) * np.uint64(2 * run_bytes)
            length = np.full(num_runs, run_bytes, dtype=np.uint64)
            src, dst = np.uint64(self._src) + at, np.uint64(self._dst) + at
            self._batches[key] = self._transport.prepare(self._peer, src, dst, length, None)
        return self._batches[key]


class _WrittenProcess:
    """The target process of the writes."""

    def __init__(self, name: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_written_to, args=(theirs, name, device), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(ANSWER_S):
            self.__exit__()
            raise TransferTimeout(f"a process with {name} did not start in {ANSWER_S:.0f} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            self.__exit__()
            raise TransportUnavailable(answer)
        self.endpoint, self.descriptor = answer

    def __enter__(self) -> _WrittenProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(1.0)
        self._process.kill()
        self._process.join()


def _be_written_to(pipe: Connection, name: str, device: str) -> None:
    """Register memory and wait for the end of the pipe."""
    memory, address = _filled(device, NUM_BYTES)
    try:
        transport = _open(name, "engine 0", device)
        _, descriptor = transport.register(address, NUM_BYTES)
    except (WeftError, OSError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send((transport.endpoint, descriptor))
    try:
        pipe.recv()
    except EOFError:
        transport.close()
        del memory
