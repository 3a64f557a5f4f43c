"""Weights that a framework hands over tensor by tensor, as TRL does; on GPUs: tests/gpu/test_gpu_staged.py."""

from __future__ import annotations

import pytest

from tests.support.staged import check_versions_arrive


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_versions_of_staged_tensors_arrive(mode):
    check_versions_arrive("cpu", "cpu", mode=mode)
