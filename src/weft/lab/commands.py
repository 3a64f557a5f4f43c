"""`ip` and `tc`, with errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from weft.errors import ConfigError, WeftError

TIMEOUT_S = 30.0


def check_possible() -> None:
    """Raise ConfigError where labs are not possible."""
    missing = [name for name in ("ip", "tc", "unshare", "setpriv", "mount") if shutil.which(name) is None]
    if missing:
        raise ConfigError(f"labs need `{missing[0]}`", hint="apt install iproute2 util-linux")
    if os.geteuid() != 0:
        raise ConfigError("labs need root: they make network namespaces", hint="sudo weft lab …")


def call(*arguments: str) -> str:
    """What a command prints. Raises WeftError with what it complains about."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise WeftError(f"`{' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def batch(tool: str, lines: Sequence[str], *, namespace: str | None = None) -> None:
    """Many commands of `ip` or `tc` in one process."""
    if not lines:
        return
    arguments = [tool, *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(
        arguments, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise WeftError(f"`{tool}` failed: {done.stderr.strip()}")


def namespaces() -> list[str]:
    """Names of all network namespaces."""
    return [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line]


def links(namespace: str) -> list[dict[str, Any]]:
    """The network cards of a namespace, with their counters."""
    return list(json.loads(call("ip", "-n", namespace, "-s", "-j", "link", "show")))
