"""Memory of an engine rank that writers may reach: made, offered to them, and cut off from those that were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.runtime.control.messages import Opened, Writer
from weft.runtime.receive.landing import Landing, in_live, in_staging, patch_bytes
from weft.runtime.transports import OpenTransports
from weft.runtime.weights import Weights
from weft.transport.base import Memory
from weft.transport.pages import keep_reserved


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """Memory, or its addresses, that writers may still reach."""

    keep: Any
    writers: tuple[Writer, ...]


class ReachableMemory:
    """Where versions land, through which transports."""

    def __init__(self, weights: Weights, transports: OpenTransports) -> None:
        self.weights = weights
        self._transports = transports
        self._landing: Landing | None = None
        self._staged: Memory | None = None
        """The landing area, where it is weft's own memory."""
        self._patches: Memory | None = None
        self._quarantine: list[_Quarantined] = []

    @property
    def landing(self) -> Landing:
        """Where versions land; known once transports were opened."""
        assert self._landing is not None
        return self._landing

    @property
    def is_open(self) -> bool:
        """Whether there is a place to land."""
        return self._landing is not None

    @property
    def is_live(self) -> bool:
        """Whether writers reach the live weights."""
        return self._staged is None and self._patches is None

    def make_room_for_patches(self, num_trainers: int, chunk_bytes: int) -> None:
        """Memory for the patches of all trainers."""
        if self._patches is None:
            self._patches = self._transports.allocate(patch_bytes(self.weights, num_trainers, chunk_bytes))

    def stage(self) -> None:
        """Let versions land beside the live weights."""
        if self._landing is None:
            self._landing, self._staged = in_staging(self.weights, self._transports.allocate)

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

    def close_transports(self, beyond_reach: Sequence[Writer]) -> None:
        """Cut off every writer but these, which may still count in arrival cells: those are kept, and read no more."""
        self._quarantine.append(_Quarantined(self._transports.close_all(), tuple(beyond_reach)))

    def give_up(self, beyond_reach: Sequence[Writer]) -> bool:
        """Let go of the memory writers were offered; returns whether what was staged is lost with it.

        `beyond_reach`: those that could still write there. Without any, memory that cannot be given up stays in use.
        """
        writers = tuple(beyond_reach)
        if self._patches is not None:
            patches = self._patches
            if patches.give_up() or writers:
                self._quarantine.append(_Quarantined(patches, writers))
                self._patches = None
            return False  # versions are staged from patches, in memory nobody else writes
        if self._staged is not None and (self._staged.give_up() or writers):
            self._quarantine.append(_Quarantined(self._staged, writers))
            self._landing, self._staged = None, None
            return True
        if self.is_live:
            self._landing = None  # registered anew, and moved where they can be
        return False

    def release_quarantine(self, has_ended: Callable[[Writer], bool]) -> None:
        """Give back what no living writer can reach."""
        self._quarantine = [kept for kept in self._quarantine if not all(has_ended(w) for w in kept.writers)]

    @property
    def num_quarantined(self) -> int:
        """Pieces of memory, or addresses, kept for writers that were lost."""
        return len(self._quarantine)

    def close(self, beyond_reach: Sequence[Writer]) -> None:
        """Let go of everything; what these writers could still reach is never used for anything else."""
        self.close_transports(beyond_reach)
        self.give_up(beyond_reach)
        if any(kept.writers for kept in self._quarantine):
            keep_reserved(self._quarantine)
        self._landing, self._staged, self._patches, self._quarantine = None, None, None, []
