"""An inference server in a process of its own, as a user starts it, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 240.0
REQUEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, and the version of the weights that made each of them: (version, first, one past the last)."""

    prompt: list[int]
    tokens: list[int]
    spans: list[tuple[str, int, int]]


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(f"{self.url}/{path}"))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        headers = {"content-type": "application/json"}
        return self._ask(urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers, method="POST"))

    @staticmethod
    def _ask(request: urllib.request.Request) -> Any:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
            text = response.read()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text.decode()


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str], server: Server) -> Iterator[None]:
    """A server, until the end of the block."""
    with server.log.open("wb") as output:
        # engines spin while their processes wait for each other: on few cores nobody else would get any
        process = subprocess.Popen(
            ["nice", *command], env=os.environ | env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_up(process, server)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _wait_until_up(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()[-4000:]
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            server.get("health")
            return
        time.sleep(0.2)
    raise AssertionError(server.log.read_text()[-4000:])
