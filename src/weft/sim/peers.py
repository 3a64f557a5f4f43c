"""Models of other systems, for validation and comparison: what they do, with the same plan and the same network.

- `gather_and_write`: Perplexity / Chen. Mesh groups one after the other (everything but experts, then experts); every
  rank of a mesh assembles full tensors with a collective, converts, and writes what it was assigned.
- `wire_limit_s`: line-rate limits, with pipeline stages together or one after the other (vLLM sharded_rdt).
- `replica_and_write`: LMSYS / miles. Gather, load into a CPU engine replica tensor by tensor, write; once per distinct
  engine rank a source serves.
- `broadcast`: NCCL broadcast of the whole model, tensor by tensor, into every engine rank's loader.

Fitted constants come from `weft.sim.costs`; the ones marked *assumed* are round figures, not fitted to the results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.core.assign import round_robin_sources
from weft.core.case import plan_case
from weft.core.layout import DTYPE_BYTES
from weft.core.layouts.engine_layout import engine_recipe, parse_engine
from weft.core.layouts.trainer_layout import Mesh, parse_trainer
from weft.core.models.catalog import load_model
from weft.core.models.model import Model
from weft.core.plans.plan import Plan
from weft.core.topology import Topology, load_topology
from weft.sim.costs import GatherCosts, StageCosts
from weft.sim.presets import PRESETS, Preset
from weft.sim.simulator import Options, Prediction, Prepare, simulate

DENSE, EXPERTS = 0, 1


def gather_and_write(preset: Preset, model: Model, *, call_s: float) -> Prediction:
    """Full tensors first, FP8 and RDMA writes after; `call_s` is the fixed cost of one `full_tensor()`."""
    plan = plan_case(preset.case(policy="greedy", gather="mesh"), model=model)
    mesh = parse_trainer(preset.trainer)
    gathers = _gathers(model, mesh)
    expert_names = {tensor.name for tensor in model.policy_tensors if tensor.expert >= 0}
    is_expert = np.array([name.removesuffix("::scale") in expert_names for name in _names(plan)])
    phase = is_expert[plan.trainer.tensor_of[plan.shard]].astype(np.int64)
    prepare = [_prepare(gather, plan.topology, call_s, offloaded=preset.offloaded) for gather in gathers]
    no_commit = StageCosts(num_control_rounds=1)
    prediction = simulate(
        plan,
        options=Options(offloaded=preset.offloaded),
        costs=no_commit,
        phase_of_row=phase,
        prepare=prepare,
    )
    return replace(prediction, predicted_s=prediction.transfer_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherComparison:
    """What gathering full tensors before quantising would cost."""

    predicted_s: float
    gathered_bytes: int
    """What trainers would send each other."""
    amax_bytes: int
    """What they send each other instead."""


def beside_gather(preset: Preset, model: Model, plan: Plan) -> GatherComparison:
    """The same run by a system that gathers; the fixed cost of a call is the one fitted to Kimi-K2's breakdown."""
    fitted = PRESETS["chen-kimi-k2-pairs"]
    call_s = fit_call_s(fitted, model if model.name == fitted.model else load_model(fitted.model), GatherCosts())
    gathered = sum(
        float(gather.num_bytes.sum()) * (1 - 1 / gather.mesh.shape[1])
        for gather in _gathers(model, parse_trainer(preset.trainer))
    )
    return GatherComparison(
        predicted_s=gather_and_write(preset, model, call_s=call_s).predicted_s,
        gathered_bytes=int(gathered),
        amax_bytes=plan.amax_bytes,
    )


def fit_call_s(preset: Preset, model: Model, costs: GatherCosts) -> float:
    """Fixed cost of one `full_tensor()`: what is left of the published stage after its bytes."""
    trainer = parse_trainer(preset.trainer)
    topology = load_topology(preset.topology).place(num_trainers=trainer.num_ranks, num_engines=1)
    moved = sum(float(_byte_seconds(gather, topology)[0].max()) for gather in _gathers(model, trainer))
    return max(costs.full_tensor_s - moved, 0.0) / costs.num_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeshGather:
    """One mesh group: every rank assembles `num_bytes` in `num_calls` collectives over its mesh."""

    num_calls: NDArray[np.float64]
    num_bytes: NDArray[np.float64]
    mesh: NDArray[np.int64]
    """Rows are the meshes (ranks that gather together), inside one pipeline stage."""


def _gathers(model: Model, mesh: Mesh) -> list[_MeshGather]:
    """Dense tensors one call each; the experts of a layer, stacked, one call per kind of weight."""
    _, shards, experts, parts = mesh.expert.shape
    dense_mesh = np.moveaxis(mesh.dense, 1, -1).reshape(-1, mesh.dense.shape[1])
    expert_mesh = np.moveaxis(mesh.expert, 1, -1).reshape(-1, shards)
    calls = np.zeros((2, mesh.num_stages))
    size = np.zeros((2, mesh.num_stages))
    stacked = set()
    for tensor in model.policy_tensors:
        kind = EXPERTS if tensor.expert >= 0 else DENSE
        num_bytes = tensor.num_elements * DTYPE_BYTES[tensor.dtype]
        key = (tensor.layer, tensor.name.rpartition(".experts.")[2].partition(".")[2]) if kind else tensor.name
        for stage in model.stages_of(tensor, mesh.num_stages):
            size[kind, stage] += num_bytes / (experts * parts if kind else mesh.dense.shape[2])
            calls[kind, stage] += key not in stacked
        stacked.add(key)
    repeat = mesh.stage_size
    return [
        _MeshGather(num_calls=np.repeat(calls[k], repeat), num_bytes=np.repeat(size[k], repeat), mesh=ranks)
        for k, ranks in ((DENSE, dense_mesh), (EXPERTS, expert_mesh))
    ]


def _byte_seconds(gather: _MeshGather, topology: Topology) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds every rank's gather needs for its bytes, and how long its NIC is busy with them.

    Hosts of a mesh exchange what the others hold once, over the NICs of the mesh's ranks; inside a host it spreads
    over the links.
    """
    per_host = topology.host.devices
    hosts_of = gather.mesh // per_host
    num_hosts = np.array([len(np.unique(row)) for row in hosts_of])
    size = gather.mesh.shape[1]
    ranks_per_host = size / num_hosts
    nic_share = (num_hosts - 1) / num_hosts / ranks_per_host
    link_share = np.where(ranks_per_host > 1, (size - 1) / size, 0.0)
    stage_size = gather.mesh.size
    nic, link = np.zeros(stage_size), np.zeros(stage_size)
    nic[gather.mesh], link[gather.mesh] = nic_share[:, None], link_share[:, None]
    num_stages = len(gather.num_bytes) // stage_size
    rate = topology.port_rate(topology.port_of(topology.trainer_device)) * topology.nic.efficiency
    nic_s = np.tile(nic, num_stages) * gather.num_bytes / rate
    link_s = np.tile(link, num_stages) * gather.num_bytes / topology.link_bytes_per_s
    return np.maximum(nic_s, link_s), nic_s


def _prepare(gather: _MeshGather, topology: Topology, call_s: float, *, offloaded: bool) -> Prepare:
    """A rank copies its own shard to the device, then takes part in every gather of its meshes."""
    gather_s, nic_s = _byte_seconds(gather, topology)
    own_bytes = gather.num_bytes / gather.mesh.shape[1]
    return Prepare(
        h2d_s=own_bytes / (topology.host.pinned_gb_per_s * 1e9) * offloaded,
        gather_s=gather_s + gather.num_calls * call_s,
        gather_nic_s=nic_s,
    )


def _names(plan: Plan) -> list[str]:
    return [tensor.name for tensor in plan.trainer.tensors]


def wire_limit_s(plan: Plan, *, serial_stages: int = 1) -> float:
    """Line-rate limit of a plan; with pipeline stages one after the other, the sum of their own limits."""
    topology = plan.topology
    rate = topology.nic.line_bytes_per_s
    per_stage = plan.pair_bytes.reshape(serial_stages, -1, topology.num_engines)
    return float(sum(max(stage.sum(axis=1).max(), stage.sum(axis=0).max()) / rate for stage in per_stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCosts:
    """What moving weights through an engine's Python loader costs."""

    tensor_s: float = 100e-6
    """One checkpoint tensor through `load_weights` (assumed)."""
    host_copy_gb_per_s: float = 10.0
    """One thread copying into host memory (measured: 9–12 GB/s)."""
    fixed_s: float = 0.2
    """Pausing, flushing, RPCs, barriers (assumed)."""
    post_load_s: float = 0.0
    """Post-processing on the engine after the last write, where it is published."""


def replica_and_write(preset: Preset, model: Model, costs: LoaderCosts) -> float:
    """miles P2P: gather + for each engine rank served: load into the CPU replica, write to its engines."""
    mesh, engine = parse_trainer(preset.trainer), parse_engine(preset.engine)
    topology = load_topology(preset.topology).place(num_trainers=mesh.num_ranks, num_engines=1)
    served = round_robin_sources(mesh.stage_size, preset.num_replicas, engine.num_ranks)
    groups = max(len({rank for _, rank in targets}) for targets in served.values())
    sessions = max(len(targets) for targets in served.values())
    recipe = engine_recipe(model, preset.engine, num_replicas=1, dtype=preset.dtype)
    shard_bytes = float(recipe.engine.rank_bytes().max()) / mesh.num_stages
    num_tensors = _num_sent_tensors(model, preset.dtype) / mesh.num_stages
    nic_rate = topology.nic.line_bytes_per_s * topology.nic.efficiency
    load_s = shard_bytes / (costs.host_copy_gb_per_s * 1e9) + num_tensors * costs.tensor_s
    write_s = sessions * shard_bytes / nic_rate
    return costs.fixed_s + _stage_gather_s(model, mesh, topology) + groups * load_s + write_s + costs.post_load_s


def broadcast(preset: Preset, model: Model, costs: LoaderCosts) -> float:
    """NCCL: stages one after the other broadcast everything to every engine rank, which loads it."""
    mesh = parse_trainer(preset.trainer)
    topology = load_topology(preset.topology).place(num_trainers=mesh.num_ranks, num_engines=1)
    wire = _wire_bytes(model, preset.dtype)
    nic_rate = topology.nic.line_bytes_per_s * topology.nic.efficiency
    load_s = _num_sent_tensors(model, preset.dtype) * costs.tensor_s
    return costs.fixed_s + wire / nic_rate + load_s


def _stage_gather_s(model: Model, mesh: Mesh, topology: Topology) -> float:
    """All-gather of one stage's weights over its ranks."""
    ranks = np.arange(mesh.stage_size)[None, :]
    size = sum(t.num_elements * DTYPE_BYTES[t.dtype] for t in model.policy_tensors) / mesh.num_stages
    everything = _MeshGather(
        num_calls=np.zeros(mesh.num_ranks), num_bytes=np.full(mesh.num_ranks, float(size)), mesh=ranks
    )
    return float(_byte_seconds(everything, topology)[0].max())


def _wire_bytes(model: Model, dtype: str) -> float:
    recipe = engine_recipe(model, "tp1", dtype=dtype)
    return float(recipe.engine.rank_bytes().max())


def _num_sent_tensors(model: Model, dtype: str) -> int:
    """Checkpoint tensors a loader sees; each FP8 tensor comes with a scale."""
    scales = sum(tensor.quantized for tensor in model.policy_tensors) if dtype == "fp8-block128" else 0
    return len(model.policy_tensors) + scales
