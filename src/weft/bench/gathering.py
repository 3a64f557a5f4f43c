"""The usual way to FP8: gather full tensors on every trainer rank, quantise, send. And what an FP8 engine holds.

To be fair to it, every rank quantises and sends only its share of the rows, cut between blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.bench import payload
from weft.bench.baselines import Groups
from weft.codec import fp8
from weft.codec.fp8 import Box, Grid
from weft.core.geometry.scaling import QUANT_BLOCK, scale_shape
from weft.core.models.model import Model
from weft.integrations.torch import weights_of
from weft.runtime.weights import Part

Parts = dict[str, tuple[Part, tuple[int, ...]]]


def quantized_engine(model: Model) -> tuple[torch.nn.Module, Parts]:
    """An engine of one rank: FP8 matrices with their scales, everything else in BF16."""
    module = payload.module_of({t.name: t.shape for t in model.policy_tensors}, "cpu")
    for name in payload.quantized_names(model):
        parameter = module.get_parameter(name)
        blocks = torch.zeros(scale_shape(tuple(parameter.shape)))
        codes = torch.zeros(parameter.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        payload.put(module, name, codes)
        payload.put(module, f"{name}_scale_inv", blocks)
    parts = {
        name: (Part(shape=tuple(p.shape), lo=(0,) * p.dim()), tuple(p.shape)) for name, p in module.named_parameters()
    }
    return module, parts


def is_quantized(module: torch.nn.Module, model: Model, version: int, steps: int) -> bool:
    """Whether an engine holds what the reference (weft/codec/fp8.py), in plain torch, makes of whole tensors."""
    names = payload.quantized_names(model)
    for tensor in model.policy_tensors:
        whole = payload.normal(tensor.name, tensor.shape, version, steps, is_quantized=tensor.name in names)
        found = module.get_parameter(tensor.name)
        if tensor.name not in names:
            if not torch.equal(found, whole):
                return False
            continue
        codes, scale = reference_fp8(whole)
        is_equal = torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
        if not is_equal or not torch.equal(module.get_parameter(f"{tensor.name}_scale_inv"), scale):
            return False
    return True


def reference_fp8(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, in plain torch."""
    rows, columns = scale_shape(tuple(whole.shape))
    padded = torch.zeros(rows * QUANT_BLOCK, columns * QUANT_BLOCK, device=whole.device)
    padded[: whole.shape[0], : whole.shape[1]] = whole.float()
    amax = padded.view(rows, QUANT_BLOCK, columns, QUANT_BLOCK).abs().amax(dim=(1, 3))
    scale = amax.clamp(min=1e-10) / torch.full_like(amax, 448.0)  # GPUs multiply by the inverse of a scalar
    spread = (1 / scale).repeat_interleave(QUANT_BLOCK, 0).repeat_interleave(QUANT_BLOCK, 1)
    values = whole.float() * spread[: whole.shape[0], : whole.shape[1]]
    return values.clamp(-448, 448).to(torch.float8_e4m3fn), scale


class QuantizedShare:
    """One trainer's share of the FP8 weights: some rows of blocks of every matrix."""

    def __init__(self, module: torch.nn.Module, model: Model, groups: Groups) -> None:
        self._source, self._groups = module, groups
        self._names = payload.quantized_names(model)
        self._share = torch.nn.Module()
        parts = {}
        for name, tensor, part in self._own():
            payload.put(self._share, name, tensor)
            parts[name] = part
        self.weights = weights_of(self._share, parts=parts)

    def _own(self) -> Iterator[tuple[str, torch.Tensor, Part]]:
        """What this rank sends: its rows of FP8 matrices and of their scales; other tensors as it holds them."""
        for name, parameter in self._source.named_parameters():
            if name not in self._names:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
                first = payload.first_row(parameter)
                if local.shape[0]:
                    yield name, local, Part(shape=tuple(parameter.shape), lo=(first, *(0,) * (parameter.dim() - 1)))
                continue
            first, last = self._rows(parameter.shape[0])
            if last <= first:
                continue
            columns = parameter.shape[1]
            codes = torch.zeros((last - first, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
            yield name, codes, Part(shape=tuple(parameter.shape), lo=(first, 0))
            shape = scale_shape(tuple(parameter.shape))
            blocks = torch.zeros((-(-last // QUANT_BLOCK) - first // QUANT_BLOCK, shape[1]))
            yield f"{name}_scale_inv", blocks, Part(shape=shape, lo=(first // QUANT_BLOCK, 0))

    def _rows(self, num_rows: int) -> tuple[int, int]:
        """This rank's rows, cut between blocks."""
        blocks = -(-num_rows // QUANT_BLOCK)
        each = -(-blocks // self._groups.num_trainers)
        rank = dist.get_rank()
        first, last = min(rank * each, blocks), min((rank + 1) * each, blocks)
        return first * QUANT_BLOCK, min(last * QUANT_BLOCK, num_rows)

    def make(self) -> None:
        """Gather every matrix, and quantise this rank's rows of it."""
        for name, parameter in self._source.named_parameters():
            if name not in self._names:
                continue
            whole = all_gathered(parameter, self._groups)
            first, last = self._rows(parameter.shape[0])
            if last > first:
                self._quantize(name, whole[first:last])

    def _quantize(self, name: str, rows: torch.Tensor) -> None:
        grid = Grid(rows=rows.shape[0], columns=rows.shape[1])
        box = Box(
            address=rows.data_ptr(),
            stride=rows.stride(0) * rows.element_size(),
            width=rows.element_size(),
            first=(0, 0),
            rows=grid.rows,
            columns=grid.columns,
        )
        amax = grid.zeros()
        fp8.add_amax(box, grid, amax, tensor=name)
        scale = fp8.scales(amax)
        codes = self._share.get_parameter(name)
        fp8.quantize(box, grid, scale, codes.data_ptr(), codes.stride(0), is_bounded=True)
        self._share.get_parameter(f"{name}_scale_inv").copy_(torch.from_numpy(scale))


def all_gathered(parameter: torch.Tensor, groups: Groups) -> torch.Tensor:
    """A full tensor on every trainer, gathered from its row shards."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().view(torch.uint8)
    rows, num_bytes = parameter.shape[0], parameter.shape[1] * parameter.element_size()
    per_rank = -(-rows // groups.num_trainers)
    padded = torch.zeros((per_rank, num_bytes), dtype=torch.uint8)
    padded[: local.shape[0]] = local
    whole = torch.empty((per_rank * groups.num_trainers, num_bytes), dtype=torch.uint8)
    parts = [whole[n * per_rank : (n + 1) * per_rank] for n in range(groups.num_trainers)]
    dist.all_gather(parts, padded, group=groups.trainers)
    return whole[:rows].view(parameter.dtype)


def gathered_bytes(model: Model, num_trainers: int) -> int:
    """Bytes trainers send each other so that each has every matrix."""
    whole = sum(2 * tensor.num_elements for tensor in model.policy_tensors if tensor.quantized)
    return whole * (num_trainers - 1)
