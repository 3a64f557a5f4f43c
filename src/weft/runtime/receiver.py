"""An engine rank's side: versions arrive in staging memory, are verified, and become visible by `commit`.

    with Receiver(address, rank=0, weights=weights, transport=transport) as receiver:
        while serving:
            engine_step()
            if (update := receiver.poll()) is not None:      # staged, verified, decided
                update.commit()                              # the only pause

Mode `shadow`: writers only ever touch staging memory, so nothing of the engine changes before `commit`, and a late
write of an aborted version cannot reach live weights.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, Self

import numpy as np

from weft import native
from weft.core.boxes import row_major_strides
from weft.core.layout import DTYPE_BYTES
from weft.core.runs import expand_runs
from weft.errors import IntegrityError, ProtocolError, TransferTimeout, WeftError
from weft.runtime.member import ControlThread, open_channel
from weft.runtime.messages import PROTOCOL, Committed, Decide, Failed, Join, Ready, ReceivePlan, Refused, Verify
from weft.runtime.sender import held_shard
from weft.runtime.weights import Held, Weights
from weft.transport.base import Column, Memory, Transport

ALIGN = 256
ARRIVE_S = 60.0


class Update:
    """A version that is staged, verified and decided, but not visible yet."""

    def __init__(self, version: int, receiver: Receiver) -> None:
        self.version = version
        self._receiver = receiver

    def commit(self) -> None:
        """Make the version visible: copy it from staging into the live weights."""
        self._receiver._commit(self)


class Receiver:
    """Joins the controller as an engine rank."""

    def __init__(
        self, address: str, *, rank: int, weights: Weights, transport: Transport[Any], **security: Any
    ) -> None:
        self.member = f"engine {rank}"
        self._transport, self._weights = transport, weights
        self._staging, staged = _stage(weights, transport)
        _, descriptor = transport.register(self._staging.address, self._staging.num_bytes)
        self._copy = _copy_columns(staged, weights.held)
        self._span = (
            np.array([held.address for held in staged], dtype=np.uint64),
            np.array([held.address - self._staging.address for held in staged], dtype=np.uint64),
            np.array([held.span_bytes for held in staged], dtype=np.uint64),
        )
        self._verify: tuple[Verify, float] | None = None
        self._decided: int | None = None
        self._version: int | None = None
        self._error: WeftError | None = None
        self._lock = threading.Lock()
        self._control = ControlThread(
            open_channel(address, self.member, **security), handle=self._handle, idle=self._look, failed=self._fail
        )
        self._control.post(
            Join(
                protocol=PROTOCOL,
                side="engine",
                rank=rank,
                held=[held_shard(held) for held in staged],
                endpoint=transport.endpoint,
                descriptors=[descriptor],
            )
        )
        self._control.start()

    @property
    def version(self) -> int | None:
        """The version that is visible, if any was committed."""
        return self._version

    def poll(self) -> Update | None:
        """A version that may be committed now, if there is one; never waits. Raises if the receiver has failed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return None if self._decided is None else Update(self._decided, self)

    def wait(self, timeout_s: float = 60.0) -> Update:
        """The next version; raises TransferTimeout."""
        deadline = time.monotonic() + timeout_s
        while (update := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TransferTimeout(f"{self.member} got no version in {timeout_s:.1f} s")
            time.sleep(0.001)
        return update

    def _commit(self, update: Update) -> None:
        with self._lock:
            if self._decided != update.version:
                raise ProtocolError(f"version {update.version} is not waiting to be committed on {self.member}")
            native.copy(*self._copy)
            self._version, self._decided = update.version, None
        self._control.post(Committed(version=update.version))

    def _handle(self, message: Any) -> None:
        match message:
            case Verify():
                self._verify = (message, time.monotonic() + ARRIVE_S)
            case Decide(version=version, commit=commit):
                self._verify = None
                if commit:
                    with self._lock:
                        self._decided = version
            case Refused(reason=reason, hint=hint):
                self._fail(ProtocolError(f"the controller refused {self.member}: {reason}", hint=hint or None))
            case ReceivePlan():
                pass

    def _look(self) -> None:
        """Verify the open version as soon as all its bytes are here."""
        if self._verify is None:
            return
        wanted, deadline = self._verify
        arrived = self._transport.arrived(wanted.version + 1)
        if arrived < wanted.num_bytes:
            if time.monotonic() > deadline:
                self._verify = None
                reason = f"{arrived} of {wanted.num_bytes} bytes arrived in {ARRIVE_S:.0f} s"
                self._control.post(Failed(version=wanted.version, reason=reason))
            return
        self._verify = None
        found = native.digest(*self._span)
        if found == wanted.digest:
            self._control.post(Ready(version=wanted.version))
        else:
            error = IntegrityError(
                f"version {wanted.version} on {self.member}: digest {found:#x}, sent {wanted.digest:#x}"
            )
            self._control.post(Failed(version=wanted.version, reason=str(error)))

    def _fail(self, error: WeftError) -> None:
        with self._lock:
            self._error = self._error or error

    def close(self) -> None:
        """Leave."""
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _padded(held: Held) -> int:
    return -(-held.span_bytes // ALIGN) * ALIGN


def _stage(weights: Weights, transport: Transport[Any]) -> tuple[Memory, list[Held]]:
    """Staging memory for all weights, and the shards in it, each contiguous."""
    contiguous = [replace(held, strides=_row_major(held.extent), address=0) for held in weights.held]
    total = sum(_padded(held) for held in contiguous)
    memory = transport.allocate(total)
    staged, offset = [], 0
    for held in contiguous:
        staged.append(replace(held, address=memory.address + offset))
        offset += _padded(held)
    return memory, staged


def _row_major(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(stride) for stride in row_major_strides(np.array([extent]))[0])


def _copy_columns(staged: list[Held], live: tuple[Held, ...]) -> tuple[Column, Column, Column]:
    """Rows that copy staging into the live weights, whatever their strides."""
    columns: list[list[np.ndarray]] = [[], [], []]
    for source, target in zip(staged, live, strict=True):
        extent = np.array([target.extent])
        _, src, dst, length = expand_runs(extent, np.array([source.strides]), np.array([target.strides]))
        size = DTYPE_BYTES[target.tensor.dtype]
        for column, values in zip(
            columns, (target.address + dst * size, source.address + src * size, length * size), strict=True
        ):
            column.append(values.astype(np.uint64))
    dst_column, src_column, length_column = (np.concatenate(column) for column in columns)
    return dst_column, src_column, length_column
