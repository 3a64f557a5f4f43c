"""Memory an engine rank sets aside for versions before it gives the rest to its KV cache.

    reservation = Reservation("cuda:0", num_bytes)      # before the KV cache is sized
    memory = reservation.take(n, allocate)              # when a plan says what is needed
    reservation.hold()                                  # when nothing is needed for a while

What is set aside is held by a placeholder. It makes way for memory that transports allocate, and shrinks to what is
left. So transports need not know about it, whatever memory they write into.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.errors import TransportError
from weft.runtime.memory import Placeholder, placeholder
from weft.transport.base import Memory

log = logging.getLogger(__name__)


class OutOfReserve(MemoryError):
    """A plan needs more than was set aside; `num_bytes` is what it needs in total."""

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


class _InUse:
    """Memory that counts as in use until it is given back or this object is gone."""

    def __init__(self, reservation: Reservation, num_bytes: int) -> None:
        self._reservation = reservation
        self._num_bytes = num_bytes

    def end(self) -> None:
        """Stop counting; may be called again. Takes no lock: garbage collection can run anywhere."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._reservation._in_use -= num_bytes

    def __del__(self) -> None:
        self.end()


class Reservation:
    """One engine rank's reservation; may be used by any thread."""

    def __init__(self, device: str, num_bytes: int) -> None:
        self._device, self.num_bytes = device, num_bytes
        self._in_use = 0
        self._is_wanted = True
        """Whether versions land in this memory."""
        self._lock = threading.Lock()
        self._placeholder: Placeholder | None = None
        self._hold(num_bytes)

    @property
    def in_use(self) -> int:
        """Bytes taken and not given back."""
        return self._in_use

    def hold(self) -> None:
        """Hold what is not in use, as far as memory is available."""
        with self._lock:
            self._is_wanted = True
            self._try_to_hold(self.num_bytes - self._in_use)

    def let_go(self) -> None:
        """Hold nothing until `hold` is called: versions land elsewhere."""
        with self._lock:
            self._is_wanted = False
            self._free_placeholder()

    def _try_to_hold(self, num_bytes: int) -> None:
        """Failure is acceptable: memory that is not in use may go, versions come first."""
        if not self._is_wanted:
            return
        try:
            self._hold(num_bytes)
        except (MemoryError, OSError, TransportError) as error:
            log.warning("%.3f GB reserved for versions are no longer held: %s", num_bytes / 1e9, error)

    def _hold(self, num_bytes: int) -> None:
        held = 0 if self._placeholder is None else self._placeholder.num_bytes
        if held != num_bytes:
            self._free_placeholder()
            self._placeholder = placeholder(self._device, num_bytes) if num_bytes > 0 else None

    def _free_placeholder(self) -> None:
        if self._placeholder is not None:
            self._placeholder.free()
        self._placeholder = None

    def take(self, num_bytes: int, allocate: Callable[[int], Memory]) -> Memory:
        """Memory for versions, counted as long as it is held. Raises OutOfReserve with both figures."""
        with self._lock:
            left = self.num_bytes - self._in_use
            if num_bytes > left:
                taken = f", of which {self._in_use / 1e9:.3f} GB are in use" if self._in_use else ""
                raise OutOfReserve(
                    f"versions need {num_bytes / 1e9:.3f} GB to land in, but {self.num_bytes / 1e9:.3f} GB were "
                    f"reserved{taken}",
                    self._in_use + num_bytes,
                )
            self._free_placeholder()
            try:
                memory = allocate(num_bytes)
            except BaseException:
                self._try_to_hold(left)
                raise
            self._in_use += num_bytes
            self._try_to_hold(left - num_bytes)
        in_use = _InUse(self, num_bytes)

        def give_up() -> bool:
            is_freed = memory.give_up()
            if is_freed:
                in_use.end()
            return is_freed

        return replace(memory, keep=(memory.keep, in_use), give_up=give_up)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing is held inside this context: the weights themselves are moved, which briefly takes as much memory."""
        with self._lock:
            self._free_placeholder()
            try:
                yield
            finally:
                self._try_to_hold(self.num_bytes - self._in_use)

    def close(self) -> None:
        """Stop setting memory aside; nothing can be taken."""
        with self._lock:
            self._free_placeholder()
            self.num_bytes = 0
