"""Links between CPU and GPU memory, through pinned host memory: what engines hold is what the reference says."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.gpu.system import System, check  # noqa: E402
from weft.transport.registry import is_installed  # noqa: E402

pytestmark = pytest.mark.gpu
DIRECTIONS = [("cpu", "cuda"), ("cuda", "cpu")]
TRANSPORTS = [kind for kind in ("auto", "nixl") if kind == "auto" or is_installed(kind)]
WAYS = [
    {"mode": "shadow"},
    {"mode": "shadow", "digest": "off"},
    {"mode": "in_place"},
    {"mode": "patch", "delta": "on"},
    {"mode": "shadow", "delta": "on"},
    {"mode": "in_place", "delta": "on"},
]


@pytest.mark.parametrize(
    ("trainers", "engine", "transport", "way"),
    [(*sides, transport, way) for sides, transport, way in itertools.product(DIRECTIONS, TRANSPORTS, WAYS)],
    ids=lambda value: value if isinstance(value, str) else " ".join(value.values()),
)
def test_engines_hold_what_the_reference_says(trainers, engine, transport, way):
    precision = "mixed" if way["mode"] == "in_place" else "fp8"
    system = System(precision, trainers, engine_device=engine, transport=transport, **way)
    try:
        for version in range(1, 5):
            answers, held = system.publish(version)
            assert set(answers) == {"committed"}
            check(held, version, precision)
    finally:
        system.close()
