"""The transports one member has open, and the memory it has registered with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from weft.config import CompressionPolicy, TransferSettings
from weft.devices import CPU
from weft.errors import ConfigError
from weft.runtime.control.addresses import own_address
from weft.runtime.control.messages import Offer
from weft.transport.base import Descriptor, Memory, Transport
from weft.transport.registry import Place, open_transport, place_here


class OpenTransports:
    """Opens transports by name when the controller asks for them. `given` replaces them all, for tests."""

    def __init__(
        self, member: str, *, rank: int, device: str, controller: str, given: Transport[Any] | None = None
    ) -> None:
        self._member, self._rank, self._device, self._controller = member, rank, device, controller
        self.device = device
        """Where the memory lies that they move."""
        self.is_near = False
        """Whether any member that is written to is on this host."""
        self._given = given
        self._open: dict[str, Transport[Any]] = {}
        self._descriptors: dict[tuple[str, int, int], Descriptor] = {}
        if given is not None:
            self._open[given.capabilities.name] = given

    def place(self, *, shareable: bool) -> Place:
        """What the controller needs to know to choose."""
        place = place_here(self._device, shareable=shareable)
        if self._given is None:
            return place
        return msgspec.structs.replace(place, installed=(self._given.capabilities.name,))

    def pass_host(self, through_host: bool) -> None:
        """Move host memory from now on, or memory of the member's own device; closes what moves the other kind."""
        device = CPU if through_host else self._device
        if device != self.device:
            self.close_all()
            self.device = device

    def open(self, names: Iterable[str], settings: TransferSettings) -> None:
        """Open what is not open yet."""
        if settings.compression is not CompressionPolicy.NONE and self._device != CPU:
            raise ConfigError(
                f"{self._member} has its weights on {self._device}, but patches can be compressed in CPU memory only",
                hint="set compression to `none`",
            )
        for name in names:
            if name not in self._open:
                self._open[name] = open_transport(
                    name,
                    self._member,
                    writer=self._rank,
                    num_threads=settings.num_threads,
                    device=self.device,
                    nixl_devices=settings.nixl_devices,
                    host=own_address(self._controller),
                    is_near=self.is_near,
                )

    def offers(self, ranges: Iterable[tuple[int, int]]) -> dict[str, Offer]:
        """Register ranges of memory with every open transport, once; returns how others reach them."""
        wanted = sorted(set(ranges))
        for name, transport in self._open.items():
            fresh = [known for known in wanted if (name, *known) not in self._descriptors]
            for known, descriptor in zip(fresh, transport.register_all(fresh), strict=True):
                self._descriptors[name, *known] = descriptor
        return {
            name: Offer(endpoint=transport.endpoint, descriptors=[self._descriptors[name, *key] for key in wanted])
            for name, transport in self._open.items()
        }

    def allocate(self, num_bytes: int) -> Memory:
        """Memory all open transports can write into: what `shm` allocates suits all transports for CPU memory."""
        chosen = self._open.get("shm") or next(iter(self._open.values()))
        return chosen.allocate(num_bytes)

    def forget_arrivals(self) -> None:
        """Count from zero again: nothing is being written."""
        for transport in self._open.values():
            transport.forget_arrivals()

    @property
    def has_cut(self) -> bool:
        """Whether a transport was torn down because a peer did not accept a write."""
        return any(transport.cut_peers for transport in self._open.values())

    def close_cut(self) -> dict[str, frozenset[str]]:
        """Close and forget transports that were torn down; returns them, with the peers that made it necessary."""
        cut = {name: transport.cut_peers for name, transport in self._open.items() if transport.cut_peers}
        for name in cut:
            self._open.pop(name).close()
        self._descriptors = {key: known for key, known in self._descriptors.items() if key[0] not in cut}
        return cut

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __getitem__(self, name: str) -> Transport[Any]:
        return self._open[name]

    def close_all(self) -> list[Transport[Any]]:
        """Close and forget every transport; returns them, for callers that must keep what others could still reach."""
        closed = list(self._open.values())
        for transport in closed:
            transport.close()
        self._open = {}
        self._descriptors = {}
        return closed
