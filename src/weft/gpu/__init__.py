"""One GPU's memory: bulk copies and the digest over planes of device addresses, as Triton kernels.

    work = GpuWork(0)
    work.copy_digest_planes(planes)         # one launch, whatever the planes are

`tiles` cuts planes into tiles of equal work (NumPy), `walking` has the kernel that walks them, `work` keeps the tables
of each Planes object on the device, `memory` has pinned host memory.
"""

from weft.gpu.memory import Pin, is_pinned, pinned_memory, pinned_view
from weft.gpu.work import GpuWork

__all__ = ["GpuWork", "Pin", "is_pinned", "pinned_memory", "pinned_view"]
