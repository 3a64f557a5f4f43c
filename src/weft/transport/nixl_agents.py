"""NIXL's agents of one member: one for each Ethernet card it was told to use, otherwise one.

UCX divides each write over all cards of an agent, and a write that waits for one card gives the others nothing. An
agent for each card has writes of its own, so that every card always has some.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.errors import TransportUnavailable
from weft.transport.base import Batch
from weft.transport.network_cards import network_cards, rdma_cards

RAIL_BYTES = 2 << 10
"""Smallest part of a row for each of several network cards, over TCP. UCX puts shorter rows on the first card only;
with its default these are rows of 4 KB, as engine ranks get them from matrices that are cut by columns. RDMA cards,
which have not been tried, keep UCX's default."""
SHORTEST_SHARE_BYTES = 8 << 10
"""Batches with less for each card stay on one."""
PROGRESS_PAUSE_US = 1000
_RAIL_VARIABLE, _DEVICES_VARIABLE = "UCX_MIN_RMA_CHUNK_SIZE", "UCX_NET_DEVICES"
_ENVIRONMENT = threading.Lock()
"""Held while the environment is changed."""
_MODULES = ("nixl_cu13", "nixl_cu12")


@dataclass(frozen=True)
class CardAgent:
    """An agent of NIXL, and how much of a batch it writes."""

    name: str
    agent: Any
    share: float = 1.0


def make_agents(api: Any, member: str, *, devices: str, is_near: bool, num_threads: int) -> list[CardAgent]:
    """Agents with UCX. `devices`: as UCX takes them; empty: `UCX_NET_DEVICES`, or all."""
    cards = divided_cards(devices or os.environ.get(_DEVICES_VARIABLE, ""))
    parameters = {"num_threads": str(num_threads if is_near else 0), "split_batch_size": "16"}
    if not (cards or is_near or rdma_cards() or _RAIL_VARIABLE in os.environ):
        parameters["engine_config"] = f"{_RAIL_VARIABLE.removeprefix('UCX_')}={RAIL_BYTES}"
    made = []
    for card, share in cards or [(devices, 1.0)]:
        name = f"{member} {uuid.uuid4().hex}"
        with _devices_in_environment(card):
            made.append(CardAgent(name=name, agent=_make_agent(api, name, parameters), share=share))
    return made


@contextmanager
def _devices_in_environment(devices: str) -> Iterator[None]:
    """What UCX may use, inside this context; empty: as it is. Its environment goes before an agent's parameters."""
    with _ENVIRONMENT:
        before = os.environ.get(_DEVICES_VARIABLE)
        if devices:
            os.environ[_DEVICES_VARIABLE] = devices
        try:
            yield
        finally:
            os.environ.pop(_DEVICES_VARIABLE, None)
            if before is not None:
                os.environ[_DEVICES_VARIABLE] = before


def divided_cards(devices: str) -> list[tuple[str, float]]:
    """Cards with an agent each, and the share of each by its rate; none for one device, or RDMA devices."""
    names = [name.strip() for name in devices.split(",") if name.strip()]
    if len(names) < 2 or not set(names) <= {name for _, name in socket.if_nameindex()}:
        return []
    known = {card.name: card.gbps for card in network_cards()}
    rates = [known.get(name, 0.0) for name in names]
    if not all(rates):
        rates = [1.0] * len(names)
    return [(name, rate / sum(rates)) for name, rate in zip(names, rates, strict=True)]


def divide(rows: Batch, agents: Sequence[CardAgent], *, first: int) -> list[tuple[CardAgent, Batch]]:
    """A batch's rows for each agent, by their shares. `first`: which of them writes a small batch."""
    if len(agents) == 1 or rows.num_bytes < len(agents) * SHORTEST_SHARE_BYTES:
        return [(agents[first % len(agents)], rows)]
    ends = np.cumsum(rows.length)
    starts = ends - rows.length
    shares = np.cumsum([0.0, *(agent.share for agent in agents)])
    cuts = np.minimum((shares / shares[-1] * rows.num_bytes / 64).round().astype(np.uint64) * np.uint64(64), ends[-1])
    cuts[-1] = ends[-1]
    return [
        (agent, _between(rows, starts, ends, low, high))
        for agent, low, high in zip(agents, cuts[:-1], cuts[1:], strict=True)
        if high > low
    ]


def _between(rows: Batch, starts: Any, ends: Any, low: Any, high: Any) -> Batch:
    """The parts of rows with these bytes of a batch."""
    some = slice(int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(starts, high, side="left")))
    begin, end = np.maximum(starts[some], low), np.minimum(ends[some], high)
    skipped = begin - starts[some]
    return replace(rows, src=rows.src[some] + skipped, dst=rows.dst[some] + skipped, length=end - begin, position=None)


def load() -> tuple[Any, Any]:
    """The Python binding, whichever CUDA build is installed; CPU memory needs no CUDA."""
    for name in _MODULES:
        try:
            found = importlib.import_module(f"{name}._api"), importlib.import_module(f"{name}._bindings")
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints a greeting on stdout, which is for data
            return found
        except ImportError:
            continue
    raise TransportUnavailable("NIXL is not installed", hint="pip install --no-deps nixl-cu13==1.5.1")


def _make_agent(api: Any, name: str, parameters: dict[str, str]) -> Any:
    """An agent whose progress thread pauses between polls; the wrapper hard-codes a busy loop."""
    base = api.nixlBind.nixlAgentConfig

    class PausingConfig(base):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(base.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            base.pthrDelay.__set__(self, PROGRESS_PAUSE_US)

    settings = api.nixl_agent_config(
        enable_prog_thread=True, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    api.nixlBind.nixlAgentConfig = PausingConfig
    try:
        agent = api.nixl_agent(name, settings)
    finally:
        api.nixlBind.nixlAgentConfig = base
    agent.create_backend("UCX", parameters)
    return agent
