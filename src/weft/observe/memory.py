"""The peak memory of this process."""

from __future__ import annotations

import re
import resource
from pathlib import Path


def peak_rss_bytes() -> int:
    """Peak memory of this process since it started its program.

    `getrusage` would include the process that started it, if that was larger.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
