"""vLLM's own trainer protocol over weft, for stacks that already speak it.

    engine = WeightTransferTrainerFactory.trainer_init(
        WeftTrainerInit(rank=0), client=HTTPVLLMWeightSyncClient("http://server:8000"), source=ModuleSource(model)
    )
    engine.send_weights()             # publish, and wait until the server serves it

Rank 0 runs the controller. With a `ModuleSource` every trainer rank sends what it holds; with any other source, rank 0
sends what it yields, from memory that is kept. A trainer that uses `weft.Sender` itself needs none of this.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine

from weft.config import TransferSettings
from weft.integrations.hf import checkpoint_weights
from weft.integrations.staged import StagedTensors
from weft.integrations.torch import weights_of
from weft.integrations.vllm import BACKEND
from weft.runtime.controller.controller import Controller
from weft.runtime.send.sender import Publication, Sender
from weft.runtime.weights import Weights

HEAD_START_S = 5.0


@dataclass
class WeftTrainerInit(TrainerInitInfo):
    """Which members take part. Settings of the transfer live here, and are shipped to all members."""

    backend: ClassVar[str] = BACKEND
    controller: str = "tcp://127.0.0.1:*"
    """Where rank 0's controller listens, and the others find it; a fixed port if there are several trainer ranks."""
    num_trainers: int = 1
    num_engine_ranks: int = 1
    ranks_per_engine: int = 1
    settings: TransferSettings = field(default_factory=TransferSettings)
    timeout_s: float = 120.0
    """Longest time one `send_weights` takes."""


class WeftTrainer(TrainerWeightTransferEngine[WeftTrainerInit]):
    """One trainer rank."""

    init_info_cls = WeftTrainerInit

    def __init__(self, init_info: WeftTrainerInit, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._timeout_s, self._version = init_info.timeout_s, 0
        self._controller: Controller | None = None
        self._sender: Sender | None = None
        self._staged = StagedTensors()
        every_rank_sends = isinstance(source, ModuleSource)
        address = init_info.controller
        if self.is_sender:
            self._controller = Controller(
                address,
                num_trainers=init_info.num_trainers if every_rank_sends else 1,
                num_engine_ranks=init_info.num_engine_ranks,
                ranks_per_engine=init_info.ranks_per_engine,
                settings=init_info.settings,
            )
            address = self._controller.address
            client.init_weight_transfer_engine({"controller": address})
        if self.is_sender or every_rank_sends:
            weights = _weights_of(source._module) if every_rank_sends else self._first_staged()
            self._sender = Sender(address, rank=init_info.rank, weights=weights, timeout_s=init_info.timeout_s)
        self._calls = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-vllm-client")

    @classmethod
    def trainer_init(cls, init_info: WeftTrainerInit, *, client: Any, source: Any = None) -> Self:
        """Called on every trainer rank."""
        if source is None:
            raise ValueError("the weft backend needs a `source` of the weights to send")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Publish the next version, and return when the engines serve it. Called on every trainer rank."""
        self._version += 1
        if not isinstance(self.source, ModuleSource):
            self._walk_source()
        publication = None if self._sender is None else self._sender.publish(version=self._version)
        if self.is_sender:
            assert publication is not None
            self._drive_engines(publication)
        if publication is not None:
            publication.wait_committed(self._timeout_s)

    def _drive_engines(self, publication: Publication) -> None:
        """vLLM's sequence of calls; a publication that has failed is no longer waited for.

        Engines stand still while they are called, so engines that take versions on their own are called only when the
        version has arrived; those inside a user's process have to be called first.
        """
        self.client.start_weight_update()
        soon = time.monotonic() + HEAD_START_S
        while not publication.is_decided and time.monotonic() < soon:
            time.sleep(0.002)
        info = {"version": self._version, "timeout_s": self._timeout_s}
        served = self._calls.submit(self.client.update_weights, info)
        with ThreadPoolExecutor(max_workers=1) as watch:
            committed = watch.submit(publication.wait_committed, self._timeout_s)
            wait([served, committed], return_when=FIRST_COMPLETED)
            if committed.done():
                committed.result()
            served.result()
        self.client.finish_weight_update(weight_version=str(self._version))

    def _first_staged(self) -> Weights:
        """Memory for a source that yields tensors: the same for every version."""
        assert self.source is not None
        self._staged.tensors = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in self.source.metadata()}
        return self._staged.weights()

    def _walk_source(self) -> None:
        """Making tensors is collective: all ranks iterate over them, rank 0 keeps their contents."""
        assert self.source is not None
        if self.is_sender:
            self._staged.fill(self.source)
        else:
            for _ in self.source:
                pass

    def shutdown(self) -> None:
        """Leave; the engines keep serving what they have."""
        if self._sender is not None:
            self._sender.close()
        if self._controller is not None:
            self._controller.close()
        self._calls.shutdown(wait=False)


def _weights_of(module: torch.nn.Module) -> Weights:
    is_hugging_face = hasattr(module, "config") and hasattr(module, "save_pretrained")
    return checkpoint_weights(module) if is_hugging_face else weights_of(module)
