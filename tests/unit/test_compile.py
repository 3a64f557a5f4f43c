"""Compiling parts of a plan: tables that travel, links, and what engines are asked to open."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import pytest

from tests.process.runtime_members import parts_of
from tests.support.raw_member import join_message
from tests.unit.test_plan import small_plan
from weft.config import EngineSettings, Settings, TransferSettings
from weft.core.geometry.fingerprint import distinct_rows
from weft.core.layout import Layout, Shard, Tensor
from weft.core.plans.memory_cost import memory_cost
from weft.core.plans.plan import Plan
from weft.core.streams.landing_areas import patch_room
from weft.core.streams.pair_links import FEW_RUNS, NUM_SLOTS, SMALLEST_SLOT, PairLinks, Wiring
from weft.core.topology import load_topology
from weft.errors import ProtocolError
from weft.runtime.compile.grids import held_grids
from weft.runtime.compile.holding import LayoutRows, RowNumbers
from weft.runtime.compile.link_boxes import LinkBoxes, PlanBoxes
from weft.runtime.compile.matching import plan_members
from weft.runtime.compile.member_plans import MemberPlans
from weft.runtime.control.columns import expand, squeeze
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.weights import Part, Weights


def large_parts(settings: TransferSettings, transport: str, *, width: int = 2048) -> tuple[Plan, MemberPlans]:
    """Two trainers cut along rows, two engine ranks along columns: 8 MiB to each, or more."""
    joins = [
        {rank: join_message(side, rank, held=held_by(rank, dim, width)) for rank in range(2)}
        for dim, side in enumerate(("trainer", "engine"))
    ]
    plan = plan_members(*joins, cluster=load_topology("h100-ib400"), ranks_per_engine=1, settings=settings.planned)
    return plan, MemberPlans(plan, "digest", tuple(joins), dict.fromkeys(np.ndindex(2, 2), transport), settings)


def held_by(rank: int, dim: int, width: int) -> list[HeldShard]:
    boxes, parts = parts_of(rank, 2, dim, {"w": (width, width)})
    array = np.empty([part.stop - part.start for part in boxes["w"]], dtype=np.float32)
    return Weights.from_arrays({"w": array}, parts=parts).shards


def test_columns_and_tables_survive_the_journey():
    columns = {"a": np.arange(1000) * 7, "b": np.array([[1, -2], [3, 4]]), "c": np.zeros(0, dtype=np.int64)}
    found = expand(squeeze(columns), ["a", "b", "c"])
    assert all(np.array_equal(found[name], column) for name, column in columns.items())


def test_tables_that_repeat_themselves_are_small():
    assert len(squeeze({"a": np.arange(100_000) * 4096})) < 8000, "of 800,000 bytes"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        msgspec.msgpack.encode({"shapes": {"a": [2]}, "data": zlib.compress(bytes(15))}),
        msgspec.msgpack.encode({"shapes": {"a": [2]}, "data": zlib.compress(bytes(24))}),
        msgspec.msgpack.encode({"shapes": {"a": [2]}, "data": b"not compressed"}),
        msgspec.msgpack.encode({"shapes": {"b": [2]}, "data": zlib.compress(bytes(16))}),
        msgspec.msgpack.encode({"shapes": {"a": [-2]}, "data": zlib.compress(b"")}),
        msgspec.msgpack.encode({"shapes": {"a": [1 << 40]}, "data": zlib.compress(b"")}),
        msgspec.msgpack.encode({"shapes": {"a": [1 << 20, 1 << 20]}, "data": zlib.compress(b"")}),
    ],
)
def test_damaged_tables_are_refused(data):
    with pytest.raises(ProtocolError, match="damaged"):
        expand(data, ["a"])


def all_rows(count: int) -> RowNumbers:
    return RowNumbers(np.arange(count), np.arange(count))


def link_boxes() -> LinkBoxes:
    plan = small_plan(dtype="bf16")
    numbers = {"shard": all_rows(len(plan.trainer.lo)), "tensor": all_rows(len(plan.recipe.engine.lo))}
    return PlanBoxes(plan, plan.row_boxes).link(0, 0, grid=np.full(len(plan.trainer.tensors), -1), **numbers)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", 10**6), ("kind", -1), ("dst", 10**6), ("extent", 0), ("what", 99)],
)
def test_boxes_that_do_not_fit_together_are_refused(name, value):
    boxes = link_boxes()
    column = getattr(boxes, name).copy()
    column.reshape(-1)[-1] = value
    names = LinkBoxes.__slots__
    altered = LinkBoxes(**{other: column if other == name else getattr(boxes, other) for other in names})
    assert len(LinkBoxes.decode(boxes.encode())) == len(boxes)
    with pytest.raises(ProtocolError, match="is inconsistent"):
        LinkBoxes.decode(altered.encode())


def test_equal_rows_are_found():
    table = np.array([[1, 2], [3, 4], [1, 2], [3, 5]])
    rows, number = distinct_rows(table)
    assert len(rows) == 3
    assert np.array_equal(rows[number], table)


@pytest.mark.parametrize(
    ("transport", "mode", "delta", "window"),
    [
        ("shm", "in_place", "off", False),
        ("cma", "in_place", "off", True),
        ("nixl", "in_place", "off", True),
        ("nixl", "shadow", "off", False),
        ("nixl", "in_place", "on", True),
        ("nixl", "shadow", "on", False),
        ("shm", "patch", "on", True),
        ("cuda_ipc", "in_place", "off", False),
    ],
)
def test_windows_are_where_chunks_must_not_reach_live_weights_by_themselves(transport, mode, delta, window):
    plan = small_plan(dtype="bf16", mode=mode, delta=delta, window_bytes=1 << 20)
    num_trainers, num_engines = plan.pair_bytes.shape
    transports = dict.fromkeys(np.ndindex(num_trainers, num_engines), transport)
    links = PairLinks.of(plan, Wiring.of(transports, ["cpu"] * num_trainers, ["cpu"] * num_engines))
    assert (links.num_slots == (NUM_SLOTS if window else 0)).all()
    assert links.lands_in_stream == (mode == "shadow")
    assert links.is_mapped.all() == (transport in ("shm", "cuda_ipc"))
    is_mapped = transport in ("shm", "cuda_ipc")
    chunk_bytes = SMALLEST_SLOT if window else (1 << 30 if is_mapped else 256 << 20)
    assert (links.chunk_bytes == chunk_bytes).all()


def links_of_vectors(count: int, num_bytes: int, mode: str = "in_place", **options) -> PairLinks:
    """One trainer and one engine rank with a matrix and so many vectors, over NIXL."""
    arrays = {"w": np.empty((256, 4096), dtype=np.float32)}
    arrays |= {f"v.{number}": np.empty(num_bytes // 4, dtype=np.float32) for number in range(count)}
    held = Weights.from_arrays(arrays).shards
    trainers, engines = ({0: join_message(side, 0, held=held)} for side in ("trainer", "engine"))
    settings = Settings(mode=mode, **options)
    plan = plan_members(trainers, engines, cluster=load_topology("h100-ib400"), ranks_per_engine=1, settings=settings)
    return PairLinks.of(plan, Wiring.of({(0, 0): "nixl"}, ["cpu"], ["cpu"]))


def test_a_few_short_runs_are_not_worth_a_window():
    usual = links_of_vectors(FEW_RUNS, 64, mode="shadow").min_run_bytes[0, 0]
    assert usual > 64
    assert links_of_vectors(FEW_RUNS, 64).min_run_bytes[0, 0] == 0
    assert links_of_vectors(FEW_RUNS + 1, 64).min_run_bytes[0, 0] == usual
    assert links_of_vectors(10 * FEW_RUNS, int(usual)).min_run_bytes[0, 0] == 0, "none of them is short"
    assert links_of_vectors(1, 64, min_write_bytes=1 << 20).min_run_bytes[0, 0] == 1 << 20


@pytest.mark.parametrize("mode", ["patch", "in_place", "shadow"])
@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_patches_reserve_a_share_and_whole_versions_pass_a_window(mode, transport):
    plan, parts = large_parts(TransferSettings(mode=mode, delta="on", window_bytes=1 << 20), transport)
    for engine in range(plan.topology.num_engines):
        opening, received = parts.opening(engine), int(plan.rx_bytes[engine])
        assert not opening.is_live, "trainers never reach the live weights"
        assert received * 0.05 <= opening.patch_bytes <= received * 0.05 + 4096
        if mode == "shadow":
            assert opening.landing_bytes >= received
        else:
            assert 0 < opening.landing_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("mode", "delta"),
    [("shadow", "off"), ("in_place", "off"), ("shadow", "on"), ("in_place", "on"), ("patch", "on")],
)
@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_what_a_mode_reserves_is_enough_for_large_weights(mode, delta, transport):
    plan, parts = large_parts(TransferSettings(mode=mode, delta=delta), transport, width=16384)
    for engine in range(plan.topology.num_engines):
        opening, received = parts.opening(engine), int(plan.rx_bytes[engine])
        needed = opening.landing_bytes + opening.patch_bytes
        assert needed <= EngineSettings(reserve=mode).reserved_bytes(received, "cpu")


def test_room_for_patches_is_never_too_small_for_their_headers():
    assert patch_room(np.array([0, 1, 64 << 20]), 0.001).tolist() == [0, 64 << 10, 67328]


def test_planned_memory_is_what_is_opened():
    plan, parts = large_parts(TransferSettings(mode="patch", delta="on"), "nixl")
    openings = [parts.opening(engine) for engine in range(plan.topology.num_engines)]
    cost = memory_cost(plan)
    assert cost.patch_bytes == max(opening.patch_bytes for opening in openings)
    assert cost.landing_bytes == max(opening.landing_bytes for opening in openings) > 0


def test_rows_of_a_layout_are_found_among_what_a_member_holds():
    halves = [Shard(tensor="w", rank=0, lo=(row, 0), extent=(4, 2)) for row in (0, 4)]
    tied = Shard(tensor="tied", rank=0, lo=(0,), extent=(3,))
    other = Shard(tensor="other", rank=1, lo=(0,), extent=(3,))
    shapes = {"w": (8, 2), "tied": (3,), "other": (3,)}
    tensors = [Tensor(name=name, dtype="bf16", shape=shape) for name, shape in shapes.items()]
    layout = Layout.from_shards(tensors, [*halves, tied, other])
    held = HeldTable.of(
        [
            HeldShard(name="unknown", dtype="bf16", shape=(9,), lo=(0,), extent=(9,), strides=(1,)),
            HeldShard(name="w", dtype="bf16", shape=(8, 2), lo=(4, 0), extent=(4, 2), strides=(2, 1)),
            HeldShard(name="w", dtype="bf16", shape=(8, 2), lo=(0, 0), extent=(4, 2), strides=(2, 1)),
            HeldShard(name="e", aliases=("tied",), dtype="bf16", shape=(3,), lo=(0,), extent=(3,), strides=(1,)),
        ]
    )
    rows = LayoutRows(layout)
    assert rows.numbers(0, held, held.lo)[np.arange(4)].tolist() == [2, 1, 3, -1]
    assert rows.numbers(1, held, held.lo)[np.arange(4)].tolist() == [-1, -1, -1, -1]
    assert rows.numbers(1, HeldTable.of([]), np.zeros((0, 1), dtype=np.int64))[np.arange(4)].tolist() == [-1] * 4


GRIDS, BOXES = np.array([[8, 4, 0, 0, 0]]), np.array([[0, 0, 2, 0, 4, 4]])


@pytest.mark.parametrize(
    ("grids", "boxes"),
    [
        (GRIDS[:, :4], BOXES),
        (GRIDS, BOXES[:, :5]),
        (GRIDS[0], BOXES),
        (np.add(GRIDS, [0, 0, 9, 0, 0]), BOXES),
        (GRIDS, np.add(BOXES, [1, 0, 0, 0, 0, 0])),
        (GRIDS, np.add(BOXES, [0, 2, 0, 0, 0, 0])),
        (GRIDS, np.add(BOXES, [0, 1, 0, 0, 0, 0])),
        (GRIDS, np.add(BOXES, [0, 0, -1, 0, 0, 0])),
        (GRIDS, np.add(BOXES, [0, 0, 0, 0, 1, 0])),
        (GRIDS, np.add(BOXES, [0, 0, 0, 0, -4, 0])),
    ],
)
def test_matrices_that_are_quantised_lie_in_what_is_held(grids, boxes):
    array = np.zeros((4, 4), dtype=np.float32)
    arrays = {"w": array, "v": np.zeros(3, dtype=np.float32)}
    weights = Weights.from_arrays(arrays, parts={"w": Part(shape=(8, 4), lo=(2, 0))})
    (found,) = held_grids(squeeze({"grids": GRIDS, "boxes": BOXES}), weights)
    assert (found.name, found.boxes[0].address, found.boxes[0].first) == ("w", array.ctypes.data, (2, 0))
    with pytest.raises(ProtocolError):
        held_grids(squeeze({"grids": grids, "boxes": boxes}), weights)
