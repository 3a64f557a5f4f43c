"""Labs need root, iproute2, and a kernel that makes namespaces and limits rates."""

from __future__ import annotations

import pytest

from weft.errors import WeftError
from weft.lab import Lab, alike


@pytest.fixture(scope="session")
def lab_obstacle() -> str:
    """Why there are no labs on this machine; empty if there are."""
    try:
        with Lab(alike(hosts=1, nic="1gbit")):
            return ""
    except (WeftError, OSError) as error:
        return str(error)


@pytest.fixture(autouse=True)
def _labs_are_possible(lab_obstacle: str) -> None:
    if lab_obstacle:
        pytest.skip(lab_obstacle)
