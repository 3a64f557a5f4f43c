"""TRL: sends the weights of `AsyncGRPOTrainer` to engines that run weft (vLLM, SGLang).

    transfer = WeftWeightTransfer(listen="tcp://127.0.0.1:7070", num_engine_ranks=2)
    AsyncGRPOTrainer(..., weight_transfer=transfer)

    WEFT_CONTROLLER=tcp://127.0.0.1:7070 vllm serve MODEL --weight-transfer-config '{"backend": "weft"}'

TRL calls it on rank 0 only, with whole tensors one by one: they are copied once into memory that is kept, and sent from
there. Engines commit on their own between two steps, so nothing has to be paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from weft.config import TransferSettings
from weft.errors import TransferTimeout
from weft.integrations.staged import StagedTensors
from weft.runtime.control.security import Security
from weft.runtime.controller.controller import Controller
from weft.runtime.send.sender import Sender


class WeftWeightTransfer:
    """TRL's `WeightTransferProtocol`. Nothing is opened before `init_weight_transfer`: other ranks never call it."""

    def __init__(
        self,
        *,
        listen: str = "tcp://127.0.0.1:7070",
        num_engine_ranks: int = 1,
        ranks_per_engine: int = 1,
        settings: TransferSettings | None = None,
        pause: Callable[[], Any] | None = None,
        resume: Callable[[], Any] | None = None,
        timeout_s: float = 600.0,
        security: Security | None = None,
    ) -> None:
        """`listen`: address at which engines find the controller. `pause` and `resume`: only if generation should stand
        still around a version, such as `VLLMClient(url).pause`. `security`: a folder with `controller.key`, the
        trainer's own key and the engines' `.pub` files; `key` names the trainer's.
        """
        self._listen, self._settings, self._security = listen, settings or TransferSettings(), security
        self._num_engine_ranks, self._ranks_per_engine = num_engine_ranks, ranks_per_engine
        self._pause, self._resume, self._timeout_s = pause, resume, timeout_s
        self._staged = StagedTensors()
        self._controller: Controller | None = None
        self._sender: Sender | None = None
        self.version = 0
        """The last version that was sent."""

    def init_weight_transfer(self) -> None:
        """Let engines join."""
        self._controller = Controller(
            self._listen,
            num_trainers=1,
            num_engine_ranks=self._num_engine_ranks,
            ranks_per_engine=self._ranks_per_engine,
            settings=self._settings,
            security=None if self._security is None else replace(self._security, key=None),
        )

    def pause(self) -> None:
        """Before a version."""
        if self._pause is not None:
            self._pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send a version; returns when the engines serve it."""
        assert self._controller is not None, "TRL calls init_weight_transfer first"
        self._staged.fill(iterator)
        if self._sender is None:
            self._sender = self._joined(self._controller)
        self.version += 1
        self._sender.publish(version=self.version).wait_committed(self._timeout_s)

    def _joined(self, controller: Controller) -> Sender:
        """Join as the only trainer; engines that outlived another trainer already serve some version."""
        sender = Sender(
            controller.address,
            rank=0,
            weights=self._staged.weights(),
            timeout_s=self._timeout_s,
            security=self._security,
        )
        if not controller.wait_planned(self._timeout_s):
            joined = ", ".join(controller.statistics().members)
            sender.close()
            raise TransferTimeout(
                f"only {joined} joined in {self._timeout_s:.0f} s, expected {self._num_engine_ranks} engine ranks",
                hint="start the engines with WEFT_CONTROLLER set to this controller's address",
            )
        self.version = controller.committed or 0
        return sender

    def resume(self) -> None:
        """After a version."""
        if self._resume is not None:
            self._resume()

    def destroy(self) -> None:
        """Leave; the engines keep serving what they have."""
        sender, self._sender = self._sender, None
        controller, self._controller = self._controller, None
        if sender is not None:
            sender.close()
        if controller is not None:
            controller.close()
