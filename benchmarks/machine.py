"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from typing import Any


def _processor() -> str:
    """Name of the processor, with the architecture; `/proc/cpuinfo` has no names on ARM, `lscpu` does."""
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in listed.splitlines() if line.startswith("Model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }
