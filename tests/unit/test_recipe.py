from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.layout import Layout, Shard, Tensor
from weft.core.layouts.strided import StridedPiece, boxes_of_view, recipe_from_strided
from weft.core.recipe import Op, Piece, Recipe
from weft.errors import LayoutError


def whole(name: str, shape: tuple[int, ...], dtype: str = "bf16") -> tuple[Tensor, Shard]:
    tensor = Tensor(name=name, dtype=dtype, shape=shape)
    return tensor, Shard(tensor=name, rank=0, lo=(0,) * len(shape), extent=shape)


def copy(dst: str, source: str, shape: tuple[int, ...], **more) -> Piece:
    zero = (0,) * len(shape)
    return Piece(**{"dst": dst, "source": source, "dst_lo": zero, "extent": shape, "src_lo": zero, **more})


def test_name_problems_are_reported_all_at_once():
    pairs = [whole("extra", (2,)), whole("small", (2, 2)), whole("exact", (4,), "fp32")]
    trainer = Layout.from_shards([t for t, _ in pairs], [s for _, s in pairs])
    local = [Tensor(name=n, dtype="bf16", shape=s) for n, s in (("a", (2,)), ("b", (4, 2)), ("c", (4,)))]
    pieces = [copy("a", "gone", (2,)), copy("b", "small", (4, 2)), copy("c", "exact", (4,))]
    recipe = Recipe.from_pieces({0: local}, {0: pieces})
    with pytest.raises(LayoutError) as caught:
        recipe.check_sources(trainer)
    problems = "\n".join(caught.value.problems)
    assert "missing: gone" in problems
    assert "unexpected: extra" in problems
    assert "shape: small is [2, 2], the engine reads up to [4, 2]" in problems
    assert "dtype: exact is fp32, c is bf16" in problems
    assert len(caught.value.problems) == 4


def test_tensors_can_be_left_out_by_name():
    pairs = [whole("w", (2,)), whole("extra", (2,))]
    trainer = Layout.from_shards([t for t, _ in pairs], [s for _, s in pairs])
    recipe = Recipe.from_pieces({0: [Tensor(name="w", dtype="bf16", shape=(2,))]}, {0: [copy("w", "w", (2,))]})
    recipe.check_sources(trainer, ignore=["extra"])


def test_pieces_must_fill_the_engine_tensor():
    tensor = Tensor(name="w", dtype="bf16", shape=(4,))
    with pytest.raises(LayoutError, match="2 elements have no piece"):
        Recipe.from_pieces({0: [tensor]}, {0: [copy("w", "w", (2,))]})
    with pytest.raises(LayoutError, match="pieces overlap"):
        Recipe.from_pieces({0: [tensor]}, {0: [copy("w", "w", (4,)), copy("w", "w", (2,))]})
    with pytest.raises(LayoutError, match="no tensor `v`"):
        Recipe.from_pieces({0: [tensor]}, {0: [copy("v", "w", (4,))]})


@pytest.mark.parametrize("axes", [(0, 0), (0, 5), (-2, 1), (-1, 1)])
def test_impossible_axis_orders_are_refused(axes):
    tensor = Tensor(name="w", dtype="bf16", shape=(2, 2))
    with pytest.raises(LayoutError, match="axis order"):
        Recipe.from_pieces({0: [tensor]}, {0: [copy("w", "w", (2, 2), axes=axes)]})


def test_ranks_that_agree_share_a_row():
    tensor = Tensor(name="w", dtype="bf16", shape=(2,))
    low = copy("w", "s", (2,))
    high = copy("w", "s", (2,), src_lo=(2,))
    recipe = Recipe.from_pieces({r: [tensor] for r in range(4)}, {0: [low], 1: [high], 2: [low], 3: [high]})
    assert [recipe.engine.groups.of(g).tolist() for g in recipe.engine.group_of] == [[0, 2], [1, 3]]


def replay(pieces: list[Piece], source: np.ndarray, dst_shape: tuple[int, ...]) -> np.ndarray:
    out = np.full(dst_shape, -1)
    for piece in pieces:
        axes = piece.axes
        extent = [1] * source.ndim
        for dim, axis in enumerate(axes):
            if axis >= 0:
                extent[axis] = piece.extent[dim]
        box = source[tuple(slice(a, a + n) for a, n in zip(piece.src_lo, extent, strict=True))]
        used = [axis for axis in axes if axis >= 0]
        box = box.transpose([*used, *(a for a in range(source.ndim) if a not in used)]).reshape(piece.extent)
        out[tuple(slice(a, a + n) for a, n in zip(piece.dst_lo, piece.extent, strict=True))] = box
    return out


def strided(source: np.ndarray, view: np.ndarray, out: np.ndarray, target: np.ndarray) -> StridedPiece:
    def offset(part: np.ndarray, base: np.ndarray) -> int:
        return (part.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize

    return StridedPiece(
        dst="d",
        source="s",
        shape=view.shape,
        dst_offset=offset(target, out),
        src_offset=offset(view, source),
        dst_strides=tuple(s // out.itemsize for s in target.strides),
        src_strides=tuple(s // source.itemsize for s in view.strides),
    )


SOURCE = np.arange(8 * 6).reshape(8, 6)


@pytest.mark.parametrize(
    ("take", "shape", "put", "num_boxes"),
    [
        (lambda s: s[2:6], (4, 6), lambda d: d, 1),
        (lambda s: s[:, 1:4], (8, 3), lambda d: d, 1),
        (lambda s: s.T, (6, 8), lambda d: d, 1),
        (lambda s: s.T[1:3], (5, 8), lambda d: d[2:4], 1),
        (lambda s: s.reshape(2, 4, 6), (8, 6), lambda d: d.reshape(2, 4, 6), 1),
        (lambda s: s[4:], (3, 4, 6), lambda d: d[1], 1),
        (lambda s: s[::2], (4, 6), lambda d: d, 4),
        (lambda s: s.reshape(4, 2, 6).transpose(1, 0, 2), (8, 6), lambda d: d.reshape(2, 4, 6), 8),
        (lambda s: s[3], (6,), lambda d: d, 1),
        (lambda s: s[:, 2], (8,), lambda d: d, 1),
        (lambda s: s.reshape(-1), (8, 6), lambda d: d.reshape(-1), 1),
        (lambda s: s.reshape(-1), (4, 12), lambda d: d.reshape(-1), 8),
        (lambda s: s.reshape(-1)[5:40], (35,), lambda d: d, 7),
        (lambda s: s[2:4].reshape(-1), (3, 12), lambda d: d[1], 2),
    ],
)
def test_traced_views_become_few_boxes_with_the_same_bytes(take, shape, put, num_boxes):
    out = np.full(shape, -1)
    view, target = take(SOURCE), put(out)
    pieces = boxes_of_view(strided(SOURCE, view, out, target), shape, SOURCE.shape)
    expected = out.copy()
    put(expected)[...] = view
    assert np.array_equal(replay(pieces, SOURCE, shape), expected)
    assert len(pieces) <= num_boxes


@given(data=st.data())
def test_random_views_replay_exactly(data):
    source = np.arange(4 * 6 * 2).reshape(4, 6, 2)
    view = source.transpose(data.draw(st.permutations(range(3))))
    cuts = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in view.shape]
    view = view[tuple(slice(a, max(b, a + 1), data.draw(st.sampled_from([1, 1, 2]))) for a, b in cuts)]
    out = np.full(tuple(n + 1 for n in view.shape), -1)
    target = out[tuple(slice(1, None) for _ in view.shape)]
    expected = out.copy()
    expected[tuple(slice(1, None) for _ in view.shape)] = view
    pieces = boxes_of_view(strided(source, view, out, target), out.shape, source.shape)
    assert np.array_equal(replay(pieces, source, out.shape), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"src_offset": 40},
        {"src_offset": -1},
        {"dst_strides": (6,)},
        {"src_strides": (-6, 1)},
        {"shape": (0, 6)},
        {"dst": "nowhere"},
        {"source": "nothing"},
    ],
)
def test_views_outside_their_tensor_are_refused(change):
    good = {"dst": "d", "source": "s", "shape": (2, 6), "dst_offset": 0, "dst_strides": (6, 1), "src_offset": 0}
    piece = StridedPiece(**{**good, "src_strides": (6, 1), **change})
    tensors = {0: [Tensor(name="d", dtype="bf16", shape=(2, 6))]}
    with pytest.raises(LayoutError):
        recipe_from_strided(tensors, {0: [piece]}, [Tensor(name="s", dtype="bf16", shape=(8, 6))])


def test_from_strided_builds_a_whole_recipe():
    out = np.zeros((8, 6), dtype=np.int64)
    halves = [strided(SOURCE, SOURCE[4:], out, out[:4]), strided(SOURCE, SOURCE[:4], out, out[4:])]
    recipe = recipe_from_strided(
        {0: [Tensor(name="d", dtype="bf16", shape=(8, 6))]},
        {0: halves},
        [Tensor(name="s", dtype="bf16", shape=(8, 6))],
    )
    assert recipe.src_lo[:, 0].tolist() == [4, 0]
    assert (recipe.op == Op.COPY).all()
