"""The loop with trainers and engines on one GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from weft.rl.run.launch import run_here  # noqa: E402
from weft.rl.settings import LoopSettings  # noqa: E402
from weft.transport.registry import is_installed  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [
        {"trainer": "ddp", "num_engines": 2},
        {"trainer": "fsdp2", "engine_dtype": "fp8"},
        pytest.param(
            {"trainer": "ddp", "delta": True, "mode": "patch", "transport": "nixl"},
            marks=pytest.mark.skipif(not is_installed("nixl"), reason="NIXL is not installed"),
        ),
    ],
    ids=lambda options: " ".join(str(value) for value in options.values()),
)
def test_engines_hold_every_version_bit_for_bit(tmp_path, options):
    settings = LoopSettings.of(
        iterations=3, rollouts_per_rank=8, check_bits=True, device="cuda", timeout_s=90.0, **options
    )
    found = run_here(settings, run_dir=tmp_path).summary()
    assert (found["iterations"], found["num_versions"], found["num_aborted"]) == (3, 4, 0)
    assert found["exact"] is True
    assert all(("nixl" if "transport" in options else "cuda_ipc") in link for link in found["links"])
