"""The examples run as they are written."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("vllm_server.py", "serves version 3"), ("fsdp_to_vllm.py", "[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]")],
)
def test_an_example_ends_well(name, expected):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected in done.stdout
