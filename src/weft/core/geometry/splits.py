"""How a length is divided into parts: by PyTorch's uneven rule, or as evenly as possible."""

from __future__ import annotations


def chunk(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Start and length of one part by PyTorch's uneven rule: ceil-sized chunks, the last ones short or empty."""
    step = -(-size // num_parts)
    start = min(part * step, size)
    return start, min(step, size - start)


def even_split(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Start and length of one part when sizes differ by at most one, longer parts first (layers, experts)."""
    step, longer = divmod(size, num_parts)
    start = part * step + min(part, longer)
    return start, step + (part < longer)
