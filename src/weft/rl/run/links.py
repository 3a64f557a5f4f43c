"""How a member reaches the others: addresses, keys, the coordinator's channel and process groups."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from weft.errors import PeerLost
from weft.rl.run.messages import ToMember
from weft.rl.settings import LoopSettings
from weft.runtime.control.channel import Reset
from weft.runtime.control.client import Client
from weft.runtime.control.security import Security, client_keys, security_in

LISTEN_S = 0.2


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """What a member receives at its start."""

    controller: str
    coordinator: str
    store_host: str
    store_port: int
    run_dir: str
    """Shared by the members of one machine."""
    keys: str = ""
    """Folder with controller.pub, trainer.key and engine.key; empty on one machine."""

    @property
    def security(self) -> Security | None:
        """Keys, for channels that need them."""
        return security_in(self.keys)

    def store(self, name: str, settings: LoopSettings) -> Store:
        """A part of the store that all members share."""
        timeout = datetime.timedelta(seconds=settings.timeout_s)
        whole = TCPStore(self.store_host, self.store_port, is_master=False, timeout=timeout)
        return PrefixStore(name, whole)


class Conversation:
    """A member's channel to the coordinator; used by one thread."""

    def __init__(self, links: Links, member: str, timeout_s: float) -> None:
        self.member, self._timeout_s = member, timeout_s
        keys = client_keys(links.security, side=member.split(maxsplit=1)[0])
        self._client = Client(links.coordinator, member=member, messages=ToMember, keys=keys)

    def say(self, message: Any) -> None:
        """Send without an answer."""
        self._client.send(message)

    def ask(self, message: Any) -> Any:
        """Send, and wait for the answer."""
        self._client.send(message)
        return self.listen()

    def listen(self, *, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """The next answer; `meanwhile` is called now and then."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            answer = self._client.receive(LISTEN_S)
            if isinstance(answer, Reset):
                raise PeerLost(f"the coordinator was restarted, or has dropped {self.member}")
            if answer is not None:
                return answer
            meanwhile()
        raise PeerLost(f"the coordinator has not answered {self.member} for {self._timeout_s:.0f} s")

    def close(self) -> None:
        """Disconnect; messages without an answer may be lost."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class ProcessGroup:
    """A few processes that sum or share small tensors; free of cost for a single one."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, device: str = "cpu") -> None:
        self.rank, self.size = rank, size
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group: Any = None
        if size == 1:
            return
        if device == "cpu":
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self._group is not None:
            self._group.allreduce([tensor], dist.AllreduceOptions()).wait()
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on all ranks."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([tensor], options).wait()
        return tensor


def device_of(settings: LoopSettings, local_rank: int) -> str:
    """Where a rank keeps its weights."""
    if settings.device != "cuda":
        return settings.device
    return f"cuda:{local_rank % max(torch.cuda.device_count(), 1)}"
