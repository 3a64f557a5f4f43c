"""What a process says of its own memory is its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from weft.observe.memory import peak_rss_bytes

CHILD = "from weft.observe.memory import peak_rss_bytes; print(peak_rss_bytes())"


def test_the_memory_of_whoever_started_it_does_not_count():
    large = np.ones(400_000_000, dtype=np.uint8)
    assert peak_rss_bytes() > large.nbytes
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert 0 < int(child.stdout) < large.nbytes
