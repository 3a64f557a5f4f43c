"""A trainer on a GPU that is stopped as it writes, replaced, and goes on: its late bytes are never served."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.support.processes import Process, stop_here  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402
from weft.config import TransferSettings  # noqa: E402
from weft.errors import WeftError  # noqa: E402
from weft.integrations.torch import weights_of  # noqa: E402
from weft.runtime.control.messages import tag_of  # noqa: E402
from weft.runtime.controller.controller import Controller  # noqa: E402
from weft.runtime.receive.receiver import Receiver  # noqa: E402
from weft.runtime.send.sender import Sender  # noqa: E402
from weft.transport.cuda_ipc import CudaIpcTransport  # noqa: E402

pytestmark = pytest.mark.gpu
WAIT_S = 60.0
NUM_ELEMENTS = 1 << 24


def module(tensor: Any) -> Any:
    made = torch.nn.Module()
    made.register_parameter("w", torch.nn.Parameter(tensor, requires_grad=False))
    return made


def trainer(pipe: Any, address: str, stop_at: int) -> None:
    """Publishes versions whose every element is their number; stops itself as it writes one of them."""
    tensor = torch.zeros(NUM_ELEMENTS, device="cuda")
    write_all = CudaIpcTransport._write_all

    def stopping_write(self: Any, writes: Any, tag: int) -> None:
        if tag == tag_of(stop_at, whole=False):
            pipe.send("stopping")
            stop_here()
            for write in writes:  # as if it had been stopped a moment later, inside the copy
                write.cancelled = threading.Event()
        write_all(self, writes, tag)
        if tag == tag_of(stop_at, whole=False):
            pipe.send("wrote late")

    CudaIpcTransport._write_all = stopping_write  # type: ignore[method-assign]
    with Sender(address, rank=0, weights=weights_of(module(tensor)), timeout_s=WAIT_S) as sender:
        pipe.send("there")
        while (version := pipe.recv()) is not None:
            tensor.fill_(version)
            try:
                sender.publish(version=version).wait_committed(WAIT_S)
                pipe.send("committed")
            except WeftError as error:
                pipe.send(str(error))


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_stopped_trainer_never_tears_a_version_of_its_successor(mode):
    settings = TransferSettings(mode=mode, transport="cuda_ipc", silence_s=2.0, version_s=20.0)
    weights = torch.zeros(NUM_ELEMENTS, device="cuda")
    with Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller:
        old, new = Process(trainer, controller.address, 2), None
        try:
            with Receiver(controller.address, rank=0, weights=weights_of(module(weights))) as receiver:
                engine = PollingEngine(receiver)
                assert old.answer(WAIT_S) == "there"
                old.ask(1)
                assert old.answer(WAIT_S) == "committed"
                old.ask(2)
                assert old.answer(WAIT_S) == "stopping"
                wait_until(lambda: "trainer 0" in controller.statistics().lost, WAIT_S, "the trainer is missed")
                new = Process(trainer, controller.address, -5)
                assert new.answer(WAIT_S) == "there"
                if mode == "in_place":
                    new.ask(3)
                    assert "could still write into the live weights" in new.answer(WAIT_S)
                    assert receiver.is_poisoned
                    old.kill()
                else:
                    engine.hold.set()
                    new.ask(3)
                    wait_until(lambda: receiver.pending == 3, WAIT_S, "version 3 is offered")
                    os.kill(old.pid, signal.SIGCONT)
                    assert old.answer(WAIT_S) == "wrote late"
                    engine.hold.clear()
                    assert new.answer(WAIT_S) == "committed"
                    assert (weights == 3).all()
                assert controller.wait_planned(WAIT_S)
                new.ask(4)
                assert new.answer(WAIT_S) == "committed"
                assert (weights == 4).all()
                engine.close()
        finally:
            old.kill()
            old.close()
            if new is not None:
                new.close()


class PollingEngine:
    """Polls and commits, unless it is held."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self.hold, self._stop = receiver, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.wait(0.002):
            if self.hold.is_set():
                continue
            try:
                if (update := self._receiver.poll()) is not None:
                    update.commit(WAIT_S)
            except WeftError:
                continue

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
