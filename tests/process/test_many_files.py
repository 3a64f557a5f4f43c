"""Processes with more than 1,024 open files, as servers have: every transport works, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

import numpy as np
import pytest

from tests.support.arena import WAIT_S, Arena
from tests.support.processes import Process
from weft.core.geometry.planes import Planes
from weft.errors import TransportError
from weft.runtime.weights import Weights
from weft.transport.shm import ShmTransport

NUM_FILES = 1100
NUM_VERSIONS = 3


@contextlib.contextmanager
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(NUM_FILES)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)


def versions_move(pipe: Any, transport: str) -> None:
    """A whole system, two engines, in a process whose next descriptor is above 1,024."""
    trainer = {"w": np.zeros(1 << 20, dtype=np.float32)}
    engines = [{"w": np.zeros(1 << 20, dtype=np.float32)} for _ in range(2)]
    weights = [Weights.from_arrays(arrays) for arrays in engines]
    with many_files(), Arena([Weights.from_arrays(trainer)], weights, transport=transport) as arena:
        for version in range(1, NUM_VERSIONS + 1):
            trainer["w"][:] = version
            arena.publish(version)
            assert all((arrays["w"] == version).all() for arrays in engines)
    pipe.send("done")


@pytest.mark.parametrize("transport", ["shm", "cma", "nixl"])
def test_versions_move_in_a_process_with_many_files(transport):
    process = Process(versions_move, transport)
    try:
        assert process.answer(WAIT_S + 30.0) == "done"
    finally:
        process.close()


def test_whatever_breaks_while_writing_reaches_the_tickets(monkeypatch):
    """Also what happens after the last byte: nobody else looks at the thread that writes."""
    with ShmTransport("engine 0") as one, ShmTransport("engine 1") as two, ShmTransport("trainer 0") as sender:
        source = np.arange(4096, dtype=np.uint8)
        sender.register(int(source.ctypes.data), source.nbytes)
        batches = []
        for target in (one, two):
            memory = target.allocate(source.nbytes)
            _, descriptor = target.register(memory.address, source.nbytes)
            peer = sender.connect(target.endpoint, [descriptor])
            src, dst, length = (np.array([n], np.uint64) for n in (source.ctypes.data, memory.address, source.nbytes))
            one_row = {"rows": np.ones_like(src), "dst_stride": src * 0, "src_stride": src * 0}
            batches.append(sender.prepare_direct(peer, [Planes(src=src, dst=dst, length=length, **one_row)]))
        broken = property(lambda _: 1 // 0)
        monkeypatch.setattr("weft.transport.host.LivingProcess.has_ended", broken)
        for together in (batches, batches[:1]):
            for ticket in sender.post_direct(together, tag=1):
                with pytest.raises(TransportError, match="by zero"):
                    ticket.wait(WAIT_S)
