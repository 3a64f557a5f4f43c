"""Patches made, checked and applied on a GPU equal those of the CPU (the order of records aside)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.codec import delta  # noqa: E402
from weft.codec.gpu.patcher import GpuPatcher  # noqa: E402
from weft.codec.image import ImageLayout, Section  # noqa: E402
from weft.codec.patching import ImagePair, PatchedImage  # noqa: E402

SIZES = [1, 16385]
CHANGES = [(0.0, 1), (0.01, 200), (0.3, 1 << 7), (1.0, 1)]
"""Share of the elements that change, and by how much at most."""


def layout_of(*sections: tuple[int, int]) -> ImageLayout:
    """Sections of (width, elements)."""
    made, at = [], 0
    for width, count in sections:
        made.append(Section(width=width, begin=at, num_elements=count))
        at += -(-width * count // 64) * 64
    return ImageLayout(sections=tuple(made), num_bytes=at)


def images(layout: ImageLayout, density: float, reach: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([layout.num_bytes, reach])
    old = rng.integers(0, 256, layout.num_bytes, dtype=np.uint8)
    new = old.copy()
    for part in layout.sections:
        mine = new[part.begin : part.begin + part.num_bytes].view(f"u{part.width}")
        hit = rng.random(len(mine)) < density
        mine[hit] += rng.integers(1, reach, hit.sum(), endpoint=True).astype(mine.dtype)
    return old, new


def on(work, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy()).to(work.device)


def patches_of(work, layout: ImageLayout, old: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    out = torch.zeros(layout.max_patch_bytes, dtype=torch.uint8, device=work.device)
    now, before = on(work, new), None if old is None else on(work, old)
    images = ImagePair(
        layout=layout,
        now=now.data_ptr(),
        old=None if before is None else before.data_ptr(),
        out=out.data_ptr(),
        capacity=len(out),
    )
    (size,) = GpuPatcher(work).encode([images], base=1, version=2)()
    return out[:size].cpu().numpy()


def patched(layout: ImageLayout, data: torch.Tensor, rows: Sequence[delta.ImageRows]) -> PatchedImage:
    return PatchedImage(layout=layout, patches=data.data_ptr(), num_bytes=len(data), rows=rows)


def cpu_patches(layout: ImageLayout, old: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    out = np.zeros(layout.max_patch_bytes, dtype=np.uint8)
    before = None if old is None else old.ctypes.data
    size = layout.encode(new.ctypes.data, before, out.ctypes.data, len(out), base=1, version=2)
    return out[:size]


def sorted_records(layout: ImageLayout, patches: np.ndarray) -> list[bytes]:
    """The records in the order of their blocks."""
    found, at = [], 0
    for part in layout.sections:
        patch = patches[at:]
        table = delta.table_of(patch, part.num_elements)
        sizes = delta.record_sizes(part.width, part.num_elements, table["changes"], table["escapes"])
        columns = zip(table["offset"].tolist(), sizes.tolist(), strict=True)
        found += [patch[offset * 4 : offset * 4 + size].tobytes() for offset, size in columns]
        found += [table[name].tobytes() for name in ("changes", "escapes")]  # offsets are in no order on a GPU
        at += -(-delta.read_header(patch.ctypes.data, len(patch)).num_bytes // 8) * 8
    return found


MIXED = ((2, 20_000), (4, 333), (1, 16_385))
SECTIONS = [*(((width, count),) for width in delta.WIDTHS for count in SIZES), MIXED]


@pytest.mark.parametrize("sections", SECTIONS, ids=str)
@pytest.mark.parametrize(("density", "reach"), CHANGES)
def test_a_patch_is_the_same_and_gives_the_new_image(work, sections, density, reach):
    layout = layout_of(*sections)
    old, new = images(layout, density, reach)
    patches = patches_of(work, layout, old, new)
    wanted = cpu_patches(layout, old, new)
    assert len(patches) == len(wanted)
    assert sorted_records(layout, patches) == sorted_records(layout, wanted)
    layout.check(patches.ctypes.data, len(patches), base=1, version=2)
    image, data = on(work, old), on(work, patches)
    patcher, one = GpuPatcher(work), patched(layout, data, layout.contiguous(image.data_ptr()))
    assert patcher.check([one], base=1, version=2) == [None]
    patcher.apply([one])
    assert np.array_equal(image.cpu().numpy(), new)


def test_anchors_are_the_same(work):
    layout = layout_of(*MIXED)
    _, new = images(layout, 0.0, 1)
    patches = patches_of(work, layout, None, new)
    assert np.array_equal(patches, cpu_patches(layout, None, new))
    data, image = on(work, patches), on(work, np.zeros_like(new))
    patcher, one = GpuPatcher(work), patched(layout, data, layout.contiguous(image.data_ptr()))
    assert patcher.check([one], base=None, version=2) == [None]
    patcher.apply([one])
    for part in layout.sections:
        mine = slice(part.begin, part.begin + part.num_bytes)
        assert np.array_equal(image.cpu().numpy()[mine], new[mine])


@pytest.mark.parametrize("width", delta.WIDTHS)
def test_rows_that_lie_apart(work, width):
    layout = layout_of((width, 20_000))
    old, new = images(layout, 0.02, 300)
    old, new = (image[: 20_000 * width] for image in (old, new))
    data = on(work, patches_of(work, layout, old, new))
    borders = np.array([0, 1, 777, 16_000, 20_000]) * width
    places = borders[:-1] + 64 * np.arange(4)
    memory = torch.zeros(len(old) + 256, dtype=torch.uint8, device=work.device)
    spans = list(zip(places.tolist(), borders[:-1].tolist(), borders[1:].tolist(), strict=True))
    for place, a, b in spans:
        memory[place : place + b - a] = on(work, old[a:b])
    rows = delta.ImageRows(
        begin=borders[:-1].astype(np.uint64),
        address=(memory.data_ptr() + places).astype(np.uint64),
        length=np.diff(borders).astype(np.uint64),
    )
    GpuPatcher(work).apply([patched(layout, data, [rows])])
    found = memory.cpu().numpy()
    for place, a, b in spans:
        assert np.array_equal(found[place : place + b - a], new[a:b])
        found[place : place + b - a] = 0
    assert not found.any()


def test_damaged_patches_are_refused_or_stay_inside(work):
    layout = layout_of((2, 20_000), (1, 300))
    old, new = images(layout, 0.02, 300)
    patches = patches_of(work, layout, old, new)
    rng = np.random.default_rng(7)
    patcher = GpuPatcher(work)
    for number in range(40):
        damaged = patches.copy()
        reach = 64 if number % 2 else len(patches)
        damaged[rng.integers(0, reach, 3)] = rng.integers(0, 256, 3)
        memory = torch.full((len(old) + 8192,), 0xA5, dtype=torch.uint8, device=work.device)
        memory[4096 : 4096 + len(old)] = on(work, old)
        data = on(work, damaged)
        one = patched(layout, data, layout.contiguous(memory.data_ptr() + 4096))
        if patcher.check([one], base=1, version=2) != [None]:
            continue
        patcher.apply([one])
        assert (memory[:4096] == 0xA5).all()
        assert (memory[4096 + len(old) :] == 0xA5).all()


@pytest.mark.parametrize(
    ("base", "version", "cut", "said"),
    [(3, 2, 0, "to version 1"), (1, 9, 0, "for version 2"), (1, 2, 8, "no valid patch"), (1, 2, -8, "are used")],
)
def test_what_does_not_fit_is_refused(work, base, version, cut, said):
    layout = layout_of((2, 700))
    patches = patches_of(work, layout, *images(layout, 0.1, 5))
    data = on(work, np.concatenate([patches, np.zeros(8, dtype=np.uint8)]))
    one = patched(layout, data[: len(patches) - cut], ())
    assert said in str(GpuPatcher(work).check([one], base=base, version=version)[0])


def test_many_images_at_once(work):
    """Sizes, sections and densities of all kinds in one call; a damaged one is named, and the others are applied."""
    layouts = [layout_of(*MIXED), layout_of((2, 1)), layout_of((1, 16_385), (2, 40_000)), layout_of((2, 33_000))]
    pairs = [images(layout, *change) for layout, change in zip(layouts, CHANGES, strict=True)]
    olds, news = zip(*((on(work, image) for image in pair) for pair in pairs), strict=True)
    outs = [torch.zeros(layout.max_patch_bytes, dtype=torch.uint8, device=work.device) for layout in layouts]
    patcher = GpuPatcher(work)
    wanted = [
        ImagePair(layout=layout, now=new.data_ptr(), old=old.data_ptr(), out=out.data_ptr(), capacity=len(out))
        for layout, new, old, out in zip(layouts, news, olds, outs, strict=True)
    ]
    sizes = patcher.encode(wanted, base=1, version=2)()
    alone = [cpu_patches(layout, *pair) for layout, pair in zip(layouts, pairs, strict=True)]
    assert sizes == [len(patches) for patches in alone]
    made = [out[:size] for out, size in zip(outs, sizes, strict=True)]
    rows = [layout.contiguous(old.data_ptr()) for layout, old in zip(layouts, olds, strict=True)]
    all_of_them = [patched(*each) for each in zip(layouts, made, rows, strict=True)]
    assert patcher.check(all_of_them, base=1, version=2) == [None] * 4
    torn = [*all_of_them[:2], all_of_them[2]._replace(num_bytes=sizes[2] - 8), all_of_them[3]]
    said = patcher.check(torn, base=1, version=2)
    assert [problem is None for problem in said] == [True, True, False, True]
    patcher.apply(all_of_them)
    for old, (_, new) in zip(olds, pairs, strict=True):
        assert np.array_equal(old.cpu().numpy(), new)
