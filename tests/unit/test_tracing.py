"""Tracing hand-written loaders: the trace, replayed on real values, gives what the loader itself gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.layout import Tensor
from weft.core.layouts.strided import recipe_from_strided
from weft.core.recipe import Op
from weft.errors import LayoutError
from weft.integrations.dtypes import NAMES
from weft.integrations.torch import weights_of_pieces
from weft.integrations.tracing import Trace, trace_loader


def checkpoint_of(values: dict[str, torch.Tensor]) -> list[Tensor]:
    return [Tensor(name=name, dtype=NAMES[value.dtype], shape=tuple(value.shape)) for name, value in values.items()]


def numbered(shape: tuple[int, ...], first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different values everywhere, exact in every precision used here."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + first) % 251 - 120).to(dtype).reshape(shape)


def replay(trace: Trace, values: dict[str, torch.Tensor], destinations: dict[str, torch.Tensor]) -> None:
    """Do on real values what the trace says."""
    for copy in trace.copies:
        source = torch.as_strided(values[copy.source], copy.shape, copy.src_strides, copy.src_offset)
        torch.as_strided(destinations[copy.dst], copy.shape, copy.dst_strides, copy.dst_offset).copy_(source)


def follow(load, values: dict[str, torch.Tensor], destinations: dict[str, torch.Tensor]) -> Trace:
    """Trace a loader, check that nothing was written, that a replay equals a real load, and that boxes say the same."""
    before = {name: tensor.clone() for name, tensor in destinations.items()}
    trace = trace_loader(lambda weights: load(destinations, weights), checkpoint_of(values), destinations)
    assert all(torch.equal(tensor, before[name]) for name, tensor in destinations.items())
    loaded = {name: tensor.clone() for name, tensor in destinations.items()}
    load(loaded, iter(values.items()))
    replayed = {name: tensor.clone() for name, tensor in destinations.items()}
    replay(trace, values, replayed)
    boxed = {name: tensor.clone() for name, tensor in destinations.items()}
    for piece in trace.pieces():
        box = values[piece.source][
            tuple(slice(a, a + n) for a, n in zip(piece.src_lo, piece.source_extent, strict=True))
        ]
        order = [axis for _, axis in piece.walked]
        order += [axis for axis in range(box.dim()) if axis not in order]
        where = tuple(slice(a, a + n) for a, n in zip(piece.dst_lo, piece.extent, strict=True))
        boxed[piece.dst][where] = box.permute(order).reshape(piece.extent).to(boxed[piece.dst].dtype)
    for name, tensor in loaded.items():
        assert torch.equal(replayed[name], tensor), name
        assert torch.equal(boxed[name], tensor), name
    return trace


def test_fused_rows_of_one_tensor_parallel_rank():
    rank, heads, kv_heads, size, width = 1, 4, 2, 3, 5

    def load(parameters, weights):
        rows = {"q": (0, heads // 2 * size), "k": (6, size), "v": (9, size)}
        for name, weight in weights:
            at, count = rows[name]
            parameters["qkv"].narrow(0, at, count).copy_(weight.narrow(0, rank * count, count))

    values = {"q": numbered((heads * size, width)), "k": numbered((kv_heads * size, width), 3)}
    values["v"] = numbered((kv_heads * size, width), 5)
    trace = follow(load, values, {"qkv": torch.zeros(12, width)})
    assert [copy.source for copy in trace.copies] == ["q", "k", "v"]
    assert not trace.unused
    assert not trace.unfilled


def test_column_slices_transposes_and_heads_in_another_order():
    def load(parameters, weights):
        for name, weight in weights:
            match name:
                case "down":
                    parameters["down"].copy_(weight.chunk(2, dim=1)[1])
                case "conv":
                    parameters["conv"].copy_(weight.t())
                case "rope":  # pairs → halves, as some rotary loaders do
                    parameters["rope"].copy_(weight.view(2, 3, 2, 4).transpose(1, 2).reshape(12, 4))

    values = {"down": numbered((4, 6)), "conv": numbered((3, 5)), "rope": numbered((12, 4))}
    destinations = {"down": torch.zeros(4, 3), "conv": torch.zeros(5, 3), "rope": torch.zeros(12, 4)}
    follow(load, values, destinations)


def test_experts_are_stacked_and_fused():
    def load(parameters, weights):
        for name, weight in weights:
            _, expert, part = name.split(".")
            if int(expert) % 2:  # the odd experts live here
                local = parameters["w2"] if part == "down" else parameters["w13"]
                rows = {"gate": slice(0, 3), "up": slice(3, 6), "down": slice(0, 2)}[part]
                local[int(expert) // 2, rows] = weight

    values = {
        f"experts.{expert}.{part}": numbered((2, 3) if part == "down" else (3, 2), 10 * expert)
        for expert in range(4)
        for part in ("gate", "up", "down")
    }
    destinations = {"w13": torch.zeros(2, 6, 2), "w2": torch.zeros(2, 2, 3)}
    trace = follow(load, values, destinations)
    assert set(trace.unused) == {name for name in values if int(name.split(".")[1]) % 2 == 0}


def test_casts_cat_and_stack_are_followed_by_lineage():
    def load(parameters, weights):
        got = dict(weights)
        parameters["fused"].copy_(torch.cat([got["a"].to(torch.bfloat16), got["b"].to(torch.bfloat16)], dim=0)[1:6])
        parameters["stacked"].copy_(torch.stack([got["b"], got["a"][:3]], dim=1))
        parameters["bias"].copy_(got["bias"].float())
        parameters["flat"].copy_(torch.cat([got["a"].t(), got["b"].t()], dim=1).contiguous().view(-1)[5:25])
        parameters["turned"].copy_(got["a"].t().clone().t())
        parameters["scalar"].copy_(got["scalar"])

    values = {"a": numbered((4, 4)), "b": numbered((3, 4), 9), "bias": numbered((6,), 2, torch.bfloat16)}
    values["scalar"] = torch.tensor(3.0)
    destinations = {
        "fused": torch.zeros(5, 4, dtype=torch.bfloat16),
        "stacked": torch.zeros(3, 2, 4),
        "bias": torch.zeros(6),
        "flat": torch.zeros(20),
        "turned": torch.zeros(4, 4),
        "scalar": torch.zeros(1),
    }
    trace = follow(load, values, destinations)
    ops = {copy.dst: copy.op for copy in trace.copies}
    assert ops["fused"] is Op.CAST
    assert ops["bias"] is Op.CAST
    assert ops["stacked"] is Op.COPY


def test_loaders_that_move_tensors_to_the_device_first():
    def load(parameters, weights):
        for name, weight in weights:
            parameters[name].copy_(weight.to(parameters[name].device)[1:])

    follow(load, {"w": numbered((3, 2))}, {"w": torch.zeros(2, 2)})


def test_padding_stays_and_shared_memory_is_one_destination():
    def load(parameters, weights):
        for _, weight in weights:
            parameters["embed"][: weight.shape[0]].copy_(weight)
            parameters["embed"][weight.shape[0] :].fill_(0)

    embed = torch.full((8, 2), 5.0)
    values = {"embed": numbered((6, 2))}
    trace = trace_loader(lambda w: load({"embed": embed}, w), checkpoint_of(values), {"embed": embed, "head": embed})
    assert [tensor.name for tensor in trace.destinations] == ["embed"]
    assert embed.eq(5.0).all()
    recipe_of_written = [(piece.dst_lo, piece.extent) for piece in trace.pieces()]
    assert recipe_of_written == [((0, 0), (6, 2))]


def test_destinations_may_be_stand_ins_themselves():
    parameter = torch.empty(4, 2, device="meta")
    values = {"w": numbered((4, 2))}
    trace = trace_loader(lambda w: parameter.copy_(next(w)[1]), checkpoint_of(values), {"p": parameter})
    assert [(copy.dst, copy.source) for copy in trace.copies] == [("p", "w")]


def problems_of(load, values, destinations) -> str:
    with pytest.raises(LayoutError) as caught:
        trace_loader(lambda weights: load(destinations, weights), checkpoint_of(values), destinations)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda p, w: [p[n].copy_(t + 1) for n, t in w], "a: goes through aten.add.Tensor"),
        (lambda p, w: [p[n].copy_(t[torch.tensor([1, 0])]) for n, t in w], "a: goes through aten.index.Tensor"),
        (lambda p, w: [p[n].add_(t) for n, t in w], "a: written by aten.add_.Tensor"),
        (lambda p, w: [p[n].copy_(t).copy_(-p[n]) for n, t in w], "a: goes through aten.neg.default"),
        (lambda p, w: [p[n].copy_(t).mul_(2) for n, t in w], "a: written by aten.mul_.Tensor"),
        (lambda p, w: [p[n].copy_(t.to(torch.bfloat16).float()) for n, t in w], "a: is cast to torch.bfloat16"),
        (lambda p, w: [p[n].copy_(t) for n, t in w if t.sum().item()], "a: the loader stopped here"),
        (lambda p, w: [p["other"].copy_(t) for n, t in w], "a: the loader stopped here: KeyError"),
    ],
    ids=[
        "arithmetic",
        "indexing",
        "added in place",
        "changed afterwards",
        "scaled afterwards",
        "cast twice",
        "reads values",
        "unknown",
    ],
)
def test_what_cannot_be_followed_is_named(load, expected):
    destinations = {"a": torch.zeros(2, 2)}
    assert expected in problems_of(load, {"a": numbered((2, 2))}, destinations)
    assert not destinations["a"].any()


def test_memory_filled_twice_is_named():
    def load(weights):
        for _, weight in weights:
            shared[:2].copy_(weight)

    shared = torch.zeros(3, 2)
    values = {"embed": numbered((2, 2)), "head": numbered((2, 2), 5)}
    with pytest.raises(LayoutError) as caught:
        trace_loader(load, checkpoint_of(values), {"embed.weight": shared, "head.weight": shared})
    assert caught.value.problems == ("embed.weight: both embed and head",)


def test_every_problem_is_listed():
    destinations = {name: torch.zeros(2) for name in "abc"}
    values = {name: numbered((2,)) for name in "abc"}
    text = problems_of(lambda p, w: [p[n].copy_(t * 2 if n != "b" else t) for n, t in w], values, destinations)
    assert text.count("aten.mul") == 2
    assert "a: " in text
    assert "c: " in text


def test_a_trace_gives_a_recipe():
    def load(weights):
        for name, weight in weights:
            destination[{"q": slice(0, 4), "k": slice(4, 6)}[name]].copy_(weight)

    destination = torch.zeros(6, 3)
    values = {"q": numbered((4, 3)), "k": numbered((2, 3))}
    trace = trace_loader(load, checkpoint_of(values), {"qk": destination})
    recipe = recipe_from_strided({0: trace.destinations}, {0: trace.copies}, trace.sources)
    assert recipe.sources == ("q", "k")
    assert recipe.dst_lo[:, 0].tolist() == [0, 4]


def test_weights_of_traced_pieces_lie_where_the_loader_puts_them():
    w13 = torch.zeros(2, 4, 3)
    values = {
        f"{expert}.{part}": numbered((2, 3), expert * 50 + len(part)) for expert in (0, 1) for part in ("g", "up")
    }

    def load(weights):
        for name, weight in weights:
            expert, part = name.split(".")
            w13[int(expert), slice(0, 2) if part == "g" else slice(2, 4)] = weight

    trace = trace_loader(load, checkpoint_of(values), {"w13": w13})
    weights = weights_of_pieces({"w13": w13}, trace.pieces(), trace.sources)
    places = {held.tensor.name: (held.address - w13.data_ptr(), held.extent, held.strides) for held in weights.held}
    assert places == {
        "0.g": (0, (2, 3), (3, 1)),
        "0.up": (6 * 4, (2, 3), (3, 1)),
        "1.g": (12 * 4, (2, 3), (3, 1)),
        "1.up": (18 * 4, (2, 3), (3, 1)),
    }
    assert weights.num_bytes == w13.numel() * 4


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_chains_of_views_casts_and_copies(data):
    """Whatever a loader does with views, clones and concatenations: the trace replays it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    values = {"a": numbered(shape), "b": numbered(shape, 17)}

    steps = data.draw(st.lists(st.sampled_from(["slice", "t", "clone", "cat", "stack", "flat", "split"]), max_size=5))
    choices = [data.draw(st.integers(0, 10_000)) for _ in steps]

    def transform(tensor, other):
        for step, choice in zip(steps, choices, strict=True):
            dim = choice % max(tensor.dim(), 1)
            match step:
                case "slice":
                    start = choice % tensor.shape[dim]
                    tensor = tensor.narrow(dim, start, tensor.shape[dim] - start)
                case "t":
                    tensor = tensor.transpose(0, dim)
                case "clone":
                    tensor = tensor.clone()
                case "cat":
                    tensor = torch.cat([tensor, tensor], dim=dim)
                case "stack":
                    tensor = torch.stack([tensor, tensor], dim=dim) if tensor.dim() < 4 else tensor
                case "flat":
                    tensor = tensor.reshape(-1)
                case "split":
                    tensor = tensor.unsqueeze(dim) if tensor.dim() < 4 else tensor
        return torch.cat([tensor.reshape(-1), other.reshape(-1)])

    def load(parameters, weights):
        got = dict(weights)
        parameters["p"].copy_(transform(got["a"], got["b"]))

    size = transform(values["a"], values["b"]).numel()
    follow(load, values, {"p": torch.zeros(size)})
