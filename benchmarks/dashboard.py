"""The dashboard of a demo run and of a rehearsal with 384 members, in a browser: pictures for docs/, and what it costs.

`python benchmarks/dashboard.py`; needs Chromium, about four minutes on two cores. Writes results/dashboard.json.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

import machine
from recording import RESULTS
from weft.observe.events_file import read_versions
from weft.web.dashboard import serve_dashboard

DOCS = Path(__file__).parent.parent / "docs"
WATCHED_S = {"demo": 10.0, "rehearsal": 40.0}
START_S = 400.0
HEADLESS_BORDER = 150
"""What a browser's window has beside the page."""
WIDTH, HEIGHT = 1500, 1000
MAX_HEIGHT = 4000
COMMANDS = {
    "demo": ("demo", "--iterations", "120", "--out", "{folder}"),
    "rehearsal": ("rehearse", "chen-kimi-k2", "--versions", "8", "--events", "{folder}/events.jsonl"),
}


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Performance.enable", {})
    try:
        yield driver
    finally:
        driver.quit()


def busy_s(driver: Any) -> float:
    """Processor time the page's thread has used."""
    found = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(metric["value"] for metric in found if metric["name"] == "TaskDuration"))


def picture(driver: Any, name: str, theme: str) -> None:
    feature = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    height = driver.execute_script("return document.documentElement.scrollHeight")
    driver.set_window_size(WIDTH, min(height + HEADLESS_BORDER, MAX_HEIGHT))
    time.sleep(1.0)
    suffix = "" if theme == "light" else "-dark"
    driver.save_screenshot(str(DOCS / f"dashboard-{name}{suffix}.png"))


def watch(driver: Any, name: str, folder: Path) -> dict[str, Any]:
    """Open the page while the command runs: its work per second, then pictures."""
    events = folder / "events.jsonl"
    driver.set_window_size(WIDTH, HEIGHT)
    command = [part.format(folder=folder) for part in COMMANDS[name]]
    with (
        serve_dashboard("127.0.0.1:0", events) as address,
        subprocess.Popen([sys.executable, "-m", "weft", *command], stdout=subprocess.DEVNULL) as process,
    ):
        driver.get(address)
        deadline = time.monotonic() + START_S
        while (not events.exists() or len(read_versions(events)) < 3) and time.monotonic() < deadline:
            time.sleep(0.2)
        before, num_before, began = busy_s(driver), len(read_versions(events)), time.monotonic()
        time.sleep(WATCHED_S[name])
        lasted_s = time.monotonic() - began
        row = {
            "run": name,
            "members": driver.execute_script("return document.querySelectorAll('#fleet .member').length"),
            "versions_per_s": (len(read_versions(events)) - num_before) / lasted_s,
            "page_ms_per_s": 1e3 * (busy_s(driver) - before) / lasted_s,
        }
        for theme in ("light", "dark"):
            picture(driver, name, theme)
        process.wait(START_S)
    return row


if __name__ == "__main__":
    with browser() as driver, tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in COMMANDS:
            (Path(folder) / name).mkdir()
            rows.append(watch(driver, name, Path(folder) / name))
            print(rows[-1])
    found = {"machine": machine.describe(), "rows": rows}
    (RESULTS / "dashboard.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
