"""One image, brought up to date while patches are made: patches as from two images, and aborts restore the base."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.kernels.test_patches import cpu_patches, layout_of, sorted_records  # noqa: E402
from weft import native  # noqa: E402
from weft.codec.conversion import ChunkFill, Conversion, Conversions  # noqa: E402
from weft.codec.gpu.kept_image import GpuKeptImage  # noqa: E402
from weft.codec.gpu.patcher import GpuPatcher  # noqa: E402
from weft.codec.image import ImageLayout  # noqa: E402
from weft.codec.patching import CpuPatcher, KeptChunk  # noqa: E402
from weft.config import TransferSettings  # noqa: E402
from weft.core.geometry.planes import Planes  # noqa: E402
from weft.runtime.send.outgoing import Outgoing  # noqa: E402
from weft.transport.base import Memory  # noqa: E402

CASES = {
    "a few long rows": [(2, 1, 40_000, 0), (2, 1, 3, 0), (2, 1, 20_001, 0)],
    "odd addresses": [(2, 1, 33_000, 1), (4, 1, 17_000, 3), (1, 1, 40_000, 5)],
    "cut columns": [(2, 400, 48, 0), (2, 2, 16_384, 0), (4, 90, 200, 0)],
    "many tiny rows": [(2, 1, n % 13 + 1, n % 3) for n in range(100)] + [(1, 5, 3, 1)],
    "tiny": [(2, 1, 100, 1), (2, 40, 7, 0), (4, 1, 9, 0)],
    "bytes": [(1, 1, 16_384, 0), (1, 40, 1_000, 0)],
}
"""Boxes: bytes of an element, rows, elements of a row, and by how many of them its address is odd."""


class Weights:
    """Boxes in memory of their own, as the CPU and the device see it, and the Chunk they are sent as."""

    def __init__(self, work, boxes, seed: int = 0) -> None:
        self._work, self._rng = work, np.random.default_rng(seed)
        columns, widths, at, begin = [], {}, 0, 0
        for width in sorted({width for width, *_ in boxes}):
            first = begin
            for _, rows, run, odd in (box for box in boxes if box[0] == width):
                stride = run * width if rows == 1 else (run + 5) * width
                columns.append((begin, at + odd * width, rows, run * width, run * width, stride))
                at = -(-(at + odd * width + rows * stride) // 256) * 256
                begin = -(-(begin + rows * run * width) // 16) * 16
            widths[width] = (begin - first) // width
            begin = -(-begin // 64) * 64
        self.layout = layout_of(*widths.items())
        self._columns = np.array(columns, dtype=np.uint64)
        self.here = np.zeros(at + 256, dtype=np.uint8)
        self.here[:] = self._rng.integers(0, 256, len(self.here))
        self.there = torch.from_numpy(self.here.copy()).to(work.device)

    def planes(self, base: int) -> Planes:
        """From memory at an address."""
        names = ("dst", "src", "rows", "length", "dst_stride", "src_stride")
        columns = dict(zip(names, (np.ascontiguousarray(column) for column in self._columns.T), strict=True))
        return Planes(**{**columns, "src": columns["src"] + np.uint64(base)})

    def change(self, density: float, reach: int) -> None:
        """Change a share of all bytes, by at most so much."""
        hit = self._rng.random(len(self.here)) < density
        self.here[hit] += self._rng.integers(1, reach, hit.sum(), endpoint=True).astype(np.uint8)
        self.there.copy_(torch.from_numpy(self.here))
        self._work.synchronize()

    def image(self) -> np.ndarray:
        """What engines hold when they have these weights."""
        made = np.zeros(self.layout.num_bytes, dtype=np.uint8)
        native.copy_planes(self.planes(self.here.ctypes.data).moved(dst=made.ctypes.data))
        return made


def room_for(work, layouts: list[ImageLayout]) -> list[torch.Tensor]:
    return [torch.zeros(layout.max_patch_bytes, dtype=torch.uint8, device=work.device) for layout in layouts]


class Kept:
    """Several Chunks that are kept, and what is expected of them."""

    def __init__(self, work, cases, undo_bytes: int = 1 << 22) -> None:
        self.weights = [Weights(work, boxes, seed) for seed, boxes in enumerate(cases)]
        self.held = [torch.from_numpy(mine.image()).to(work.device) for mine in self.weights]
        self._outs = room_for(work, [mine.layout for mine in self.weights])
        chunks = [
            KeptChunk(mine.layout, mine.planes(mine.there.data_ptr()), image.data_ptr())
            for mine, image in zip(self.weights, self.held, strict=True)
        ]
        self.image = GpuKeptImage(work, chunks, undo_bytes=undo_bytes)

    def update(self) -> None:
        """Patches are those between the images, and the image is the new one."""
        before = [image.cpu().numpy().copy() for image in self.held]
        addresses = [out.data_ptr() for out in self._outs]
        sizes = self.image.update(range(len(self.held)), addresses, base=1, version=2)()
        for mine, old, out, size in zip(self.weights, before, self._outs, sizes, strict=True):
            made, wanted = out[:size].cpu().numpy(), cpu_patches(mine.layout, old, mine.image())
            assert sorted_records(mine.layout, made) == sorted_records(mine.layout, wanted)
            mine.layout.check(made.ctypes.data, len(made), base=1, version=2)
        assert self.holds([mine.image() for mine in self.weights])

    def holds(self, images: list[np.ndarray]) -> bool:
        """Whether these are the images."""
        return all(np.array_equal(a.cpu().numpy(), b) for a, b in zip(self.held, images, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("density", "reach"), [(0.004, 200), (0.4, 100)])
def test_patches_are_the_same_and_an_abort_restores_the_base(work, case, density, reach):
    kept = Kept(work, [CASES[case]])
    base = [mine.image() for mine in kept.weights]
    for mine in kept.weights:
        mine.change(density, reach)
    kept.image.begin()
    kept.update()
    assert kept.image.restore()
    assert kept.holds(base)
    kept.image.begin()
    kept.update()
    kept.image.begin()  # committed
    assert kept.image.restore()
    assert kept.holds([mine.image() for mine in kept.weights])


def test_many_chunks_at_once(work):
    kept = Kept(work, CASES.values())
    base = [mine.image() for mine in kept.weights]
    for mine, density in zip(kept.weights, (0.0, 0.01, 0.2, 0.05, 0.1, 1.0), strict=True):
        mine.change(density, 3)
    kept.image.begin()
    kept.update()
    assert kept.image.restore()
    assert kept.holds(base)


def test_an_undo_list_that_is_too_short_is_reported(work):
    kept = Kept(work, [CASES["bytes"]], undo_bytes=1 << 14)
    kept.image.begin()
    kept.weights[0].change(0.5, 3)
    kept.update()
    assert not kept.image.restore()
    kept.image.begin()
    kept.update()
    assert kept.image.restore()


class Copies:
    """A converter that only copies."""

    def __init__(self, copy) -> None:
        self._copy = copy

    def fill(self, chunks, images) -> None:
        for chunk, image in zip(chunks, images, strict=True):
            self._copy(chunk.planes.moved(dst=image))


def outgoing(weights: list[Weights], patcher, copy, device, base: str) -> tuple[Outgoing, list[torch.Tensor]]:
    """The Chunks of a link, on the CPU or on the device."""
    memory: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> Memory:
        memory.append(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        return Memory(address=memory[-1].data_ptr(), num_bytes=num_bytes)

    none = Conversions(table=np.zeros((0, len(Conversion._fields)), dtype=np.int64), at=np.zeros(0, dtype=np.int64))
    starts = [mine.here.ctypes.data if base == "here" else mine.there.data_ptr() for mine in weights]
    fills = [ChunkFill(planes=mine.planes(at), boxes=none) for mine, at in zip(weights, starts, strict=True)]
    stream = SimpleNamespace(
        images=lambda: [mine.layout for mine in weights],
        fills=lambda _: fills,
        chunks=SimpleNamespace(group=np.full(len(weights), -1)),
        num_straight=0,
    )
    settings = TransferSettings(delta="on", mode="patch", anchor_every=6)
    return Outgoing(stream, np.zeros(0, np.int64), settings, Copies(copy), patcher, allocate), memory


@pytest.mark.parametrize("seed", range(2))
def test_one_image_behaves_like_two(work, seed):
    """Versions that are committed, aborted, given up half-way, anchors, and engines that are behind."""
    rng = np.random.default_rng(seed)
    weights = [Weights(work, CASES[case], seed) for case in ("tiny", "bytes")]
    one, image = outgoing(weights, GpuPatcher(work), work.copy_planes, work.device, "there")
    two, images = outgoing(weights, CpuPatcher(), native.copy_planes, "cpu", "here")
    assert (len(image), len(images)) == (1, 2)
    layouts, chunks = [mine.layout for mine in weights], range(len(weights))
    rooms = [room_for(work, layouts), room_for(SimpleNamespace(device="cpu"), layouts)]
    holds: dict[int, int | None] = {0: None, 1: None}
    for version in range(1, 14):
        for mine in weights:
            mine.change(float(rng.choice([0.0, 0.002, 0.01])), 9)
        patched = [side.begin(version, holds, patch_room=1 << 30) for side in (one, two)]
        assert patched[0] == patched[1]
        ends_early = rng.random() < 0.2
        sent = chunks[: int(rng.integers(0, 3))] if ends_early else chunks
        sizes: list[list[int]] = []
        for side, outs in zip((one, two), rooms, strict=True):
            side.fill(sent, [side.address(chunk, side.now) for chunk in sent])
            if side.is_compared:
                sizes.append(side.encode(sent, [outs[chunk].data_ptr() for chunk in sent])())
        if patched[0]:
            for chunk, size in zip(sent, sizes[0], strict=True):
                made = [outs[chunk][:size].cpu().numpy() for outs in rooms]
                assert sorted_records(layouts[chunk], made[0]) == sorted_records(layouts[chunk], made[1])
        if ends_early:
            continue
        assert np.array_equal(image[0].cpu().numpy(), images[two.now].numpy())
        if rng.random() < 0.6:
            one.committed(version)
            two.committed(version)
            holds = {0: version, 1: version if rng.random() < 0.7 else None}
