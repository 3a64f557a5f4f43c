"""Which modules an engine changes after loading a checkpoint: their live weights are no longer the loader's.

    touched = touched_modules(model, lambda: engine_processes(model))

A module is touched if any operation met one of its parameters, even a view (its result may have been kept), if a
parameter or its memory was replaced, or if the module holds new objects besides its parameters (packed copies, handles
of a library). Operations that torch does not see leave one of these traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_PLAIN = (bool, int, float, str, type(None), dict, set, torch.nn.Module)
"""Attributes that hold no weights."""


def touched_modules(model: torch.nn.Module, process: Callable[[], Any]) -> set[str]:
    """Run an engine's processing of a model, and return the names of the modules it touched."""
    before = {name: _state(module) for name, module in model.named_modules()}
    with _Touches(model) as touches:
        process()
    changed = {name for name, module in model.named_modules() if _state(module) != before.get(name)}
    return changed | touches.modules


def _state(module: torch.nn.Module) -> Any:
    """What processing would change about a module: its parameters' memory, and other objects it holds."""
    parameters = {
        name: (id(parameter), parameter.data_ptr(), tuple(parameter.shape), tuple(parameter.stride()))
        for name, parameter in module.named_parameters(recurse=False)
    }
    held = {name: id(value) for name, value in vars(module).items() if not isinstance(value, _PLAIN)}
    return parameters, held


class _Touches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Modules whose parameters meet an operation."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: set[str] = set()
        self._owners: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter.untyped_storage()._cdata, set()).add(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.equal.default:  # used to detect tied embeddings
            for value in tree_flatten((args, kwargs))[0]:
                if isinstance(value, torch.Tensor):
                    self.modules |= self._owners.get(value.untyped_storage()._cdata, set())
        return func(*args, **kwargs)
