"""Starting writes of a version, and waiting for them; writes over one transport go together."""

from __future__ import annotations

import time
from typing import Any

from weft.errors import TransferTimeout, TransportError
from weft.runtime.send.job import Job, Link, Parcel, Sent
from weft.runtime.send.program import SendProgram
from weft.transport.base import Batch, Ticket, Transport, WriteResult
from weft.transport.mapped import DirectBatch, MappedTransport

Posted = list[tuple[int, Ticket]]
"""Engine ranks and what is being written to them."""
LOOK_S = 0.5
"""How often to look whether an engine rank is still waited for."""


def takes(job: Job, sent: dict[int, Sent], engine: int) -> bool:
    """Whether a version is still written to an engine rank."""
    return engine in sent and not sent[engine].loss and engine not in job.left_out


def post_all(program: SendProgram, job: Job, parcels: list[tuple[Link, Parcel]], sent: dict[int, Sent]) -> Posted:
    """Start writes, those over one transport together."""
    job.flow.check()
    posted: Posted = []
    parcels = [(link, parcel) for link, parcel in parcels if takes(job, sent, link.engine)]
    for name in sorted({link.transport for link, _ in parcels}):
        mine = [(link.engine, parcel) for link, parcel in parcels if link.transport == name]
        tickets = _post(program.transports[name], [parcel for _, parcel in mine], job.tag)
        job.posted(tickets, sum(parcel.num_writes for _, parcel in mine if isinstance(parcel, Batch)))
        posted += [(engine, ticket) for (engine, _), ticket in zip(mine, tickets, strict=True)]
    return posted


def _post(transport: Transport[Any], parcels: list[Parcel], tag: int) -> list[Ticket]:
    """Start writes of one kind together."""
    direct = [parcel for parcel in parcels if isinstance(parcel, DirectBatch)]
    if direct:
        assert isinstance(transport, MappedTransport)
        return transport.post_direct(direct, tag)
    return transport.post_all([parcel for parcel in parcels if isinstance(parcel, Batch)], tag)


def wait_all(job: Job, posted: Posted, sent: dict[int, Sent]) -> int:
    """Wait for writes; returns the bytes that were written."""
    num_bytes = 0
    for engine, ticket in posted:
        try:
            done = _wait(job, engine, ticket)
            num_bytes += done.num_bytes
            sent[engine].count(ticket, done)
        except TransportError as error:
            sent[engine].loss = sent[engine].loss or str(error)
    return num_bytes


def _wait(job: Job, engine: int, ticket: Ticket) -> WriteResult:
    """What was written, at the latest when the engine rank is no longer waited for, which may change meanwhile."""
    while True:
        left_s = job.waits_until(engine) - time.monotonic()
        try:
            return ticket.wait(max(min(left_s, LOOK_S), 0.0))
        except TransferTimeout:
            if ticket.done:  # in this moment, or with an error of this kind
                return ticket.wait(0.0)
            if left_s <= LOOK_S:
                raise
