"""Weights of torch modules: plain modules, DDP, FSDP2 and any other DTensor sharding, tied parameters.

    weights = weights_of(model)              # of this rank; nothing is copied or gathered
    Sender("tcp://ctl:7070", rank=rank, weights=weights)

A parameter that is sharded along several mesh dimensions may hold several boxes of its tensor (FSDP2 over tensor
parallelism cuts rows twice): each becomes a shard of its own. Parameters that share memory are one shard with several
names.

CPU weights can be moved into shared memory, so that other processes write into them directly: the tensor objects the
model holds stay the same, only the memory behind them changes. That is safe only if nothing else holds that memory.
This is checked: if another object does, the weights stay where they are and the `cma` transport is used.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.nn.parallel import DistributedDataParallel

from weft.core.geometry.alignment import ALIGN, aligned
from weft.core.layout import Tensor
from weft.core.recipe import Piece
from weft.errors import LayoutError, RegistrationError
from weft.integrations.dtypes import NAMES
from weft.runtime.weights import Allocate, Held, Part, Weights

_PREFIXES = ("_orig_mod.",)
"""Prefix in compiled modules; not part of a tensor's name."""


@dataclass(frozen=True, slots=True)
class _Named:
    """One parameter's local memory and all its names."""

    names: tuple[str, ...]
    parameter: torch.Tensor
    """As the module holds it: a DTensor, where it is sharded."""
    local: torch.Tensor
    parts: tuple[Part, ...] = ()
    """Which boxes of which tensors it is, if given."""
    pieces: tuple[Piece, ...] = ()
    """The same, from a loader's trace; what no piece fills stays unchanged."""


def weights_of(
    module: torch.nn.Module, *, parts: Mapping[str, Part | Sequence[Part]] | None = None, buffers: bool = False
) -> Weights:
    """The parameters a module holds on this rank. Raises LayoutError naming those that cannot be transferred.

    `parts` says which box of its tensor a plain parameter is, where a module shards without DTensor, or which boxes of
    other tensors a fused one is made of. `buffers`: those that a checkpoint has as well.

    >>> weights = weights_of(torch.nn.Linear(4, 2))
    >>> [held.tensor.name for held in weights.held]
    ['weight', 'bias']
    """
    named = list(_parameters(module, parts or {}, buffers=buffers))
    if not named:
        raise LayoutError(f"{type(module).__name__} has no parameters")
    return _checked_weights(named, {})


def weights_of_tensors(tensors: Mapping[str, torch.Tensor], *, parts: Mapping[str, Part] | None = None) -> Weights:
    """Tensors by name; `parts` says which box of its tensor one is, where it is not the whole."""
    given = parts or {}
    named = [
        _Named((name,), tensor, tensor, parts=(given[name],) if name in given else ())
        for name, tensor in tensors.items()
    ]
    if not named:
        raise LayoutError("no tensors to transfer")
    return _checked_weights(named, {})


def weights_of_pieces(
    tensors: Mapping[str, torch.Tensor], pieces: Iterable[Piece], sources: Iterable[Tensor]
) -> Weights:
    """Weights in tensors that are filled piece by piece from `sources`, as an engine's loader fills them."""
    shapes = {source.name: source.shape for source in sources}
    by_tensor: dict[str, list[Piece]] = {name: [] for name in tensors}
    for piece in pieces:
        by_tensor[piece.dst].append(piece)
    named = [
        _Named((name,), tensor, tensor, pieces=tuple(by_tensor[name]))
        for name, tensor in tensors.items()
        if by_tensor[name]
    ]
    return _checked_weights(named, shapes)


def _parameters(
    module: torch.nn.Module, parts: Mapping[str, Part | Sequence[Part]], *, buffers: bool
) -> Iterator[_Named]:
    """Every parameter once, with all its names."""
    if isinstance(module, DistributedDataParallel):
        module = module.module
    by_object: dict[int, tuple[torch.Tensor, list[str]]] = {}
    members = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in [*members, *(_kept_buffers(module) if buffers else ())]:
        for prefix in _PREFIXES:
            name = name.replace(prefix, "")  # noqa: PLW2901
        local = _local(parameter)
        key = local.data_ptr() if local.numel() else id(parameter)
        by_object.setdefault(key, (parameter, []))[1].append(name)
    for tensor, names in by_object.values():
        given = parts.get(names[0], ())
        yield _Named(tuple(names), tensor, _local(tensor), (given,) if isinstance(given, Part) else tuple(given))


def _kept_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are part of a checkpoint."""
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _checked_weights(named: Sequence[_Named], shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    problems = tuple(problem for parameter in named for problem in _problems(parameter))
    if problems:
        raise LayoutError("these parameters cannot be transferred", problems=problems)
    devices = sorted({_device(parameter.local) for parameter in named})
    if len(devices) > 1:
        raise LayoutError(f"parameters lie on {', '.join(devices)}", hint="put all weights of a member on one device")
    return _weights(named, devices[0], shapes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory a parameter has on this rank; the tensor it holds itself, not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _problems(named: _Named) -> Iterator[str]:
    name, local = named.names[0], named.local
    if local.dtype not in NAMES:
        yield f"{name} is {local.dtype}; supported: {', '.join(str(dtype) for dtype in NAMES)}"
    if local.device.type not in ("cpu", "cuda"):
        yield f"{name} lies on {local.device}"
    if local.layout is not torch.strided:
        yield f"{name} is {local.layout}"
    elif any(stride < 1 for size, stride in zip(local.shape, local.stride(), strict=True) if size > 1):
        yield f"{name} has strides {tuple(local.stride())}"
    yield from _part_problems(named)
    if isinstance(named.parameter, DTensor):
        yield from (
            f"{name} is placed as {placement}"
            for placement in named.parameter.placements
            if not (placement.is_shard() or isinstance(placement, Replicate) or _is_strided_shard(placement))
        )


def _part_problems(named: _Named) -> Iterator[str]:
    """Boxes must lie inside the parameter and the tensor, and fill the parameter exactly once."""
    whole = tuple(named.local.shape)
    boxes = []
    for part in named.parts:
        at, extent = part.at or (0,) * len(whole), part.extent or whole
        if not len(at) == len(extent) == len(part.lo) == len(part.shape) == len(whole):
            yield f"{named.names[0]} has {len(whole)} dimensions, but a part of it does not"
            return
        inside = all(a >= 0 and n > 0 and a + n <= size for a, n, size in zip(at, extent, whole, strict=True))
        inside &= all(lo >= 0 and lo + n <= size for lo, n, size in zip(part.lo, extent, part.shape, strict=True))
        if not inside:
            source = f"{part.source or named.names[0]} {list(part.shape)}"
            yield f"{named.names[0]} {list(whole)}: {list(extent)} at {list(at)}, from {list(part.lo)} of {source}"
        boxes.append((at, extent))
    apart = all(
        any(a + n <= b or b + m <= a for a, n, b, m in zip(*one, *other, strict=True))
        for one, other in itertools.combinations(boxes, 2)
    )
    if boxes and (not apart or sum(math.prod(extent) for _, extent in boxes) != named.local.numel()):
        yield f"{named.names[0]} is not filled exactly once by its parts"


def _device(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def _weights(named: Sequence[_Named], device: str, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """`shapes`: of the sources of traced pieces."""
    seen: Counter[str] = Counter()
    held = tuple(shard for parameter in named for shard in _shards(parameter, seen, shapes))
    can_move = device == "cpu" and all(_nobody_else_holds(group) for group in _by_storage(named))
    rehome = (lambda allocate: _rehome(named, allocate, shapes)) if can_move else None
    keep = [parameter.parameter for parameter in named]
    return Weights.of(held, tuple(_ranges(named, held)), keep=keep, device=device, rehome=rehome)


def _ranges(named: Sequence[_Named], held: Sequence[Held]) -> Iterator[tuple[int, int]]:
    """Memory of the shards; adjacent shards of one storage are one range."""
    starts = sorted({parameter.local.untyped_storage().data_ptr() for parameter in named if parameter.local.numel()})
    spans = sorted({(shard.address, shard.address + shard.span_bytes) for shard in held})
    begin, end = spans[0] if spans else (0, 0)
    for start, stop in spans[1:]:
        same_storage = bisect.bisect(starts, start) == bisect.bisect(starts, begin)
        if same_storage and start <= end:
            end = max(end, stop)
        else:
            yield begin, end - begin
            begin, end = start, stop
    if spans:
        yield begin, end - begin


def _shards(named: _Named, seen: Counter[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Held]:
    """The boxes of tensors that a parameter's local memory holds.

    Further boxes of a tensor that was `seen` in fused parameters get names of their own, and the tensor's as an alias.
    """
    name, *aliases = named.names
    if isinstance(named.parameter, DTensor):
        yield from _boxes(named, name, aliases, tuple(named.parameter.shape), _segments(named.parameter))
        return
    if named.pieces:
        yield from (_held_piece(piece, named.local, seen, shapes[piece.source]) for piece in named.pieces)
        return
    zeros, whole = (0,) * named.local.dim(), tuple(named.local.shape)
    for part in named.parts or (Part(shape=whole, lo=zeros),):
        runs = zip(part.at or zeros, part.lo, part.extent or whole, strict=True)
        if part.source:
            name, aliases = _box_name(part.source, seen)
        yield from _boxes(named, name, aliases, part.shape, [[run] for run in runs])


def _box_name(source: str, seen: Counter[str]) -> tuple[str, list[str]]:
    """Name and aliases of the next box of a tensor."""
    seen[source] += 1
    is_first = seen[source] == 1
    return (source, []) if is_first else (f"box {seen[source]} of {source}", [source])


def _held_piece(piece: Piece, local: torch.Tensor, seen: Counter[str], shape: tuple[int, ...]) -> Held:
    """A box of a source where a piece puts it; its dimensions are the source's."""
    name, aliases = _box_name(piece.source, seen)
    strides = [1] * len(shape)
    for dim, axis in piece.walked:
        strides[axis] = local.stride(dim)
    offset = sum(at * stride for at, stride in zip(piece.dst_lo, local.stride(), strict=True))
    return Held(
        tensor=Tensor(name=name, dtype=NAMES[local.dtype], shape=shape),
        aliases=tuple(aliases),
        lo=piece.src_lo,
        extent=piece.source_extent,
        strides=tuple(strides),
        address=local.data_ptr() + offset * local.element_size(),
    )


def _boxes(
    named: _Named,
    name: str,
    aliases: Sequence[str],
    shape: tuple[int, ...],
    per_dim: Sequence[Sequence[tuple[int, int, int]]],
) -> Iterator[Held]:
    """One shard for every combination of runs: (place in local memory, global index, count) in each dimension."""
    local = named.local
    tensor = Tensor(name=name, dtype=NAMES[local.dtype], shape=shape)
    size, strides = local.element_size(), tuple(local.stride())
    for box in itertools.product(*per_dim):
        extent = tuple(count for _, _, count in box)
        if 0 in extent:
            continue
        offset = sum(at * stride for (at, _, _), stride in zip(box, strides, strict=True))
        yield Held(
            tensor=tensor,
            aliases=tuple(aliases),
            lo=tuple(lo for _, lo, _ in box),
            extent=extent,
            strides=strides,
            address=local.data_ptr() + offset * size,
        )


def _segments(parameter: DTensor) -> list[list[tuple[int, int, int]]]:
    """For every dimension, the runs of indices this rank holds: (place in local memory, global index, count).

    Each placement cuts one dimension, so dimensions are independent; torch's own splitting is applied to the indices.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return [[] for _ in parameter.shape]
    indices = [torch.arange(size) for size in parameter.shape]
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        parts = _split(placement, indices[dim], parameter.device_mesh.size(axis))
        indices[dim] = parts[coordinate[axis]]
    return [_runs(index) for index in indices]


def _split(placement: Any, index: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """A dimension's indices, cut as torch cuts a tensor's rows."""
    options = {"split_factor": placement.split_factor} if _is_strided_shard(placement) else {}
    along_rows = type(placement)(0, **options)
    return along_rows._split_tensor(index, num_parts, with_padding=False, contiguous=True)[0]


def _is_strided_shard(placement: Placement) -> bool:
    return hasattr(placement, "split_factor")


def _runs(index: torch.Tensor) -> list[tuple[int, int, int]]:
    if not len(index):
        return [(0, 0, 0)]
    borders = [0, *(torch.nonzero(torch.diff(index) != 1).flatten() + 1).tolist(), len(index)]
    return [(begin, int(index[begin]), end - begin) for begin, end in itertools.pairwise(borders)]


def _by_storage(named: Sequence[_Named]) -> list[list[torch.Tensor]]:
    """Local tensors, grouped by the memory they lie in."""
    groups: dict[int, list[torch.Tensor]] = {}
    for parameter in named:
        if parameter.local.numel():
            groups.setdefault(parameter.local.untyped_storage().data_ptr(), []).append(parameter.local)
    return list(groups.values())


def _nobody_else_holds(tensors: list[torch.Tensor]) -> bool:
    """Whether these tensors are the only users of their memory; any other would be left behind by moving it."""
    if any(tensor.is_inference() for tensor in tensors):
        return False
    storage = tensors[0].untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata)
    return bool(holders <= len(tensors) + 1)  # and `storage` itself


def _rehome(named: Sequence[_Named], allocate: Allocate, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Move all weights into one piece of shared memory; the tensor objects stay."""
    with torch.inference_mode(False):  # a tensor made in inference mode could never be moved again
        groups = _by_storage(named)
        if not all(_nobody_else_holds(group) for group in groups):
            hint = "use the cma transport"
            raise RegistrationError("the memory of these weights is now held by another object", hint=hint)
        _move_all(groups, allocate)
        return _weights(named, "cpu", shapes)


def _move_all(groups: list[list[torch.Tensor]], allocate: Allocate) -> None:
    sizes = [aligned(group[0].untyped_storage().nbytes()) for group in groups]
    memory = allocate(max(sum(sizes), ALIGN))
    assert memory.buffer is not None
    arena = torch.from_numpy(
        np.frombuffer(memory.buffer, dtype=np.uint8)
    )  # keeps it mapped; torch.frombuffer would not
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        _move_storage(group, arena, start)
        start += size


def _move_storage(tensors: list[torch.Tensor], arena: torch.Tensor, start: int) -> None:
    """Copy one storage to byte `start` of the arena and let its tensors point there."""
    old = tensors[0].untyped_storage()
    as_bytes = torch.empty(0, dtype=torch.uint8).set_(old)
    arena[start : start + old.nbytes()].copy_(as_bytes)
    for tensor in tensors:
        at = start // tensor.element_size() + tensor.storage_offset()
        moved = torch.empty(0, dtype=tensor.dtype)
        moved.set_(arena.untyped_storage(), at, tensor.shape, tensor.stride())
        tensor.data = moved
