"""Mistakes in what `weft.Layout`, `weft.Recipe` and `weft.make_plan` are given: one clear error each, with names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import weft
from weft.core.geometry.scaling import Scaling
from weft.core.recipe import Op
from weft.errors import ConfigError, LayoutError

W = weft.Tensor(name="w", dtype="bf16", shape=(8, 4))
WHOLE = weft.Shard(tensor="w", rank=0, lo=(0, 0), extent=(8, 4))
D = weft.Tensor(name="d", dtype="bf16", shape=(8, 4))
PIECE = weft.Piece(dst="d", source="w", dst_lo=(0, 0), extent=(8, 4), src_lo=(0, 0))
LAYOUT = weft.Layout.from_shards([W], [WHOLE])
RECIPE = weft.Recipe.from_pieces({0: [D]}, {0: [PIECE]})
TOPOLOGY = weft.load_topology("h100-ib400").place(num_trainers=1, num_engines=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "expected a Tensor with a name"),
        ({"name": 3}, "expected a Tensor with a name"),
        ({"dtype": "int7"}, "w: unknown dtype `int7`"),
        ({"dtype": ["bf16"]}, "w: unknown dtype"),
        ({"shape": [8, 4]}, r"w: shape \[8, 4\], expected a tuple of whole numbers"),
        ({"shape": (8, 4.0)}, "w: shape .*expected a tuple of whole numbers"),
        ({"shape": (np.int64(8), 4)}, "w: shape .*expected a tuple of whole numbers"),
        ({"shape": (8, 0)}, r"w: impossible shape \[8, 0\]"),
        ({"shape": None}, "w: shape None"),
    ],
)
def test_tensors(change: dict[str, Any], message: str):
    with pytest.raises(LayoutError, match=message):
        weft.Layout.from_shards([replace(W, **change)], [WHOLE])
    with pytest.raises(LayoutError, match=message):
        weft.Recipe.from_pieces({0: [replace(W, **change)]}, {0: [replace(PIECE, dst="w")]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": "v"}, "v on rank 0: no such tensor"),
        ({"tensor": ["w"]}, "on rank 0: no such tensor"),
        ({"rank": -1}, "w on rank -1: rank outside 0…65535"),
        ({"rank": "0"}, "w on rank 0: rank outside"),
        ({"rank": 10**9}, "rank outside"),
        ({"lo": [0, 0]}, r"w on rank 0: lo is \[0, 0\] and extent .*expected tuples of whole numbers"),
        ({"extent": [8, 4]}, "w on rank 0: lo is .*expected tuples of whole numbers"),
        ({"lo": (0,)}, "w on rank 0: lo has 1 and extent 2 dimensions, the tensor 2"),
        ({"extent": (8, 4, 1)}, "w on rank 0: lo has 2 and extent 3 dimensions, the tensor 2"),
        ({"lo": (1, 0)}, r"w on rank 0: box \[1, 0\] \+ \[8, 4\] is outside \[8, 4\]"),
        ({"strides": (4,)}, r"w on rank 0: strides \(4,\), expected 2 numbers from 1"),
        ({"strides": (0, 1)}, "w on rank 0: strides"),
        ({"strides": [4, 1]}, "w on rank 0: strides"),
        ({"strides": (1, 1)}, "w on rank 0: .*two elements of .* at one address"),
        ({"strides": (3, 1)}, "w on rank 0: .*two elements of .* at one address"),
        ({"strides": (2, 4)}, "w on rank 0: .*two elements of .* at one address"),
    ],
)
def test_shards(change: dict[str, Any], message: str):
    with pytest.raises(LayoutError, match=message):
        weft.Layout.from_shards([W], [replace(WHOLE, **change)])


@pytest.mark.parametrize("strides", [(4, 1), (1, 8), (5, 1), (1, 9), (8, 2), (4, 33), (3, 25)])
def test_memory_without_two_elements_at_one_address(strides: tuple[int, ...]):
    """Rows, columns, gaps, and rows that interleave without meeting."""
    assert weft.Layout.from_shards([W], [replace(WHOLE, strides=strides)]).strides.tolist() == [list(strides)]


def test_interleaved_rows_may_share_a_range_but_no_address():
    narrow = weft.Tensor(name="w", dtype="bf16", shape=(3, 2))
    shard = weft.Shard(tensor="w", rank=0, lo=(0, 0), extent=(3, 2), strides=(2, 3))
    weft.Layout.from_shards([narrow], [shard])
    with pytest.raises(LayoutError, match="at one address"):
        weft.Layout.from_shards([replace(narrow, shape=(4, 2))], [replace(shard, extent=(4, 2), strides=(1, 3))])


def test_replicas_are_alike_where_their_strides_make_no_difference():
    row = weft.Tensor(name="w", dtype="bf16", shape=(1, 4))
    shards = [weft.Shard(tensor="w", rank=rank, lo=(0, 0), extent=(1, 4)) for rank in range(3)]
    shards[1], shards[2] = replace(shards[1], strides=(4, 1)), replace(shards[2], strides=(99, 1))
    assert weft.Layout.from_shards([row], shards).groups.of(0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_ranks": 0}, "0 trainer ranks, expected 3 to"),
        ({"num_ranks": 1}, "1 trainer ranks, expected 3 to"),
        ({"num_ranks": "3"}, "'3' trainer ranks"),
        ({"num_ranks": 10**9}, "1000000000 trainer ranks"),
        ({"side": "trainers"}, "unknown side `trainers`"),
    ],
)
def test_layouts(more: dict[str, Any], message: str):
    with pytest.raises(LayoutError, match=message):
        weft.Layout.from_shards([W], [replace(WHOLE, rank=2)], **more)
    with pytest.raises(LayoutError, match="expected a Shard"):
        weft.Layout.from_shards([W], [("w", 0)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": "e"}, "e on engine rank 0: a piece for it, but no tensor `e`"),
        ({"dst": ["d"]}, "on engine rank 0: a piece for it"),
        ({"source": ""}, "d on engine rank 0: a piece without a source"),
        ({"source": None}, "d on engine rank 0: a piece without a source"),
        ({"op": Op.PAD}, "d on engine rank 0: source is 'w', but padding has none"),
        ({"op": 17}, "d on engine rank 0: op is 17, expected an Op"),
        ({"op": "copy"}, "d on engine rank 0: op is 'copy'"),
        ({"dst_lo": [0, 0]}, r"d on engine rank 0: dst_lo is \[0, 0\], expected a tuple of whole numbers"),
        ({"extent": (8, 4.0)}, "d on engine rank 0: extent is"),
        ({"src_lo": [0, 0]}, "d on engine rank 0: src_lo is"),
        ({"axes": [0, 1]}, "d on engine rank 0: axes is"),
        ({"dst_lo": (0, 0, 0)}, r"d on engine rank 0: dst_lo \[0, 0, 0\] has 3 dimensions, the tensor 2"),
        ({"extent": (8, 4, 1)}, "d on engine rank 0: extent .* has 3 dimensions, the tensor 2"),
        ({"axes": (0, 1, -1)}, "d on engine rank 0: axes .* has 3 dimensions, the tensor 2"),
        ({"extent": (8,), "dst_lo": (0,)}, "d on engine rank 0: dst_lo .* has 1 dimensions, the tensor 2"),
        ({"src_lo": (0,)}, r"d on engine rank 0: axis order \[0, 1\] .* 1 coordinates of w"),
        ({"src_lo": ()}, "d on engine rank 0: axis order"),
        ({"src_lo": (-1, 0)}, r"d on engine rank 0: reads w from \[-1, 0\]"),
        ({"dst_lo": (1, 0)}, r"d on engine rank 0: box \[1, 0\] \+ \[8, 4\] is empty or outside \[8, 4\]"),
        ({"extent": (0, 4)}, "d on engine rank 0: box .* is empty or outside"),
        ({"axes": (0, 0)}, "d on engine rank 0: axis order"),
        ({"axes": (0, 2)}, "d on engine rank 0: axis order"),
    ],
)
def test_pieces(change: dict[str, Any], message: str):
    with pytest.raises(LayoutError, match=message):
        weft.Recipe.from_pieces({0: [D]}, {0: [replace(PIECE, **change)]})


@pytest.mark.parametrize(
    ("tensors", "pieces", "more", "message"),
    [
        ({}, {}, {}, "no engine rank has a tensor"),
        ({0: []}, {0: []}, {}, "no engine rank has a tensor"),
        ({0: [D], 1: [D]}, {0: [PIECE]}, {}, "engine rank 1: has tensors but no entry in `pieces`"),
        ({0: [D]}, {0: [PIECE], 1: [PIECE]}, {}, "engine rank 1: has pieces but no entry in `tensors`"),
        ({-1: [D]}, {-1: [PIECE]}, {}, "engine rank -1: outside 0…"),
        ({"0": [D]}, {"0": [PIECE]}, {}, "engine rank '0': outside 0…"),
        ({0: [D]}, {0: ["copy"]}, {}, "'copy' on engine rank 0: expected a Piece"),
        ({0: ["d"]}, {0: []}, {}, "'d': expected a Tensor"),
        ({0: [D, D]}, {0: [PIECE]}, {}, "d: listed twice"),
        ({0: [D]}, {0: [PIECE]}, {"num_replicas": 0}, "0 replicas of 1 ranks"),
        ({0: [D]}, {0: [PIECE]}, {"num_replicas": 1.5}, "1.5 replicas of 1 ranks"),
        ({0: [D]}, {0: [PIECE]}, {"scaling": {"w": Scaling.TENSOR}}, "w: no scales are made of it"),
    ],
)
def test_recipes(tensors: Any, pieces: Any, more: dict[str, Any], message: str):
    with pytest.raises(LayoutError, match=message):
        weft.Recipe.from_pieces(tensors, pieces, **more)


FP8 = replace(D, dtype="fp8_e4m3")
SCALES = weft.Tensor(name="d_scale", dtype="fp32", shape=(1, 1))
QUANTIZE = replace(PIECE, op=Op.QUANTIZE)
SCALE = replace(PIECE, dst="d_scale", extent=(1, 1), op=Op.SCALE)


def test_fp8_needs_its_scales_on_every_rank():
    weft.Recipe.from_pieces({0: [FP8, SCALES]}, {0: [QUANTIZE, SCALE]})
    with pytest.raises(LayoutError, match="w: engine rank 0 takes it in FP8, but not its scales"):
        weft.Recipe.from_pieces({0: [FP8]}, {0: [QUANTIZE]})
    with pytest.raises(LayoutError, match="w: engine rank 1 takes it in FP8, but not its scales"):
        weft.Recipe.from_pieces({0: [FP8, SCALES], 1: [FP8]}, {0: [QUANTIZE, SCALE], 1: [QUANTIZE]})
    with pytest.raises(LayoutError, match="w: its scales are taken, but nothing of it in FP8"):
        weft.Recipe.from_pieces({0: [SCALES]}, {0: [SCALE]})
    with pytest.raises(LayoutError, match="w: unknown scaling 'rows'"):
        weft.Recipe.from_pieces(
            {0: [FP8, SCALES]},
            {0: [QUANTIZE, SCALE]},
            scaling={"w": "rows"},  # type: ignore[dict-item]
        )


def test_only_matrices_become_fp8():
    vector = weft.Tensor(name="w", dtype="bf16", shape=(8,))
    layout = weft.Layout.from_shards([vector], [replace(WHOLE, lo=(0,), extent=(8,))])
    line = {"dst_lo": (0,), "src_lo": (0,)}
    pieces = [replace(QUANTIZE, **line, extent=(8,)), replace(SCALE, **line, extent=(1,))]
    recipe = weft.Recipe.from_pieces({0: [replace(FP8, shape=(8,)), replace(SCALES, shape=(1,))]}, {0: pieces})
    with pytest.raises(LayoutError, match=r"dtype: w is \[8\], only matrices become FP8"):
        weft.make_plan(trainer=layout, recipe=recipe, topology=TOPOLOGY)


def test_names_weft_gives_to_scales_are_not_given_to_others():
    scale = weft.Tensor(name="w::scale", dtype="bf16", shape=(8, 4))
    layout = weft.Layout.from_shards([W, scale], [WHOLE, replace(WHOLE, tensor="w::scale")])
    other = replace(PIECE, dst="e", source="w::scale")
    recipe = weft.Recipe.from_pieces({0: [D, replace(D, name="e")]}, {0: [PIECE, other]})
    assert weft.make_plan(trainer=layout, recipe=recipe, topology=TOPOLOGY).num_routes == 2
    quantized = weft.Recipe.from_pieces({0: [FP8, SCALES, replace(D, name="e")]}, {0: [QUANTIZE, SCALE, other]})
    with pytest.raises(LayoutError, match="w::scale: reserved for the scales of w"):
        weft.make_plan(trainer=layout, recipe=quantized, topology=TOPOLOGY)


@pytest.mark.parametrize(("src_lo", "axes"), [((0,), (0, -1)), ((0, 0, 0), (0, 1))])
def test_a_piece_has_as_many_source_coordinates_as_its_source(src_lo: tuple[int, ...], axes: tuple[int, ...]):
    thin = replace(D, shape=(8, 1))
    piece = replace(PIECE, extent=(8, 1), src_lo=src_lo, axes=axes)
    recipe = weft.Recipe.from_pieces({0: [thin]}, {0: [piece]})
    message = rf"shape: w is \[8, 4\], a piece of d on engine rank 0 reads it with {len(src_lo)} coordinates"
    with pytest.raises(LayoutError, match=message):
        weft.make_plan(trainer=LAYOUT, recipe=recipe, topology=TOPOLOGY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": W}, "`trainer` is a Tensor, expected a Layout"),
        ({"recipe": LAYOUT}, "`recipe` is a Layout, expected a Recipe"),
        ({"topology": weft.load_topology("h100-ib400")}, "`topology` is a Cluster, expected a Topology"),
        ({"settings": {"min_write_bytes": 1}}, "`settings` is a dict, expected a Settings"),
        ({"policy": "best"}, "unknown policy `best`"),
        ({"ignore": "w"}, "`ignore` is 'w'"),
        ({"ignore": [3]}, r"`ignore` is \[3\]"),
    ],
)
def test_plans(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        weft.make_plan(**{"trainer": LAYOUT, "recipe": RECIPE, "topology": TOPOLOGY, **change})
