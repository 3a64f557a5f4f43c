"""Every kernel compiles for a GPU, which needs none: the compiler refuses things that the interpreter runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_every_kernel_compiles_for_hopper():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_all"],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assembly = json.loads(done.stdout)
    assert {"walk", "quantize", "amax", "scale", "cast", "encode", "check", "apply", "finish", "open"} <= set(assembly)
    assert {"update", "gather", "restore", "quantize rows", "amax of rows"} <= set(assembly)
    for name in ("walk", "quantize", "quantize rows", "cast", "update"):
        assert assembly[name]["vectors"], f"`{name}` does not read 16 bytes at a time"
