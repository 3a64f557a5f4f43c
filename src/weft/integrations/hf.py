"""Hugging Face `transformers` on the trainer's side: weights under the names of their checkpoint.

    weights = checkpoint_weights(model)         # plain, DDP or FSDP2; nothing is copied or gathered
    Sender("tcp://ctl:7070", rank=rank, weights=weights)

Since version 5 `transformers` holds the experts of a layer in one parameter, while checkpoints (and engines that load
them) have one tensor for each; its own conversion back is traced once on stand-ins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from weft.core.layout import Tensor
from weft.errors import LayoutError
from weft.integrations.renaming import renamed
from weft.integrations.torch import weights_of
from weft.integrations.tracing import trace_export
from weft.runtime.weights import Weights


def checkpoint_weights(model: torch.nn.Module) -> Weights:
    """What this rank holds of a `transformers` model, as boxes of the tensors `save_pretrained` would write."""
    weights = weights_of(model, buffers=True)
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    parameters: dict[str, Tensor] = {}
    for held in weights.held:
        for name in (held.tensor.name, *held.aliases):
            parameters[name] = Tensor(name=name, dtype=held.tensor.dtype, shape=held.tensor.shape)
    trace = trace_export(lambda stand_ins: _as_saved(inner, stand_ins), parameters.values())
    if trace.unused:
        raise LayoutError("these parameters belong to no checkpoint tensor", problems=trace.unused)
    return renamed(weights, trace.pieces(), trace.destinations)


def _as_saved(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415
    except ImportError:  # before version 5, parameters are the same as in checkpoints
        return state
    return revert_weight_conversion(model, state)
