"""The process `weft.rl.run.launch` starts for every rank.

RANK=1 LOCAL_RANK=1 WEFT_LAUNCHER=4711 python -m weft.rl.run.member RUN_DIR
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Let the kernel end this process with its launcher; exit if the launcher has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["WEFT_LAUNCHER"]):
        sys.exit("the launcher is gone")


def main() -> None:
    """Read what the launcher wrote, and run as that rank."""
    die_with_launcher()

    import msgspec  # noqa: PLC0415  # everything else, and torch above all, takes seconds

    from weft.rl.run.links import Links  # noqa: PLC0415
    from weft.rl.run.rank import run_rank  # noqa: PLC0415
    from weft.rl.settings import LoopSettings  # noqa: PLC0415

    run_dir = Path(sys.argv[1])
    settings = msgspec.json.decode((run_dir / "settings.json").read_bytes(), type=LoopSettings)
    links = msgspec.json.decode((run_dir / "links.json").read_bytes(), type=Links)
    run_rank(settings, links, rank=int(os.environ["RANK"]), local_rank=int(os.environ["LOCAL_RANK"]))


if __name__ == "__main__":
    main()
