"""Memory that is given up while another process may still write there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weft import native
from weft.config import TransferSettings
from weft.errors import RegistrationError
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights
from weft.transport.base import ordinary_memory
from weft.transport.pages import Pages
from weft.transport.shm import SharedMemory, ShmTransport

NUM_BYTES = 32 << 20


def own_mib() -> int:
    """Anonymous and shared memory of this process."""
    text = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon", "RssShmem"))) >> 10


def write_from_outside(address: int) -> int:
    """Another process writes there, as a trainer over `cma` does; returns its exit code."""
    code = (
        "import sys, numpy as np; from weft import native;"
        "row = lambda n: np.array([n], dtype=np.uint64); src = np.ones(8, dtype=np.uint8);"
        f"native.write_process({os.getpid()}, row({address}), row(src.ctypes.data), row(8))"
    )
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("make", [Pages, SharedMemory])
def test_given_up_memory_is_free_and_late_writes_fail(make):
    memory = make(NUM_BYTES)
    ctypes.memset(memory.address, 7, NUM_BYTES)
    assert write_from_outside(memory.address) == 0
    before = own_mib()
    assert memory.give_up()
    assert own_mib() <= before - (NUM_BYTES >> 20) + 2
    assert write_from_outside(memory.address) != 0
    others = [Pages(NUM_BYTES) for _ in range(4)]
    assert all(abs(other.address - memory.address) >= NUM_BYTES for other in others), "the addresses are reserved"


def test_memory_that_others_have_mapped_is_freed_for_them_too():
    memory = SharedMemory(NUM_BYTES)
    theirs = SharedMemory.opened(os.getpid(), memory.fd, NUM_BYTES)
    ctypes.memset(memory.address, 7, NUM_BYTES)
    inode = os.fstat(theirs.fd)
    assert inode.st_blocks * 512 >= NUM_BYTES
    memory.give_up()
    assert os.fstat(theirs.fd).st_blocks == 0
    ctypes.memset(theirs.address, 1, 4096)  # a late write: harmless
    theirs.close()


def test_ordinary_memory_is_zeroed_and_aligned():
    memory = ordinary_memory(5000)
    assert memory.address % 4096 == 0
    view = np.ctypeslib.as_array((ctypes.c_uint8 * 5000).from_address(memory.address))
    assert not view.any()
    assert native.digest(*(np.array([n], dtype=np.uint64) for n in (memory.address, 0, 5000))) == 0


def test_memory_outlives_its_transport_while_it_is_held():
    transport = ShmTransport("engine 0")
    memory = transport.allocate(8192)
    transport.close()
    ctypes.memset(memory.address, 3, 8192)
    assert ctypes.string_at(memory.address, 4) == b"\3\3\3\3"


def test_a_peer_cannot_make_us_write_into_a_file(tmp_path):
    with (tmp_path / "precious").open("w+b") as file:
        file.truncate(8192)
        with pytest.raises(RegistrationError, match="not weft's shared memory"):
            SharedMemory.opened(os.getpid(), file.fileno(), 8192)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_receiver_that_closes_while_it_is_written_to_leaves_the_addresses_reserved(is_under_way):
    trainer, engine = (np.ones(1 << 16, dtype=np.float32) for _ in range(2))
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=TransferSettings(transport="cma")) as controller,
        Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": trainer})) as sender,
    ):
        receiver = Receiver(controller.address, rank=0, weights=Weights.from_arrays({"w": engine}))
        publication = sender.publish(version=1)
        receiver.wait(20.0).commit()
        publication.wait_committed(20.0)
        address = receiver._memory.landing.address
        if is_under_way:
            receiver._state.expect(2, whole=False)
        receiver.close()
        assert is_reserved(address) == is_under_way


def is_reserved(address: int) -> bool:
    """Whether nothing is there, and nothing will be put there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        first, last = (int(text, 16) for text in span.split("-"))
        if first <= address < last:
            return mode.startswith("---")
    return False
