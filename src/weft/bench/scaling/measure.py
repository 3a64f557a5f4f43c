"""Versions from 1, 2, 4 … sending hosts to some receiving ones, beside plain sockets and collectives in one lab.

Trainers hold FSDP2 shards of a model, the engine's ranks its tensor-parallel parts; each is a host of its own, and so
is the controller. FP8 engines have one rank each. Times are medians; afterwards every element is compared. The limit
are the NICs: of the senders, or of the receivers where these are fewer. Collectives are bound by the NIC of rank 0, so
they are measured with the fewest and with the most senders only. Other engines than tensor-parallel ones are measured
with the most senders and receivers.

With a slow host, these are measured once more: the last sender carries a tenth, which the controller finds out and
plans around.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from weft.bench import payload
from weft.bench.scaling.rows import SLOW_SHARE, FleetShape, ScalingCase, ScalingReport, ScalingRow
from weft.bench.scaling.run import Run, Say, start_fleet
from weft.core.models.model import Model
from weft.lab import Lab, alike, parse_rate


def measure(case: ScalingCase, *, repeat: int, baselines: bool, say: Say) -> ScalingReport:
    """Run every method with every number of senders and receivers."""
    model, most = payload.load_payload(case.model), max(case.num_receivers)
    num_hosts = max(case.num_senders) + most + 1
    say(f"making a lab of {num_hosts} hosts")
    with Lab(alike(hosts=num_hosts, nic=case.nic, nics=case.num_nics)) as lab:
        rows = list(_Measurement(case, model, lab, repeat, say).all(baselines=baselines))
    num_bytes = payload.total_bytes(model, num_engine_ranks=most, num_parts=most)
    return ScalingReport(model=case.model, num_bytes=num_bytes, nic=case.nic, rows=tuple(rows))


class _Measurement:
    """All fleets of a case, one after the other."""

    def __init__(self, case: ScalingCase, model: Model, lab: Lab, repeat: int, say: Say) -> None:
        self._case, self._model, self._lab, self._repeat, self._say = case, model, lab, repeat, say

    def all(self, *, baselines: bool) -> Iterator[ScalingRow]:
        """Every row."""
        rates = {}
        senders, receivers = self._case.num_senders, self._case.num_receivers
        for num_receivers, num_senders in itertools.product(receivers, senders):
            with self._running(FleetShape(num_senders=num_senders, num_receivers=num_receivers)) as run:
                rate = rates[num_senders, num_receivers] = run.sockets()
                run.dense(rate)
                run.patches(rate)
                if baselines and num_senders in (min(senders), max(senders)):
                    run.collectives(rate)
            yield from run.rows
        most = FleetShape(num_senders=max(senders), num_receivers=max(receivers))
        yield from self._other_engines(most, rates[most.num_senders, most.num_receivers])
        if self._case.slow_host and most.num_senders > 1:
            yield from self._with_slow_host(most, rates[most.num_senders, most.num_receivers])

    def _other_engines(self, most: FleetShape, rate: float) -> Iterator[ScalingRow]:
        """Replicas, the expert-parallel ranks of a MoE, and FP8 engines."""
        for engines, method in (("replicas", "weft, BF16 replicas"), ("ep", "weft, expert-parallel ranks of a MoE")):
            with self._running(replace(most, engines=engines)) as run:
                run.dense(rate, method=method)
            yield from run.rows
        with self._running(replace(most, engines="replicas", precision="fp8")) as run:
            run.dense(rate, method="weft, FP8 engines")
            run.patches(rate)
        yield from run.rows

    def _with_slow_host(self, most: FleetShape, rate: float) -> Iterator[ScalingRow]:
        """Weights that only the slow host has cannot be sent by others; those that all have can."""
        for layout in ("fsdp", "ddp"):
            with (
                self._running(replace(most, layout=layout, slow_share=SLOW_SHARE)) as run,
                self._slowed(most.num_receivers + most.num_senders),
            ):
                run.dense(rate, method=f"weft, {layout.upper()}, one sender at a tenth", rebalance=True)
            yield from run.rows
        with self._running(replace(most, num_senders=most.num_senders - 1, layout="ddp")) as run:
            run.dense(rate, method="weft, DDP, without the slow sender")
        yield from run.rows

    @contextmanager
    def _slowed(self, host: int) -> Iterator[None]:
        """A host carries a tenth, inside this context."""
        self._lab.slow(host, f"{parse_rate(self._case.nic) * SLOW_SHARE / 1e3:.0f}kbit")
        try:
            yield
        finally:
            self._lab.heal(host)

    @contextmanager
    def _running(self, fleet: FleetShape) -> Iterator[Run]:
        self._say(f"starting {fleet.num_senders} senders and {fleet.num_receivers} receivers")
        with start_fleet(self._lab, self._case, fleet) as processes:
            model = payload.load_payload(payload.SMALL_MOE) if fleet.shares_experts else self._model
            yield Run(self._case, fleet, model, self._lab, processes, self._repeat, self._say)
