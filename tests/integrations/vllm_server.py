"""A vLLM server in a process of its own, as a user starts it, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.fsdp_trainer import free_port
from tests.integrations.vllm_process import ENVIRONMENT

START_S = 240.0
REQUEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, and the version of the weights that made each of them."""

    prompt: list[int]
    tokens: list[int]
    spans: list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    log: Path

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        greedy = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
        (choice,) = self.post("inference/v1/generate", {"token_ids": prompt, "sampling_params": greedy})["choices"]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        return Answer(prompt, choice["token_ids"], spans)

    @property
    def version(self) -> str:
        return self.get("weight_info")["weight_version"]

    def status(self) -> list[dict[str, Any]]:
        return self.post("collective_rpc", {"method": "weft_status"})["results"]

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
        return json.loads(text) if text else None


@contextmanager
def serving(checkpoint: Path, log: Path, **weft_settings: str) -> Iterator[Server]:
    """A server with weft's backend, until the end of the block."""
    port = free_port()
    arguments = [
        *("--model", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--skip-tokenizer-init"),
        *("--enable-scale-out", "--weight-transfer-config", '{"backend": "weft"}'),
    ]
    settings = {f"WEFT_{name.upper()}": value for name, value in weft_settings.items()}
    server_env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env = os.environ | ENVIRONMENT | settings | server_env
    with log.open("wb") as output:
        # vLLM's processes spin while they wait for each other: on few cores nobody else would get any
        command = ["nice", sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            server = Server(f"http://127.0.0.1:{port}", log)
            _wait_until_up(process, server)
            yield server
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
