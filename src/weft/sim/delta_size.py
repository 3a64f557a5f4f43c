"""The size of a delta, and the bytes touched to apply it, from the fraction of elements that changed.

Positions of n changes among N elements carry H(p)/p bits per change (p = n/N, H the binary entropy); a good gap coder
comes close to that. Values add a constant number of bits. Published encodings with fixed fields are modelled as such.
"""

from __future__ import annotations

from math import log2

XOR_ZSTD_VALUE_BITS = 6.55
"""Value bits per change of XOR + zstd: fitted to one published case, NeMo-DCR Qwen3-30B at 3% (1.49 GB)."""


def position_bits(density: float) -> float:
    """Entropy of the positions, in bits per changed element."""
    return -(density * log2(density) + (1 - density) * log2(1 - density)) / density


def entropy_coded_bytes(num_elements: float, density: float) -> float:
    """Bytes of a delta with entropy-coded positions and XOR-ed values."""
    return num_elements * density * (position_bits(density) + XOR_ZSTD_VALUE_BITS) / 8


def indexed_bytes(num_elements: float, density: float, *, index_bytes: int, value_bytes: int) -> float:
    """Bytes of a delta with a fixed-size index and value per change."""
    return num_elements * density * (index_bytes + value_bytes)


BLOCK, GROUPS = 16384, 64
"""weft's patches: elements of a block, and one-byte counts it has (`weft.codec.delta`)."""


def patch_bytes(num_elements: float, density: float, *, width: int) -> float:
    """Bytes of weft's own patches, uncompressed, changes spread evenly; without escapes, which are rare in training."""
    num_blocks = num_elements / BLOCK
    changed_blocks = num_blocks * (1 - (1 - density) ** BLOCK)
    record = GROUPS * changed_blocks + num_elements * density * (1 + (4 if width == 4 else 1))
    return 8 * num_blocks + min(record, num_elements * width)


LINE_BYTES = 128
"""Cache line of a GPU: the least that is read and written where one element changes."""


def apply_traffic(density: float, *, width: int) -> float:
    """Bytes read and written per byte of weights when a patch is applied, changes spread evenly.

    The patch is read; every line with a change is read and written.
    """
    patch = patch_bytes(BLOCK, density, width=width) / (BLOCK * width)
    touched = 1 - (1 - density) ** (LINE_BYTES / width)
    return patch + 2 * touched
