"""What benchmarks move: real tensor shapes, with contents that both sides derive from a tensor's name and a version.

Element `i` of a tensor in version `v` has the 16 bits `hash(name, i) + 7919 v`, so an engine rank can tell whether it
holds exactly the right version without having seen the trainer's memory.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from weft.core.models.catalog import build_model, load_model
from weft.core.models.model import Model
from weft.errors import ConfigError
from weft.runtime.weights import Held, Part, Weights

VERSION_STEP = 7919
PERIOD, ROW_SHIFT = 100, 31
_MULTIPLIER = 2_654_435_761
_FACTORS = (1.0, -2.0, 4.0)
_STRIDE = 37


SMALLEST = "smallest"
"""A model of a few kilobytes: what a version costs beyond its bytes."""
_SMALLEST_CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


SMALL = "small"
"""A model of 50 MB with eight heads: large enough for slow networks."""
_SMALL_CONFIG = {
    **_SMALLEST_CONFIG,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
MEDIUM = "medium"
"""The same with 168 MB: what a version costs beyond its bytes hardly shows on slow networks."""
_MEDIUM_CONFIG = {**_SMALL_CONFIG, "hidden_size": 1024, "intermediate_size": 4096}
SMALL_MOE = "small-moe"
"""The same with 64 experts, which are nearly all of it."""
_SMALL_MOE_CONFIG = {
    **_SMALLEST_CONFIG,
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
_OWN_CONFIGS = {SMALLEST: _SMALLEST_CONFIG, SMALL: _SMALL_CONFIG, MEDIUM: _MEDIUM_CONFIG, SMALL_MOE: _SMALL_MOE_CONFIG}


def load_payload(name: str) -> Model:
    """A model by its name in benchmarks."""
    return build_model(name, _OWN_CONFIGS[name]) if name in _OWN_CONFIGS else load_model(name)


def module_of(shapes: Mapping[str, tuple[int, ...]], device: str) -> torch.nn.Module:
    """A module tree whose parameters have these names and shapes; BF16, uninitialised."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        put(root, name, torch.empty(shape, dtype=torch.bfloat16, device=device))
    return root


def put(root: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make a tensor a parameter of a module tree, under a dotted name."""
    *path, leaf = name.split(".")
    node = root
    for part in path:
        if not hasattr(node, part):
            node.add_module(part, torch.nn.Module())
        node = node.get_submodule(part)
    node.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def fill_normal(module: torch.nn.Module) -> None:
    """Give a module's parameters, FSDP2 shards by rows or whole ones, the numbers of version 0."""
    for name, parameter in module.named_parameters():
        whole = normal(name, tuple(parameter.shape), 0)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        first = first_row(parameter)
        local.copy_(whole[first : first + local.shape[0]])


def first_row(parameter: torch.Tensor) -> int:
    """Where this rank's rows of a parameter begin."""
    if not isinstance(parameter, DTensor):
        return 0
    rows, ranks = parameter.shape[0], parameter.device_mesh.size()
    return min(parameter.device_mesh.get_local_rank() * -(-rows // ranks), rows)


def advance_normal(weights: torch.nn.Module, version: int) -> None:
    """From the version before to this one: times a power of two, so that nothing is rounded."""
    for parameter in weights.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        local.mul_(_FACTORS[version % 3] / _FACTORS[(version - 1) % 3])


def advance_some_normal(module: torch.nn.Module, model: Model, step: int) -> None:
    """One element in PERIOD changes, different ones at every step."""
    quantized = quantized_names(model)
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        before = first_row(parameter) * (parameter.numel() // max(parameter.shape[0], 1))
        _change_some(local, step * _STRIDE - before, is_quantized=name in quantized)


def _change_some(weights: torch.Tensor, first: int, *, is_quantized: bool) -> None:
    """To the next number, as in training; where that would be rounded away, to the other sign, which keeps scales."""
    if is_quantized:
        weights.view(-1)[first % PERIOD :: PERIOD].neg_()
    else:
        weights.view(torch.int16).view(-1)[first % PERIOD :: PERIOD].add_(1)


def quantized_names(model: Model) -> set[str]:
    """Tensors an FP8 engine holds quantised."""
    return {tensor.name for tensor in model.policy_tensors if tensor.quantized}


def normal(
    name: str, shape: tuple[int, ...], version: int, steps: int = 0, *, is_quantized: bool = True
) -> torch.Tensor:
    """A tensor like those of a trained model, BF16, the same in every process; after some small steps."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)
    for step in range(1, steps + 1):
        _change_some(whole, step * _STRIDE, is_quantized=is_quantized)
    return whole.mul_(_FACTORS[version % 3])


def whole_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """All tensors of a model that are transferred."""
    return {tensor.name: tensor.shape for tensor in model.policy_tensors}


def expert_parts(model: Model, *, num_parts: int, part: int) -> dict[str, tuple[Part, tuple[int, ...]]]:
    """What one expert-parallel rank holds: its share of the experts, and everything else."""
    names = {tensor.name: _expert_of(tensor.name) for tensor in model.policy_tensors}
    num_experts = 1 + max((number for number in names.values() if number is not None), default=0)
    return {
        tensor.name: (Part(shape=tensor.shape, lo=(0,) * len(tensor.shape)), tensor.shape)
        for tensor in model.policy_tensors
        if (expert := names[tensor.name]) is None or expert * num_parts // num_experts == part
    }


def _expert_of(name: str) -> int | None:
    """The number of the expert a tensor belongs to."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def engine_parts(model: Model, *, num_parts: int, part: int) -> dict[str, tuple[Part, tuple[int, ...]]]:
    """What one tensor-parallel rank holds of every tensor: where it begins, and its shape."""
    parts = {}
    for tensor in model.policy_tensors:
        boxes = tensor.part_boxes(num_parts, part)
        if len(boxes) != 1:
            raise ConfigError(f"`{tensor.name}` is cut into several boxes", hint="use a model without fused tensors")
        lo, extent = boxes[0]
        parts[tensor.name] = Part(shape=tensor.shape, lo=lo), extent
    return parts


def total_bytes(model: Model, *, num_engine_ranks: int, num_parts: int) -> int:
    """Bytes of one version to all engine ranks."""
    per_rank = [
        sum(2 * torch.Size(extent).numel() for _, extent in engine_parts(model, num_parts=num_parts, part=p).values())
        for p in range(num_parts)
    ]
    return sum(per_rank) * (num_engine_ranks // num_parts)


def tensor_at(held: Held) -> torch.Tensor:
    """A shard's memory as a tensor of 16-bit integers."""
    buffer = (ctypes.c_int16 * (held.span_bytes // 2)).from_address(held.address)
    return torch.as_strided(torch.frombuffer(buffer, dtype=torch.int16), held.extent, held.strides)


def fill(weights: Weights, version: int) -> None:
    """Give all shards their contents in a version."""
    for held in weights.held:
        target = tensor_at(held)
        for rows, values in _expected(held, version):
            target[rows] = values


def advance(weights: Weights) -> None:
    """From one version to the next."""
    for held in weights.held:
        tensor_at(held).add_(VERSION_STEP)


def advance_some(weights: Weights, step: int) -> None:
    """A version in which one element in PERIOD becomes the next number, different ones at every step."""
    for held in weights.held:
        matrix = tensor_at(held)
        matrix = matrix if matrix.dim() == 2 else matrix.view(1, -1)
        row_lo, column_lo = held.lo if len(held.lo) == 2 else (0, held.lo[0])
        for first in range(min(PERIOD, matrix.shape[0])):
            start = (step - ROW_SHIFT * (row_lo + first) - column_lo) % PERIOD
            matrix[first::PERIOD, start::PERIOD] += 1


def is_version(weights: Weights, version: int, steps: int = 0) -> bool:
    """Whether every element of every shard is exactly that version's, after some steps of `advance_some`."""
    return all(
        torch.equal(tensor_at(held)[rows], values)
        for held in weights.held
        for rows, values in _expected(held, version, steps)
    )


def _expected(held: Held, version: int, steps: int = 0) -> Iterator[tuple[slice, torch.Tensor]]:
    """A shard's contents, some rows at a time."""
    seed = zlib.crc32(held.tensor.name.encode())
    inner = torch.zeros((), dtype=torch.int64)
    stride = 1
    for lo, extent, size in reversed(list(zip(held.lo[1:], held.extent[1:], held.tensor.shape[1:], strict=True))):
        inner = (torch.arange(lo, lo + extent) * stride)[(...,) + (None,) * inner.dim()] + inner
        stride *= size
    step = max((4 << 20) // max(inner.numel(), 1), 1)
    for first in range(0, held.extent[0], step):
        rows = slice(first, min(first + step, held.extent[0]))
        index = torch.arange(held.lo[0] + rows.start, held.lo[0] + rows.stop) * stride
        index = index[(...,) + (None,) * inner.dim()] + inner
        bits = ((index * _MULTIPLIER + seed) >> 13) + version * VERSION_STEP
        if steps:
            width = held.tensor.shape[1] if len(held.tensor.shape) == 2 else held.tensor.shape[0]
            residue = (index // width * ROW_SHIFT + index % width) % PERIOD
            bits += (steps + PERIOD - torch.where(residue == 0, PERIOD, residue)) // PERIOD
        yield rows, bits.to(torch.int16)
