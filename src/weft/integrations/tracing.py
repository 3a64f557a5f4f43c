"""Recipes from an engine's own weight loader: run it once on stand-in tensors and see what it copies where.

    checkpoint = [Tensor(name="q.weight", dtype="bf16", shape=(64, 32)), …]     # names and shapes, no values
    trace = trace_loader(model.load_weights, checkpoint, dict(model.named_parameters()))
    trace.copies          # (destination view) ← (checkpoint tensor view), as strided pieces
    trace.unused          # checkpoint tensors the loader looked at and left out

The checkpoint is made of meta tensors: they have shapes, strides and dtypes, but no memory. The loader cuts, fuses,
transposes, casts and stacks them as it does with real ones; its final `copy_` into a parameter is intercepted, recorded
and not executed. A strided view is already the composition of every narrow, chunk and transpose, so only operations
that make new tensors are followed by lineage: casts, clones, `cat`, `stack`. Anything else that happens to a checkpoint
tensor before it arrives (arithmetic, indexing by values) is reported with the tensor's name.

Nothing in the engine changes: destinations may be live parameters or meta tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from weft.core.layout import Tensor
from weft.core.layouts.strided import StridedPiece, boxes_of_view
from weft.core.recipe import Op, Piece
from weft.errors import LayoutError
from weft.integrations.dtypes import NAMES, TORCH_DTYPES

aten = torch.ops.aten

_SAME_ELEMENTS = frozenset({aten._to_copy.default, aten.clone.default})
"""A new tensor with the elements of the first argument."""

_CONSTANTS = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
"""What a destination may be filled with besides copies: padding."""

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a loader copies."""

    sources: tuple[Tensor, ...]
    """The checkpoint it was given."""
    destinations: tuple[Tensor, ...]
    """The tensors it may write; the first name of those that share memory."""
    copies: tuple[StridedPiece, ...]
    unused: tuple[str, ...]
    """Checkpoint tensors that were not copied anywhere."""

    @property
    def unfilled(self) -> tuple[str, ...]:
        """Destinations nothing was copied to."""
        filled = {copy.dst for copy in self.copies}
        return tuple(tensor.name for tensor in self.destinations if tensor.name not in filled)

    def pieces(self) -> Iterator[Piece]:
        """The copies as boxes."""
        shapes = {tensor.name: tensor.shape for tensor in self.sources}
        filled = {tensor.name: tensor.shape for tensor in self.destinations}
        for copy in self.copies:
            yield from boxes_of_view(copy, filled[copy.dst], shapes[copy.source])


def trace_loader(load: Load, checkpoint: Iterable[Tensor], destinations: Mapping[str, torch.Tensor]) -> Trace:
    """Run a loader on stand-ins. Raises LayoutError naming every checkpoint tensor that could not be followed."""
    sources = tuple(checkpoint)
    mode = _Watch(sources, destinations)
    current = ""

    def stand_ins() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for tensor in sources:
            current = tensor.name
            yield tensor.name, mode.stand_in(tensor.name)

    try:
        with torch.no_grad(), mode:
            load(stand_ins())
    except Exception as error:
        problems = (*mode.problems, f"{current}: the loader stopped here: {type(error).__name__}: {error}")
        raise _not_followed(problems) from error
    if mode.problems:
        raise _not_followed(mode.problems)
    trace = mode.trace()
    clashes = tuple(_clashes(trace))
    if clashes:
        raise LayoutError("the engine's loader fills the same memory from several tensors", problems=clashes)
    return trace


def _clashes(trace: Trace) -> Iterator[str]:
    """Checkpoint tensors that overwrite what earlier ones have filled."""
    by_destination: dict[str, list[Piece]] = {}
    for piece in trace.pieces():
        by_destination.setdefault(piece.dst, []).append(piece)
    for name, pieces in by_destination.items():
        lo = np.array([piece.dst_lo for piece in pieces])
        hi = lo + np.array([piece.extent for piece in pieces])
        meet = (np.maximum(lo[:, None], lo[None]) < np.minimum(hi[:, None], hi[None])).all(axis=2)
        for one, other in zip(*np.nonzero(np.triu(meet, 1)), strict=True):
            yield f"{name}: both {pieces[one].source} and {pieces[other].source}"


Export = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def trace_export(export: Export, parameters: Iterable[Tensor]) -> Trace:
    """The other way round: how a trainer's parameters become the tensors of a checkpoint."""
    sources = tuple(parameters)
    mode = _Watch(sources, {})
    with torch.no_grad(), mode:
        exported = export({tensor.name: mode.stand_in(tensor.name) for tensor in sources})
    copies = [copy for name, tensor in exported.items() for copy in mode.exported(name, tensor)]
    if mode.problems:
        raise _not_followed(mode.problems)
    used = {copy.source for copy in copies}
    return Trace(
        sources=sources,
        destinations=tuple(
            Tensor(name=name, dtype=NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape))
            for name, tensor in exported.items()
        ),
        copies=tuple(copies),
        unused=tuple(tensor.name for tensor in sources if tensor.name not in used),
    )


def _not_followed(problems: Sequence[str]) -> LayoutError:
    return LayoutError(
        f"the engine's loader could not be followed for {len(problems)} tensors",
        problems=tuple(problems),
        hint="check that the checkpoint belongs to this model; declare what a loader computes from values by hand",
    )


@dataclass(frozen=True, slots=True)
class _Strided:
    """A view of one memory: what it is, and where its elements lie in it."""

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Strided:
        return cls(tuple(tensor.shape), int(tensor.storage_offset()), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class _FromSource:
    """A box of a tensor made during loading ← a view of a checkpoint tensor, of the same shape."""

    lo: tuple[int, ...]
    source: str
    view: _Strided

    def permuted(self, order: Sequence[int]) -> _FromSource:
        """The same, with the dimensions in another order."""
        shape, strides = self.view.shape, self.view.strides
        view = _Strided(tuple(shape[i] for i in order), self.view.offset, tuple(strides[i] for i in order))
        return _FromSource(tuple(self.lo[i] for i in order), self.source, view)


@dataclass(frozen=True, slots=True)
class _MadeTensor:
    """A tensor made during loading, from checkpoint tensors, box by box."""

    shape: tuple[int, ...]
    """With the dimensions in memory order."""
    parts: tuple[_FromSource, ...]
    dtypes: frozenset[torch.dtype]
    """Every precision its elements went through, except the checkpoint's."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """A tensor computed from checkpoint tensors in a way that is not followed."""

    sources: tuple[str, ...]
    operation: str


@dataclass(slots=True)
class _Memories:
    """What is known of each memory (storage) met while loading; keeps them alive so that none is met twice."""

    known: dict[int, str | _MadeTensor | _Lost] = field(default_factory=dict)
    keep: list[torch.Tensor] = field(default_factory=list)

    def note(self, tensor: torch.Tensor, what: str | _MadeTensor | _Lost) -> None:
        self.known[_memory(tensor)] = what
        self.keep.append(tensor)

    def of(self, tensor: torch.Tensor) -> str | _MadeTensor | _Lost | None:
        return self.known.get(_memory(tensor))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies into destinations, follows lineage, executes nothing that would change a destination."""

    def __init__(self, sources: Sequence[Tensor], destinations: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[str] = []
        self._sources = {tensor.name: tensor for tensor in sources}
        self._memories = _Memories()
        self._copies: dict[StridedPiece, None] = {}
        self._copied_to: dict[int, dict[str, None]] = {}
        self._destinations: dict[int, list[tuple[str, torch.Tensor]]] = {}
        seen: set[tuple[int, _Strided]] = set()
        for name, tensor in destinations.items():
            place = (_memory(tensor), _Strided.of(tensor))
            if tensor.numel() and place not in seen:
                seen.add(place)
                self._destinations.setdefault(place[0], []).append((name, tensor))

    def stand_in(self, name: str) -> torch.Tensor:
        """A checkpoint tensor without memory."""
        tensor = self._sources[name]
        made = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        self._memories.note(made, name)
        return made

    def exported(self, name: str, tensor: torch.Tensor) -> Iterator[StridedPiece]:
        """What an exported tensor is made of."""
        parts = self._sources_of(tensor)
        if parts is None:
            what = self._memories.of(tensor)
            why = f"comes from {what.operation}, which is not followed" if isinstance(what, _Lost) else "is not known"
            self.problems.append(f"{name}: {why}")
            return
        strides = _contiguous(tuple(tensor.shape))
        for part in parts:
            yield StridedPiece(
                dst=name,
                source=part.source,
                shape=part.view.shape,
                dst_offset=sum(lo * stride for lo, stride in zip(part.lo, strides, strict=True)),
                dst_strides=strides,
                src_offset=part.view.offset,
                src_strides=part.view.strides,
            )

    def trace(self) -> Trace:
        """What was seen."""
        used = {copy.source for copy in self._copies}
        named = [pair for pairs in self._destinations.values() for pair in pairs]
        return Trace(
            sources=tuple(self._sources.values()),
            destinations=tuple(
                Tensor(name=name, dtype=NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape))
                for name, tensor in named
            ),
            copies=tuple(self._copies),
            unused=tuple(name for name in self._sources if name not in used),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        if func is aten.copy_.default and self._is_destination(args[0]):
            self._note_copy(args[0], args[1])
            return args[0]
        if func._schema.is_mutable and any(self._is_destination(tensor) for tensor in tensors[:1]):
            self._mutated(func, tensors)
            return args[0]
        known = [tensor for tensor in tensors if self._names(tensor)]
        if known and func is aten._to_copy.default:
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}  # stand-ins stay stand-ins
        result = func(*args, **kwargs)
        if known and not func.is_view:
            self._follow(func, args, known, result)
        return result

    def _is_destination(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._destinations

    def _mutated(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """A destination is changed by something other than a copy; constants (zeroed padding) do not matter here."""
        names = [name for tensor in tensors[1:] for name in self._names(tensor)]
        if func not in _CONSTANTS:
            names += self._names(tensors[0])
        self.problems += [f"{name}: written by {func}, which is not followed" for name in names]

    def _names(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The checkpoint tensors a tensor was made from; for a destination, those copied to it so far."""
        match self._memories.of(tensor):
            case str(name):
                return (name,)
            case _MadeTensor(parts=parts):
                return tuple(dict.fromkeys(part.source for part in parts))
            case _Lost(sources=sources):
                return sources
            case _:
                return tuple(self._copied_to.get(_memory(tensor), ()))

    def _follow(self, func: Any, args: tuple[Any, ...], known: Sequence[torch.Tensor], result: Any) -> None:
        """Record what a new tensor was made from."""
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor) and not self._names(tensor):
                self._memories.note(tensor, self._lineage(func, args, known, tensor))

    def _lineage(
        self, func: Any, args: tuple[Any, ...], known: Sequence[torch.Tensor], made: torch.Tensor
    ) -> _MadeTensor | _Lost:
        lost = _Lost(tuple(dict.fromkeys(name for tensor in known for name in self._names(tensor))), str(func))
        strides = made.stride()
        order = sorted(range(made.dim()), key=lambda dim: (-strides[dim], dim))
        if not made.permute(order).is_contiguous():
            return lost
        if func in _SAME_ELEMENTS:
            inputs, starts = [args[0]], [(0,) * made.dim()]
        elif func is aten.cat.default:
            inputs = [tensor for tensor in args[0] if tensor.numel()]
            starts = list(_starts([tensor.shape for tensor in inputs], args[1] if len(args) > 1 else 0))
        elif func is aten.stack.default:
            dim = args[1] if len(args) > 1 else 0
            inputs = [tensor.unsqueeze(dim) for tensor in args[0]]
            starts = list(_starts([tensor.shape for tensor in inputs], dim))
        else:
            return lost
        parts = [self._parts(tensor, start) for tensor, start in zip(inputs, starts, strict=True)]
        if any(part is None for part in parts):
            return lost
        dtypes = frozenset({made.dtype}).union(*(self._dtypes(tensor) for tensor in inputs))
        boxes = tuple(box.permuted(order) for part in parts for box in part or ())
        return _MadeTensor(tuple(made.permute(order).shape), boxes, dtypes)

    def _dtypes(self, tensor: torch.Tensor) -> frozenset[torch.dtype]:
        what = self._memories.of(tensor)
        return what.dtypes if isinstance(what, _MadeTensor) else frozenset()

    def _parts(self, tensor: torch.Tensor, start: tuple[int, ...]) -> list[_FromSource] | None:
        """The boxes of checkpoint tensors that make up a view, moved to where it begins in a new tensor."""
        found = self._sources_of(tensor)
        if found is None:
            return None
        return [replace(part, lo=tuple(a + b for a, b in zip(part.lo, start, strict=True))) for part in found]

    def _sources_of(self, tensor: torch.Tensor) -> list[_FromSource] | None:
        """A view as boxes, each a view of one checkpoint tensor; None if that is not known."""
        view = _Strided.of(tensor)
        match self._memories.of(tensor):
            case str(name):
                return [_FromSource((0,) * len(view.shape), name, view)]
            case _MadeTensor() as made:
                return list(_through(made, view))
            case _:
                return None

    def _note_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        names = self._names(src)
        if not names or not dst.numel():
            return  # a constant, the engine's own, or nothing at all
        what = self._memories.of(src)
        if isinstance(what, _Lost):
            self.problems += [f"{name}: goes through {what.operation}, which is not followed" for name in names]
            return
        try:
            self._note_parts(dst, src.expand(dst.shape))
        except LayoutError as error:
            self.problems += [f"{name}: {error}" for name in names]

    def _note_parts(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        name, home = self._home(dst)
        for part in self._sources_of(src) or ():
            source = self._sources[part.source]
            lossy = self._dtypes(src) - {TORCH_DTYPES[source.dtype], dst.dtype}
            if lossy:
                passed = ", ".join(sorted(str(dtype) for dtype in lossy))
                raise LayoutError(f"is cast to {passed} on its way from {source.dtype} to {dst.dtype}")
            at = dst.storage_offset() - home.storage_offset()
            at += sum(lo * stride for lo, stride in zip(part.lo, dst.stride(), strict=True))
            copy = StridedPiece(
                dst=name,
                source=part.source,
                shape=part.view.shape,
                dst_offset=int(at),
                dst_strides=tuple(dst.stride()),
                src_offset=part.view.offset,
                src_strides=part.view.strides,
                op=Op.COPY if TORCH_DTYPES[source.dtype] == dst.dtype else Op.CAST,
            )
            self._copies[copy] = None
            self._copied_to.setdefault(_memory(dst), {})[part.source] = None

    def _home(self, view: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The destination a view lies in."""
        for name, tensor in self._destinations[_memory(view)]:
            begin = tensor.storage_offset()
            if not tensor.is_contiguous():
                raise LayoutError(f"goes to `{name}`, which is not contiguous")
            if begin <= view.storage_offset() < begin + tensor.numel():
                return name, tensor
        raise LayoutError("goes to memory between the destinations")


def _starts(shapes: Sequence[Sequence[int]], dim: int) -> Iterator[tuple[int, ...]]:
    """Where each of several tensors begins in their concatenation."""
    at = 0
    for shape in shapes:
        along = dim % len(shape)
        yield tuple(at if i == along else 0 for i in range(len(shape)))
        at += shape[along]


def _through(made: _MadeTensor, view: _Strided) -> Iterator[_FromSource]:
    """A view of a made tensor, as views of what it was made from."""
    inside = StridedPiece(
        dst="view",
        source="made",
        shape=view.shape or (1,),
        dst_offset=0,
        dst_strides=_contiguous(view.shape or (1,)),
        src_offset=view.offset,
        src_strides=view.strides or (1,),
    )
    for box in boxes_of_view(inside, view.shape or (1,), made.shape or (1,)):
        for part in made.parts:
            met = _meet(box, part)
            if met is not None:
                yield met if view.shape else replace(met, lo=(), view=replace(met.view, shape=(), strides=()))


def _meet(box: Piece, part: _FromSource) -> _FromSource | None:
    """Where a box (of a view ← of a made tensor) and a part of the made tensor meet."""
    lo = [max(a, b) for a, b in zip(box.src_lo, part.lo, strict=True)]
    ends = zip(box.src_lo, box.source_extent, part.lo, part.view.shape, strict=True)
    hi = [min(a + n, b + m) for a, n, b, m in ends]
    if any(end <= start for start, end in zip(lo, hi, strict=True)):
        return None
    offset = part.view.offset + sum(
        (at - start) * stride for at, start, stride in zip(lo, part.lo, part.view.strides, strict=True)
    )
    num_dims = len(box.extent)
    at, shape, strides = list(box.dst_lo), [1] * num_dims, [0] * num_dims
    for dim, axis in box.walked:
        at[dim] += lo[axis] - box.src_lo[axis]
        shape[dim], strides[dim] = hi[axis] - lo[axis], part.view.strides[axis]
    return _FromSource(tuple(at), part.source, _Strided(tuple(shape), offset, tuple(strides)))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    if not shape:
        return ()
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
