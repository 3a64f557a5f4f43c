"""Members of a rehearsal hold what their case says, and count what they would write."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.case import Case, lay_out
from weft.errors import RegistrationError
from weft.rehearse.transport import Board, CountingTransport
from weft.rehearse.weights import EngineWeights, TrainerWeights

CASE = Case(model="qwen3-0.6b", trainer="fsdp4", engine="tp2", num_replicas=2, dtype="fp8-block128")


@pytest.fixture(scope="module")
def sides():
    return lay_out(CASE)


@pytest.fixture
def pair(tmp_path):
    board = Board(path=tmp_path / "board", num_trainers=2, num_engine_ranks=3)
    board.make()
    with (
        CountingTransport("trainer 1", board, writer=1) as sender,
        CountingTransport("engine 2", board, writer=2) as receiver,
    ):
        yield sender, receiver


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def test_trainers_hold_the_model_once(sides):
    num_bytes = sum(TrainerWeights(sides).of(rank).num_bytes for rank in range(4))
    assert num_bytes == sum(tensor.num_bytes for tensor in sides.trainer.tensors)


def test_engine_ranks_hold_boxes_of_checkpoint_tensors(sides):
    weights = EngineWeights(sides).of(3)
    names = [held.tensor.name for held in weights.held]
    assert len(set(names)) == len(names)
    shapes = {tensor.name: tensor.shape for tensor in sides.trainer.tensors}
    for held in weights.held:
        source = (held.aliases or (held.tensor.name,))[0]
        if not source.endswith("_scale_inv"):
            assert held.tensor.shape == shapes[source]
    assert {held.tensor.dtype for held in weights.held} == {"bf16", "fp32", "fp8_e4m3"}


def test_shards_lie_in_reserved_memory_one_after_the_other(sides):
    weights = TrainerWeights(sides).of(0)
    ((address, num_bytes),) = weights.ranges
    ends = [held.address + held.span_bytes for held in weights.held]
    assert weights.held[0].address == address
    assert all(end <= held.address for end, held in zip(ends, weights.held[1:], strict=False))
    assert ends[-1] <= address + num_bytes


def test_what_is_posted_is_counted_by_tag_and_writer(pair):
    sender, receiver = pair
    target, source = receiver.allocate(1 << 40), sender.allocate(1 << 40)
    _, descriptor = receiver.register(target.address, target.num_bytes)
    sender.register_source(source.address, source.num_bytes)
    peer = sender.connect(receiver.endpoint, [descriptor])
    batch = sender.prepare(
        peer, rows(source.address, source.address + 64), rows(target.address, target.address), rows(64, 9)
    )
    for tag in (5, 6):
        assert sender.post(batch, tag).wait(1.0).num_bytes == 73
        assert receiver.arrived(tag, writer=1) == 73
    assert receiver.arrived(5, writer=1) == 0
    assert receiver.arrived(6, writer=0) == 0
    assert (sender.num_writes, sender.num_bytes) == (4, 146)
    receiver.connect(sender.endpoint, [])
    receiver.credit("trainer 1", 6, 73)
    assert sender.arrived(6, writer=2) == 73
    receiver.forget_arrivals()
    assert receiver.arrived(6, writer=1) == 0


def test_rows_outside_registered_memory_are_refused(pair):
    sender, receiver = pair
    memory = receiver.allocate(4096)
    _, descriptor = receiver.register(memory.address, memory.num_bytes)
    sender.register_source(memory.address, memory.num_bytes)
    peer = sender.connect(receiver.endpoint, [descriptor])
    with pytest.raises(RegistrationError):
        sender.prepare(peer, rows(memory.address), rows(memory.address + 4000), rows(97))
