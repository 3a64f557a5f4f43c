"""A trainer rank's side: publish versions of its weights.

with Sender(address, rank=0, weights=weights, transport=transport) as sender:
    publication = sender.publish(version=1)      # returns at once
    publication.wait_released()                  # the weights may change again
    publication.wait_committed()                 # every engine serves version 1
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from weft import native
from weft.errors import ProtocolError, TransferTimeout, VersionError, WeftError
from weft.runtime.member import ControlThread, open_channel
from weft.runtime.messages import (
    PROTOCOL,
    Decide,
    Failed,
    Go,
    HeldShard,
    Join,
    Part,
    Refused,
    SendPlan,
    Target,
    Want,
    Written,
    unpack,
)
from weft.runtime.weights import Held, Weights
from weft.transport.base import Batch, Column, Transport

JOIN_S, WRITE_S = 60.0, 60.0


class Publication:
    """The sender's side of one version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._released = threading.Event()
        self._decided = threading.Event()
        self._error: WeftError | None = None
        self.may_write = threading.Event()

    def wait_released(self, timeout_s: float = 60.0) -> None:
        """Wait until the source memory may change again; raises what went wrong."""
        self._wait(self._released, timeout_s, "written")

    def wait_committed(self, timeout_s: float = 60.0) -> None:
        """Wait until every engine has been told to serve the version; raises VersionError if it was aborted."""
        self._wait(self._decided, timeout_s, "decided")

    def _wait(self, event: threading.Event, timeout_s: float, what: str) -> None:
        if not event.wait(timeout_s):
            raise TransferTimeout(f"version {self.version} was not {what} after {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error

    @property
    def is_decided(self) -> bool:
        """Whether it was committed or aborted."""
        return self._decided.is_set()

    def release(self) -> None:
        """The writes are done."""
        self._released.set()

    def decide(self, error: WeftError | None) -> None:
        """The version is committed, or failed with an error."""
        self._error = self._error or error
        self.may_write.set()
        self._released.set()
        self._decided.set()


class Sender:
    """Joins the controller as a trainer rank and writes what it is given to send."""

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        weights: Weights,
        transport: Transport[Any],
        timeout_s: float = JOIN_S,
        **security: Any,
    ) -> None:
        self.member = f"trainer {rank}"
        self._transport, self._weights = transport, weights
        for held in weights.held:
            transport.register(held.address, held.span_bytes)
        self._planned = threading.Event()
        self._error: WeftError | None = None
        self._targets: list[tuple[Target, Batch, Column, Column]] = []
        self._publication: Publication | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"weft-{self.member}-write")
        self._control = ControlThread(
            open_channel(address, self.member, **security), handle=self._handle, failed=self._fail
        )
        self._control.post(
            Join(
                protocol=PROTOCOL,
                side="trainer",
                rank=rank,
                held=[held_shard(held) for held in weights.held],
                endpoint=transport.endpoint,
                descriptors=[],
            )
        )
        self._control.start()
        self._timeout_s = timeout_s

    def publish(self, *, version: int) -> Publication:
        """Start sending a version; returns at once. The previous one must be decided."""
        if self._publication is not None and not self._publication.is_decided:
            raise VersionError(
                f"version {self._publication.version} is not decided yet",
                hint="wait_committed() before the next publish",
            )
        publication = self._publication = Publication(version)
        if self._error is not None:
            raise self._error
        self._writer.submit(self._send, publication)
        return publication

    def _send(self, publication: Publication) -> None:
        """On the writer thread: ask, write, digest, report."""
        try:
            if not self._planned.wait(self._timeout_s):
                raise ProtocolError(
                    f"{self.member} got no plan in {self._timeout_s:.1f} s", hint="are all members there?"
                )
            self._control.post(Want(version=publication.version))
            if not publication.may_write.wait(self._timeout_s):
                raise TransferTimeout(
                    f"{self.member} may not write version {publication.version} after {self._timeout_s} s"
                )
            if publication.is_decided:
                return
            self._control.post(Written(version=publication.version, parts=self._write(publication.version)))
            publication.release()
        except WeftError as error:
            self._give_up(publication, error)
        except Exception as error:  # a defect of ours: nobody looks at this thread's result, so it is reported here
            self._give_up(publication, ProtocolError(f"{self.member}: {type(error).__name__} while sending: {error}"))

    def _give_up(self, publication: Publication, error: WeftError) -> None:
        """Tell the controller and whoever waits for the publication."""
        self._control.post(Failed(version=publication.version, reason=str(error)))
        publication.decide(error)

    def _write(self, version: int) -> list[Part]:
        deadline = time.monotonic() + WRITE_S
        tickets = [self._transport.post(batch, tag=version + 1) for _, batch, _, _ in self._targets]
        parts = [
            Part(
                engine=target.engine,
                num_bytes=batch.num_bytes,
                digest=native.digest(src, position, unpack(target.length)),
            )
            for target, batch, src, position in self._targets
        ]
        for ticket in tickets:
            ticket.wait(max(deadline - time.monotonic(), 0.0))
        return parts

    def _handle(self, message: Any) -> None:
        publication = self._publication
        match message:
            case SendPlan():
                self._prepare(message)
            case Go(version=version):
                if publication is not None and publication.version == version:
                    publication.may_write.set()
            case Decide(version=version, commit=commit, reason=reason):
                if publication is not None and publication.version == version:
                    aborted = VersionError(f"version {version} was aborted: {reason}")
                    publication.decide(None if commit else aborted)
            case Refused(reason=reason, hint=hint):
                self._fail(ProtocolError(f"the controller refused {self.member}: {reason}", hint=hint or None))

    def _prepare(self, plan: SendPlan) -> None:
        prepared = []
        for target in plan.targets:
            peer = self._transport.connect(target.endpoint, target.descriptors)
            src, position = unpack(target.src), unpack(target.position)
            batch = self._transport.prepare(peer, src, unpack(target.dst), unpack(target.length))
            prepared.append((target, batch, src, position))
        self._targets = prepared
        self._planned.set()

    def _fail(self, error: WeftError) -> None:
        self._error = self._error or error
        self._planned.set()
        if self._publication is not None:
            self._publication.decide(error)

    def close(self) -> None:
        """Leave; outstanding writes are finished first."""
        self._writer.shutdown(wait=True)
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def held_shard(held: Held) -> HeldShard:
    """A shard as the controller gets to know it."""
    return HeldShard(
        name=held.tensor.name,
        dtype=held.tensor.dtype,
        shape=held.tensor.shape,
        lo=held.lo,
        extent=held.extent,
        strides=held.strides,
        address=held.address,
    )
