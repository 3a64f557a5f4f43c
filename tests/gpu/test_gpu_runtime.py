"""FP8, patches and staging of GPU weights through the whole system: what engines hold is what the reference says."""

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
TRANSPORTS = [kind for kind in ("cuda_ipc", "nixl") if is_installed(kind)]
WAYS = [
    {"mode": "shadow"},
    {"mode": "in_place", "staging": "cpu"},
    {"mode": "patch", "delta": "on"},
    {"mode": "shadow", "delta": "on", "staging": "cpu"},
]


@pytest.mark.parametrize("precision", ["fp8", "mixed"])
@pytest.mark.parametrize(
    ("transport", "way"),
    list(itertools.product(TRANSPORTS, WAYS)),
    ids=lambda value: value if isinstance(value, str) else " ".join(value.values()),
)
def test_engines_hold_what_the_reference_says(transport, way, precision):
    system = System(precision, transport=transport, **way)
    try:
        for version in range(1, 5):
            answers, held = system.publish(version)
            assert set(answers) == {"committed"}
            check(held, version, precision)
    finally:
        system.close()


def test_numbers_that_are_not_finite_are_refused_by_name():
    system = System("fp8", mode="shadow")
    try:
        _, held = system.publish(1)
        check(held, 1, "fp8")
        answers, held = system.publish(2, spoil=True)
        assert all("`a` has 1 elements that are not finite" in answer for answer in answers), answers
        check(held, 1, "fp8")
        _, held = system.publish(3)
        check(held, 3, "fp8")
    finally:
        system.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_offloaded_weights_go_through_the_device(transport):
    system = System("fp8", device="cpu", through="cuda:0", transport=transport, mode="shadow")
    try:
        for version in range(1, 4):
            answers, held = system.publish(version)
            assert set(answers) == {"committed"}
            check(held, version, "fp8")
    finally:
        system.close()
