"""What is done to columns is what would be done to tensors one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.codec import cast, conversion, fp8
from weft.codec.conversion import DTYPES, ChunkFill, Conversion, Conversions, CpuConverter
from weft.codec.fp8 import Grid
from weft.codec.grids import SCALINGS, BlockSpread, GridBoxes, HeldGrids
from weft.core.geometry.planes import joined
from weft.core.geometry.scaling import Scaling, block_sides, block_sides_of
from weft.core.layout import GroupBuilder, Shard, Tensor, group_ranks, shard_problem
from weft.core.layouts.box_recipe import TakenBoxes, recipe_of_boxes
from weft.core.recipe import Op, Piece, Recipe
from weft.errors import CodecError, LayoutError
from weft.runtime.compile.grids import needed_boxes
from weft.runtime.control.held import HeldShard, HeldTable
from weft.runtime.controller.admission import _check_shards


@given(rows=st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=12))
def test_sets_of_ranks_are_numbered_as_they_appear(rows):
    builder = GroupBuilder()
    expected = [builder.add(ranks) for ranks in rows]
    pairs = [(row, rank) for row, ranks in enumerate(rows) for rank in (*ranks, min(ranks))]
    row, rank = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True)) if pairs else ([], [])
    groups, group_of = group_ranks(np.asarray(row, dtype=np.int64), np.asarray(rank, dtype=np.int64))
    assert group_of.tolist() == expected
    assert groups.members.tolist() == builder.build().members.tolist()
    assert groups.starts.tolist() == builder.build().starts.tolist()


@given(
    shapes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(list(Scaling)), min_size=5, max_size=5),
)
def test_sides_of_blocks(shapes, kinds):
    padded = np.array([[*shape, 1, 1][:3] for shape in shapes])
    dims = np.array([len(shape) for shape in shapes])
    found = block_sides_of(padded, dims, np.array([SCALINGS.index(kind) for kind in kinds[: len(shapes)]]))
    for shape, kind, sides in zip(shapes, kinds, found.tolist(), strict=False):
        assert tuple(sides[: len(shape)]) == block_sides(tuple(shape), kind)


TENSORS = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from("xyz"),
    st.sampled_from(["bf16", "fp32"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 2),
)


@given(ranks=st.lists(st.lists(TENSORS, max_size=4, unique_by=lambda t: t[0]), min_size=1, max_size=3))
def test_a_recipe_of_boxes_is_that_of_their_pieces(ranks):
    rows = [(rank, *tensor) for rank, tensors in enumerate(ranks) for tensor in tensors]
    extent = np.array([[*shape, 1, 1][:3] for *_, shape, _ in rows], dtype=np.int64).reshape(-1, 3)
    dims = np.array([len(shape) for *_, shape, _ in rows], dtype=np.int64)
    taken = TakenBoxes(
        names="abcd",
        sources="xyz",
        dtypes=("bf16", "fp32"),
        rank=np.array([row[0] for row in rows], dtype=np.int64),
        name=np.array(["abcd".index(row[1]) for row in rows], dtype=np.int64),
        source=np.array(["xyz".index(row[2]) for row in rows], dtype=np.int64),
        dtype=np.array([["bf16", "fp32"].index(row[3]) for row in rows], dtype=np.int64),
        num_dims=dims,
        extent=extent,
        src_lo=np.array([[row[5], 0, 0] for row in rows], dtype=np.int64).reshape(-1, 3),
        src_dims=dims,
        op=np.array([Op.COPY if row[3] == "bf16" else Op.CAST for row in rows], dtype=np.int64),
    )
    if not rows:
        with pytest.raises(LayoutError, match="no engine rank has a tensor"):
            recipe_of_boxes(taken, num_ranks=len(ranks))
        return
    numbers = {rank: [i for i, row in enumerate(rows) if row[0] == rank] for rank in range(len(ranks))}
    expected = Recipe.from_pieces(
        {rank: [tensor_taken(taken, i) for i in mine] for rank, mine in numbers.items()},
        {rank: [piece_taken(taken, i) for i in mine] for rank, mine in numbers.items()},
    )
    found = recipe_of_boxes(taken, num_ranks=len(ranks))
    assert (found.sources, found.engine.tensors) == (expected.sources, expected.engine.tensors)
    for name in ("dst", "src", "op", "dst_lo", "extent", "src_lo", "axes", "src_dims"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype, name
        assert np.array_equal(mine, theirs), name
    for name in ("tensor_of", "group_of", "lo", "extent", "strides"):
        mine, theirs = getattr(found.engine, name), getattr(expected.engine, name)
        assert mine.dtype == theirs.dtype, name
        assert np.array_equal(mine, theirs), name
    assert found.engine.groups.members.tolist() == expected.engine.groups.members.tolist()


def tensor_taken(taken: TakenBoxes, row: int) -> Tensor:
    shape = tuple(taken.extent[row, : taken.num_dims[row]].tolist())
    return Tensor(name=taken.names[taken.name[row]], dtype=taken.dtypes[taken.dtype[row]], shape=shape)


def piece_taken(taken: TakenBoxes, row: int) -> Piece:
    dims = int(taken.num_dims[row])
    return Piece(
        dst=taken.names[taken.name[row]],
        source=taken.sources[taken.source[row]],
        dst_lo=(0,) * dims,
        extent=tuple(taken.extent[row, :dims].tolist()),
        src_lo=tuple(taken.src_lo[row, : taken.src_dims[row]].tolist()),
        axes=tuple(range(dims)),
        op=Op(int(taken.op[row])),
    )


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 8, 2**29 + 1, 2**31, 2**62])


@settings(max_examples=300)
@given(boxes=st.lists(st.lists(st.tuples(*[NUMBERS] * 4), min_size=1, max_size=3), min_size=1, max_size=4))
def test_columns_show_every_shard_that_is_wrong(boxes):
    shards = [
        HeldShard(
            name=f"t{number}",
            dtype="bf16",
            shape=tuple(dim[0] for dim in dims),
            lo=tuple(dim[1] for dim in dims),
            extent=tuple(dim[2] for dim in dims),
            strides=tuple(dim[3] for dim in dims),
        )
        for number, dims in enumerate(boxes)
    ]
    wrong = {shard.name for shard in shards if _is_wrong(shard)}
    try:
        _check_shards(HeldTable.of(shards))
    except LayoutError as error:
        assert {problem.partition(":")[0] for problem in error.problems} == wrong
    else:
        assert not wrong


def _is_wrong(held: HeldShard) -> bool:
    if not all(0 < size < 2**31 for size in held.shape) or np.prod([n + 1 for n in held.shape], dtype=object) > 1 << 60:
        return True
    shard = Shard(tensor="w", rank=0, lo=held.lo, extent=held.extent, strides=held.strides)
    return bool(shard_problem(shard, {"w": held.shape}))


@st.composite
def matrices(draw):
    """Matrices of two groups, cut into boxes, some of which one trainer holds."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
        rows, columns = (sorted({0, n, draw(st.integers(0, n))}) for n in size)
        tiles = [
            ((top, left), (bottom - top, right - left))
            for (top, bottom), (left, right) in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
        ]
        held = draw(st.lists(st.sampled_from(tiles), min_size=1, unique=True))
        found.append((size, draw(st.sampled_from(list(Scaling))), number // 3, held, draw(st.sampled_from([2, 4]))))
    return found


class Quantised:
    """Matrices in memory, and what one trainer knows of them."""

    def __init__(self, matrices, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.boxes, self.memory = [], []
        for number, (_, _, _, tiles, width) in enumerate(matrices):
            for first, extent in sorted(tiles):
                values = rng.standard_normal(extent).astype(np.float32)
                if width == 2:
                    values = (values.view(np.uint32) >> 16).astype(np.uint16)
                self.memory.append(np.ascontiguousarray(values))
                self.boxes.append((number, first, extent, width))
        sizes = [np.prod(grid.shape) for grid in self.grids_of(matrices)]
        self.grids = HeldGrids(
            names=[f"w{number}" for number in range(len(matrices))],
            size=np.array([size for size, *_ in matrices]),
            scaling=np.array([SCALINGS.index(kind) for _, kind, *_ in matrices]),
            group=np.array([group for _, _, group, *_ in matrices]),
            first_key=1000 + np.cumsum([0, *sizes[:-1]]),
            boxes=GridBoxes(
                grid=np.array([box[0] for box in self.boxes]),
                address=np.array([values.ctypes.data for values in self.memory]),
                stride=np.array([values.strides[0] for values in self.memory]),
                width=np.array([box[3] for box in self.boxes]),
                first=np.array([box[1] for box in self.boxes]),
                extent=np.array([box[2] for box in self.boxes]),
            ),
        )

    @staticmethod
    def grids_of(matrices) -> list[Grid]:
        return [Grid(rows=size[0], columns=size[1], scaling=kind) for size, kind, *_ in matrices]


@given(matrices=matrices())
def test_blocks_that_others_hold_parts_of(matrices):
    held = Quantised(matrices, 0)
    spread = BlockSpread(held.grids)
    expected: list[list[int]] = [[] for _ in range(spread.num_groups)]
    for number, (size, _, group, tiles, _) in enumerate(matrices):
        (height, width), across = held.grids[number].grid.block, held.grids[number].grid.shape[1]
        covered = np.zeros(size, dtype=np.int64)
        for tile, ((top, left), (rows, columns)) in enumerate(sorted(tiles), 1):
            covered[top : top + rows, left : left + columns] = tile
        for row, column in np.ndindex(*held.grids[number].grid.shape):
            owners = set(covered[row * height : (row + 1) * height, column * width : (column + 1) * width].flat)
            if len(owners) > 1:
                expected[group].append(spread.start(number) + row * across + column)
    assert [cut.tolist() for cut in spread.cut] == expected
    assert [keys.tolist() for keys in spread.keys] == [[block + 1000 for block in blocks] for blocks in expected]


@pytest.mark.parametrize("compiled", [True, False])
@settings(max_examples=40, deadline=None)
@given(matrices=matrices(), seed=st.integers(0, 2**31))
def test_many_matrices_are_quantised_as_each_of_them_would_be(compiled, matrices, seed):
    with pytest.MonkeyPatch.context() as patched:
        if not compiled:
            patched.setattr(fp8, "_codec", None)
        held = Quantised(matrices, seed)
        converter = CpuConverter(held.grids)
        for group in range(converter.spread.num_groups):
            converter.agree(group, converter.find_amax(group))
        image = np.zeros(sum(values.size for values in held.memory), dtype=np.uint8)
        converter.fill([quantised_chunk(held)], [image.ctypes.data])
        expected = [one_by_one(held, number) for number in range(len(matrices))]
    assert image.tobytes() == b"".join(expected)


def quantised_chunk(held: Quantised) -> ChunkFill:
    rows, places, at = [], [], 0
    for (number, first, extent, width), values in zip(held.boxes, held.memory, strict=True):
        src_dtype = DTYPES.index("bf16" if width == 2 else "fp32")
        memory = (values.ctypes.data, values.strides[0], src_dtype, DTYPES.index("fp8_e4m3"))
        rows.append(Conversion(Op.QUANTIZE, number, *memory, *first, *extent))
        places.append(at)
        at += values.size
    return ChunkFill(planes=no_planes(), boxes=Conversions(table=np.array(rows), at=np.array(places)))


def no_planes():
    none = np.zeros(0, dtype=np.uint64)
    return joined([conversion.Planes(dst=none, src=none, rows=none, length=none, dst_stride=none, src_stride=none)])


def one_by_one(held: Quantised, number: int) -> bytes:
    grid = held.grids[number]
    amax = grid.grid.zeros()
    for box in grid.boxes:
        fp8.add_amax(box, grid.grid, amax)
    codes = [np.zeros((box.rows, box.columns), dtype=np.uint8) for box in grid.boxes]
    for box, into in zip(grid.boxes, codes, strict=True):
        fp8.quantize(box, grid.grid, fp8.scales(amax), into.ctypes.data, box.columns, is_bounded=True)
    return b"".join(into.tobytes() for into in codes)


def test_a_box_outside_its_matrix_is_not_read():
    held = Quantised([((4, 4), Scaling.BLOCK, 0, [((0, 0), (4, 4))], 4)], 0)
    chunk = quantised_chunk(held)
    chunk.boxes.table[0, Conversion._fields.index("first_row")] = 1
    with pytest.raises(CodecError, match=r"`w0`: box of \[4, 4\] at \[1, 0\] lies outside its matrix of \[4, 4\]"):
        CpuConverter(held.grids).fill([chunk], [0])


def test_the_matrix_that_is_not_finite_is_named():
    held = Quantised([((4, 4), Scaling.BLOCK, 0, [((0, 0), (4, 4))], 4) for _ in range(3)], 0)
    held.memory[1][2, 1:3] = np.inf
    with pytest.raises(CodecError, match="`w1` has 2 elements that are not finite"):
        CpuConverter(held.grids).find_amax(0)
    CpuConverter(held.grids, allow_nonfinite=True).find_amax(0)


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp16")])
def test_many_matrices_are_cast_as_each_of_them_would_be(dtypes):
    width = {"fp32": 4, "bf16": 2, "fp16": 2}
    raw = np.random.default_rng(0).integers(0, 256, size=(20, 6 * 4), dtype=np.uint8)
    src_stride, dst_stride = (3 * width[dtype] for dtype in dtypes)
    table = np.array([(row.ctypes.data, src_stride, 64 * i, dst_stride, 2, 3) for i, row in enumerate(raw)])
    together, apart = (np.zeros(20 * 64, dtype=np.uint8) for _ in range(2))
    cast.cast_all(table, together.ctypes.data, *dtypes)
    for src, stride, at, to_stride, rows, columns in table.tolist():
        to = apart.ctypes.data + at
        cast.cast(src, stride, dtypes[0], to, to_stride, dtypes[1], rows=rows, columns=columns)
    assert together.tobytes() == apart.tobytes()


SPANS = st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda span: (span[0], span[0] + span[1]))
RECTS = st.tuples(SPANS, SPANS).map(lambda spans: (spans[0][0], spans[1][0], spans[0][1], spans[1][1]))


@given(
    shards=st.lists(st.tuples(RECTS, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    sides=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    sent=st.lists(st.tuples(st.integers(0, 3), RECTS), max_size=8),
)
def test_blocks_that_are_needed_of_replicated_shards(shards, sides, sent):
    """What is sent of a shard and what lies in a block that is cut at its border, and no rectangle inside another."""
    side = np.array([sides] * len(shards))
    mine = np.array([rect for rect, *_ in shards])
    size = mine[:, 2:] + np.array([more for _, *more in shards])
    sent = [(number, rect) for number, rect in sent if number < len(shards)]
    shard = np.array([number for number, _ in sent], dtype=np.int64)
    rects = np.array([rect for _, rect in sent], dtype=np.int64).reshape(-1, 4)
    row, found = needed_boxes(mine, size, side, shard, rects)
    assert row.tolist() == sorted(row.tolist())
    for number, (top, left, bottom, right) in enumerate(mine.tolist()):
        wanted = {
            (i, j)
            for i, j in itertools.product(range(top, bottom), range(left, right))
            if any(
                _is_cut(at, of, mine[number, dim::2], size[number, dim])
                for dim, (at, of) in enumerate(zip((i, j), sides, strict=True))
            )
            or any(a <= i < c and b <= j < d for which, (a, b, c, d) in sent if which == number)
        }
        boxes = [set(itertools.product(range(a, c), range(b, d))) for a, b, c, d in found[row == number].tolist()]
        assert set().union(*boxes) == wanted
        assert not any(one <= other for one, other in itertools.permutations(boxes, 2))


def _is_cut(at: int, side: int, span: np.ndarray, size: int) -> bool:
    """Whether the block of a row or column reaches beyond the shard; the matrix may end inside a block."""
    first, last = at // side * side, min((at // side + 1) * side, size)
    return bool(first < span[0] or last > span[1])
