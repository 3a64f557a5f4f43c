"""Labs need root and iproute2."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.lab.commands import check_possible


@pytest.fixture(autouse=True)
def _labs_are_possible():
    try:
        check_possible()
    except ConfigError as error:
        pytest.skip(str(error))
