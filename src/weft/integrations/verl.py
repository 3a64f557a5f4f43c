"""verl: a checkpoint-engine backend called `weft`.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: weft
      custom_backend_module: weft.integrations.verl
      engine_kwargs: {weft: {timeout_s: 120}}

verl creates one of these in every actor and every rollout process, and keeps them; every update goes through `prepare`
(all processes), `build_topology` (the driver), `init_process_group` (all), then `send_weights` in parallel with
`receive_weights`, `finalize`. The controller lives in the driver, the only process that knows all others, as long as
the same processes take part. Actors send from memory that is kept, and rollouts receive into theirs; plan and
connections serve all updates.

verl hands out whole tensors on every actor rank, so rank 0 sends (`senders: all` lets all ranks send a part each). With
`WeftManager` as `checkpoint_manager_class`, actors send the shards they hold: nothing is gathered or copied.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry

from weft.config import TransferSettings
from weft.errors import LayoutError, VersionError
from weft.integrations.dtypes import NAMES
from weft.integrations.torch import weights_of, weights_of_tensors
from weft.runtime.control.keys import Grant, new_keys
from weft.runtime.control.security import KeysInMemory, Security
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Part

SPLIT_BYTES = 1 << 20
"""Tensors smaller than this are sent by one rank."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that verl hands out, and how it travels: all but floating-point tensors as 16-bit words."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """A tensor's entry."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def _is_carried(self) -> bool:
        return self.dtype in NAMES and len(self.shape) > 0 and 0 not in self.shape

    @property
    def carrier(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Its form in transit."""
        if self._is_carried:
            return self.dtype, self.shape
        return torch.float16, ((math.prod(self.shape) * self.dtype.itemsize + 1) // 2,)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it travels."""
        if self._is_carried:
            return tensor
        as_bytes = tensor.reshape(-1).contiguous().view(torch.uint8)
        return torch.nn.functional.pad(as_bytes, (0, as_bytes.numel() % 2)).view(torch.float16)

    def unpack(self, carried: torch.Tensor | None) -> torch.Tensor:
        """The original tensor; `None` is what travels for an empty one."""
        if carried is None:
            return torch.empty(self.shape, dtype=self.dtype)
        if self._is_carried:
            return carried
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return carried.view(torch.uint8)[:num_bytes].view(self.dtype).view(self.shape)


def _to_text(entries: Iterable[Entry]) -> str:
    return json.dumps([(entry.name, str(entry.dtype).removeprefix("torch."), entry.shape) for entry in entries])


def _from_text(text: bytes) -> list[Entry]:
    known = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return [Entry(name, known[f"torch.{dtype}"], tuple(shape)) for name, dtype, shape in json.loads(text)]


class _RowSplit:
    """Which rank sends which rows: decided tensor by tensor, identically on all ranks."""

    def __init__(self, num_senders: int) -> None:
        self._bytes = [0] * num_senders

    def rows(self, dtype: torch.dtype, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Sender, first row, number of rows."""
        num_bytes, count = math.prod(shape) * dtype.itemsize, len(self._bytes)
        if num_bytes < SPLIT_BYTES or shape[0] < count:
            least = self._bytes.index(min(self._bytes))
            self._bytes[least] += num_bytes
            return [(least, 0, shape[0])]
        cuts = [shape[0] * part // count for part in range(count + 1)]
        return [(part, cuts[part], cuts[part + 1] - cuts[part]) for part in range(count)]


@dataclass(frozen=True, slots=True)
class _Session:
    """A controller and the processes it was made for."""

    members: tuple[str, ...]
    controller: Controller
    security: dict[str, Security | None]
    """By side; for members on other hosts."""


@dataclass(slots=True)
class _KeptState:
    """What a process holds between updates."""

    entries: list[Entry] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    ranges: tuple[tuple[int, int], ...] = ()
    """Memory of a training engine that sends from its own parameters."""


@CheckpointEngineRegistry.register("weft")
class WeftCheckpointEngine(CheckpointEngine):
    """One actor or rollout process. verl calls it on the process's event loop: only waits leave that thread."""

    wire_format = "named_tensors"
    _sessions: ClassVar[dict[str, _Session]] = {}
    """In the driver: keyed by the process of actor 0."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        senders: str = "master",
        timeout_s: float = 120.0,
        settings: Mapping[str, Any] | None = None,
        use_keys: bool = False,
    ) -> None:
        """`bucket_size` is verl's; nothing is split into buckets here."""
        if senders not in ("master", "all"):
            raise ValueError(f"`senders` is `{senders}`, expected master or all")
        self._is_master, self._timeout_s = is_master, float(timeout_s)
        given = {"mode": "in_place", "silence_s": 30.0, "version_s": self._timeout_s, **dict(settings or {})}
        self._options = {"senders": senders, "use_keys": bool(use_keys), "settings": given}
        self._home = self._uid = uuid.uuid4().hex  # of the process; of the member, which changes after a failure
        self._node = ray.util.get_node_ip_address().strip("[]")
        self._store: TCPStore | None = None
        self._where: tuple[str, int] = ("", 0)
        self._security: Security | None = None
        self._address, self._num_senders, self._rank = "", 1, -1
        self._epoch, self._version = "", 0
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._memory = _KeptState()

    def prepare(self) -> dict[str, Any]:
        """Every process, before every update: its identity."""
        if self._is_master and self._store is None:
            self._store = _new_store(self._node)
        return {
            "home": self._home,
            "uid": self._uid,
            "node": self._node,
            "port": self._store.port if self._store is not None else None,
            "version": self._version,
            "options": self._options,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The driver, before every update: which processes take part, and where the controller is."""
        master = metadata[0]
        num_senders = actor_wg_world_size if master["options"]["senders"] == "all" else 1
        members = tuple(m["uid"] for m in [*metadata[:num_senders], *metadata[actor_wg_world_size:]])
        session = cls._sessions.get(master["home"])
        if session is None or session.members != members:
            if session is not None:
                session.controller.close()
            session = cls._sessions[master["home"]] = _new_session(members, num_senders, metadata)
        common = {
            "address": session.controller.address,
            "num_senders": num_senders,
            "epoch": uuid.uuid5(uuid.NAMESPACE_OID, session.controller.address + "".join(members)).hex,
            "version": max(m["version"] for m in metadata) + 1,
            "store": (master["node"], master["port"]),
        }
        senders = [rank if rank < num_senders else -1 for rank in range(actor_wg_world_size)]
        actors = _for_each(senders, common | {"security": session.security["trainer"]})
        rollouts = _for_each(list(range(rollout_world_size)), common | {"security": session.security["engine"]})
        return actors, rollouts

    def init_process_group(
        self,
        rank: int,
        address: str,
        security: Security | None,
        num_senders: int,
        epoch: str,
        version: int,
        store: tuple[str, int],
    ) -> None:
        """Every process, before every update: what the driver decided."""
        if epoch != self._epoch:
            self._forget()
        self._rank, self._address, self._security = rank, address, security
        self._num_senders, self._epoch, self._version, self._where = num_senders, epoch, version, store

    def finalize(self) -> None:
        """After every update: memory, plan and connections serve the next."""

    def _forget(self) -> None:
        sender, self._sender = self._sender, None
        receiver, self._receiver = self._receiver, None
        for member in (sender, receiver):
            if member is not None:
                member.close()
        self._memory = _KeptState()

    def _start_over(self, epoch: str) -> None:
        """After a failure: join as a new member next time, unless verl has gone on without waiting for it."""
        if self._epoch == epoch:
            self._forget()
            self._uid, self._epoch = uuid.uuid4().hex, ""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float] | None:
        """Actors. All ranks walk through the tensors: making them is collective."""
        if self._rank < 0:
            for _ in weights:
                pass
            return None
        began, epoch = time.monotonic(), self._epoch
        try:
            self._stage(weights)
            staged = time.monotonic()
            assert self._sender is not None
            publication = self._sender.publish(version=self._version)
            await asyncio.to_thread(publication.wait_committed, self._timeout_s)
        except BaseException:
            self._start_over(epoch)
            raise
        if not self._is_master:
            return None
        return {"weft/stage_s": staged - began, "weft/transfer_s": time.monotonic() - staged}

    @torch.no_grad()
    def _stage(self, weights: Any) -> None:
        if hasattr(weights, "get_per_tensor_param"):  # WeftManager hands over the training engine itself
            self._join_with(weights.module)
        elif self._sender is None:
            self._stage_first(weights)
        else:
            self._stage_again(weights)

    def _stage_first(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        split, memory = _RowSplit(self._num_senders), self._memory
        for name, tensor in weights:
            entry = Entry.of(name, tensor)
            memory.entries.append(entry)
            dtype, shape = entry.carrier
            if 0 in shape:
                continue
            for sender, first, count in split.rows(dtype, shape):
                if sender == self._rank:
                    rows = entry.pack(tensor)[first : first + count]
                    memory.tensors[name] = rows.to("cpu", copy=True, memory_format=torch.contiguous_format)
                    memory.parts[name] = Part(shape=shape, lo=(first, *(0 for _ in shape[1:])))
        self._say_layout()
        weights_held = weights_of_tensors(memory.tensors, parts=memory.parts)
        self._sender = self._new_sender(weights_held)

    def _join_with(self, module: torch.nn.Module) -> None:
        weights = weights_of(module)
        if self._sender is None:
            named = module.named_parameters(remove_duplicate=False)
            self._memory.entries = [Entry.of(name, parameter) for name, parameter in named]
            self._memory.ranges = weights.ranges
            self._say_layout()
            self._sender = self._new_sender(weights)
        elif weights.ranges != self._memory.ranges:
            hint = "keep the actor's parameters where they are (no param_offload), or do not use WeftManager"
            raise LayoutError("the actor's parameters have moved since the last update", hint=hint)

    def _new_sender(self, weights: Any) -> Sender:
        return Sender(
            self._address, rank=self._rank, weights=weights, timeout_s=self._timeout_s, security=self._security
        )

    def _say_layout(self) -> None:
        """Publish the layout: rollouts do not know what verl hands out here."""
        if self._store is not None:
            self._store.set(f"layout/{self._epoch}", _to_text(self._memory.entries))

    def _stage_again(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        expected = iter(self._memory.entries)
        for name, tensor in weights:
            entry, found = next(expected, None), Entry.of(name, tensor)
            if entry != found:
                raise LayoutError(f"verl handed out {found}, expected {entry} as before")
            mine = self._memory.tensors.get(name)
            if mine is not None:
                first = self._memory.parts[name].lo[0]
                mine.copy_(found.pack(tensor)[first : first + mine.shape[0]])
        missing = next(expected, None)
        if missing is not None:
            raise LayoutError(f"verl did not hand out {missing}")

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Rollouts: all tensors, once all have arrived and are verified."""
        epoch = self._epoch
        try:
            if self._receiver is None:
                await asyncio.to_thread(self._join)
            assert self._receiver is not None
            version = await asyncio.to_thread(self._receiver.take, self._timeout_s)
            if version != self._version:
                raise VersionError(f"version {version} arrived, expected {self._version}")
        except BaseException:
            self._start_over(epoch)
            raise
        for entry in self._memory.entries:
            yield entry.name, entry.unpack(self._memory.tensors.get(entry.name))

    def _join(self) -> None:
        store = TCPStore(*self._where, is_master=False, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=self._timeout_s))
        memory = self._memory
        memory.entries = _from_text(store.get(f"layout/{self._epoch}"))  # waits until actor 0 has published it
        carriers = {entry.name: entry.carrier for entry in memory.entries}
        memory.tensors = {
            name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in carriers.items() if 0 not in shape
        }
        weights = weights_of_tensors(memory.tensors)
        self._receiver = Receiver(self._address, rank=self._rank, weights=weights, security=self._security)


def _new_store(node: str) -> TCPStore:
    """A store that listens on the node's own address only; torch's default is all addresses of the host."""
    listening = socket.create_server((node, 0), family=socket.AF_INET6 if ":" in node else socket.AF_INET)
    port = listening.getsockname()[1]
    return TCPStore(node, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _for_each(ranks: Sequence[int], common: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Arguments of every process of a group, as verl wants them: a list for each name."""
    return {"rank": list(ranks), **{name: [value] * len(ranks) for name, value in common.items()}}


def _new_session(members: tuple[str, ...], num_senders: int, metadata: Sequence[Mapping[str, Any]]) -> _Session:
    """A controller for these members; across hosts only with keys, which travel in verl's own messages."""
    here = ray.util.get_node_ip_address().strip("[]")
    options = metadata[0]["options"]
    server: Security | None = None
    security: dict[str, Security | None] = {"trainer": None, "engine": None}
    address = "tcp://127.0.0.1:*"
    if options["use_keys"] or {m["node"] for m in metadata} != {here}:
        own, theirs = new_keys(), {side: new_keys() for side in security}
        address = f"tcp://[{here}]:*" if ":" in here else f"tcp://{here}:*"
        grants = tuple(Grant(public=keys.public, side=side) for side, keys in theirs.items())
        server = Security(keys=KeysInMemory(own=own, grants=grants))
        for side, keys in theirs.items():
            security[side] = Security(keys=KeysInMemory(own=keys, server_public=own.public))
    controller = Controller(
        address,
        num_trainers=num_senders,
        num_engine_ranks=len(members) - num_senders,
        settings=TransferSettings(**options["settings"]),
        security=server,
    )
    return _Session(members, controller, security)


class WeftManager(CheckpointEngineManager):
    """Lets actors send the shards they hold. Needs `senders: all`; parameters only, by the training module's names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backend = "delta_sharded"  # the one mode in which verl hands over the training engine
