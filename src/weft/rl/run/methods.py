"""How weights get from trainers to engines: weft, or the collectives it is compared with.

All methods have the same two sides: trainers `publish` and `wait_released`, engines call `update` between tokens.
Weft's publish returns at once and overlaps training and generation; a broadcast needs all members at the same time.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft import Receiver, Sender, weights_of
from weft.errors import TransportUnavailable, VersionError
from weft.rl.model.engine_model import EngineModel
from weft.rl.run.links import Links, ProcessGroup
from weft.rl.run.messages import VersionSent
from weft.rl.settings import LoopSettings, Method

if TYPE_CHECKING:
    from weft.runtime.send.sender import Publication


ATTEMPTS = 1_000
"""Weft's version number of a policy: the policy's times this, plus one for every further attempt to send it."""


class SendingMethod(Protocol):
    """A trainer's side."""

    def publish(self, version: int) -> None:
        """Give the weights to the engines."""

    def publish_again(self) -> None:
        """The last version was given up: send the same weights again."""

    def wait_released(self) -> None:
        """Wait until the weights may change."""

    def reports(self, *, wait: bool = False) -> list[VersionSent]:
        """How versions ended since the last call; `wait`: until all have."""

    def close(self) -> None:
        """Stop."""


class WeftSending:
    """Publishes through weft; a thread watches how each version ends."""

    def __init__(self, settings: LoopSettings, links: Links, policy: nn.Module, rank: int) -> None:
        self._timeout_s = settings.timeout_s
        self._sender = Sender(
            links.controller,
            rank=rank,
            weights=weights_of(policy),
            timeout_s=settings.timeout_s,
            security=links.security,
        )
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-rl-watch")
        self._seen: list[Future[VersionSent]] = []
        self._publication: Publication | None = None

    def publish(self, version: int) -> None:
        """Returns at once."""
        self._publish(version * ATTEMPTS)

    def publish_again(self) -> None:
        """Weft's version numbers must increase; the policy's stays the same."""
        self.wait_released()
        if self._publication is not None:
            self._publish(self._publication.version + 1)

    def _publish(self, number: int) -> None:
        began = time.time()
        self._publication = publication = self._sender.publish(version=number)
        self._seen.append(self._watcher.submit(self._watch, publication, began))

    def _watch(self, publication: Publication, began: float) -> VersionSent:
        """Wait for the end of a version; one that was given up does not stop training."""
        released = began
        reason = ""
        try:
            publication.wait_released(self._timeout_s)
            released = time.time()
            publication.wait_committed(self._timeout_s)
        except VersionError as error:
            reason = str(error)
        ended = time.time()
        return VersionSent(
            version=publication.version // ATTEMPTS,
            published_at=began,
            released_at=released,
            committed_at=ended,
            write_s=publication.write_s or 0.0,
            reason=reason,
        )

    def wait_released(self) -> None:
        """Wait until the weights may change; an aborted version no longer reads them."""
        if self._publication is not None:
            try:
                self._publication.wait_released(self._timeout_s)
            except VersionError:
                return  # reported by the watcher

    def reports(self, *, wait: bool = False) -> list[VersionSent]:
        """Versions whose end is known."""
        over = [seen for seen in self._seen if wait or seen.done()]
        self._seen = [seen for seen in self._seen if seen not in over]
        return [seen.result(self._timeout_s) for seen in over]

    def close(self) -> None:
        """Leave."""
        self._sender.close()
        self._watcher.shutdown(wait=False)


class CollectiveSending:
    """Assembles full tensors on all trainers, and broadcasts them from the first."""

    def __init__(
        self,
        settings: LoopSettings,
        policy: nn.Module,
        rank: int,
        group: ProcessGroup | None,
        offer: Callable[[int], None],
    ) -> None:
        self._policy, self._rank, self._group, self._offer = policy, rank, group, offer
        self._gathers_first = settings.method is Method.GATHER
        self._sent: list[VersionSent] = []

    def publish(self, version: int) -> None:
        """Returns when every engine has everything."""
        began = time.time()
        if self._rank == 0:
            self._offer(version)
        tensors = full_tensors(self._policy)
        num_bytes = 0
        for _, whole in list(tensors) if self._gathers_first else tensors:
            if self._group is not None:
                self._group.share(whole)
                num_bytes += whole.nbytes * (self._group.size - 1)
        ended = time.time()
        sent = VersionSent(
            version=version, published_at=began, released_at=ended, committed_at=ended, num_bytes=num_bytes
        )
        self._sent.append(sent)

    def publish_again(self) -> None:
        """Never needed: a broadcast that fails ends the run."""

    def wait_released(self) -> None:
        """Nothing is in flight."""

    def reports(self, *, wait: bool = False) -> list[VersionSent]:
        """Versions that were sent."""
        del wait
        sent, self._sent = self._sent, []
        return sent

    def close(self) -> None:
        """Nothing to leave."""


def full_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a policy, whole; all trainers must ask for them together."""
    for name, parameter in sorted(policy.named_parameters()):
        detached = parameter.detach()
        yield name, (detached.full_tensor() if isinstance(detached, DTensor) else detached).contiguous()


class Receiving(Protocol):
    """An engine rank's side."""

    def update(self) -> float | None:
        """Between two tokens: how long a new version took to become visible, if one did."""

    @property
    def version(self) -> int:
        """The version it serves; -1 before the first."""

    def close(self) -> None:
        """Stop."""


class WeftReceiving:
    """Commits what weft has staged."""

    def __init__(self, links: Links, model: EngineModel, rank: int) -> None:
        weights = weights_of(model, parts=model.parts)
        self._receiver = Receiver(links.controller, rank=rank, weights=weights, security=links.security)

    def update(self) -> float | None:
        """Commit an update, if there is one."""
        update = self._receiver.poll()
        if update is None or not update.commit():
            return None
        return self._receiver.last_pause_s

    @property
    def version(self) -> int:
        """The version it serves; -1 before the first."""
        number = self._receiver.version
        return -1 if number is None else number // ATTEMPTS

    def close(self) -> None:
        """Leave."""
        self._receiver.close()


class CollectiveReceiving:
    """Takes part in broadcasts, between two jobs."""

    def __init__(
        self, model: EngineModel, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, group: ProcessGroup
    ) -> None:
        self._model, self._group = model, group
        device = model.embed.weight.device
        self._tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in sorted(shapes.items())}
        self.version = -1

    def update(self) -> float | None:
        """Never between tokens."""
        return None

    def receive(self, version: int) -> float:
        """Receive everything, tensor by tensor; the engine is paused meanwhile."""
        began = time.monotonic()
        for name, whole in self._tensors.items():
            self._model.load(name, self._group.share(whole))
        self.version = version
        return time.monotonic() - began

    def close(self) -> None:
        """Nothing to leave."""


def use_plugins(settings: LoopSettings) -> None:
    """Let NCCL find UCCL, where that is the method; before anything uses NCCL."""
    if settings.method is Method.UCCL:
        import uccl  # noqa: PLC0415  # optional

        os.environ["NCCL_NET_PLUGIN"] = uccl.nccl_plugin_path()


def check_method(settings: LoopSettings) -> None:
    """Raise if a method cannot work here."""
    if settings.method is Method.UCCL and (settings.device == "cpu" or importlib.util.find_spec("uccl") is None):
        raise TransportUnavailable(
            "uccl's collectives need GPUs and its network plugin for NCCL",
            hint="pip install uccl on machines with GPUs, or use --method broadcast",
        )
