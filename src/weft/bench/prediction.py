"""The simulator's prediction for a benchmark's method, from the rates measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.config import DigestPolicy, ReceiverMode, Settings
from weft.core.layouts.engine_layout import engine_recipe
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.models.model import Model
from weft.core.planner import make_plan
from weft.core.plans.plan import Plan
from weft.core.topology import CPU, CUDA, Cluster, HostKind, Nic
from weft.errors import LayoutError
from weft.sim.simulator import Options, simulate

COPY_BYTES_PER_S = 2e9
"""One core's copies, where networks are far slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of all processes together; the digest's of one."""

    copy: float = 0.0
    checked: float = 0.0
    """A copy, then one digest of the result."""
    digest: float = 0.0
    kernel: float = 0.0
    nixl: float = 0.0


def predict(
    model: Model,
    num_trainers: int,
    num_engine_ranks: int,
    num_parts: int,
    rates: Rates,
    transport: str,
    mode: str,
    digest: str,
) -> float | None:
    """Seconds from publish to committed; None where the simulator has no rate, or engines do not cut a model so."""
    wire = {"shm": rates.copy, "cuda_ipc": rates.copy, "cma": rates.kernel, "nixl": rates.nixl}.get(transport)
    if not wire:
        return None
    per_process = wire / num_trainers
    if digest == DigestPolicy.ON and rates.digest:
        per_process = 1 / (1 / per_process + 1 / rates.digest)
    cluster, memory = _machine(per_process, rates.copy / num_trainers), CUDA if transport == "cuda_ipc" else CPU
    try:
        plan = make_plan(
            trainer=trainer_layout(model, f"fsdp{num_trainers}"),
            recipe=engine_recipe(model, f"tp{num_parts}", num_replicas=num_engine_ranks // num_parts),
            topology=cluster.place(num_trainers=num_trainers, num_engines=num_engine_ranks),
            settings=Settings(mode=ReceiverMode(mode)),
            trainer_memory=memory,
            engine_memory=memory,
        )
    except LayoutError:  # plain slices of tensors, for which heads need not be divisible, are moved all the same
        return None
    return simulate(plan).predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsCase:
    """Trainers and engine ranks that are hosts of their own."""

    trainer: str
    """Layout: `fsdp8`, `ddp4`."""
    num_trainers: int
    engine: str
    """Layout of one engine: `tp8`."""
    num_replicas: int
    dtype: str
    """Of engines: `bf16`, `fp8-block128`."""
    num_nics: int
    nic_bytes_per_s: float
    host_speed: tuple[float, ...] = ()
    """What each host carries of that rate, trainers first; empty: all of it."""


def plan_hosts(model: Model, case: HostsCase) -> Plan:
    """The plan of such a case."""
    recipe = engine_recipe(model, case.engine, dtype=case.dtype, num_replicas=case.num_replicas)
    cluster = _machine(case.nic_bytes_per_s, COPY_BYTES_PER_S, num_nics=case.num_nics)
    topology = cluster.place(num_trainers=case.num_trainers, num_engines=recipe.engine.num_ranks)
    return make_plan(
        trainer=trainer_layout(model, case.trainer),
        recipe=recipe,
        topology=replace(topology, host_speed=case.host_speed),
        trainer_memory=CPU,
        engine_memory=CPU,
    )


def predict_plan(plan: Plan, *, density: float | None = None) -> float:
    """Seconds of a version, in mode `shadow`. `density`: of changes, where patches are sent."""
    return simulate(plan, options=Options(delta_density=density)).predicted_s


def _machine(bytes_per_s: float, copy_bytes_per_s: float, *, num_nics: int = 1) -> Cluster:
    """Every process is a host of its own, reached at the measured rate."""
    card = Nic(devices=(0,), gbps=bytes_per_s * 8 / 1e9, latency_us=1.0, gap_us=0.1)
    host = HostKind(
        devices=1,
        nics=(card,) * num_nics,
        link_gb_per_s=bytes_per_s / 1e9,
        pinned_gb_per_s=copy_bytes_per_s / 1e9,
        device_gb_per_s=copy_bytes_per_s / 1e9,
    )
    return Cluster(name="this machine", host=host)
