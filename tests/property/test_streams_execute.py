"""Streams are what runs: packing, writing and scattering them on real memory equals loading the whole checkpoint.

Both ends compile every link from the boxes that travel; the trainer writes straight or packs into Chunks, the engine
scatters. Digests of what was sent and of what arrived agree, however it was cut.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executor import NUMPY_DTYPE, random_checkpoint, same_bits, shard_memory
from tests.support.reference_engine import ReferenceEngine
from tests.support.tiny import CONFIGS, tiny_model
from weft import native
from weft.core.geometry.planes import joined
from weft.core.layouts.engine_layout import engine_recipe, parse_engine
from weft.core.layouts.trainer_layout import trainer_layout
from weft.core.planner import make_plan
from weft.core.streams.carriage import Carriage
from weft.core.streams.exchange import ScaleGroups
from weft.core.streams.row_boxes import RowBoxes
from weft.core.streams.stream import Path
from weft.core.topology import load_topology
from weft.runtime.compile.holding import RowNumbers
from weft.runtime.compile.link_boxes import LinkBoxes, PlanBoxes
from weft.runtime.compile.link_stream import LinkStream


class Memories:
    """Real memory of every shard and engine tensor of a plan."""

    def __init__(self, plan, seed: int) -> None:
        self.plan, self.checkpoint = plan, random_checkpoint(plan, seed)
        self.shards = [shard_memory(plan, self.checkpoint, i)[0] for i in range(len(plan.trainer.lo))]
        self.engines = [np.zeros(t.shape, dtype=NUMPY_DTYPE[t.dtype]) for t in plan.recipe.engine.tensors]
        self.source = np.array([shard.ctypes.data for shard in self.shards])
        self.live = np.array([tensor.ctypes.data for tensor in self.engines])
        sizes = np.array([-(-tensor.nbytes // 256) * 256 for tensor in self.engines])
        self.place = np.cumsum(sizes) - sizes


def all_rows(count: int) -> RowNumbers:
    return RowNumbers(np.arange(count), np.arange(count))


def transfer(boxes: LinkBoxes, carriage: Carriage, memories: Memories) -> tuple[int, int]:
    """One link's version: written, scattered. Returns the digests of both ends."""
    trainer, engine = (LinkStream(LinkBoxes.decode(boxes.encode()), carriage) for _ in range(2))
    landing = np.zeros(engine.num_bytes + 64, dtype=np.uint8)
    live, place = memories.live[boxes.tensors], memories.place[boxes.tensors]
    to = int(landing.ctypes.data) if carriage.lands_in_stream else live
    sent = sum(native.copy_digest_planes(planes)[0] for planes in trainer.straight(memories.source, to, place))
    for fill, parcel in zip(trainer.fills(memories.source), trainer.parcels(to, place), strict=True):
        assert not fill.boxes
        chunk = np.zeros(carriage.chunk_bytes, dtype=np.uint8)
        address = int(chunk.ctypes.data)
        native.copy_planes(fill.planes.moved(dst=address))
        sent += native.copy_digest_planes(parcel.moved(src=address))[0]
    landed = engine.landed(to, live, place)
    found = sum(native.digest_planes(planes) for planes in landed)
    if carriage.lands_in_stream:
        native.copy_planes(joined(landed))
    return sent & (2**64 - 1), found & (2**64 - 1)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    trainer=st.sampled_from(["fsdp3", "tp2", "fsdp3.tp2", "hsdp2x2", "pp2.fsdp2"]),
    engine=st.sampled_from(["tp1", "tp2", "tp4"]),
    seed=st.integers(0, 99),
    chunk_bytes=st.sampled_from([4096, 65536, 1 << 20]),
    min_run_bytes=st.sampled_from([0, 1024, 1 << 40]),
    is_mapped=st.booleans(),
    is_kept=st.booleans(),
    lands_in_stream=st.booleans(),
)
def test_streams_equal_a_full_load(name, trainer, engine, seed, **carriage):
    model = tiny_model(name).with_dtype("bf16")
    layout, recipe = trainer_layout(model, trainer), engine_recipe(model, engine)
    topology = load_topology("h100-ib400").place(num_trainers=layout.num_ranks, num_engines=recipe.engine.num_ranks)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    memories = Memories(plan, seed)
    boxes = PlanBoxes(plan, RowBoxes.of(plan, ScaleGroups.of(plan)))
    numbers = {
        "shard": all_rows(len(plan.trainer.lo)),
        "tensor": all_rows(len(plan.recipe.engine.lo)),
        "grid": np.full(len(plan.trainer.tensors), -1),
    }
    for t, e in zip(*(side.tolist() for side in np.nonzero(plan.pair_bytes)), strict=True):
        sent, found = transfer(boxes.link(t, e, **numbers), Carriage(**carriage), memories)
        assert sent == found
    mesh = parse_engine(engine)
    for i, tensor in enumerate(plan.recipe.engine.tensors):
        rank = int(plan.recipe.engine.groups.of(int(plan.recipe.engine.group_of[i]))[0])
        loaded = ReferenceEngine(
            model, memories.checkpoint, tp=mesh.tp, ep=mesh.ep, ranks=mesh.stage_size, rank=rank, dtype="bf16"
        ).load()
        assert same_bits(memories.engines[i], loaded[tensor.name]), tensor.name


def test_whole_tensors_are_single_writes():
    model = tiny_model(sorted(CONFIGS)[0]).with_dtype("bf16")
    layout, recipe = trainer_layout(model, "ddp2"), engine_recipe(model, "tp1")
    topology = load_topology("h100-ib400").place(num_trainers=2, num_engines=1)
    plan = make_plan(trainer=layout, recipe=recipe, topology=topology)
    rows = RowBoxes.of(plan, ScaleGroups.of(plan))
    numbers = {"shard": all_rows(len(layout.lo)), "tensor": all_rows(len(recipe.engine.lo))}
    carriage = Carriage(chunk_bytes=1 << 30, min_run_bytes=0, is_mapped=False, lands_in_stream=True, is_kept=False)
    total = 0
    for trainer in range(2):
        link = PlanBoxes(plan, rows).link(trainer, 0, grid=np.full(len(layout.tensors), -1), **numbers)
        stream = LinkStream(link, carriage)
        assert (stream.chunks.path == Path.ZERO_COPY).all()
        total += sum(int(table.rows.sum()) for table in stream.straight(np.zeros(len(layout.lo), int), 0, None))
    assert total == plan.num_rows
