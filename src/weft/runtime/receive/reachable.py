"""Memory of an engine rank that writers may reach: created, offered to writers, and cut off from lost ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.config import TransferSettings
from weft.devices import CPU
from weft.runtime.control.messages import Opened, Writer, pack
from weft.runtime.memory import pinned
from weft.runtime.receive.landing import check_contiguous
from weft.runtime.receive.reservation import Reservation
from weft.runtime.transports import OpenTransports
from weft.runtime.weights import Weights
from weft.transport.base import Memory
from weft.transport.pages import keep_reserved

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Quarantined:
    """Memory, or its addresses, that writers may still reach."""

    keep: Any
    writers: tuple[Writer, ...]


class ReachableMemory:
    """Where versions land, through which transports."""

    def __init__(self, weights: Weights, transports: OpenTransports, reservation: Reservation | None = None) -> None:
        self.weights = weights
        self._transports, self._reservation = transports, reservation
        self.landing: Memory | None = None
        """Where streams land, beside the live weights."""
        self.patches: Memory | None = None
        self.window: Memory | None = None
        """Memory in front of the live weights, which is drained into them."""
        self.is_behind_host = False
        """Whether versions land in host memory, although the weights are on a GPU."""
        self._is_offered = False
        self._quarantine: list[_Quarantined] = []

    @property
    def is_open(self) -> bool:
        """Whether the live weights were moved to where others can reach them, or offered where they are."""
        return self._is_offered

    @property
    def is_live(self) -> bool:
        """Whether writers reach the live weights."""
        return self.landing is None and self.patches is None and not self.is_behind_host

    def pass_host(self, through_host: bool) -> None:
        """Land in host memory from now on, or where the weights lie; no writer reaches what was used before."""
        is_behind_host = through_host and self.weights.device != CPU
        if is_behind_host != self.is_behind_host:
            self.close_transports(())
            self.landing, self.patches, self.window = None, None, None
            self.is_behind_host, self._is_offered = is_behind_host, False
            self._use_reservation(is_behind_host)
        self._transports.pass_host(through_host)

    def open_transports(self, names: Sequence[str], settings: TransferSettings) -> None:
        """Open these; what was counted before does not count."""
        self._transports.open(names, settings)
        self._transports.forget_arrivals()

    def _use_reservation(self, is_behind_host: bool) -> None:
        """What was reserved lies beside the weights: versions that land in host memory do not need it."""
        if self._reservation is None:
            return
        if not is_behind_host:
            self._reservation.hold()
            return
        self._reservation.let_go()
        log.info(
            "versions land in host memory: %.3f GB that were reserved for them on %s are released",
            self._reservation.num_bytes / 1e9,
            self.weights.device,
        )

    def make_room_for_patches(self, num_bytes: int) -> None:
        """Memory for the patches of all trainers."""
        if self.patches is None or self.patches.num_bytes < num_bytes:
            self.patches = None
            self.patches = self._make(num_bytes)

    def stage(self, num_bytes: int) -> None:
        """Let versions land beside the live weights."""
        if self.landing is None or self.landing.num_bytes < num_bytes:
            self.landing = None  # free the old one first: both may not fit
            self.landing = self._make(num_bytes)

    def _make(self, num_bytes: int) -> Memory:
        """Memory that transports reach, from the reservation if there is one on that device."""
        if self.is_behind_host:
            return pinned(self._transports.allocate(max(num_bytes, 1)))
        if self._reservation is None:
            return self._transports.allocate(max(num_bytes, 1))
        return self._reservation.take(max(num_bytes, 1), self._transports.allocate)

    def land_in_live(self, *, window_bytes: int = 0, rehome: bool = False) -> None:
        """Let versions land in the live weights, or in a window; `rehome` moves the weights where others reach them."""
        check_contiguous(self.weights)
        if window_bytes and (self.window is None or self.window.num_bytes < window_bytes):
            self.window = None
            self.window = self._make(window_bytes)
        if rehome and self.weights.rehome is not None:
            with contextlib.nullcontext() if self._reservation is None else self._reservation.aside():
                self.weights = self.weights.rehome(self._transports.allocate)
        self._is_offered = True

    def offer(self, number: int) -> Opened:
        """What trainers need to know, in a round of opening transports."""
        beside = self.landing or self.window
        own = [(memory.address, memory.num_bytes) for memory in (beside, self.patches) if memory is not None]
        live = self.weights.addresses.astype(np.uint64) if self.is_live else np.zeros(0, dtype=np.uint64)
        return Opened(
            round=number,
            offers=self._transports.offers([*(self.weights.ranges if self.is_live else ()), *own]),
            live=pack(live),
            landing=0 if beside is None else beside.address,
            patches=0 if self.patches is None else self.patches.address,
        )

    def close_transports(self, beyond_reach: Sequence[Writer]) -> None:
        """Cut off every writer but these, which may still write to arrival cells: those are kept, but not read."""
        self._quarantine.append(_Quarantined(self._transports.close_all(), tuple(beyond_reach)))

    def give_up(self, beyond_reach: Sequence[Writer]) -> bool:
        """Release the memory that was offered to writers; returns whether what was staged is lost with it.

        `beyond_reach`: writers that could still write there. If there are none, memory that cannot be given up stays in
        use.
        """
        writers = tuple(beyond_reach)
        if self.is_live:
            self._is_offered = False  # registered again, and moved if possible
            return False
        had_landing = self.landing is not None
        self.patches, self.window, self.landing = (
            self._given_up(memory, writers) for memory in (self.patches, self.window, self.landing)
        )
        return had_landing and self.landing is None

    def _given_up(self, memory: Memory | None, writers: tuple[Writer, ...]) -> Memory | None:
        """What is left of some memory: itself, if it stays in use."""
        if memory is None or not (memory.give_up() or writers):
            return memory
        self._quarantine.append(_Quarantined(memory, writers))
        return None

    def release_quarantine(self, has_ended: Callable[[Writer], bool]) -> None:
        """Free what no living writer can reach."""
        self._quarantine = [kept for kept in self._quarantine if not all(has_ended(w) for w in kept.writers)]

    @property
    def num_quarantined(self) -> int:
        """Pieces of memory, or addresses, kept for writers that were lost."""
        return len(self._quarantine)

    def close(self, beyond_reach: Sequence[Writer]) -> None:
        """Release everything; what these writers could still reach is never reused."""
        self.close_transports(beyond_reach)
        self.give_up(beyond_reach)
        if any(kept.writers for kept in self._quarantine):
            keep_reserved(self._quarantine)
        self.landing, self.patches, self.window, self._quarantine = None, None, None, []
