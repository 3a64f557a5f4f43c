"""Property tests draw the same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.

Without a GPU, Triton kernels run in its interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; see tests/kernels

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
