"""`weft bench codec`: what patches, FP8 and digests cost, compared with a plain copy in the same run.

CPU figures are of one core, GPU figures of one device. `gb_per_s` counts the weights (before conversion) that a kernel
processes per second; `fraction_of_limit` compares that with the bytes a plain copy moves per second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft import native
from weft.bench.payload import load_payload
from weft.codec import compress, delta, fp8
from weft.codec.memory import Bytes
from weft.core.geometry.planes import Column

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One kernel."""

    kernel: str
    device: str
    bytes: int
    """Of weights."""
    seconds: float
    gb_per_s: float
    fraction_of_limit: float
    exact: bool | None
    """Whether the result equals the reference, bit for bit; None for limits."""
    touched: float | None = None
    """Bytes per second that must be read and written, as a fraction of what a copy reads and writes."""
    result_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecReport:
    """The results of one run."""

    device: str
    density: float
    copy_gb_per_s: float
    rows: tuple[CodecRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


class Bench:
    """Collects rows; all are compared with the first, a plain copy."""

    def __init__(self, device: str, repeat: int, say: Say, timer: Callable[[Callable[[], Any], int], float]) -> None:
        self._device, self._repeat, self._say, self._timer = device, repeat, say, timer
        self.rows: list[CodecRow] = []

    def measure(
        self,
        kernel: str,
        num_bytes: int,
        work: Callable[[], Any],
        exact: Callable[[], bool] | None = None,
        *,
        touched: float | None = None,
        result_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Time some work; `touched` are the bytes it must read and write, for each byte of weights."""
        self._say(kernel)
        seconds = self._timer(work, self._repeat)
        rate = num_bytes / seconds / 1e9
        copy = self.rows[0].gb_per_s if self.rows else rate
        row = CodecRow(
            kernel=kernel,
            device=self._device,
            bytes=num_bytes,
            seconds=seconds,
            gb_per_s=rate,
            fraction_of_limit=rate / copy,
            exact=None if exact is None else exact(),
            touched=None if touched is None else rate * touched / (2 * copy),
            result_bytes=None if result_bytes is None else result_bytes(),
        )
        self.rows.append(row)


def cpu_seconds(work: Callable[[], Any], repeat: int) -> float:
    """Median wall-clock seconds, after one run to warm up."""
    work()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_cpu(num_bytes: int, *, density: float, repeat: int, say: Say) -> CodecReport:
    """Every kernel on one core."""
    bench = Bench("cpu", repeat, say, cpu_seconds)
    old, new = changed_weights(num_bytes // 2, density)
    target = old.copy()
    bench.measure("limit: plain copy", num_bytes, lambda: np.copyto(target, old))
    _measure_digest(bench, new, target)
    for width, name in ((2, "BF16"), (1, "FP8"), (4, "FP32")):
        _measure_patches(bench, old, new, width, f"{name}, {density:.2%} of 16-bit words changed")
    _measure_fp8(bench, new)
    return CodecReport(device="cpu", density=density, copy_gb_per_s=bench.rows[0].gb_per_s, rows=tuple(bench.rows))


def changed_weights(num_elements: int, density: float) -> tuple[Bytes, Bytes]:
    """BF16 weights, and the same after a small step: some elements are the next number up or down."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(num_elements, dtype=np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    new = old.copy()
    hit = rng.random(num_elements) < density
    new[hit] += rng.choice(np.array([1, 0xFFFF], dtype=np.uint16), int(hit.sum()))
    return old.view(np.uint8), new.view(np.uint8)


def _column(value: int) -> Column:
    return np.array([value], dtype=np.uint64)


def _measure_digest(bench: Bench, new: Bytes, target: Bytes) -> None:
    size = len(new)
    src, dst, zero, length = _column(new.ctypes.data), _column(target.ctypes.data), _column(0), _column(size)
    wanted = native.digest_bytes(new[: 1 << 20], 0)
    exact = native.digest(src, zero, _column(1 << 20)) == wanted
    bench.measure("digest", size, lambda: native.digest(src, zero, length), lambda: exact)
    bench.measure(
        "copy and digest",
        size,
        lambda: native.copy_digest(dst, src, zero, length),
        lambda: native.copy_digest(dst, src, zero, length) == native.digest(dst, zero, length),
    )


def _measure_patches(bench: Bench, old: Bytes, new: Bytes, width: int, name: str) -> None:
    num_elements = len(new) // width
    out = np.zeros(delta.max_bytes(num_elements, width), dtype=np.uint8)
    held = old.copy()
    sizes = [0]

    def encode() -> None:
        sizes[0] = delta.encode(
            int(new.ctypes.data),
            int(old.ctypes.data),
            width=width,
            num_elements=num_elements,
            out=int(out.ctypes.data),
            capacity=len(out),
            base=1,
            version=2,
        )

    def check() -> None:
        where = int(out.ctypes.data)
        delta.check(where, sizes[0], width=width, num_elements=num_elements, base=1, version=2)

    def apply() -> None:
        rows = delta.ImageRows.contiguous(int(held.ctypes.data), len(held))
        delta.apply(int(out.ctypes.data), sizes[0], width=width, num_elements=num_elements, rows=rows)

    def applied() -> bool:
        held[:] = old
        apply()
        return bool((held == new).all())

    bench.measure(f"delta encode, {name}", len(new), encode, applied, result_bytes=lambda: sizes[0])
    bench.measure(f"delta check, {name}", len(new), check, applied)
    bench.measure(f"delta apply, {name}", len(new), apply, applied)
    if width == 2:
        _measure_compression(bench, out[: sizes[0]], len(new), num_elements)


def _measure_compression(bench: Bench, patch: Bytes, num_bytes: int, num_elements: int) -> None:
    packed = compress.compress(patch)

    def unpack() -> Bytes:
        return compress.decompress(packed, width=2, num_elements=num_elements)

    def exact() -> bool:
        return bool((unpack() == patch).all())

    bench.measure("patch, zstd", num_bytes, lambda: compress.compress(patch), exact, result_bytes=lambda: len(packed))
    bench.measure("patch, from zstd", num_bytes, unpack, exact)


def _measure_fp8(bench: Bench, new: Bytes) -> None:
    side = 4096
    matrix = new[: len(new) // (2 * side) * 2 * side]
    grid = fp8.Grid(rows=len(matrix) // (2 * side), columns=side)
    box = fp8.Box(address=int(matrix.ctypes.data), stride=2 * side, width=2, first=(0, 0), rows=grid.rows, columns=side)
    codes, amax = np.zeros((grid.rows, side), dtype=np.uint8), grid.zeros()
    fp8.add_amax(box, grid, amax)

    def quantize() -> None:
        fp8.quantize(box, grid, fp8.scales(amax), int(codes.ctypes.data), side, is_bounded=True)

    def exact() -> bool:
        values = (matrix.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(-1, side)[:256]
        factor = (np.float32(1.0) / fp8.scales(amax)).repeat(128, axis=0).repeat(128, axis=1)[:256]
        return bool((fp8.to_e4m3(np.clip(values * factor, -448, 448)) == codes[:256]).all())

    quantize()
    bench.measure("FP8: largest magnitudes", len(matrix), lambda: fp8.add_amax(box, grid, amax))
    bench.measure("FP8: quantise 128×128 blocks", len(matrix), quantize, exact)


def layer_shapes(model: str) -> list[tuple[int, int]]:
    """The matrices of one layer of a model, and its embedding."""
    tensors = [tensor for tensor in load_payload(model).tensors if len(tensor.shape) == 2]
    chosen = [tensor.shape for tensor in tensors if ".layers." not in tensor.name or ".layers.0." in tensor.name]
    return [(shape[0], shape[1]) for shape in chosen]
