"""What one write costs on this machine: the figures in a topology for transports that take descriptors.

The planner packs runs that are shorter than a write costs (`op_us`) and sends longer ones straight from the weights.
One process writes into another, the same bytes once in one piece and once in many runs; the difference is the cost of
the runs.

    report = measure(repeat=9, say=print)
    report.rows[0].op_us
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from weft import native
from weft.core.topology import Cluster
from weft.devices import CPU
from weft.errors import TransferTimeout, TransportUnavailable, WeftError
from weft.transport.base import Transport
from weft.transport.registry import is_installed, open_transport

TRANSPORTS = ("cma", "nixl", "mooncake")
"""Those that take descriptors and reach CPU memory of this machine."""
NUM_BYTES = 64 << 20
RUN_BYTES = 4096
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One transport."""

    transport: str
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
    rows: list[LinkCost]
    missing: dict[str, str]
    """Transports that could not be measured, and why."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def put_into(self, cluster: Cluster) -> Cluster:
        """A kind of cluster with these costs."""
        costs = {**cluster.host.op_us, **{row.transport: round(row.op_us, 3) for row in self.rows}}
        host = replace(cluster.host, cpu_gb_per_s=round(self.cpu_gb_per_s, 2), op_us=costs)
        return replace(cluster, host=host)


def measure(*, repeat: int, say: Callable[[str], None]) -> LinkReport:
    """Measure every transport that is installed."""
    say("a plain copy")
    copy_s = _copy_s(repeat)
    rows, missing = [], {}
    for name in TRANSPORTS:
        say(name)
        try:
            rows.append(_measure(name, repeat, copy_s))
        except (WeftError, OSError) as error:
            missing[name] = str(error)
    return LinkReport(cpu_gb_per_s=NUM_BYTES / copy_s / 1e9, rows=rows, missing=missing)


def _copy_s(repeat: int) -> float:
    src, dst = np.ones(NUM_BYTES, dtype=np.uint8), np.ones(NUM_BYTES, dtype=np.uint8)
    columns = [np.array([n], dtype=np.uint64) for n in (dst.ctypes.data, src.ctypes.data, NUM_BYTES)]
    return _median(lambda: native.copy(*columns), repeat)


def _median(work: Callable[[], object], repeat: int) -> float:
    """Median seconds, without the first run."""
    work()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _measure(name: str, repeat: int, copy_s: float) -> LinkCost:
    if not is_installed(name):
        raise TransportUnavailable(f"{name} is not installed")
    with _WrittenProcess(name) as target:
        source = np.ones(NUM_BYTES, dtype=np.uint8)
        transport = _open(name, "trainer 0")
        try:
            transport.register_source(source.ctypes.data, NUM_BYTES)
            peer = transport.connect(target.endpoint, [target.descriptor])
            writes = _Writes(transport, peer, source.ctypes.data, target.descriptor.address)
            whole_s = _median(lambda: writes.post(NUM_BYTES, 1), repeat)
            num_runs = NUM_BYTES // RUN_BYTES // 2
            half_s = _median(lambda: writes.post(NUM_BYTES // 2, 1), repeat)
            runs_s = _median(lambda: writes.post(RUN_BYTES, num_runs), repeat)
        finally:
            transport.close()
    op_s = max(runs_s - half_s, 0.0) / num_runs
    return LinkCost(
        transport=name,
        op_us=op_s * 1e6,
        gb_per_s=NUM_BYTES / whole_s / 1e9,
        of_copy=copy_s / whole_s,
        min_run_bytes=int(op_s * NUM_BYTES / copy_s / 2),
    )


def _open(name: str, member: str) -> Transport[Any]:
    return open_transport(name, member, writer=0, num_threads=1, device=CPU, nixl_devices="")


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

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_written_to, args=(theirs, name), daemon=True)
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


def _be_written_to(pipe: Connection, name: str) -> None:
    """Register memory and wait for the end of the pipe."""
    memory = np.ones(NUM_BYTES, dtype=np.uint8)
    try:
        transport = _open(name, "engine 0")
        _, descriptor = transport.register(memory.ctypes.data, NUM_BYTES)
    except (WeftError, OSError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send((transport.endpoint, descriptor))
    try:
        pipe.recv()
    except EOFError:
        transport.close()
