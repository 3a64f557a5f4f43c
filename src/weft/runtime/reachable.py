"""Memory of an engine rank that writers may reach: made, offered to them, and cut off from those that were lost."""

from __future__ import annotations

from typing import Any

from weft.runtime.landing import Landing, in_live, in_staging, patch_bytes
from weft.runtime.messages import Opened
from weft.runtime.transports import OpenTransports
from weft.runtime.weights import Weights
from weft.transport.base import Memory


class ReachableMemory:
    """Where versions land, through which transports."""

    def __init__(self, weights: Weights, transports: OpenTransports) -> None:
        self.weights = weights
        self._transports = transports
        self._landing: Landing | None = None
        self._patches: Memory | None = None
        self._quarantine: list[Any] = []
        """Memory a lost writer could still reach (staging, arrival cells); kept, never used again."""

    @property
    def landing(self) -> Landing:
        """Where versions land; known once transports were opened."""
        assert self._landing is not None
        return self._landing

    @property
    def is_open(self) -> bool:
        """Whether there is a place to land."""
        return self._landing is not None

    def make_room_for_patches(self, num_trainers: int, chunk_bytes: int) -> None:
        """Memory for the patches of all trainers."""
        if self._patches is None:
            self._patches = self._transports.allocate(patch_bytes(self.weights, num_trainers, chunk_bytes))

    def stage(self) -> None:
        """Let versions land beside the live weights."""
        if self._landing is None:
            self._landing = in_staging(self.weights, self._transports.allocate)

    def land_in_live(self, *, rehome: bool = False) -> None:
        """Let versions land in the live weights; `rehome` moves them into memory others can reach."""
        if rehome and self.weights.rehome is not None:
            self.weights = self.weights.rehome(self._transports.allocate)
        self._landing = in_live(self.weights)

    def offer(self, number: int) -> Opened:
        """What trainers need to know, in a round of opening."""
        addresses = list(self.landing.addresses)
        if self._patches is None:
            return Opened(round=number, offers=self._transports.offers(self.landing.ranges), addresses=addresses)
        where = self._patches.address, self._patches.num_bytes
        return Opened(
            round=number,
            offers=self._transports.offers([where]),
            addresses=addresses,
            patch_address=where[0],
            patch_bytes=where[1],
        )

    def cut_off(self) -> None:
        """A writer was lost while it wrote: it must not reach memory that is used from now on."""
        closed = self._transports.close_all()
        self._quarantine.append((self._landing, self._patches, closed))
        self._landing, self._patches = None, None

    def close(self) -> None:
        """Let go of everything."""
        self._transports.close_all()
        self._landing, self._patches, self._quarantine = None, None, []
