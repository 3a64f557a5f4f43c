"""Every Triton kernel against the CPU: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def work():
    """Who works on `work.device`'s memory."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        from weft.gpu import GpuWork  # noqa: PLC0415 - only where Triton is installed

        return GpuWork(0)
    from tests.support.interpreted import InterpretedWork  # noqa: PLC0415 - only where Triton is installed

    return InterpretedWork()
