"""Memory an engine rank sets aside for versions before it gives the rest to its KV cache.

    reservation = Reservation("cuda:0", num_bytes)      # before the KV cache is sized
    memory = reservation.take(n, allocate)              # when a plan says what is needed
    reservation.hold()                                  # when nothing is needed for a while

What is set aside is held by a placeholder. It makes way for memory that transports allocate, and shrinks to what is
left. So transports need not know of it, whatever memory they write into.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from weft.errors import TransportError
from weft.runtime.memory import Placeholder, placeholder
from weft.transport.base import Memory

log = logging.getLogger(__name__)


class OutOfReserve(MemoryError):
    """A plan needs more than was set aside."""


class _InUse:
    """As long as it is held, its memory counts."""


class Reservation:
    """Of one engine rank; used by any thread."""

    def __init__(self, device: str, num_bytes: int) -> None:
        self._device, self.num_bytes = device, num_bytes
        self._in_use = 0
        self._lock = threading.Lock()
        self._placeholder: Placeholder | None = None
        self.hold()

    @property
    def in_use(self) -> int:
        """Bytes that were taken and not given back."""
        return self._in_use

    def hold(self) -> None:
        """Hold what is not in use."""
        with self._lock:
            self._hold(self.num_bytes - self._in_use)

    def _hold(self, num_bytes: int) -> None:
        held = 0 if self._placeholder is None else self._placeholder.num_bytes
        if held != num_bytes:
            self._let_go()
            self._placeholder = placeholder(self._device, num_bytes) if num_bytes > 0 else None

    def _let_go(self) -> None:
        if self._placeholder is not None:
            self._placeholder.free()
        self._placeholder = None

    def take(self, num_bytes: int, allocate: Callable[[int], Memory]) -> Memory:
        """Memory for versions, counted until nobody holds it. Raises OutOfReserve with both figures."""
        with self._lock:
            left = self.num_bytes - self._in_use
            if num_bytes > left:
                taken = f", of which {self._in_use / 1e9:.3f} GB are in use" if self._in_use else ""
                raise OutOfReserve(
                    f"versions need {num_bytes / 1e9:.3f} GB to land in, but {self.num_bytes / 1e9:.3f} GB were "
                    f"reserved{taken}"
                )
            self._let_go()
            try:
                memory = allocate(num_bytes)
            except BaseException:
                self._hold(left)
                raise
            self._in_use += num_bytes
            try:
                self._hold(left - num_bytes)
            except (MemoryError, OSError, TransportError) as error:  # what is left may go; the version comes first
                log.warning("%.3f GB that were reserved for versions are not held any more: %s", left / 1e9, error)
        token = _InUse()
        weakref.finalize(token, self._give_back, num_bytes)
        return replace(memory, keep=(memory.keep, token))

    def _give_back(self, num_bytes: int) -> None:
        self._in_use -= num_bytes

    def close(self) -> None:
        """Set nothing aside any more, for as long as the engine sleeps."""
        with self._lock:
            self._let_go()
