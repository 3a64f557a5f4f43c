"""In every vLLM worker process: the Receiver, and what the engine core and vLLM's own routes ask of it.

consumes      versions from trainers (Receiver); `weft_attend` of the engine core; vLLM's weight-transfer calls
produces      notices to the engine core that a version wants to be committed
waits for     in `attend`: ranks of the same engine, in place also the writers; all with deadlines
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weft.config import EngineSettings, engine_settings
from weft.errors import TransferTimeout, VersionError, WeftError
from weft.integrations.vllm.loading import LoadedModel
from weft.runtime.keys import member_security
from weft.runtime.receiver import Receiver

log = logging.getLogger("vllm.weft")

NOTICE_S = 5.0
"""How long a worker waits for a version another rank of its engine has heard of."""


@dataclass
class WeftInit(WeightTransferInitInfo):
    """`init_info` of vLLM's routes: where the controller is, if the engine was not told when it started."""

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
        self._receiver: Receiver | None = None
        self._notices: zmq.Socket[bytes] | None = None
        self._notice_lock = threading.Lock()
        self._last_pause_s, self._num_commits = 0.0, 0
        self._must_process = False
        """Whether the engine's own layout was not yet made of what is served."""
        if self._settings.controller:
            self._join(self._settings)

    @property
    def rank(self) -> int:
        """This worker's rank among all engine ranks."""
        parallel = self.parallel_config
        return self._settings.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank

    def attach(self, address: str) -> None:
        """Where the engine core listens."""
        notices: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        notices.setsockopt(zmq.LINGER, 0)
        notices.connect(address)
        with self._notice_lock:
            self._notices = notices
        if self._receiver is not None:
            self._notice(self._receiver.pending)  # what was missed until now

    def _notice(self, version: int | None) -> None:
        """On any thread: the engine core should attend."""
        with self._notice_lock, contextlib.suppress(zmq.Again):  # a core that does not listen has ended
            if self._notices is not None:
                self._notices.send(b"" if version is None else str(version).encode(), zmq.NOBLOCK)

    def _join(self, settings: EngineSettings) -> None:
        if self._loaded is None:
            with set_current_vllm_config(self.vllm_config):
                self._loaded = LoadedModel(self.model, self.model_config)
            staged = self._loaded.num_staged_bytes
            log.info("weft: %d copies traced, %.1f MB staged", len(self._loaded.trace.copies), staged / 1e6)
        self._receiver = Receiver(
            settings.controller,
            rank=self.rank,
            weights=self._loaded.weights(),
            on_wanted=self._notice,
            **member_security(settings.keys, settings.key),
        )

    def init_transfer_engine(self, init_info: WeftInit) -> None:
        """Join a controller; once more if it is another one."""
        given = {name: value for name, value in vars(init_info).items() if value}
        if not given.get("controller") and self._receiver is not None:
            return
        settings = engine_settings(_additional(self.vllm_config) | given)
        member_security(settings.keys, settings.key)  # raises before the present controller is left
        self.shutdown()
        self._settings = settings
        self._join(settings)

    def start_weight_update(self) -> None:
        """Versions arrive by themselves; there is nothing to prepare."""
        self._joined()

    def receive_weights(self, update_info: WeftUpdate) -> None:
        """Wait for a version and serve it."""
        attended = self.attend(update_info.version, update_info.timeout_s, is_asked=True)
        if attended["error"]:
            raise WeftError(attended["error"])

    def finish_weight_update(self) -> None:
        """A version is whole when `update_weights` has returned."""

    def _joined(self) -> Receiver:
        if self._receiver is None:
            hint = "set WEFT_CONTROLLER, or call init_weight_transfer_engine with it"
            raise VersionError("this engine has no controller yet", hint=hint)
        return self._receiver

    def attend(self, version: int | None, timeout_s: float, *, is_asked: bool = False) -> dict[str, Any]:
        """Between two steps, on all workers: serve a version that is decided; without one, whatever else is wanted.

        `is_asked`: by the user, who may ask before the version is there.
        """
        error = ""
        try:
            receiver = self._joined()
            if version is None:
                receiver.poll(step=0)
            elif not self._serves(receiver, version):
                self._commit(receiver, version, timeout_s, is_asked=is_asked)
            self._process()
        except WeftError as problem:
            error = str(problem)
        except Exception as problem:  # of the engine's own processing: its weights are half made
            log.exception("weft: processing failed")
            error = f"{type(problem).__name__}: {problem}"
        return self.status() | {"error": error}

    @staticmethod
    def _serves(receiver: Receiver, version: int) -> bool:
        return not receiver.is_poisoned and receiver.version is not None and receiver.version >= version

    def _commit(self, receiver: Receiver, version: int, timeout_s: float, *, is_asked: bool) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._serves(receiver, version):
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                update = receiver.wait(left_s if is_asked else min(left_s, NOTICE_S))
            except TransferTimeout:
                if is_asked or receiver.pending is not None:
                    raise
                return  # called off meanwhile
            if not update.commit(max(deadline - time.monotonic(), 0.0)):
                return  # called off before anything was written
            self._must_process, self._num_commits = True, self._num_commits + 1

    def _process(self) -> None:
        """Let the engine make its own layout of what was committed."""
        if not self._must_process:
            return
        assert self._loaded is not None
        assert self._receiver is not None
        began = time.monotonic()
        with set_current_vllm_config(self.vllm_config):
            self._loaded.process()
        self._must_process = False
        self._last_pause_s = self._receiver.last_pause_s + time.monotonic() - began

    def status(self) -> dict[str, Any]:
        """What this worker serves."""
        receiver = self._receiver
        poisoned = self._must_process or (receiver is not None and receiver.is_poisoned)
        return {
            "rank": self.rank,
            "version": None if receiver is None or poisoned else receiver.version,
            "is_poisoned": poisoned,
            "num_commits": self._num_commits,
            "pause_s": self._last_pause_s,
            "staged_bytes": 0 if self._loaded is None else self._loaded.num_staged_bytes,
        }

    def shutdown(self) -> None:
        """Leave the controller; the model goes on serving what it has."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


def settings_of(vllm_config: Any) -> EngineSettings:
    """What the user said: `additional_config={"weft": {…}}`, and `WEFT_*` variables."""
    return engine_settings(_additional(vllm_config))


def _additional(vllm_config: Any) -> dict[str, Any]:
    additional = vllm_config.additional_config
    return dict(additional.get("weft", {})) if isinstance(additional, Mapping) else {}


def extend_workers() -> None:
    """Give vLLM's workers the calls the engine core makes."""
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    def weft_attach(worker: Any, address: str) -> None:
        worker.weight_transfer_engine.attach(address)

    def weft_attend(worker: Any, version: int | None, timeout_s: float) -> dict[str, Any]:
        return worker.weight_transfer_engine.attend(version, timeout_s)

    def weft_status(worker: Any) -> dict[str, Any]:
        return worker.weight_transfer_engine.status()

    for call in (weft_attach, weft_attend, weft_status):
        setattr(Worker, call.__name__, call)
