"""Versions from 1, 2, 4 … sending hosts to as many receiving ones, beside plain sockets and collectives in one lab.

Trainers hold FSDP2 shards of a model, the engine's ranks its tensor-parallel parts; each is a host of its own, and so
is the controller. FP8 engines have one rank each. Times are medians; afterwards every element is compared. The limit
are the NICs: of the senders, or of the receivers where these are fewer. Collectives are bound by the NIC of rank 0, so
they are measured with the fewest and with the most senders only.

With a slow host, the largest number of senders is measured once more: the last of them carries a tenth, which the
controller finds out and plans around.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.bench import payload
from weft.bench.scaling.rows import SLOW_SHARE, FleetShape, ScalingCase, ScalingReport, ScalingRow
from weft.bench.scaling.run import Run, Say, start_fleet
from weft.core.models.model import Model
from weft.lab import Lab, alike, parse_rate


def measure(case: ScalingCase, *, repeat: int, baselines: bool, say: Say) -> ScalingReport:
    """Run every method with every number of senders."""
    model = payload.load_payload(case.model)
    num_hosts = max(case.num_senders) + case.num_receivers + 1
    say(f"making a lab of {num_hosts} hosts")
    with Lab(alike(hosts=num_hosts, nic=case.nic, nics=case.num_nics)) as lab:
        rows = list(_Measurement(case, model, lab, repeat, say).all(baselines=baselines))
    num_bytes = payload.total_bytes(model, num_engine_ranks=case.num_receivers, num_parts=case.num_receivers)
    return ScalingReport(model=case.model, num_bytes=num_bytes, nic=case.nic, rows=tuple(rows))


class _Measurement:
    """All fleets of a case, one after the other."""

    def __init__(self, case: ScalingCase, model: Model, lab: Lab, repeat: int, say: Say) -> None:
        self._case, self._model, self._lab, self._repeat, self._say = case, model, lab, repeat, say

    def all(self, *, baselines: bool) -> Iterator[ScalingRow]:
        """Every row."""
        rates = {}
        for num_senders in self._case.num_senders:
            with self._running(FleetShape(num_senders=num_senders, num_receivers=self._case.num_receivers)) as run:
                rate = rates[num_senders] = run.sockets()
                run.dense(rate)
                run.patches(rate)
                if baselines and num_senders in (min(self._case.num_senders), max(self._case.num_senders)):
                    run.collectives()
            yield from run.rows
        most = max(self._case.num_senders)
        for engines, method in (("replicas", "weft, BF16 replicas"), ("ep", "weft, expert-parallel ranks of a MoE")):
            fleet = FleetShape(num_senders=most, num_receivers=self._case.num_receivers, engines=engines)
            with self._running(fleet) as run:
                run.dense(rates[most], method=method)
            yield from run.rows
        fleet = FleetShape(
            num_senders=most, num_receivers=self._case.num_receivers, engines="replicas", precision="fp8"
        )
        with self._running(fleet) as run:
            run.dense(rates[most], method="weft, FP8 engines")
            run.patches(rates[most])
        yield from run.rows
        if self._case.slow_host and most > 1:
            yield from self._with_slow_host(most, rates[most])

    def _with_slow_host(self, num_senders: int, rate: float) -> Iterator[ScalingRow]:
        """Weights that only the slow host has cannot be sent by others; those that all have can."""
        for layout in ("fsdp", "ddp"):
            fleet = FleetShape(
                num_senders=num_senders,
                num_receivers=self._case.num_receivers,
                layout=layout,
                slow_share=SLOW_SHARE,
            )
            with self._running(fleet) as run, self._slowed(num_senders):
                run.dense(rate, method=f"weft, {layout.upper()}, one sender at a tenth", rebalance=True)
            yield from run.rows
        others = FleetShape(num_senders=num_senders - 1, num_receivers=self._case.num_receivers, layout="ddp")
        with self._running(others) as run:
            run.dense(rate, method="weft, DDP, without the slow sender")
        yield from run.rows

    @contextmanager
    def _slowed(self, num_senders: int) -> Iterator[None]:
        """The last sender's host carries a tenth, inside this context."""
        host = self._case.num_receivers + num_senders
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
