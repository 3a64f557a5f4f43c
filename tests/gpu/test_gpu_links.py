"""What one write between memory of GPUs costs, as `weft bench links` measures it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from weft.bench.links import measure  # noqa: E402
from weft.core.topology import load_topology  # noqa: E402
from weft.transport.registry import is_installed  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed")]


def test_both_kinds_of_memory_are_measured():
    report = measure(repeat=1, say=lambda _: None)
    assert {row.memory for row in report.rows if row.transport == "nixl"} == {"cpu", "cuda"}
    host = report.put_into(load_topology("h100-ib400")).host
    assert set(host.op_us["nixl"]) == {"cpu", "cuda"}
    assert host.device_gb_per_s == round(report.device_gb_per_s, 2)
