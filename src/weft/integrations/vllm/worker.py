"""In every vLLM worker process: the Receiver, and what the engine core and vLLM's own routes ask of it.

consumes      versions from trainers (Receiver); calls from the engine core (`weft_*`); vLLM's weight-transfer calls
produces      notices to the engine core that a version is ready to commit
waits for     in `serve`: see EngineRank
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import zmq
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weft.config import EngineSettings, engine_settings
from weft.errors import ConfigError, WeftError
from weft.integrations.engine_rank import EngineRank, reserved
from weft.integrations.vllm.loading import LoadedModel
from weft.runtime.control.security import client_keys, security_in
from weft.runtime.receive.receiver import Receiver
from weft.runtime.receive.reservation import Reservation
from weft.runtime.weights import Weights

log = logging.getLogger("vllm.weft")

DISCARDS = 2
"""The sleep level at which vLLM does not keep the weights."""


class Notice(msgspec.Struct, frozen=True):
    """From a worker to its engine core."""

    rank: int
    """Among the workers of this core."""
    version: int | None
    """What is ready to commit; None: the receiver wants something else."""
    controller: str
    """Whose version it is."""
    num_joins: int
    """How often the worker has joined: notices from before its latest join do not count."""


@dataclass
class WeftInit(WeightTransferInitInfo):
    """`init_info` of vLLM's routes: the controller's address, if the engine was not given one at start."""

    controller: str = ""
    first_rank: int = 0
    keys: str = ""
    key: str = ""


@dataclass
class WeftUpdate(WeightTransferUpdateInfo):
    """`update_info` of vLLM's routes: the version to serve."""

    version: int
    timeout_s: float = 120.0


class WeftTransfer(WeightTransferEngine[WeftInit, WeftUpdate]):
    """vLLM's interface for weight-transfer backends."""

    init_info_cls = WeftInit
    update_info_cls = WeftUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._settings = settings_of(vllm_config)
        self._loaded: LoadedModel | None = None
        self._rank = EngineRank(self._rank_of(self._settings), self._process)
        self._num_joins = 0
        self._notices: zmq.Socket[bytes] | None = None
        self._notice_lock = threading.Lock()
        if self._settings.controller:
            self._join(self._settings)
        else:
            self._reservation(self._weights())

    def _rank_of(self, settings: EngineSettings) -> int:
        """This worker's rank among all engine ranks."""
        parallel = self.parallel_config
        return settings.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank

    def attach(self, address: str) -> None:
        """Where the engine core listens."""
        notices: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        notices.setsockopt(zmq.LINGER, 0)
        notices.connect(address)
        with self._notice_lock:
            self._notices = notices
        if self._rank.has_joined:
            self._notice(self._num_joins, self._rank.wanted)  # what was missed so far

    def _notice(self, num_joins: int, version: int | None) -> None:
        """On any thread: the engine core should attend."""
        rank, controller = self.parallel_config.rank, self._settings.controller
        said = Notice(rank=rank, version=version, controller=controller, num_joins=num_joins)
        notice = msgspec.msgpack.encode(said)
        with self._notice_lock, contextlib.suppress(zmq.Again):  # a core that does not listen has ended
            if self._notices is not None:
                self._notices.send(notice, zmq.NOBLOCK)

    def _join(self, settings: EngineSettings) -> None:
        if self.parallel_config.enable_eplb:
            raise ConfigError(
                "vLLM's expert load balancing moves experts, so weft cannot know where their weights are",
                hint="start vLLM without --enable-eplb, or without weft's controller",
            )
        self._rank.rank = self._rank_of(settings)
        weights = self._weights()
        number = self._num_joins + 1
        self._rank.join(
            Receiver(
                settings.controller,
                rank=self._rank.rank,
                weights=weights,
                reservation=self._rank.reservation if self._rank.is_asleep else self._reservation(weights),
                on_wanted=functools.partial(self._notice, number),
                security=security_in(settings.keys, settings.key),
            )
        )
        self._num_joins = number

    def _weights(self) -> Weights:
        """What is received."""
        if self._loaded is None:
            with set_current_vllm_config(self.vllm_config):
                self._loaded = LoadedModel(self.model, self.model_config)
            staged = self._loaded.num_staged_bytes
            log.info("weft: %d copies traced, %.1f MB staged", len(self._loaded.trace.copies), staged / 1e6)
        return self._loaded.weights()

    def _reservation(self, weights: Weights) -> Reservation | None:
        """Made when the model is loaded, before vLLM measures how much memory is left for its KV cache."""
        if self._rank.reservation is None:
            self._rank.reservation = reserved(weights.device, weights.num_bytes, self._settings)
        return self._rank.reservation

    def init_transfer_engine(self, init_info: WeftInit) -> None:
        """Join a controller; joins again if it is a different one."""
        given = {name: value for name, value in vars(init_info).items() if value}
        if not given.get("controller") and self._rank.has_joined:
            return
        settings = engine_settings(_additional(self.vllm_config) | given)
        client_keys(security_in(settings.keys, settings.key), "engine")  # raises before the present controller is left
        self._rank.leave()
        self._settings = settings
        if not self._rank.is_asleep:  # it joins when it wakes up
            self._join(settings)

    def start_weight_update(self) -> None:
        """Versions arrive on their own; there is nothing to prepare."""
        self._rank.joined()

    def receive_weights(self, update_info: WeftUpdate) -> None:
        """Wait for a version and serve it."""
        status = self._rank.serve(update_info.version, update_info.timeout_s, is_asked=True)
        if status["error"]:
            raise WeftError(status["error"])

    def finish_weight_update(self) -> None:
        """A version is complete when `update_weights` has returned."""

    def tend(self) -> dict[str, Any]:
        """Between two steps: see EngineRank."""
        return self._rank.tend()

    def serve(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Between two steps, on all workers: see EngineRank."""
        return self._rank.serve(version, timeout_s)

    def _process(self) -> None:
        """Let vLLM convert what was committed into its own layout."""
        assert self._loaded is not None
        with set_current_vllm_config(self.vllm_config):
            self._loaded.process()

    def status(self) -> dict[str, Any]:
        """What this worker serves."""
        return self._rank.status() | {"staged_bytes": 0 if self._loaded is None else self._loaded.num_staged_bytes}

    def fall_asleep(self, *, discards: bool) -> None:
        """Before vLLM releases the memory of the weights."""
        self._rank.fall_asleep(discards=discards)

    def wake_up(self) -> None:
        """The weights have memory again."""
        if self._rank.is_asleep:
            self._reserve_again()
            if self._settings.controller:
                self._join(self._settings)
            self._rank.wake_up()

    def stay_awake(self) -> None:
        """vLLM could not go to sleep."""
        if self._rank.is_asleep:
            self._rank.stay_awake()
            self._reserve_again()
            if self._settings.controller:
                self._join(self._settings)

    def _reserve_again(self) -> None:
        """The memory may still be lent out: versions then land in whatever is free when they arrive."""
        try:
            self._reservation(self._weights())
        except ConfigError as error:
            log.warning("weft: %s", error)

    def renew(self) -> None:
        """vLLM has loaded the weights from disk."""
        self._rank.renew()

    def shutdown(self) -> None:
        """Leave the controller for good; the model keeps serving what it has."""
        self._settings = replace(self._settings, controller="")
        self._rank.leave()


def settings_of(vllm_config: Any) -> EngineSettings:
    """The user's settings: `additional_config={"weft": {…}}`, and `WEFT_*` variables."""
    return engine_settings(_additional(vllm_config))


def _additional(vllm_config: Any) -> dict[str, Any]:
    additional = vllm_config.additional_config
    return dict(additional.get("weft", {})) if isinstance(additional, Mapping) else {}


def extend_workers() -> None:
    """Give vLLM's workers the calls the engine core makes."""
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    def weft_attach(worker: Any, address: str) -> None:
        follow_memory(type(worker))
        worker.weight_transfer_engine.attach(address)

    def weft_tend(worker: Any) -> dict[str, Any]:
        return worker.weight_transfer_engine.tend()

    def weft_serve(worker: Any, version: int, timeout_s: float) -> dict[str, Any]:
        return worker.weight_transfer_engine.serve(version, timeout_s)

    def weft_status(worker: Any) -> dict[str, Any]:
        return worker.weight_transfer_engine.status()

    for call in (weft_attach, weft_tend, weft_serve, weft_status):
        setattr(Worker, call.__name__, call)


def follow_memory(kind: type[Any]) -> None:
    """Let workers of this kind leave the controller before the memory of their weights is released, and join when it
    is back."""
    if "_follows_memory" not in vars(kind):
        kind._follows_memory = True
        kind.sleep, kind.discard = _asleep(kind.sleep), _discarded(kind.discard)
        kind.wake_up, kind.reload_weights = _awake(kind.wake_up), _reloaded(kind.reload_weights)


def _transfer(worker: Any) -> WeftTransfer | None:
    """The worker's backend, if it is weft."""
    transfer = getattr(worker, "weight_transfer_engine", None)
    return transfer if isinstance(transfer, WeftTransfer) else None


@contextlib.contextmanager
def _asleep_meanwhile(worker: Any, *, discards: bool) -> Iterator[None]:
    """Leave before vLLM releases the memory; rejoin at once if it cannot."""
    transfer = _transfer(worker)
    if transfer is not None:
        transfer.fall_asleep(discards=discards)
    try:
        yield
    except BaseException:
        if transfer is not None:
            transfer.stay_awake()
        raise


def _asleep(sleep: Any) -> Any:
    @functools.wraps(sleep)
    def asleep(worker: Any, level: int = 1) -> Any:
        with _asleep_meanwhile(worker, discards=level >= DISCARDS):
            return sleep(worker, level)

    return asleep


def _discarded(discard: Any) -> Any:
    @functools.wraps(discard)
    def discarded(worker: Any, tags: tuple[str, ...]) -> Any:
        if "weights" not in tags:
            return discard(worker, tags)
        with _asleep_meanwhile(worker, discards=True):
            return discard(worker, tags)

    return discarded


def _awake(wake_up: Any) -> Any:
    @functools.wraps(wake_up)
    def awake(worker: Any, tags: list[str] | None = None) -> Any:
        answer = wake_up(worker, tags)
        if (tags is None or "weights" in tags) and (transfer := _transfer(worker)):
            transfer.wake_up()
        return answer

    return awake


def _reloaded(reload_weights: Any) -> Any:
    @functools.wraps(reload_weights)
    def reloaded(worker: Any, *args: Any, **kwargs: Any) -> Any:
        answer = reload_weights(worker, *args, **kwargs)
        if transfer := _transfer(worker):
            transfer.renew()
        return answer

    return reloaded
