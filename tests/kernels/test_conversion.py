"""Conversions on a GPU equal those on the CPU: codes, scales, casts, however blocks are cut by holders and chunks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.support.conversions import conversions_of, grids_of  # noqa: E402
from weft.codec import fp8  # noqa: E402
from weft.codec.conversion import DTYPES, ChunkFill, Conversion, CpuConverter  # noqa: E402
from weft.codec.fp8 import Box, Grid  # noqa: E402
from weft.codec.gpu.converter import GpuConverter  # noqa: E402
from weft.codec.gpu.fp8_arithmetic import has_fp8_cast  # noqa: E402
from weft.codec.grids import HeldGrid, HeldGrids  # noqa: E402
from weft.core.geometry.planes import Planes, rows_as_planes  # noqa: E402
from weft.core.geometry.scaling import Scaling  # noqa: E402
from weft.core.recipe import Op  # noqa: E402
from weft.errors import CodecError  # noqa: E402

NOTHING = np.zeros(0, dtype=np.uint64)
NO_PLANES = Planes(
    dst=NOTHING, src=NOTHING, rows=NOTHING, length=NOTHING, dst_stride=NOTHING, src_stride=NOTHING
)  # fmt: skip
GUARD = 4096
"""Bytes behind an image that must not change: more than a program writes at a time."""
NO_MAGNITUDES = np.zeros(0, dtype=np.float32)
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def matrix(rows: int, columns: int, dtype: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(rows, 1, generator=generator) * 4)
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


def held(
    x: torch.Tensor, scaling: Scaling, parts: list[tuple[int, int]], name: str = "w", key: int = 0, first: int = 0
) -> HeldGrids:
    """A matrix of which rows [a, b) are held, from column `first` on."""
    boxes = tuple(
        Box(
            address=x[a:b, first:].data_ptr(), stride=x.stride(0) * x.element_size(), width=x.element_size(),
            first=(a, first), rows=b - a, columns=x.shape[1] - first,
        )
        for a, b in parts
    )  # fmt: skip
    grid = Grid(rows=x.shape[0], columns=x.shape[1], scaling=scaling)
    return grids_of([HeldGrid(name=name, grid=grid, group=0, first_key=key, boxes=boxes)])


def conversion(x: torch.Tensor, op: Op, rows: tuple[int, int], columns: tuple[int, int], to: str = "fp8_e4m3"):
    part = x[rows[0] : rows[1], columns[0] : columns[1]]
    return Conversion(
        op=op, grid=0, src=part.data_ptr(), stride=x.stride(0) * x.element_size(),
        src_dtype=DTYPES.index(KINDS[x.dtype]), dst_dtype=DTYPES.index(to), first_row=rows[0], first_column=columns[0],
        rows=part.shape[0], columns=part.shape[1],
    )  # fmt: skip


def scales_of(grid: Grid) -> Conversion:
    rows, columns = grid.shape
    return Conversion(Op.SCALE, 0, 0, 0, 0, DTYPES.index("fp32"), 0, 0, rows, columns)


def chunk(*boxes: Conversion, align: int = 16) -> tuple[ChunkFill, int]:
    """Boxes one after the other, and the bytes of the image."""
    found, at = [], 0
    for box in boxes:
        found.append((box, at))
        at += box.rows * box.columns * (4 if DTYPES[box.dst_dtype] == "fp32" else 2 if box.op == Op.CAST else 1)
        at = -(-at // align) * align
    return ChunkFill(planes=NO_PLANES, boxes=conversions_of(found)), at


def image_on(work, converter, described: tuple[ChunkFill, int], shift: int = 0) -> np.ndarray:
    """What a chunk becomes; bytes that nothing is written to are 0xAA, also before and behind it."""
    fill, num_bytes = described
    image = torch.full((num_bytes + shift + GUARD,), 0xAA, dtype=torch.uint8, device=work.device if work else "cpu")
    wait = converter.fill([fill], [image.data_ptr() + shift])
    if wait is not None:
        wait()
    assert (image[:shift] == 0xAA).all()
    assert (image[shift + num_bytes :] == 0xAA).all()
    return image[shift : shift + num_bytes].cpu().numpy()


def both(
    work, x: torch.Tensor, scaling: Scaling, chunks: Any, parts: Any = None, others: Any = None, *, first: int = 0,
    shift: int = 0, **options: Any,
):  # fmt: skip
    """What CPU and GPU make of the same chunks; `others`: magnitudes of other holders, given the cut blocks.

    `first`: the first column that is held. `shift`: where chunks begin, beyond aligned memory.
    """
    there = x.to(work.device)
    found = []
    for here, who, make in ((x, None, CpuConverter), (there, work, lambda g, **o: GpuConverter(work, g, **o))):
        converter = make(held(here, scaling, parts or [(0, x.shape[0])], first=first), **options)
        magnitudes = converter.find_amax(0)
        converter.agree(0, magnitudes if others is None else others(magnitudes))
        images = [image_on(who, converter, described, shift) for described in chunks(here)]
        found.append((magnitudes, images))
    return found


def assert_equal(found: Any) -> None:
    (cpu_amax, cpu), (gpu_amax, gpu) = found
    assert np.array_equal(cpu_amax, gpu_amax)
    for a, b in zip(cpu, gpu, strict=True):
        assert np.array_equal(a, b)


SHAPES = [
    *((Scaling.BLOCK, shape) for shape in ((256, 128), (130, 200), (1, 5))),
    *((scaling, (4, 200)) for scaling in Scaling if scaling is not Scaling.BLOCK),
]


@pytest.mark.parametrize(("scaling", "shape"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_matrices(work, scaling, dtype, shape):
    x = matrix(*shape, dtype)
    grid = Grid(rows=shape[0], columns=shape[1], scaling=scaling)
    whole = ((0, shape[0]), (0, shape[1]))
    assert_equal(both(work, x, scaling, lambda here: [chunk(conversion(here, Op.QUANTIZE, *whole), scales_of(grid))]))


@pytest.mark.parametrize(("scaling", "num_rows"), [(Scaling.BLOCK, 200), (Scaling.CHANNEL, 6), (Scaling.TENSOR, 200)])
def test_chunks_that_cut_blocks_and_scales_that_travel_first(work, scaling, num_rows):
    x = matrix(num_rows, 300, torch.bfloat16)
    grid = Grid(rows=num_rows, columns=300, scaling=scaling)

    def chunks(here: torch.Tensor):
        yield chunk(scales_of(grid))
        cuts = ((0, num_rows // 4), (num_rows // 4, num_rows)), ((0, 128), (128, 300))
        for rows, columns in itertools.product(*cuts):
            yield chunk(conversion(here, Op.QUANTIZE, rows, columns), align=1)

    assert_equal(both(work, x, scaling, chunks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 48, 130, 1030, 2050, 2064])
def test_rows_with_a_scale_each(work, dtype, columns):
    x = matrix(5, columns, dtype)
    grid = Grid(rows=5, columns=columns, scaling=Scaling.CHANNEL)
    whole = (0, columns)

    def chunks(here: torch.Tensor):
        yield chunk(
            conversion(here, Op.QUANTIZE, (0, 2), whole),
            scales_of(grid),
            conversion(here, Op.CAST, (1, 2), whole, "fp32"),
        )
        yield chunk(conversion(here, Op.QUANTIZE, (2, 5), whole), align=1)

    assert_equal(both(work, x, Scaling.CHANNEL, chunks))
    codes = lambda here: [chunk(conversion(here, Op.QUANTIZE, (0, 5), whole), align=1)]  # noqa: E731
    assert_equal(both(work, x, Scaling.CHANNEL, codes, shift=3))


def test_rows_of_zeros(work):
    x = matrix(4, 1040, torch.bfloat16)
    x[1:3] = 0.0
    grid = Grid(rows=4, columns=1040, scaling=Scaling.CHANNEL)
    make = lambda here: [chunk(conversion(here, Op.QUANTIZE, (0, 4), (0, 1040)), scales_of(grid))]  # noqa: E731
    found = both(work, x, Scaling.CHANNEL, make)
    assert_equal(found)
    assert not found[1][1][0][1040 : 3 * 1040].any()


def test_long_rows(work):
    """Longer than the 16 bits that rows of a tile have."""
    x = matrix(2, 70_000, torch.bfloat16)
    grid = Grid(rows=2, columns=70_000, scaling=Scaling.CHANNEL)
    make = lambda here: [chunk(conversion(here, Op.QUANTIZE, (0, 2), (0, 70_000)), scales_of(grid))]  # noqa: E731
    assert_equal(both(work, x, Scaling.CHANNEL, make))


@pytest.mark.parametrize("first", [100, 1040])
def test_rows_of_several_holders(work, first):
    x = matrix(5, 2100, torch.bfloat16)
    grid = Grid(rows=5, columns=2100, scaling=Scaling.CHANNEL)

    def chunks(here: torch.Tensor):
        yield chunk(conversion(here, Op.QUANTIZE, (0, 2), (first, 2100)), scales_of(grid))
        yield chunk(conversion(here, Op.QUANTIZE, (2, 5), (first + 8, 2000)), align=1)

    found = both(work, x, Scaling.CHANNEL, chunks, others=lambda mine: mine * np.float32(1.5), first=first)
    assert len(found[0][0]) == 5
    assert_equal(found)


def test_rows_that_chunks_cut_are_searched_once_before(work):
    parts = (((0, 3), (0, 400)), ((3, 5), (0, 200)), ((3, 5), (200, 400)))
    x = matrix(6, 400, torch.bfloat16)
    cpu = CpuConverter(held(x, Scaling.CHANNEL, [(0, 6)]))
    cpu.agree(0, cpu.find_amax(0))
    wanted = [image_on(None, cpu, chunk(conversion(x, Op.QUANTIZE, *part))) for part in parts]
    there = x.to(work.device)
    described = [chunk(conversion(there, Op.QUANTIZE, *part)) for part in parts]
    for is_told, searched in ((False, [0, 2, 2]), (True, [0, 0, 0])):
        converter = GpuConverter(work, held(there, Scaling.CHANNEL, [(0, 6)]))
        if is_told:
            converter.expect([fill for fill, _ in described])
        assert converter.looks_before(0) == is_told
        converter.find_amax(0)
        found = [image_on(work, converter, each) for each in described]
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert [len(converter._programs[id(fill)].search.blocks) for fill, _ in described] == searched


def scales_at(first: tuple[int, int], count: tuple[int, int]) -> Conversion:
    return Conversion(Op.SCALE, 0, 0, 0, 0, DTYPES.index("fp32"), *first, *count)


PARTS_OF_ROWS = [
    [scales_at((1, 0), (2, 1))],
    [((0, 3), (0, 300))],
    [((3, 6), (0, 200)), scales_at((4, 0), (1, 1))],
    [((3, 6), (200, 300))],
]
PARTS_OF_BLOCKS = [
    [scales_at((1, 1), (1, 2))],
    [((0, 100), (0, 300))],
    [((100, 200), (0, 300)), scales_at((0, 0), (1, 1))],
    [((200, 300), (0, 256)), scales_at((2, 0), (1, 3))],
    [((200, 300), (256, 300))],
]


@pytest.mark.parametrize(
    ("scaling", "num_rows", "parts"), [(Scaling.CHANNEL, 6, PARTS_OF_ROWS), (Scaling.BLOCK, 300, PARTS_OF_BLOCKS)]
)
@pytest.mark.parametrize("is_told", [True, False])
def test_chunks_read_nothing_but_what_they_name(work, scaling, num_rows, parts, is_told):
    """The rest of weights that are offloaded may not be on the device yet."""
    x = matrix(num_rows, 300, torch.bfloat16)
    there = torch.full_like(x, 1e30).to(work.device)

    def chunks(here: torch.Tensor) -> list[tuple[ChunkFill, int]]:
        boxes = [
            [p if isinstance(p, Conversion) else conversion(here, Op.QUANTIZE, *p) for p in part] for part in parts
        ]
        return [chunk(*part) for part in boxes]

    def bring(address: np.ndarray, num_bytes: np.ndarray) -> None:
        there.fill_(1e30)
        for begin, size in zip((address - there.data_ptr()).tolist(), num_bytes.tolist(), strict=True):
            assert 0 <= begin < begin + size <= 2 * x.numel()
            there.view(-1).view(torch.uint8)[begin : begin + size] = x.view(-1).view(torch.uint8)[begin : begin + size]

    cpu, grids = CpuConverter(held(x, scaling, [(0, num_rows)])), held(there, scaling, [(0, num_rows)])
    cpu.find_amax(0)
    cpu.agree(0, NO_MAGNITUDES)
    converter, described = GpuConverter(work, grids), chunks(there)
    if is_told:
        converter.expect([fill for fill, _ in described])
    bring(*grids.source_spans(0))
    converter.find_amax(0)
    for each, wanted in zip(described, chunks(x), strict=True):
        bring(*map(np.concatenate, zip(each[0].source_spans, converter.searched_spans(each[0]), strict=True)))
        assert np.array_equal(image_on(work, converter, each), image_on(None, cpu, wanted))


def test_only_what_a_chunk_lacks_is_searched(work):
    x = matrix(300, 300, torch.bfloat16).to(work.device)
    converter = GpuConverter(work, held(x, Scaling.BLOCK, [(0, 300)]))
    whole = conversion(x, Op.QUANTIZE, (0, 300), (0, 300))
    chunks = [chunk(whole, scales_at((0, 0), (3, 3))), chunk(scales_at((1, 2), (1, 1)))]
    converter.expect([fill for fill, _ in chunks])
    assert not converter.looks_before(0)
    found = [converter.searched_spans(fill) for fill, _ in chunks]
    assert [len(address) for address, _ in found] == [0, 1]
    corner, row = x[128:256, 256:300], 2 * 300
    assert (found[1][0] - corner.data_ptr(), found[1][1]) == (0, 127 * row + 2 * 44)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
@pytest.mark.parametrize("columns", [(0, 1040), (0, 500)])
def test_rows_that_are_not_finite(work, columns):
    x = matrix(4, 1040, torch.bfloat16)
    x[1, 1030], x[1, 2], x[3, 400] = math.nan, math.inf, -math.inf
    grid = Grid(rows=4, columns=1040, scaling=Scaling.CHANNEL)
    make = lambda here: [chunk(conversion(here, Op.QUANTIZE, (0, 4), columns), scales_of(grid))]  # noqa: E731
    assert_equal(both(work, x, Scaling.CHANNEL, make, allow_nonfinite=True))
    there = x.to(work.device)
    converter = GpuConverter(work, held(there, Scaling.CHANNEL, [(0, 4)], "model.q"))
    converter.agree(0, converter.find_amax(0))
    with pytest.raises(CodecError, match=r"`model\.q` has 3 elements that are not finite"):
        image_on(work, converter, make(there)[0])


def test_blocks_of_several_holders(work):
    x = matrix(400, 160, torch.bfloat16)
    grid = Grid(rows=400, columns=160)

    def chunks(here: torch.Tensor):
        yield chunk(conversion(here, Op.QUANTIZE, (100, 390), (0, 160)), scales_of(grid))

    found = both(work, x, Scaling.BLOCK, chunks, [(100, 390)], others=lambda mine: mine * np.float32(1.5))
    assert len(found[0][0]) == 4
    assert_equal(found)


def test_a_new_version_forgets_the_old_magnitudes(work):
    x = matrix(300, 128, torch.bfloat16).to(work.device)
    converter = GpuConverter(work, held(x, Scaling.BLOCK, [(0, 200), (200, 300)]))
    described = chunk(conversion(x, Op.QUANTIZE, (0, 200), (0, 128)), conversion(x, Op.QUANTIZE, (200, 300), (0, 128)))
    for _ in range(2):
        converter.agree(0, converter.find_amax(0))
        found = image_on(work, converter, described)
        x.mul_(0.25)
    again = GpuConverter(work, held(x, Scaling.BLOCK, [(0, 300)]))
    x.mul_(4.0)
    again.find_amax(0)
    whole = chunk(conversion(x, Op.QUANTIZE, (0, 300), (0, 128)))
    assert np.array_equal(found[: 300 * 128], image_on(work, again, whole)[: 300 * 128])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
@pytest.mark.parametrize("rows", [(0, 130), (5, 100)])
def test_what_is_not_finite_names_the_tensor(work, rows):
    x = matrix(130, 200, torch.bfloat16)
    x[6, 7], x[7, 199], x[8, 5] = math.nan, math.inf, -math.inf
    x = x.to(work.device)
    converter = GpuConverter(work, held(x, Scaling.BLOCK, [(0, 130)], "model.q"))
    converter.find_amax(0)
    with pytest.raises(CodecError, match=r"`model\.q` has 3 elements that are not finite"):
        image_on(work, converter, chunk(conversion(x, Op.QUANTIZE, rows, (0, 200))))
    x[6:9] = 1.0
    image_on(work, converter, chunk(conversion(x, Op.QUANTIZE, rows, (0, 200))))


def test_what_is_not_finite_may_be_allowed(work):
    x = matrix(130, 200, torch.bfloat16)
    x[6, 7], x[7, 199], x[8, 5] = math.nan, math.inf, -math.inf
    grid = Grid(rows=130, columns=200)
    whole = ((0, 130), (0, 200))
    make = lambda here: [chunk(conversion(here, Op.QUANTIZE, *whole), scales_of(grid))]  # noqa: E731
    assert_equal(both(work, x, Scaling.BLOCK, make, allow_nonfinite=True))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # the interpreter's; infinite is what is wanted
@pytest.mark.parametrize(("src", "dst"), [(torch.float32, "bf16"), (torch.bfloat16, "fp32"), (torch.float32, "fp16")])
def test_casts(work, src, dst):
    x = matrix(140, 150, src)
    x[3, 4], x[5, 6] = math.inf, 0.0
    if src == torch.float32 and dst == "bf16":
        x[7, 8] = -math.nan
    cast = lambda here: [chunk(conversion(here, Op.CAST, (1, 139), (2, 150), dst))]  # noqa: E731
    assert_equal(both(work, x, Scaling.BLOCK, cast, allow_nonfinite=True))


def test_every_bf16_number_has_its_code(work):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(512, 128)
    x = torch.where(bits.isfinite() & (bits.abs() <= 448), bits, 0.0)
    x[:, 0] = 448.0
    codes = np.zeros(x.shape, dtype=np.uint8)
    box = held(x, Scaling.BLOCK, [(0, 512)])[0].boxes[0]
    grid = Grid(rows=512, columns=128)
    fp8.quantize(box, grid, np.ones(grid.shape, dtype=np.float32), codes.ctypes.data, 128)
    there = x.to(work.device)
    converter = GpuConverter(work, held(there, Scaling.BLOCK, [(0, 512)]))
    for shift in (0, 3):
        described = chunk(conversion(there, Op.QUANTIZE, (0, 512), (0, 128)))
        assert np.array_equal(image_on(work, converter, described, shift)[: codes.size].reshape(codes.shape), codes)


def test_the_interpreter_runs_the_arithmetic_of_gpus_without_fp8(work):
    assert has_fp8_cast(work.device) == (work.device.type == "cuda")


def test_chunks_that_are_filled_together_are_the_same_as_one_by_one(work):
    x = matrix(256, 200, torch.bfloat16).to(work.device)
    converter = GpuConverter(work, held(x, Scaling.BLOCK, [(0, 256)]))
    converter.agree(0, converter.find_amax(0))
    row = x.element_size() * x.shape[1]
    fills = []
    for first in (0, 128):
        boxes, num_bytes = chunk(conversion(x, Op.QUANTIZE, (first, first + 128), (0, 200)))
        copied = rows_as_planes(
            dst=np.array([num_bytes], dtype=np.uint64),
            src=np.array([x.data_ptr() + first * row + 2], dtype=np.uint64),
            length=np.array([7 * row + 2], dtype=np.uint64),
        )
        fills.append((ChunkFill(planes=copied, boxes=boxes.boxes), num_bytes + 7 * row + 2))
    apart = [image_on(work, converter, described) for described in fills]
    images = [torch.zeros(num_bytes, dtype=torch.uint8, device=work.device) for _, num_bytes in fills]
    converter.fill([fill for fill, _ in fills], [image.data_ptr() for image in images])()
    assert all(np.array_equal(image.cpu().numpy(), alone) for image, alone in zip(images, apart, strict=True))
    assert not np.array_equal(*apart)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
def test_chunks_begun_behind_one_that_is_not_finite_are_not_blamed(work):
    x, y = matrix(130, 200, torch.bfloat16), matrix(128, 128, torch.bfloat16)
    x[6, 7] = math.nan
    x, y = x.to(work.device), y.to(work.device)
    grids = [held(x, Scaling.BLOCK, [(0, 130)], "model.q")[0], held(y, Scaling.BLOCK, [(0, 128)], "model.k", 4)[0]]
    converter = GpuConverter(work, grids_of(grids))
    converter.find_amax(0)
    images = [torch.zeros(1 << 16, dtype=torch.uint8, device=work.device) for _ in grids]
    boxes = [conversion(each, Op.QUANTIZE, (0, len(each)), (0, each.shape[1])) for each in (x, y)]
    fills = [chunk(box._replace(grid=grid))[0] for grid, box in enumerate(boxes)]
    waits = [converter.fill([fill], [image.data_ptr()]) for fill, image in zip(fills, images, strict=True)]
    with pytest.raises(CodecError, match=r"`model\.q` has 1 elements that are not finite"):
        waits[0]()
    waits[1]()
