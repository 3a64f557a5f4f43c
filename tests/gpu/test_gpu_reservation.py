"""A KV cache that takes all GPU memory it finds: versions land in what was reserved before, and nowhere without it."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from weft.config import EngineSettings, TransferSettings  # noqa: E402
from weft.errors import WeftError  # noqa: E402
from weft.integrations.torch import weights_of  # noqa: E402
from weft.runtime.controller.controller import Controller  # noqa: E402
from weft.runtime.receive.receiver import Receiver  # noqa: E402
from weft.runtime.receive.reservation import Reservation  # noqa: E402
from weft.runtime.send.sender import Sender  # noqa: E402

pytestmark = pytest.mark.gpu
WAIT_S = 60.0
SHAPE = 2048, 1 << 20
"""In BF16: a second copy needs more than `LEFT_BYTES`."""
LEFT_BYTES = 2 << 30
"""For everything else: the trainer's kernels, tables."""


def model(value: float) -> Any:
    made = torch.nn.Module()
    weight = torch.full(SHAPE, value, dtype=torch.bfloat16, device="cuda")
    made.register_parameter("w", torch.nn.Parameter(weight, requires_grad=False))
    return made


def engine(pipe: Any, address: str, reserves: bool) -> None:
    served = model(0.0)
    weights = weights_of(served)
    num_bytes = EngineSettings().reserved_bytes(weights.num_bytes, "cuda:0")
    reservation = Reservation("cuda:0", num_bytes) if reserves else None
    free, _ = torch.cuda.mem_get_info()
    kv_cache = torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device="cuda")
    try:
        with Receiver(address, rank=0, weights=weights, reservation=reservation) as receiver:
            receiver.wait(WAIT_S).commit(WAIT_S)
            lowest, highest = (float(value) for value in torch.aminmax(served.w))  # takes no memory of its own
            pipe.send((receiver.version, lowest == highest == 1.0, len(kv_cache) > 0))
    except (WeftError, RuntimeError) as error:
        pipe.send(str(error))


@pytest.mark.parametrize("reserves", [True, False], ids=["reserved", "not reserved"])
def test_versions_land_beside_a_kv_cache_that_takes_all(reserves):
    settings = TransferSettings(version_s=WAIT_S, silence_s=30.0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with (
        Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller,
        Sender(controller.address, rank=0, weights=weights_of(model(1.0)), timeout_s=20.0) as sender,
    ):
        process = context.Process(target=engine, args=(theirs, controller.address, reserves), daemon=True)
        process.start()
        try:
            publication = sender.publish(version=1)
            assert ours.poll(WAIT_S), "no answer"
            answer = ours.recv()
            if reserves:
                publication.wait_committed(WAIT_S)
                assert answer == (1, True, True)
            else:
                assert "memory" in str(answer)
        finally:
            process.kill()
            process.join(WAIT_S)
            torch.cuda.empty_cache()
