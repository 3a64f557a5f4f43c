"""The dashboard, in a real browser, of real fleets: what it shows is what the controller recorded."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.errors import ConfigError
from weft.observe.events_file import find_version, read_versions
from weft.web.dashboard import serve_dashboard
from weft.web.page_file import write_page
from weft.web.reports import report_of

WAIT_S = 60.0
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="Chromium is not installed (apt-get install chromium chromium-driver)"
)
SIZE = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver  # noqa: PLC0415 - only where there is a browser
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1600,1400"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(WAIT_S)
    yield driver
    driver.quit()


def until(browser: Any, check: Callable[[], Any]) -> Any:
    """Wait until a check holds."""
    from selenium.webdriver.support.ui import WebDriverWait  # noqa: PLC0415

    return WebDriverWait(browser, WAIT_S).until(lambda _: check())


def text(browser: Any, element: str) -> str:
    return str(browser.find_element("id", element).text)


def links_shown(browser: Any) -> dict[tuple[int, int], tuple[float, ...]]:
    """Bytes and seconds of both ends of every link, exactly as the page has them."""
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#links tr[data-trainer]')].map(row => ({...row.dataset}))"
    )
    keys = ("sent", "sentS", "arrived", "arrivedS")
    return {(int(row["trainer"]), int(row["engine"])): tuple(float(row[key]) for key in keys) for row in rows}


def links_recorded(events: Path, version: int) -> dict[tuple[int, int], tuple[float, ...]]:
    record = find_version(events, version)
    arrived = {(trainer, engine): (size, took) for trainer, engine, size, took in record["arrivals"]}
    return {(t, e): (float(size), took, *map(float, arrived[t, e])) for t, e, size, took in record["writes"]}


class Fleet:
    """Two trainers that hold a half each, and two engines that hold all, in threads of this process."""

    def __init__(self, stack: contextlib.ExitStack, address: str) -> None:
        self.engines = [stack.enter_context(self._engine(address, rank)) for rank in range(2)]
        self.trainers = [stack.enter_context(self._trainer(address, rank)) for rank in range(2)]

    @staticmethod
    def _engine(address: str, rank: int) -> weft.Receiver:
        weights = weft.Weights.from_arrays({"w": np.zeros(SIZE, np.float32)})
        return weft.Receiver(address, rank=rank, weights=weights)

    @staticmethod
    def _trainer(address: str, rank: int) -> weft.Sender:
        part = weft.Part(shape=(SIZE,), lo=(rank * SIZE // 2,))
        half = weft.Weights.from_arrays({"w": np.ones(SIZE // 2, np.float32)}, parts={"w": part})
        return weft.Sender(address, rank=rank, weights=half)

    def version(self, number: int) -> None:
        takers = [threading.Thread(target=engine.take, args=(WAIT_S,)) for engine in self.engines]
        for taker in takers:
            taker.start()
        for publication in [trainer.publish(version=number) for trainer in self.trainers]:
            publication.wait_committed(WAIT_S)
        for taker in takers:
            taker.join()


def requests(browser: Any) -> list[str]:
    """Addresses the page has asked for since the last call."""
    found = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in found if one["method"] == "Network.requestWillBeSent"]


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@needs_browser
def test_the_page_shows_what_was_recorded_also_after_a_restart(browser, tmp_path):
    events = tmp_path / "events.jsonl"
    requests(browser)
    with serve_dashboard("127.0.0.1:0", events) as address, contextlib.ExitStack() as members:
        browser.get(address)
        controller = weft.Controller(num_trainers=2, num_engine_ranks=2, events=events)
        with controller:
            fleet = Fleet(members, controller.address)
            for number in (1, 2, 3):
                fleet.version(number)
            until(browser, lambda: text(browser, "chosen").startswith("3, committed"))
            assert links_shown(browser) == links_recorded(events, 3)
            assert "4 of 4 members" in text(browser, "headline")
            assert text(browser, "sentence").startswith("version 3 took")
            assert len(browser.find_elements("css selector", "#fleet .member")) == 4
            where = controller.address
        with weft.Controller(where, num_trainers=2, num_engine_ranks=2, events=events) as again:
            until(browser, lambda: "the controller was restarted" in text(browser, "failures"))
            assert again.wait_planned(WAIT_S)
            fleet.version(4)
            until(browser, lambda: text(browser, "chosen").startswith("4, committed"))
            assert links_shown(browser) == links_recorded(events, 4)
            browser.find_element("tag name", "body").send_keys("\ue012")  # left
            until(browser, lambda: text(browser, "chosen").startswith("3, committed"))
            assert links_shown(browser) == links_recorded(events, 3), "a version of the first controller"
            cards = text(browser, "cards")
            assert f"{len(read_versions(events))}, 0" in cards
        assert all(each.startswith((address, "data:")) for each in requests(browser)), "nothing from elsewhere"
        assert complaints(browser) == []
        browser.get("about:blank")


@needs_browser
def test_light_and_dark(browser, tmp_path):
    def shade() -> int:
        found = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in found[found.index("(") + 1 : -1].split(",")[:3])

    with serve_dashboard("127.0.0.1:0", tmp_path / "events.jsonl") as address:
        for scheme, is_dark in (("light", False), ("dark", True)):
            feature = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
            browser.get(address)
            until(browser, lambda: "0 of 0" in text(browser, "headline"))
            assert (shade() < 300) is is_dark
            browser.find_element("tag name", "body").send_keys("d")
            assert (shade() < 300) is not is_dark
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.get("about:blank")


@needs_browser
def test_a_report_draws_its_charts(browser, tmp_path):
    events = tmp_path / "events.jsonl"
    with contextlib.ExitStack() as stack:
        controller = stack.enter_context(weft.Controller(num_trainers=2, num_engine_ranks=2, events=events))
        fleet = Fleet(stack, controller.address)
        for number in (1, 2):
            fleet.version(number)
    page = write_page(report_of(events), tmp_path / "report.html")
    requests(browser)
    browser.get(page.as_uri())
    until(browser, lambda: len(browser.find_elements("css selector", ".chart:has(canvas)")) == 3)
    width = browser.execute_script("return document.querySelector('.wide').getBoundingClientRect().width / innerWidth")
    assert width > 0.9, "it uses the width of the window"
    assert all(each.startswith(("file:", "data:")) for each in requests(browser))
    assert complaints(browser) == []


def answer(address: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_beyond_loopback_a_token_is_needed(tmp_path):
    with serve_dashboard("0.0.0.0:0", tmp_path / "events.jsonl") as address:
        base, _, token = address.partition("?token=")
        for path in ("", "api/state", "api/links", "api/versions/1", "api/changes", "page/charts.js"):
            assert answer(base + path)[0] == 401
            assert answer(f"{base}{path}?token={token}x")[0] == 401
        assert answer(address)[0] == 200
        assert answer(f"{base}api/state", Cookie=f"weft_token={token}")[0] == 200


def test_only_reads_and_knows_its_files(tmp_path):
    with serve_dashboard("127.0.0.1:0", tmp_path / "events.jsonl") as address:
        assert json.loads(answer(f"{address}api/state")[1])["versions"] == []
        assert answer(f"{address}api/versions/3")[0] == 404
        for name in ("dashboard.py", "..%2Fstory.py", "%2e%2e/story.py"):
            assert answer(f"{address}page/{name}")[0] == 404
        request = urllib.request.Request(f"{address}api/state", method="POST", data=b"{}")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=WAIT_S)


@pytest.mark.parametrize("bind", ["7080", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:http"])
def test_wrong_addresses_are_named(tmp_path, bind):
    with (
        pytest.raises(ConfigError, match=f"the dashboard cannot be served on `{bind}`"),
        serve_dashboard(bind, tmp_path / "events.jsonl"),
    ):
        pass


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[Any, str, str]]:
    """A command that serves the dashboard: its process, what it said, and the address."""
    command = [sys.executable, "-m", "weft", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "dashboard at" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            yield process, said, said.split("dashboard at ")[1].strip()
        finally:
            process.kill()


def test_a_controller_serves_its_dashboard():
    command = ["controller", "--trainers", "1", "--engine-ranks", "1", "--bind", "tcp://127.0.0.1:*"]
    with serving(*command, "--dashboard", "127.0.0.1:0") as (process, _, address):
        assert json.loads(answer(f"{address}api/state")[1])["controller"]["trainers"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def test_a_file_that_does_not_exist_yet_is_said(tmp_path):
    with serving("dashboard", str(tmp_path / "events.jsonl"), "--bind", "127.0.0.1:0") as (process, said, _):
        assert "does not exist yet" in said
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
