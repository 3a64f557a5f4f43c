"""In every SGLang scheduler process: the Receiver, and commits between two iterations.

consumes      versions from trainers (Receiver); SGLang's own loop, through hooks
produces      committed weights, dropped caches, version spans
waits for     in a commit: ranks of the same engine, in place also the writers; all with deadlines

All ranks of an engine go through the same iterations (each begins with a broadcast of new requests, even of none), so
counting them is enough to commit at the same one. A receiver that fails is reported once, and the engine goes on with
what it serves; weights that are torn stop the engine until the next version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.config import CachePolicy, EngineSettings, engine_settings
from weft.errors import ConfigError, LayoutError, WeftError
from weft.integrations.checkpoint import checkpoint_tensors
from weft.integrations.torch import weights_of_pieces
from weft.integrations.touching import touched_modules
from weft.integrations.tracing import trace_loader
from weft.runtime.keys import member_security
from weft.runtime.receiver import Receiver, Update
from weft.runtime.weights import Weights

log = logging.getLogger("sglang.weft")

IDLE_MS = 5
"""How often an engine without requests looks for versions."""
HOOKED: list[str] = []
"""What must be hooked in a scheduler; SGLang only logs where that fails."""
_TOUCHED: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()


def processing(original: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """SGLang processes what it has loaded: see which modules are left as they were loaded."""
    touched = touched_modules(model, lambda: original(model, *args, **kwargs))
    _TOUCHED.setdefault(model, set()).update(touched)


def running(original: Callable[..., Any], scheduler: Any) -> Any:
    """Everything is loaded and nothing runs yet; ends when the engine ends."""
    attendant = Attendant(scheduler, engine_settings({}))
    scheduler.weft = attendant
    try:
        return original(scheduler)
    finally:
        attendant.close()


def between_iterations(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Once in every iteration on every rank: busy, idle or paused."""
    attendant = getattr(scheduler, "weft", None)
    if attendant is not None:
        attendant.attend()


def with_new_request(_: Any, scheduler: Any, request: Any) -> None:
    """A request finds only what requests of its own version have left in the cache."""
    attendant = getattr(scheduler, "weft", None)
    if attendant is not None:
        attendant.separate(request)


def sleeping(sleeper: Any) -> None:
    """An idle engine looks up more often than once a second."""
    sleeper.poller.poll(IDLE_MS)


class Attendant:
    """Serves versions in one scheduler process."""

    def __init__(self, scheduler: Any, settings: EngineSettings) -> None:
        from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

        _check_hooks()
        self._scheduler, self._settings = scheduler, settings
        parallel = get_parallel()
        rank = settings.first_rank + (parallel.dp_rank or 0) * parallel.tp_size + parallel.tp_rank
        if parallel.pp_size > 1:
            raise ConfigError("weft does not support pipeline parallelism in SGLang", hint="use tensor parallelism")
        self._cache = settings.cache
        if scheduler.enable_overlap and self._cache is CachePolicy.KEEP:
            log.warning("weft: with the overlap schedule running requests are computed again (cache policy recompute)")
            self._cache = CachePolicy.RECOMPUTE
        runner = scheduler.tp_worker.model_runner
        self._model = runner.model
        weights = loaded_weights(runner.model, Path(runner.model_config.model_path))
        self._receiver: Receiver | None = Receiver(
            settings.controller, rank=rank, weights=weights, **member_security(settings.keys, settings.key)
        )
        self._version: int | None = None
        self._was_paused: bool | None = None
        """Before the engine was stopped because its weights are torn."""

    def attend(self) -> None:
        """Commit a version if all ranks may."""
        if self._receiver is None:
            return
        try:
            update = self._receiver.poll()
            if update is not None:
                self._commit(self._receiver, update)
        except WeftError as error:
            self._report(self._receiver, error)
        if self._receiver is not None and self._receiver.is_poisoned:
            self._scheduler._engine_paused = True  # whoever tells it to go on

    def _report(self, receiver: Receiver, error: WeftError) -> None:
        """The engine goes on with what it serves, unless that is torn."""
        log.error("weft: %s", error)
        if not receiver.is_poisoned:
            self.close()

    def _commit(self, receiver: Receiver, update: Update) -> None:
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        began = time.monotonic()
        scheduler = self._scheduler
        was_paused = scheduler._engine_paused if self._was_paused is None else self._was_paused
        try:
            if self._cache is CachePolicy.RECOMPUTE and not scheduler.is_fully_idle(ignore_waiting=True):
                scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            if update.commit(self._settings.commit_s):
                self._serve(update.version)
                pause_s = time.monotonic() - began
                log.info("weft: version %d is served, paused for %.1f ms", update.version, 1e3 * pause_s)
        finally:
            self._was_paused = was_paused if receiver.is_poisoned else None
            if scheduler._engine_paused and not was_paused and not receiver.is_poisoned:
                scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _serve(self, version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput  # noqa: PLC0415
        from sglang.srt.model_loader.loader import post_load_weights  # noqa: PLC0415

        scheduler = self._scheduler
        post_load_weights(self._model)
        self._version = version
        scheduler.record_weight_version_change(new_version=str(version))
        told = UpdateWeightVersionReqInput(new_version=str(version))
        scheduler.ipc_channels.send_to_tokenizer.send_output(told)  # goes nowhere on all ranks but one
        if self._cache is not CachePolicy.REUSE:
            self._part_from_cache()

    def _part_from_cache(self) -> None:
        """Empty the cache if nobody runs; otherwise let nobody find what older weights computed."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415

        scheduler = self._scheduler
        scheduler._engine_paused, paused = True, scheduler._engine_paused  # requests that wait hold nothing
        flushed = scheduler.is_fully_idle(ignore_waiting=True) and scheduler.flush_cache(empty_cache=False)
        scheduler._engine_paused = paused
        for request in [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]:
            if not request.kv.holds_kv:
                self.separate(request)
        if not flushed:
            cache = scheduler.tree_cache
            size = getattr(cache, "full_evictable_size", cache.evictable_size)
            cache.evict(EvictParams(num_tokens=size()))

    def separate(self, request: Any) -> None:
        """Give a request a part of the cache that belongs to the version it begins with."""
        if self._version is None or self._cache is CachePolicy.REUSE:
            return
        key = getattr(request, "weft_key", request.extra_key)
        request.weft_key = key
        request.extra_key = f"{key or ''}|weft={self._version}"

    def close(self) -> None:
        """Leave the controller."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


def _check_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415

    missing = [target for target in HOOKED if target not in HookRegistry._patched]
    if missing:
        raise ConfigError(f"this SGLang has no {', '.join(missing)}", hint="weft was made for SGLang 0.5.23")


def loaded_weights(model: torch.nn.Module, checkpoint: Path) -> Weights:
    """What a Receiver should receive: traced from the model's own loader, written where it lives."""
    live = dict(model.named_parameters(remove_duplicate=False))
    trace = trace_loader(model.load_weights, checkpoint_tensors(checkpoint), live)  # type: ignore[arg-type]
    touched = _TOUCHED.get(model)
    if touched is None:
        raise LayoutError(
            "SGLang's processing of the loaded weights was not seen", hint="load the model with SGLang's default loader"
        )
    written = {copy.dst for copy in trace.copies}
    packed = tuple(f"{name} is held in another layout" for name in written if name.rpartition(".")[0] in touched)
    if packed:
        hint = "weft writes only parameters that SGLang leaves as it has loaded them (no packing, no quantisation)"
        raise LayoutError("SGLang has changed parameters after loading", problems=packed, hint=hint)
    return weights_of_pieces(live, trace.pieces(), trace.sources)
