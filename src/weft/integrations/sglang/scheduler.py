"""In every SGLang scheduler process: the Receiver, and commits between two iterations.

consumes      versions from trainers (Receiver); SGLang's own loop, through hooks
produces      committed weights, dropped caches, version spans
waits for     ranks of the same engine, in SGLang's own broadcasts; in a commit: see EngineRank

All ranks of an engine do the same in every iteration, because the first one tells the others what to do. So it also
tells them which version to serve. They serve it if all of them have it, and then compare what they serve: if that
differs, or is torn, the engine stands still until the next version. A receiver that fails is reported once, and the
engine keeps serving what it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.model_loader.loader import post_load_weights
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.utils import TypeBasedDispatcher

from weft.config import CachePolicy, EngineSettings, engine_settings
from weft.errors import ConfigError, LayoutError, WeftError
from weft.integrations.checkpoint import checkpoint_tensors
from weft.integrations.engine_rank import EngineRank, reserved
from weft.integrations.torch import weights_of_pieces
from weft.integrations.touching import touched_modules
from weft.integrations.tracing import trace_loader
from weft.runtime.control.security import security_in
from weft.runtime.receive.receiver import Receiver
from weft.runtime.receive.reservation import Reservation
from weft.runtime.weights import Weights

log = logging.getLogger("sglang.weft")

IDLE_MS = 5
"""How often an engine without requests looks for versions."""
RETRY_S = 60.0
"""When to try again to serve a version that one rank does not have; ranks wait for it each time."""
HELD = 2
"""`_engine_paused` of a torn engine: truthy, and distinct from the value SGLang's own routes set."""
HOOKED: list[str] = []
"""What must be hooked in a scheduler; SGLang only logs if that fails."""
_TOUCHED: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
_RESERVED: WeakKeyDictionary[torch.nn.Module, Reservation | None] = WeakKeyDictionary()
"""Memory set aside for versions when a model was loaded."""


def processing(original: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """SGLang processes what it has loaded: note which modules stay as they were loaded."""
    touched = touched_modules(model, lambda: original(model, *args, **kwargs))
    _TOUCHED.setdefault(model, set()).update(touched)


def loaded(_: Any, runner: Any) -> None:
    """The model has its memory; the KV cache does not yet."""
    if not runner.is_draft_worker:
        _RESERVED[runner.model] = _reserved(runner.model)


def _reserved(model: torch.nn.Module) -> Reservation | None:
    parameters = list(model.parameters())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return reserved(str(parameters[0].device), num_bytes, engine_settings({}))


def running(original: Callable[..., Any], scheduler: Any) -> Any:
    """Everything is loaded and nothing runs yet; returns when the engine ends."""
    attendant = SchedulerAttendant(scheduler, engine_settings({}))
    scheduler.weft = attendant
    try:
        return original(scheduler)
    finally:
        attendant.close()


@dataclass(frozen=True, slots=True)
class ServeVersion:
    """What the first rank of an engine tells all of them."""

    version: int


def with_own_requests(requests: list[Any], scheduler: Any) -> list[Any]:
    """In every iteration on the first rank: what it tells all ranks, in addition to users' requests."""
    attendant = getattr(scheduler, "weft", None)
    version = None if attendant is None else attendant.wanted
    return requests if version is None else [*requests, ServeVersion(version)]


def between_iterations(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Once in every iteration on every rank: busy, idle or paused."""
    attendant = getattr(scheduler, "weft", None)
    if attendant is not None:
        attendant.tend()


def with_new_request(_: Any, scheduler: Any, request: Any) -> None:
    """A request finds only what requests of its own version have left in the cache."""
    attendant = getattr(scheduler, "weft", None)
    if attendant is not None:
        attendant.separate(request)


def releasing_memory(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """The user takes the engine's memory away, perhaps that of its weights."""
    attendant = getattr(updater.scheduler, "weft", None)
    if attendant is None or not _names_weights(request):
        return original(updater, request)
    backed_up = get_exec().features.enable_weights_cpu_backup
    attendant.fall_asleep(discards=updater.memory_saver_adapter.enabled and not backed_up)
    try:
        return original(updater, request)
    except BaseException:
        attendant.stay_awake()
        raise


def resuming_memory(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """The user gives it back."""
    answer = original(updater, request)
    attendant = getattr(updater.scheduler, "weft", None)
    if attendant is not None and _names_weights(request):
        attendant.wake_up()
    return answer


def _names_weights(request: Any) -> bool:
    return not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags


def sleeping(sleeper: Any) -> None:
    """An idle engine checks for versions more often than once a second."""
    sleeper.poller.poll(IDLE_MS)


class SchedulerAttendant:
    """Serves versions in one scheduler process."""

    def __init__(self, scheduler: Any, settings: EngineSettings) -> None:
        _check_hooks()
        self._scheduler, self._settings = scheduler, settings
        parallel = get_parallel()
        _check_parallelism(parallel)
        self._group = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
        self._cache = settings.cache
        if scheduler.enable_overlap and self._cache is not CachePolicy.RECOMPUTE:
            log.warning("weft: with the overlap schedule, running requests are recomputed (cache policy recompute)")
            self._cache = CachePolicy.RECOMPUTE
        runner = scheduler.tp_worker.model_runner
        rank = settings.first_rank + (parallel.dp_rank or 0) * parallel.tp_size + parallel.tp_rank
        self._rank = EngineRank(rank, lambda: post_load_weights(runner.model))
        self._rank.reservation = _RESERVED.pop(runner.model, None)
        self._model, self._checkpoint = runner.model, Path(runner.model_config.model_path)
        self._join()
        self._version: int | None = None
        self._num_commits = 0
        self._missed: tuple[int, float] | None = None
        """A version that not all ranks had, and when to try again."""
        self._wants_pause: bool | None = None
        """Whether the user wants an engine paused that stands still because its weights are torn."""
        self._reported = ""
        scheduler._request_dispatcher += TypeBasedDispatcher([(ServeVersion, self.serve)])

    def _join(self) -> None:
        settings = self._settings
        self._rank.join(
            Receiver(
                settings.controller,
                rank=self._rank.rank,
                weights=loaded_weights(self._model, self._checkpoint),
                reservation=self._rank.reservation,
                on_wanted=_look_in_every_iteration,
                security=security_in(settings.keys, settings.key),
            )
        )

    def fall_asleep(self, *, discards: bool) -> None:
        """On all ranks, before the memory of the weights is released."""
        self._rank.fall_asleep(discards=discards)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the memory versions landed in is now free for others

    def stay_awake(self) -> None:
        """SGLang could not release the memory."""
        self._rank.stay_awake()
        self._join_again()

    def _join_again(self) -> None:
        """In SGLang's own loop, which must not fail; the memory may still be lent out."""
        try:
            self._rank.reservation = _reserved(self._model)
        except ConfigError as error:
            log.warning("weft: %s", error)
        try:
            self._join()
        except WeftError as error:
            log.error("weft: the engine no longer receives versions: %s", error)

    def wake_up(self) -> None:
        """The weights have memory again, on all ranks; if they were discarded, the engine waits for new ones."""
        self._join_again()
        self._rank.wake_up()
        if self._rank.status()["is_poisoned"] and self._wants_pause is None:
            log.warning("weft: the engine's weights were discarded; it serves again after the next version")
            self._stand_still(wants_pause=bool(self._scheduler._engine_paused))

    def _stand_still(self, *, wants_pause: bool) -> None:
        """Until the next version; `wants_pause`: whether the user wants a pause as well."""
        self._wants_pause, self._scheduler._engine_paused = wants_pause, HELD

    @property
    def wanted(self) -> int | None:
        """A version that all ranks should serve now."""
        version = self._rank.wanted
        is_missed = self._missed is not None and self._missed[0] == version and time.monotonic() < self._missed[1]
        return None if is_missed else version

    def tend(self) -> None:
        """Attend to the receiver; a torn engine stands still even if it is told to resume."""
        self._report(self._rank.tend()["error"])
        if self._wants_pause is not None and self._scheduler._engine_paused is not HELD:
            self._stand_still(wants_pause=bool(self._scheduler._engine_paused))

    def _report(self, error: str) -> None:
        if error and error != self._reported:
            log.error("weft: %s", error)
        self._reported = error

    def serve(self, told: ServeVersion) -> None:
        """On all ranks in the same iteration."""
        scheduler = self._scheduler
        if not self._all_agree(self._rank.hears_of(told.version)):
            log.warning("weft: not all ranks of this engine have version %d", told.version)
            self._missed = told.version, time.monotonic() + RETRY_S
            return
        was_paused = bool(scheduler._engine_paused) if self._wants_pause is None else self._wants_pause
        if self._cache is CachePolicy.RECOMPUTE and not scheduler.is_fully_idle(ignore_waiting=True):
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        status = self._rank.serve(told.version, self._settings.stand_still_s)
        self._report(status["error"])
        if not self._all_serve(status):
            log.error("weft: the engine's weights are torn; it serves again after the next version")
            self._stand_still(wants_pause=was_paused)
            return
        if status["num_commits"] != self._num_commits:
            self._num_commits = status["num_commits"]
            self._show(status["version"])
            log.info("weft: version %d is served, paused for %.1f ms", status["version"], 1e3 * status["pause_s"])
        self._wants_pause = None
        if was_paused:
            scheduler._engine_paused = True
        elif scheduler._engine_paused:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _all_serve(self, status: Mapping[str, Any]) -> bool:
        """Whether all ranks serve the same, whole version."""
        version = -1 if status["version"] is None else status["version"]
        low, minus_high, are_whole = self._least(version, -version, int(not status["is_poisoned"]))
        return bool(are_whole) and low == -minus_high

    def _all_agree(self, holds: bool) -> bool:
        return bool(self._least(int(holds))[0])

    def _least(self, *numbers: int) -> list[int]:
        """The minimum of each number over all ranks of the engine."""
        found = torch.tensor(numbers, dtype=torch.int64)
        if self._group is not None:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return found.tolist()

    def _show(self, version: int) -> None:
        """Let answers and caches know the version."""
        scheduler = self._scheduler
        self._version = version
        scheduler.record_weight_version_change(new_version=str(version))
        told = UpdateWeightVersionReqInput(new_version=str(version))
        scheduler.ipc_channels.send_to_tokenizer.send_output(told)  # a no-op on all ranks but one
        if self._cache is not CachePolicy.REUSE:
            self._part_from_cache()

    def _part_from_cache(self) -> None:
        """Empty the cache if no request runs; otherwise hide what older weights computed from all other requests."""
        scheduler = self._scheduler
        scheduler._engine_paused, paused = True, scheduler._engine_paused  # waiting requests hold nothing
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
        self._rank.leave()


def _look_in_every_iteration(_: int | None) -> None:
    """The first rank checks by itself and need not be notified."""


def _check_parallelism(parallel: Any) -> None:
    for is_used, name in (
        (parallel.pp_size > 1, "pipeline parallelism"),
        (parallel.attn_dp_enabled, "dp attention"),
        (get_exec().moe.enable_eplb, "expert load balancing, which moves experts,"),
    ):
        if is_used:
            raise ConfigError(f"weft does not support {name} in SGLang", hint="use tensor parallelism and replicas")


def _check_hooks() -> None:
    missing = [target for target in HOOKED if target not in HookRegistry._patched]
    if missing:
        raise ConfigError(f"this SGLang has no {', '.join(missing)}", hint="weft is written for SGLang 0.5.23")


def loaded_weights(model: torch.nn.Module, checkpoint: Path) -> Weights:
    """What a Receiver receives: traced from the model's own loader, written where the parameters live."""
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
        hint = "weft writes only parameters that SGLang leaves as it loaded them (no packing, no quantisation)"
        raise LayoutError("SGLang changed these parameters after loading", problems=packed, hint=hint)
    return weights_of_pieces(live, trace.pieces(), trace.sources)
