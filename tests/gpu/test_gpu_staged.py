"""Weights that a framework hands over tensor by tensor: staged in host memory, with GPU memory on either side."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.support.staged import check_versions_arrive  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize(("trainer", "engine"), [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_versions_of_staged_tensors_arrive(trainer, engine, mode):
    check_versions_arrive(trainer, engine, mode=mode)
