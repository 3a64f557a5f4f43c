"""Property tests draw the same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.

Without a GPU, Triton kernels run in its interpreter, but not where inference engines are installed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists() and importlib.util.find_spec("vllm") is None:  # inference engines heed it, too
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; see tests/kernels

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
