"""`weights_of`: boxes and addresses of real modules, sharded by torch itself, and re-homing into shared memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.integrations.dtensor_ranks import PLACEMENTS, Net, all_reports, full_model
from weft import Part, weights_of
from weft.errors import LayoutError, RegistrationError
from weft.transport.shm import ShmTransport


def assemble(reports) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tensors put together from all ranks' boxes, and how often each element was reported."""
    tensors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for shards in reports.values():
        for name, _, shape, lo, extent, values in shards:
            whole, count = tensors.setdefault(name, (np.full(shape, np.nan, np.float32), np.zeros(shape, int)))
            box = tuple(slice(a, a + n) for a, n in zip(lo, extent, strict=True))
            whole[box] = values
            count[box] += 1
    return tensors


@pytest.fixture(scope="module")
def reports():
    return all_reports()


@pytest.mark.parametrize(("kind", "copies"), [("ddp", 4), ("fsdp", 1), ("hsdp", 2), ("fsdp_tp", None)])
def test_sharded_modules_report_exactly_what_each_rank_holds(reports, kind, copies):
    mine = {rank: report[kind] for rank, report in reports.items()}
    tensors = assemble(mine)
    expected = dict(full_model().named_parameters())
    assert set(tensors) == set(expected)
    for name, (whole, count) in tensors.items():
        assert np.array_equal(whole, expected[name].detach().numpy()), name
        assert copies is None or (count == copies).all(), name
    aliases = {name: alias for shards in mine.values() for name, alias, *_ in shards}
    assert aliases["embed.weight"] == ("head.weight",)


@pytest.mark.parametrize("case", PLACEMENTS)
def test_any_placement_on_any_mesh(reports, case):
    whole, count = assemble({rank: report[case] for rank, report in reports.items()})["w"]
    assert np.array_equal(whole, np.arange(77, dtype=np.float32).reshape(11, 7))
    assert (count == (2 if case == "rows, replicated" else 1)).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_plain_and_compiled_modules_have_their_own_names():
    net = full_model()
    names = [held.tensor.name for held in weights_of(net).held]
    assert names == [name for name, _ in net.named_parameters()]
    assert [held.tensor.name for held in weights_of(torch.compile(net)).held] == names


def test_parameters_that_cannot_be_transferred_are_all_named():
    net = Net()
    net.register_parameter("odd", torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    net.register_parameter("stuck", torch.nn.Parameter(torch.zeros(1, 4).expand(3, 4)))
    with pytest.raises(LayoutError) as caught:
        weights_of(net)
    assert "odd is torch.float64" in str(caught.value)
    assert "stuck has strides (0, 1)" in str(caught.value)
    with pytest.raises(LayoutError, match="has no parameters"):
        weights_of(torch.nn.ReLU())


def test_rehoming_keeps_every_tensor_object_and_every_value():
    net = full_model()
    before = {name: (id(parameter), parameter.detach().clone()) for name, parameter in net.named_parameters()}
    inputs = torch.arange(4)
    with torch.no_grad():  # a graph would hold the weights
        expected = net.head(net.down(torch.relu(net.up(net.embed(inputs)))))
    with ShmTransport("engine 0") as transport:
        weights = weights_of(net)
        moved = weights.rehome(transport.allocate)
        for name, parameter in net.named_parameters():
            assert id(parameter) == before[name][0]
            assert torch.equal(parameter, before[name][1])
        assert net.head.weight is net.embed.weight
        assert torch.equal(net.head(net.down(torch.relu(net.up(net.embed(inputs))))), expected)
        embed = next(held for held in moved.held if held.tensor.name == "embed.weight")
        assert embed.address != next(held for held in weights.held if held.tensor.name == "embed.weight").address
        ctypes.memset(embed.address, 0, embed.span_bytes)  # a write from outside is what the model sees
        assert not net.embed.weight.any()
        assert moved.rehome is not None
    assert net.up.weight.sum() == before["up.weight"][1].sum()  # still there after the transport is closed


def test_memory_that_somebody_else_holds_is_not_moved():
    net = full_model()
    weights = weights_of(net)
    view = net.up.weight.detach()[1:]
    assert weights_of(net).rehome is None
    with ShmTransport("engine 0") as transport, pytest.raises(RegistrationError, match="held by another object"):
        weights.rehome(transport.allocate)
    del view
    assert weights_of(net).rehome is not None


def test_weights_moved_in_inference_mode_can_be_moved_again():
    net = full_model()
    with ShmTransport("engine 0") as transport:
        with torch.inference_mode():
            weights_of(net).rehome(transport.allocate)
        assert not net.up.weight.is_inference()
        assert weights_of(net).rehome is not None


def test_fused_parameters_are_boxes_of_several_tensors():
    fused = torch.nn.Linear(4, 10, bias=False)
    parts = [
        Part(source="q.weight", shape=(8, 4), lo=(2, 0), extent=(3, 4), at=(0, 0)),
        Part(source="k.weight", shape=(8, 4), lo=(0, 0), extent=(5, 4), at=(3, 0)),
        Part(source="q.weight", shape=(8, 4), lo=(6, 2), extent=(2, 2), at=(8, 0)),
        Part(source="v.weight", shape=(2, 2), lo=(0, 0), extent=(2, 2), at=(8, 2)),
    ]
    held = weights_of(fused, parts={"weight": parts}).held
    assert [shard.tensor.name for shard in held] == ["q.weight", "k.weight", "box 2 of q.weight", "v.weight"]
    assert held[2].aliases == ("q.weight",)
    start = fused.weight.data_ptr()
    assert [shard.address - start for shard in held] == [0, 3 * 16, 8 * 16, 8 * 16 + 8]
    assert [shard.extent for shard in held] == [(3, 4), (5, 4), (2, 2), (2, 2)]
    assert {shard.strides for shard in held} == {(4, 1)}
    with pytest.raises(LayoutError, match="exactly once"):
        weights_of(fused, parts={"weight": parts[:-1]})
    with pytest.raises(LayoutError, match="exactly once"):
        weights_of(fused, parts={"weight": [*parts[:-1], parts[-2]]})


@pytest.mark.parametrize(
    "part",
    [
        Part(shape=(100, 4), lo=(0, 0), extent=(100, 4)),
        Part(shape=(10, 4), lo=(6, 0)),
        Part(shape=(10, 4), lo=(0, 0), at=(1, 0)),
        Part(shape=(10, 4), lo=(-1, 0)),
        Part(shape=(10,), lo=(0,)),
    ],
)
def test_parts_outside_the_parameter_or_the_tensor_are_refused(part):
    with pytest.raises(LayoutError, match="weight"):
        weights_of(torch.nn.Linear(4, 10, bias=False), parts={"weight": part})
