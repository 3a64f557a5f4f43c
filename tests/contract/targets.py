"""A member that is written to, in a process of its own; driven over a pipe so that tests can look at its memory."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.support.processes import quick_context
from weft.transport.base import Descriptor, Endpoint
from weft.transport.cma import CmaTransport
from weft.transport.local import LocalNetwork, LocalTransport
from weft.transport.nixl import NixlTransport
from weft.transport.shm import ShmTransport

ANSWER_S = 60.0
NIXL_CARDS = {"nixl tcp": "lo", "nixl 2 cards": "lo,lo"}
"""Devices of the kinds of NIXL between hosts. A card that is named twice has two agents, like two cards."""


def make_transport(kind: str, member: str, *, writer: int = 0) -> Any:
    """A transport between processes; NIXL stays on loopback, and uses no shared memory where its cards are named."""
    if kind == "nixl":
        return NixlTransport(member, writer=writer, devices="lo")
    if kind in NIXL_CARDS:
        with patch.dict(os.environ, UCX_TLS="tcp"):
            return NixlTransport(member, writer=writer, devices=NIXL_CARDS[kind], is_near=False)
    return {"shm": ShmTransport, "cma": CmaTransport}[kind](member, writer=writer)


def _memory(transport: Any, num_bytes: int) -> tuple[np.ndarray, int]:
    """Ordinary memory where the transport can write it, else what it allocates."""
    if transport.capabilities.any_memory:
        array = np.zeros(num_bytes, dtype=np.uint8)
        return array, array.ctypes.data
    memory = transport.allocate(num_bytes)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(memory.address)), memory.address


def _serve(pipe: Any, kind: str, num_bytes: int, member: str) -> None:
    """The target process: registers memory, then answers questions until told to stop."""
    transport = make_transport(kind, member)
    array, address = _memory(transport, num_bytes)
    handle, descriptor = transport.register(address, num_bytes)
    pipe.send((transport.endpoint, descriptor))
    while (request := pipe.recv()) is not None:
        name, value = request
        if name == "arrived":
            pipe.send(transport.arrived(value[0], writer=value[1]))
        elif name == "bytes":
            pipe.send(array.tobytes())
        elif name == "spin":
            pipe.send("spinning")
            while not pipe.poll():
                pass
    transport.deregister(handle)
    transport.close()


class ProcessTarget:
    """A target in another process."""

    def __init__(self, kind: str, num_bytes: int, member: str = "engine 0") -> None:
        context = quick_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, num_bytes, member), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint: Endpoint
        self.descriptor: Descriptor
        self.endpoint, self.descriptor = self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the target does not answer"
        return self._pipe.recv()

    def arrived(self, tag: int, writer: int = 0) -> int:
        self._pipe.send(("arrived", (tag, writer)))
        return int(self._answer())

    def bytes(self) -> bytes:
        self._pipe.send(("bytes", None))
        return bytes(self._answer())

    def keep_busy(self) -> None:
        """Make the target's interpreter spin, holding its lock most of the time, until the next question."""
        self._pipe.send(("spin", None))
        self._answer()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(ANSWER_S)
        self._process.kill()
        self._pipe.close()


class LocalTarget:
    """A target in this process."""

    def __init__(self, network: LocalNetwork, num_bytes: int) -> None:
        self._transport = LocalTransport("engine 0", network)
        self._array, address = _memory(self._transport, num_bytes)
        _, self.descriptor = self._transport.register(address, num_bytes)
        self.endpoint = self._transport.endpoint

    def arrived(self, tag: int, writer: int = 0) -> int:
        return self._transport.arrived(tag, writer=writer)

    def bytes(self) -> bytes:
        return self._array.tobytes()

    def kill(self) -> None:
        self._transport.close()

    def close(self) -> None:
        self._transport.close()
