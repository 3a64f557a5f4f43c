"""Property tests draw the same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.

Without a GPU, Triton kernels run in its interpreter, but not where inference engines are installed.

A test that failed while the whole machine stood still is repeated; the summary names it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.machine import Machine

if not Path("/dev/nvidiactl").exists() and importlib.util.find_spec("vllm") is None:  # inference engines heed it, too
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; see tests/kernels

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

MACHINE = pytest.StashKey[Machine]()
MAX_REPEATS = 2
SLOW = ("process", "lab", "kernels")
"""Folders of tests that take long, or wait."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in SLOW)  # else one process works last, alone
    _repeat_when_the_machine_stands_still(config, items)


def _repeat_when_the_machine_stands_still(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not items or config.option.usepdb or not config.pluginmanager.hasplugin("rerunfailures"):
        return
    machine = config.stash[MACHINE] = Machine()

    def failed_by_machine(error: BaseException | None) -> bool:
        return error is not None and bool(machine.stands_still())

    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=MAX_REPEATS, condition=failed_by_machine))


@pytest.fixture(autouse=True)
def _only_what_happens_in_this_test(request: pytest.FixtureRequest) -> None:
    if machine := request.config.stash.get(MACHINE, None):
        machine.stood_still()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Also what workers repeated."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_line(f"REPEATED {report.nodeid}: the machine stood still", yellow=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if machine := config.stash.get(MACHINE, None):
        machine.close()
