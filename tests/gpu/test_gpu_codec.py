"""On a CUDA device: patches equal what the CPU makes of the same numbers (conversions: tests/kernels)."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from weft.codec import delta, patch_kernels  # noqa: E402
from weft.errors import CodecError  # noqa: E402

pytestmark = pytest.mark.gpu
SIZES = [1, 700, 16384, 16385, 200_000]
DENSITIES = [0.0, 0.001, 0.01, 0.3, 1.0]


def images(width: int, num_elements: int, density: float, reach: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([width, num_elements, reach])
    old = rng.integers(0, 1 << (8 * width), num_elements, dtype=f"u{width}")
    new = old.copy()
    hit = rng.random(num_elements) < density
    new[hit] += rng.integers(1, reach, hit.sum(), endpoint=True).astype(new.dtype)
    return old.view(np.uint8), new.view(np.uint8)


def device_patch(old: np.ndarray, new: np.ndarray, width: int) -> np.ndarray:
    out = torch.zeros(delta.max_bytes(len(new) // width, width), dtype=torch.uint8, device="cuda")
    now, base = torch.from_numpy(new).cuda(), torch.from_numpy(old).cuda()
    size = patch_kernels.encode(now, base, width=width, base=1, version=2, out=out)
    return out[:size].cpu().numpy()


def sorted_records(patch: np.ndarray, num_elements: int, width: int) -> list[bytes]:
    """The records in the order of their blocks."""
    table = delta.table_of(patch, num_elements)
    sizes = delta.record_sizes(width, num_elements, table["changes"], table["escapes"])
    return [
        patch[offset * 4 : offset * 4 + size].tobytes()
        for offset, size in zip(table["offset"].tolist(), sizes.tolist(), strict=True)
    ]


@pytest.mark.parametrize("width", delta.WIDTHS)
@pytest.mark.parametrize("num_elements", SIZES)
def test_the_device_makes_the_same_patch(width, num_elements):
    for density in DENSITIES:
        for reach in (1, 200, 1 << (8 * width - 1)):
            old, new = images(width, num_elements, density, reach)
            patch = device_patch(old, new, width)
            out = np.zeros(delta.max_bytes(num_elements, width), dtype=np.uint8)
            size = delta.encode(
                new.ctypes.data, old.ctypes.data, width=width, num_elements=num_elements, out=out.ctypes.data,
                capacity=len(out), base=1, version=2,
            )  # fmt: skip
            assert len(patch) == size
            assert sorted_records(patch, num_elements, width) == sorted_records(out[:size], num_elements, width)
            delta.check(patch.ctypes.data, size, width=width, num_elements=num_elements, base=1, version=2)


@pytest.mark.parametrize("width", delta.WIDTHS)
@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_device_applies_patches_to_rows(width, num_elements, num_rows):
    for density in DENSITIES:
        old, new = images(width, num_elements, density, 300)
        patch = torch.from_numpy(device_patch(old, new, width)).cuda()
        borders = np.unique(np.linspace(0, num_elements, num_rows + 1).astype(np.int64)) * width
        memory = torch.zeros(len(old) + 64 * num_rows, dtype=torch.uint8, device="cuda")
        places = borders[:-1] + 64 * np.arange(len(borders) - 1) // width * width
        rows = delta.ImageRows(
            begin=borders[:-1].astype(np.uint64),
            address=(memory.data_ptr() + places).astype(np.uint64),
            length=np.diff(borders).astype(np.uint64),
        )
        spans = list(zip(places.tolist(), borders[:-1].tolist(), borders[1:].tolist(), strict=True))
        for place, a, b in spans:
            memory[place : place + b - a] = torch.from_numpy(old[a:b]).cuda()
        patch_kernels.check(patch, width=width, num_elements=num_elements)
        patch_kernels.apply(
            patch, width=width, num_elements=num_elements,
            rows=patch_kernels.DeviceRows.of(rows, width, num_elements, memory.device),
        )  # fmt: skip
        found = np.concatenate([memory[place : place + b - a].cpu().numpy() for place, a, b in spans])
        assert (found == new).all()
        between = memory.clone()
        for place, a, b in spans:
            between[place : place + b - a] = 0
        assert not between.any()


def test_damaged_patches_are_refused_or_stay_inside():
    old, new = images(2, 50_000, 0.02, 300)
    patch = device_patch(old, new, 2)
    rng = np.random.default_rng(7)
    for _ in range(200):
        damaged = patch.copy()
        damaged[rng.integers(0, len(patch), 3)] = rng.integers(0, 256, 3)
        memory = torch.full((len(old) + 8192,), 0xA5, dtype=torch.uint8, device="cuda")
        memory[4096 : 4096 + len(old)] = torch.from_numpy(old).cuda()
        rows = delta.ImageRows.contiguous(memory.data_ptr() + 4096, len(old))
        there = torch.from_numpy(damaged).cuda()
        try:
            patch_kernels.check(there, width=2, num_elements=50_000)
        except CodecError:
            continue
        patch_kernels.apply(
            there, width=2, num_elements=50_000, rows=patch_kernels.DeviceRows.of(rows, 2, 50_000, memory.device)
        )
        assert (memory[:4096] == 0xA5).all()
        assert (memory[4096 + len(old) :] == 0xA5).all()
