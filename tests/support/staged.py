"""TRL's way of sending weights, tensor by tensor, from a trainer on one device to an engine on another."""

from __future__ import annotations

import threading

import torch

from weft.config import TransferSettings
from weft.integrations.torch import weights_of_tensors
from weft.integrations.trl import WeftWeightTransfer
from weft.runtime.receive.receiver import Receiver

WAIT_S = 60.0
SHAPES = {"embed.weight": (96, 40), "norm.weight": (40,), "head.weight": (33, 40)}


def drawn(device: str, seed: int) -> dict[str, torch.Tensor]:
    """A version's weights, on a device."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16().to(device) for name, shape in SHAPES.items()}


def check_versions_arrive(trainer_device: str, engine_device: str, **settings: str) -> None:
    """Two versions are what the engine holds, bit for bit."""
    served = {name: torch.zeros_like(tensor) for name, tensor in drawn(engine_device, 0).items()}
    transfer = WeftWeightTransfer(listen="tcp://127.0.0.1:*", settings=TransferSettings(**settings), timeout_s=WAIT_S)
    transfer.init_weight_transfer()
    assert transfer._controller is not None
    try:
        with Receiver(transfer._controller.address, rank=0, weights=weights_of_tensors(served)) as receiver:
            for seed in (1, 2):
                published = drawn(trainer_device, seed)
                serving = threading.Thread(target=receiver.take, args=(WAIT_S,))
                serving.start()
                transfer.send_weights(iter(published.items()))
                serving.join(WAIT_S)
                assert not serving.is_alive()
                for name, tensor in published.items():
                    assert torch.equal(served[name].cpu().view(torch.int16), tensor.cpu().view(torch.int16)), name
            assert receiver.version == transfer.version == 2
    finally:
        transfer.destroy()
