"""What trainers say of their patches is checked before any of it is read."""

from __future__ import annotations

import pytest

from weft.codec.image import ImageLayout, Section
from weft.errors import CodecError
from weft.runtime.receive.incoming import arriving_patches
from weft.runtime.receive.landing import PatchedLink, PatchPlace

ADDRESS, ROOM = 1 << 20, 256
LAYOUT = ImageLayout(sections=(Section(width=2, begin=0, num_elements=8),), num_bytes=16)
LINK = PatchedLink(
    trainer=3,
    transport="shm",
    address=ADDRESS,
    num_bytes=ROOM,
    chunks=tuple(PatchPlace(layout=LAYOUT, rows=()) for _ in range(3)),
)


def test_patches_lie_one_behind_the_other():
    arriving = arriving_patches(LINK, [1, 65, 64])
    (chunk,) = arriving.chunks
    assert chunk.planes.src.tolist() == [ADDRESS, ADDRESS + 64, ADDRESS + 192]
    assert chunk.planes.position.tolist() == [0, 64, 192]
    assert arriving.total == 130


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [64, 64],
        [64, 64, 64, 64],
        [64, 0, 64],
        [64, -1, 64],
        [65, 65, 1],  # 131 bytes, but the last begins where the memory ends
        [64, 64, 129],
        [64, 64, 2**70],
    ],
)
def test_patches_outside_their_memory_are_refused(sizes):
    with pytest.raises(CodecError, match="trainer 3 sent"):
        arriving_patches(LINK, sizes)
