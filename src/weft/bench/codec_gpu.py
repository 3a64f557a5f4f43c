"""The GPU's part of `weft bench codec`: Triton kernels compared with the device's own copy. Times include launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from weft import native
from weft.bench.codec import Bench, CodecReport, Say, layer_shapes
from weft.codec.gpu import fp8_kernels
from weft.codec.gpu.matrix_tiles import MatrixBox, MatrixTiles
from weft.codec.gpu.patcher import GpuPatcher
from weft.codec.image import ImageLayout, Section
from weft.codec.patching import ImagePair, PatchedImage
from weft.gpu import GpuWork

MIX = "qwen3-32b"


def measure_gpu(device: str, num_bytes: int, *, density: float, repeat: int, say: Say) -> CodecReport:
    """Every kernel on one device."""
    torch.cuda.set_device(device)
    bench = Bench(device, repeat, say, _seconds)
    old, new = _changed_weights(num_bytes // 2, density)
    _measure_copy(bench, old)
    _measure_digest(bench, new)
    _measure_patches(bench, old, new, density)
    _measure_fp8(bench, new.view(torch.bfloat16))
    _measure_path(bench, density)
    return CodecReport(device=device, density=density, copy_gb_per_s=bench.rows[0].gb_per_s, rows=tuple(bench.rows))


def _seconds(work: Callable[[], Any], repeat: int) -> float:
    """Median seconds from an idle device to an idle device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _changed_weights(num_elements: int, density: float) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 bits before and after a small step."""
    torch.manual_seed(0)
    old = torch.randn(num_elements, device="cuda", dtype=torch.bfloat16).view(torch.int16)
    new = old.clone()
    for part in new.split(1 << 28):
        hit = (torch.rand(len(part), device="cuda") < density) & ((part & 0x7FFF) > 0)
        step = torch.randint(0, 2, (len(part),), device="cuda", dtype=torch.int16) * 2 - 1
        part.add_(step * hit.to(torch.int16))
    return old, new


def _measure_copy(bench: Bench, old: torch.Tensor) -> None:
    target = torch.empty_like(old)
    bench.measure("limit: device copy", 2 * old.numel(), lambda: target.copy_(old))


def _measure_digest(bench: Bench, new: torch.Tensor) -> None:
    work = GpuWork(new.device.index or 0)
    size = new.numel() * 2
    columns = [np.array([n], dtype=np.uint64) for n in (new.data_ptr(), 0, size)]
    begin = [np.array([n], dtype=np.uint64) for n in (new.data_ptr(), 0, 1 << 20)]
    host = new[: 1 << 19].cpu().numpy().view(np.uint8)
    wanted = native.digest_bytes(host, 0)
    bench.measure("digest", size, lambda: work.digest(*columns), lambda: work.digest(*begin) == wanted, touched=1.0)


class _ImagePatches:
    """Patches between two images of elements of one size."""

    def __init__(self, work: GpuWork, old: torch.Tensor, new: torch.Tensor, width: int) -> None:
        num_bytes = old.numel() * old.element_size()
        section = Section(width=width, begin=0, num_elements=num_bytes // width)
        self._layout = ImageLayout(sections=(section,), num_bytes=num_bytes)
        self._patcher, self._old, self._new, self._held = GpuPatcher(work), old, new, old.clone()
        self._rows = self._layout.contiguous(self._held.data_ptr())
        self._out = torch.zeros(self._layout.max_patch_bytes, dtype=torch.uint8, device="cuda")
        self.num_bytes = 0
        torch.cuda.synchronize()

    @property
    def address(self) -> int:
        """Where they are."""
        return self._out.data_ptr()

    def encode(self) -> None:
        """Make them."""
        images = self._new.data_ptr(), self._old.data_ptr()
        whole = ImagePair(self._layout, *images, self.address, len(self._out))
        (self.num_bytes,) = self._patcher.encode([whole], base=1, version=2)()

    def check(self) -> None:
        """Check them."""
        problem = self._patcher.check([self._image], base=1, version=2)[0]
        if problem is not None:
            raise problem

    def apply(self) -> None:
        """Apply them to the held image."""
        self._patcher.apply([self._image])

    @property
    def _image(self) -> PatchedImage:
        return PatchedImage(self._layout, self.address, self.num_bytes, self._rows)

    def is_exact(self) -> bool:
        """Whether they turn the old image into the new one."""
        self._held.copy_(self._old)
        torch.cuda.synchronize()
        self.check()
        self.apply()
        return bool(torch.equal(self._held, self._new))


def _measure_patches(bench: Bench, old: torch.Tensor, new: torch.Tensor, density: float) -> None:
    size = 2 * old.numel()
    patches = _ImagePatches(GpuWork(old.device.index or 0), old, new, 2)
    patches.encode()
    name, exact = f"BF16, {density:.2%} changed", patches.is_exact
    bench.measure(
        f"delta encode, {name}", size, patches.encode, exact, touched=2.0, result_bytes=lambda: patches.num_bytes
    )
    bench.measure(f"delta apply, {name}", size, patches.apply, exact)
    bench.measure(f"delta check, {name}", size, patches.check, exact)


def _measure_fp8(bench: Bench, weights: torch.Tensor) -> None:
    """Blocks of matrices that are the left half of wider ones."""
    columns = 8192
    wide = weights[: weights.numel() // (2 * columns) * 2 * columns].view(-1, 2 * columns)
    source = wide[:, :columns]
    codes = torch.zeros(source.shape, dtype=torch.uint8, device="cuda")
    fp8 = _Fp8(source, codes, [(source.shape[0], columns)], wide.stride(0) * 2)
    size = source.numel() * 2

    def exact() -> bool:
        part = source[:1024].float().view(8, 128, columns // 128, 128)
        top = torch.tensor(448.0, device="cuda")  # by a plain number torch would multiply with its inverse here
        scale = part.abs().amax(dim=(1, 3)).clamp(min=1e-10) / top
        wanted = (part * (1 / scale)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return bool(torch.equal(wanted.view(torch.uint8).reshape(1024, columns), codes[:1024]))

    bench.measure("pack and FP8, strided source", size, fp8.quantize, exact, touched=1.5)


def _measure_path(bench: Bench, density: float) -> None:
    """A layer and the embedding of a real model: FP8, the patch to the version before, and the patch's digest."""
    shapes = layer_shapes(MIX)
    num_elements = sum(rows * columns for rows, columns in shapes)
    old, new = _changed_weights(num_elements, density)
    base, image = (torch.zeros(num_elements, dtype=torch.uint8, device="cuda") for _ in range(2))
    before, now = (_Fp8(weights, into, shapes, 0) for weights, into in ((old, base), (new, image)))
    before.quantize()
    work = GpuWork(0)
    patches = _ImagePatches(work, base, image, 1)

    def path() -> None:
        with work.queue():
            now.quantize()
        patches.encode()
        columns = [np.array([n], dtype=np.uint64) for n in (patches.address, 0, patches.num_bytes)]
        work.digest(*columns)

    path()
    bench.measure(
        f"FP8, patch and digest of a layer and the embedding of {MIX}",
        2 * num_elements,
        path,
        patches.is_exact,
        touched=2.5,  # BF16 read, FP8 written, read again, and the base read: 5 bytes for 2
        result_bytes=lambda: patches.num_bytes,
    )


class _Fp8:
    """Matrices that follow each other, quantised by one launch."""

    def __init__(self, weights: torch.Tensor, into: torch.Tensor, shapes: list[tuple[int, int]], stride: int) -> None:
        """`stride`: bytes from row to row; 0 where rows follow each other."""
        boxes: list[MatrixBox] = []
        src, to, num_blocks = weights.data_ptr(), 0, 0
        for rows, columns in shapes:
            row_bytes = stride or 2 * columns
            where = (0, 0, rows, columns, len(boxes), num_blocks, rows, columns, 128, 128)
            boxes.append(MatrixBox(src, row_bytes, 2, to, 1, *where))
            src, to = src + rows * row_bytes, to + rows * columns
            num_blocks += -(-rows // 128) * -(-columns // 128)
        self._table = torch.from_numpy(MatrixTiles.of(boxes).table()).cuda()
        self._amax = torch.zeros(num_blocks, dtype=torch.float32, device="cuda")
        self._wild = torch.zeros(1 + len(shapes), dtype=torch.int32, device="cuda")
        self._image = into.data_ptr()

    def quantize(self) -> None:
        """One pass over all of them."""
        fp8_kernels.KERNELS.quantize(self._table, self._image, self._amax, self._wild, width=2)
