"""In vLLM's engine-core process: commits versions between two steps, on all workers together.

consumes      notices from the workers that a version is ready to commit; calls of vLLM's step functions
produces      `weft_serve` on all workers; dropped caches; the version that responses carry
waits for     workers, in `attend`                      unblocked by   their answers; they have deadlines

Only the engine core knows where a step ends, and only it holds the scheduler and the prefix cache. Batches that were
handed to workers ahead of time are finished first, so that every token is labelled with the version that computed it.
An idle engine is woken up. Engines whose ranks compute together across several engine cores (data parallel, experts
spread over them) stop through vLLM's own agreement between the cores.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import secrets
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import zmq

from weft.config import CachePolicy
from weft.integrations.vllm import BACKEND
from weft.integrations.vllm.worker import Notice, settings_of

log = logging.getLogger("vllm.weft")


def extend_engine_core() -> None:
    """Let engine cores whose backend is weft check for versions between two steps."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc  # noqa: PLC0415

    EngineCore._initialize_kv_caches = _attending(EngineCore._initialize_kv_caches)
    EngineCore.add_request = _with_new_request(EngineCore.add_request)
    EngineCore.collective_rpc = _with_calls(EngineCore.collective_rpc)
    EngineCore.wake_up = _with_wake_up(EngineCore.wake_up)
    EngineCore.step = _between_steps(EngineCore.step)
    EngineCore.step_with_batch_queue = _between_steps(EngineCore.step_with_batch_queue)
    EngineCoreProc._process_input_queue = _between_steps(EngineCoreProc._process_input_queue)
    EngineCore.shutdown = _leaving(EngineCore.shutdown)


def _attending(initialize: Any) -> Any:
    """The first thing an engine core does when its workers have loaded the model."""

    @functools.wraps(initialize)
    def attending(core: Any, vllm_config: Any) -> Any:
        transfer = vllm_config.weight_transfer_config
        core.weft = CoreAttendant(core) if transfer is not None and transfer.backend == BACKEND else None
        return initialize(core, vllm_config)

    return attending


def _between_steps(step: Any) -> Any:
    @functools.wraps(step)
    def between_steps(core: Any) -> Any:
        attendant = getattr(core, "weft", None)
        if attendant is not None:
            attendant.between_steps()
        return step(core)

    return between_steps


def _with_new_request(add_request: Any) -> Any:
    @functools.wraps(add_request)
    def with_new_request(core: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        attendant = getattr(core, "weft", None)
        if attendant is not None:
            attendant.separate(request)
        add_request(core, request, *args, **kwargs)

    return with_new_request


def _with_calls(collective_rpc: Any) -> Any:
    """vLLM's own routes reach the workers without going through the attendant."""

    @functools.wraps(collective_rpc)
    def with_calls(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return collective_rpc(core, method, *args, **kwargs)
        finally:
            attendant = getattr(core, "weft", None)
            if attendant is not None and method in ("update_weights", "reload_weights"):
                attendant.after_update()

    return with_calls


def _with_wake_up(wake_up: Any) -> Any:
    """An engine whose weights were discarded stands still until it has new ones."""

    @functools.wraps(wake_up)
    def with_wake_up(core: Any, *args: Any, **kwargs: Any) -> Any:
        answer = wake_up(core, *args, **kwargs)
        attendant = getattr(core, "weft", None)
        if attendant is not None:
            attendant.after_update()
        return answer

    return with_wake_up


def _leaving(shutdown: Any) -> Any:
    @functools.wraps(shutdown)
    def leaving(core: Any) -> None:
        if getattr(core, "weft", None) is not None:
            core.weft.close()
        shutdown(core)

    return leaving


class Brake:
    """Keeps a scheduler from scheduling; a pause or resume by the user meanwhile takes effect afterwards."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._wished: Any = None
        """The state the user wants; None while the brake is off."""

    def hold(self) -> None:
        """Schedule nothing more, even if the scheduler is told to resume."""
        from vllm.v1.core.sched.interface import PauseState  # noqa: PLC0415

        scheduler = self._core.scheduler
        if self._wished is None:
            self._wished = scheduler.pause_state
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            scheduler.set_pause_state = self._wish

    def _wish(self, state: Any) -> None:
        self._wished = state

    def release(self) -> None:
        """Restore the state the user wants."""
        if self._wished is not None:
            scheduler, wished = self._core.scheduler, self._wished
            self._wished = None
            del scheduler.set_pause_state  # the scheduler's own method again
            scheduler.set_pause_state(wished)


class _Wanted(NamedTuple):
    """A version that all workers should commit, as they heard of it after the same join."""

    controller: str
    num_joins: int
    version: int


class CoreAttendant:
    """Brings decided versions to the workers of one engine core. `attend` runs on the core's own thread."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._settings = settings_of(core.vllm_config)
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        """What receivers request; from the listening thread."""
        self._wanted: dict[_Wanted, set[int]] = {}
        """What is ready to commit, and the workers that have it."""
        self._is_stopping = False
        """Whether the cores of this engine are agreeing on a step."""
        self._must_resume = False
        """Whether the cores were running before."""
        self._is_called = False
        """Whether an idle core was asked to attend."""
        self._commits: list[int] = []
        """How many versions each worker has committed."""
        self._has_parted = False
        """Whether blocks of older weights may still lie in the prefix cache."""
        self._is_torn = False
        self._brake = Brake(core)
        self._reported: set[str] = set()
        """Errors that were logged."""
        self._folder = tempfile.TemporaryDirectory(prefix="weft-vllm-")  # so that no other user can send notices
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._folder.name}/notices"
        self._socket.bind(address)
        core.model_executor.collective_rpc("weft_attach", args=(address,))
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="weft-notices", daemon=True)
        self._thread.start()

    def between_steps(self) -> None:
        """Attend if a receiver requests it."""
        if self._wanted or not self._notices.empty():
            self.attend()

    def close(self) -> None:
        """Stop listening."""
        self._is_closed.set()
        self._thread.join(2.0)

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            if self._socket.poll(200):
                self._notices.put(msgspec.msgpack.decode(self._socket.recv(), type=Notice))
                self._call_idle_core()
        self._socket.close()
        self._folder.cleanup()

    def _call_idle_core(self) -> None:
        """A core without requests waits for input; one inside the user's own process waits for the next call."""
        if hasattr(self._core, "_idle_state_callbacks") and hasattr(self._core, "input_queue") and not self._is_called:
            self._is_called = True
            self._core._idle_state_callbacks.append(self._attend_idle)
            self._wake_up()

    def _attend_idle(self, _: Any) -> None:
        self._is_called = False
        self.between_steps()
        if self._core.has_work():  # which was on hold until this version
            self._wake_up()

    def _wake_up(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415

        self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def attend(self) -> None:
        """Between two steps: do what the workers' receivers request."""
        if self._take_notices():
            self._ask_workers("weft_tend")
        if self._next() is None or self._is_stopping or self._must_finish_batches():
            return  # called again before the next step
        if hasattr(self._core, "dp_group"):
            self._commit_with_other_cores()
        else:
            self._commit()

    def _next(self) -> _Wanted | None:
        """The latest version that all workers have."""
        num_workers = self._core.vllm_config.parallel_config.world_size
        ready = [wanted for wanted, ranks in self._wanted.items() if len(ranks) == num_workers]
        return max(ready, key=lambda wanted: (wanted.num_joins, wanted.version), default=None)

    def _take_notices(self) -> bool:
        """Whether any receiver wants something other than a commit."""
        others = False
        with contextlib.suppress(queue.Empty):
            while True:
                notice = self._notices.get_nowait()
                if notice.version is None:
                    others = True
                else:
                    wanted = _Wanted(notice.controller, notice.num_joins, notice.version)
                    self._wanted.setdefault(wanted, set()).add(notice.rank)
        return others

    def _must_finish_batches(self) -> bool:
        """Whether workers are still computing batches; no new ones are scheduled then."""
        if self._core.batch_queue:
            self._brake.hold()
        return bool(self._core.batch_queue)

    def _commit_with_other_cores(self) -> None:
        """All cores stop at the same step: they compute with each other's experts."""
        self._brake.release()  # vLLM's own agreement takes over
        self._is_stopping = True
        self._must_resume = self._must_resume or not self._core.is_scheduler_paused()
        stopped = self._core.pause_scheduler(mode="keep", clear_cache=False)

        def go_on(_: Any = None) -> None:
            self._is_stopping = False
            self._commit()
            if self._must_resume and not self._is_torn:
                self._must_resume = False
                self._core.resume_scheduler()

        go_on() if stopped is None else stopped.add_done_callback(go_on)

    def _ask_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The answers of all workers; new errors are logged."""
        answers = self._core.model_executor.collective_rpc(method, args=args)
        errors = {answer["error"] for answer in answers if answer["error"]}
        for error in sorted(errors - self._reported):
            log.error("weft: %s", error)
        self._reported = errors
        return answers

    def _commit(self) -> None:
        answers, wanted = [], self._next()
        if wanted is not None:
            answers = self._ask_workers("weft_serve", wanted.version, self._settings.stand_still_s)
            others = (key for key in self._wanted if key.controller != wanted.controller or key > wanted)
            self._wanted = {key: self._wanted[key] for key in others}
        is_torn = _is_torn(answers)
        if hasattr(self._core, "dp_group"):  # cores that compute together stand still together
            is_torn = self._core.vllm_config.parallel_config.has_unfinished_dp(self._core.dp_group, is_torn)
        self._settle(answers, is_torn=is_torn)

    def _settle(self, answers: list[dict[str, Any]], *, is_torn: bool) -> None:
        """What the workers serve may have changed: stand still, or report it."""
        self._is_torn = is_torn
        if is_torn:
            states = ", ".join(f"rank {a['rank']}: {'torn' if a['is_poisoned'] else a['version']}" for a in answers)
            log.error("weft: the engine's weights are not whole (%s); it serves again after the next version", states)
            self._brake.hold()
            return
        commits = [answer["num_commits"] for answer in answers]
        now = answers[0]["version"] if answers else None
        if commits != self._commits and now is not None:
            self._commits = commits
            self._drop_caches()
            self._core.set_weight_version(str(now))
            log.info("weft: version %d is served, paused for %.1f ms", now, 1e3 * max(a["pause_s"] for a in answers))
        self._brake.release()

    def after_update(self) -> None:
        """The weights of the workers have changed through vLLM's own routes."""
        answers = self._ask_workers("weft_status")
        self._settle(answers, is_torn=_is_torn(answers))

    def _drop_caches(self) -> None:
        policy = self._settings.cache
        if policy is CachePolicy.REUSE:
            return
        if policy is CachePolicy.RECOMPUTE:
            self._core.reset_prefix_cache(reset_running_requests=True)
        else:
            self._part_from_old_blocks()
        if self._core.vllm_config.model_config.is_multimodal_model:
            self._core.reset_encoder_cache()

    def _part_from_old_blocks(self) -> None:
        """Blocks are found by hashes chained from an initial value: with another one, old blocks are never found.

        Running requests keep their blocks and their chains; waiting requests are given new chains.
        """
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

        if self._core.request_block_hasher is None:
            return
        kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(secrets.token_bytes(32))
        self._has_parted = True
        for request in self._waiting_requests():
            self.separate(request)

    def separate(self, request: Any) -> None:
        """Let a request that holds no blocks look for blocks of the present version; it may have been hashed before."""
        if self._has_parted:
            request.block_hashes.clear()
            request.update_block_hashes()

    def _waiting_requests(self) -> Iterator[Any]:
        scheduler = self._core.scheduler
        running = {request.request_id for request in scheduler.running}
        for request in scheduler.requests.values():
            if request.request_id not in running and request.num_computed_tokens == 0:
                yield request


def _is_torn(answers: list[dict[str, Any]]) -> bool:
    """Whether workers serve different versions, or part of one."""
    return len({answer["version"] for answer in answers}) > 1 or any(answer["is_poisoned"] for answer in answers)
