"""Where a checkpoint tensor goes in a vLLM model, and what has to be repeated after it was written.

vLLM loads a checkpoint into parameters in its *loader's* layout and then lets every layer process them: on CPUs linear
weights are packed into handles of a library, experts are permuted, MLA derives matrices. So a model is examined twice:

1. While vLLM loads it (`watch_loading`): which checkpoint tensors there are, and which modules' parameters were touched
   in any way by the processing. Untouched parameters are *plain*: the loader's bytes are the live bytes.
2. When a version is to be received (`LoadedModel`): vLLM's own loader is traced on stand-ins of the loader's layout.
   Plain parameters are written where they live. The others get memory of their own in the loader's layout; after a
   commit vLLM's own processing makes the live form from it, and the results are copied to where they were before, so
   that addresses in captured graphs stay valid.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.core.layout import Tensor
from weft.errors import LayoutError
from weft.integrations.checkpoint import checkpoint_tensors
from weft.integrations.dtypes import NAMES
from weft.integrations.torch import weights_of_pieces
from weft.integrations.touching import touched_modules
from weft.integrations.tracing import trace_loader
from weft.integrations.vllm import BACKEND
from weft.runtime.weights import Weights


@dataclass(slots=True)
class _Seen:
    """What was seen while vLLM loaded a model."""

    checkpoint: dict[str, Tensor] = field(default_factory=dict)
    touched: set[str] | None = None
    """Names of modules whose parameters are not plain; None if the processing was not seen."""


_SEEN: WeakKeyDictionary[torch.nn.Module, _Seen] = WeakKeyDictionary()


def watch_loading() -> None:
    """Watch vLLM load models that weft will update."""
    from vllm.model_executor.model_loader import base_loader, default_loader, utils  # noqa: PLC0415

    loader = default_loader.DefaultModelLoader
    loader.get_all_weights = _noting_names(loader.get_all_weights)
    base_loader.process_weights_after_loading = _noting_touched(base_loader.process_weights_after_loading)
    utils.maybe_retie_word_embeddings = _not_retying(utils.maybe_retie_word_embeddings)


def _is_ours() -> bool:
    from vllm.config import get_current_vllm_config  # noqa: PLC0415

    transfer = get_current_vllm_config().weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def _noting_names(get_all_weights: Any) -> Any:
    @functools.wraps(get_all_weights)
    def noting(loader: Any, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        weights = get_all_weights(loader, model_config, model)
        if not _is_ours():
            yield from weights
            return
        checkpoint = _SEEN.setdefault(model, _Seen()).checkpoint
        for name, weight in weights:
            dtype = NAMES.get(weight.dtype, str(weight.dtype))
            checkpoint[name] = Tensor(name=name, dtype=dtype, shape=tuple(weight.shape))
            yield name, weight

    return noting


def _not_retying(retie: Any) -> Any:
    """vLLM lets an output head that equals the embeddings share their memory; in the next version they may differ."""

    @functools.wraps(retie)
    def not_retying(model: torch.nn.Module, *args: Any) -> None:
        if not _is_ours():
            retie(model, *args)

    return not_retying


def _noting_touched(process: Any) -> Any:
    @functools.wraps(process)
    def noting(model: torch.nn.Module, *args: Any) -> None:
        if not _is_ours():
            process(model, *args)
            return
        touched = touched_modules(model, lambda: process(model, *args))
        _SEEN.setdefault(model, _Seen()).touched = touched

    return noting


@dataclass(frozen=True, slots=True)
class _Kept:
    """A module's parameters and buffers, to be put back."""

    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    not_persistent: set[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Kept:
        return cls(dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set))

    def put_back(self, module: torch.nn.Module) -> None:
        """Let the module hold what it held before; objects, not copies."""
        module._parameters.clear()
        module._parameters.update(self.parameters)
        self.put_back_buffers(module)

    def put_back_buffers(self, module: torch.nn.Module) -> None:
        module._buffers.clear()
        module._buffers.update(self.buffers)
        module._non_persistent_buffers_set = set(self.not_persistent)


class LoadedModel:
    """A worker's model as its loader sees it, and as the engine computes with it."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._dtype = model, model_config.dtype
        self._modules = dict(model.named_modules())
        seen = _SEEN.get(model, _Seen())
        touched = set(self._modules) if seen.touched is None else seen.touched
        checkpoint = list(seen.checkpoint.values()) or checkpoint_tensors(Path(model_config.model))
        live = dict(model.named_parameters(remove_duplicate=False))
        with self._as_loaded() as stand_ins:
            self.trace = trace_loader(model.load_weights, checkpoint, stand_ins)  # type: ignore[arg-type]
        self._homes: dict[str, torch.Tensor] = {}
        """The memory that is written, by destination of the trace."""
        self._staged: dict[str, dict[str, torch.Tensor]] = {}
        """By module and parameter: the loader's layout of what the engine holds in another layout."""
        self._find_homes(stand_ins, live, touched)

    @property
    def num_staged_bytes(self) -> int:
        """Memory beside the live weights, for parameters the engine holds in its own layout."""
        staged = {id(t): t.nbytes for parameters in self._staged.values() for t in parameters.values()}
        return sum(staged.values())

    def weights(self) -> Weights:
        """What a Receiver receives."""
        return weights_of_pieces(self._homes, self.trace.pieces(), self.trace.sources)

    @contextmanager
    def _as_loaded(self) -> Iterator[dict[str, torch.Tensor]]:
        """The model with stand-ins (meta tensors) in the layout its loader fills; tied parameters share one."""
        kept = {name: _Kept.of(module) for name, module in self._modules.items()}
        tied: dict[int, Any] = {}
        try:
            for name, module in self._modules.items():
                _restore(module)
                for parameter_name, live in kept[name].parameters.items():
                    stand_in = module._parameters.get(parameter_name)
                    if live is not None and stand_in is not None and live.numel():
                        module._parameters[parameter_name] = tied.setdefault(id(live), stand_in)
            yield dict(self._model.named_parameters(remove_duplicate=False))
        finally:
            for name, module in self._modules.items():
                kept[name].put_back(module)

    def _find_homes(
        self, stand_ins: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], touched: set[str]
    ) -> None:
        """Where each destination of the trace is written: where it lives, or in the loader's layout beside it."""
        names_of: dict[int, list[str]] = {}
        for name, stand_in in stand_ins.items():
            names_of.setdefault(id(stand_in), []).append(name)
        unfilled, problems = set(self.trace.unfilled), []
        for destination in self.trace.destinations:
            name, stand_in = destination.name, stand_ins[destination.name]
            places = [other.rpartition(".") for other in names_of[id(stand_in)]]
            is_plain = stand_in is live.get(name) or not any(module in touched for module, _, _ in places)
            if is_plain and (name in unfilled or _is_like(live[name], stand_in)):
                self._homes[name] = live[name]
                continue
            if name in unfilled:
                problems.append(f"{name}: processed by the engine after loading, but no checkpoint tensor fills it")
                continue
            device = next(iter(live.values())).device
            self._homes[name] = torch.zeros(stand_in.shape, dtype=stand_in.dtype, device=device)
            for module, _, parameter in places:
                self._staged.setdefault(module, {})[parameter] = self._homes[name]
        if problems:
            raise LayoutError("these parameters of the engine cannot be updated", problems=tuple(problems))

    @torch.no_grad()
    def process(self) -> None:
        """After a commit: let the engine convert what was staged into its own layout."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer  # noqa: PLC0415
        from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

        if not self._staged:
            return
        attention = [module for module in self._modules.values() if is_deferred_attention_layer(module)]
        needed_later = {id(part) for layer in attention for part in layer.modules()}
        waiting: list[tuple[torch.nn.Module, _Kept]] = []
        with set_default_torch_dtype(self._dtype):
            for name, module in self._modules.items():
                if name not in self._staged:
                    continue
                kept = _process_again(module, self._staged[name])
                if id(module) in needed_later:
                    waiting.append((module, kept))
                else:
                    _settle(module, kept)
            for layer in attention:
                layer.process_weights_after_loading(self._dtype)
        for module, kept in waiting:
            _settle(module, kept)


def _restore(module: torch.nn.Module) -> None:
    """Give a module stand-ins for the parameters its loader fills, with their loaders."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # noqa: PLC0415
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta  # noqa: PLC0415

    restore_layer_on_meta(module, get_layerwise_info(module))


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def _process_again(module: torch.nn.Module, staged: dict[str, torch.Tensor]) -> _Kept:
    """Let a layer process what was staged; returns what it held before."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    kept = _Kept.of(module)
    _restore(module)
    kept.put_back_buffers(module)
    for name, tensor in staged.items():
        module._parameters[name] = _dressed(tensor.clone(), module._parameters[name])
    for flag in ("_already_called_process_weights_after_loading",):
        if hasattr(module, flag):
            delattr(module, flag)
    method: Any = module.quant_method if hasattr(module, "quant_method") else None
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None  # vLLM 0.32 packs experts for the CPU only while there is no kernel yet
    if hasattr(method, "process_weights_after_loading"):
        method.process_weights_after_loading(module)
    return kept


def _dressed(tensor: torch.Tensor, stand_in: Any) -> Any:
    """A tensor with the class and attributes (weight loaders, dimensions) of the parameter it stands for."""
    tensor.__class__ = stand_in.__class__
    tensor.__dict__ = stand_in.__dict__.copy()
    return tensor


def _settle(module: torch.nn.Module, kept: _Kept) -> None:
    """Copy what processing made into the memory the engine computes with, and let the module hold that again."""
    made = dict(module._parameters) | dict(module._buffers)
    kept.put_back(module)
    for name, live in (kept.parameters | kept.buffers).items():
        result = made.get(name)
        if live is not None and result is not None and result is not live and live.numel():
            live.data.copy_(result.data)
