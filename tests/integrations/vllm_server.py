"""A vLLM server with weft's backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.engine_server import Answer, Server, running
from tests.integrations.fsdp_trainer import free_port
from tests.integrations.vllm_process import ENVIRONMENT


@dataclass(frozen=True)
class VllmServer(Server):
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


@contextmanager
def serving(
    checkpoint: Path, log: Path, *more: str, kv_cache_gib: str = "1", **weft_settings: str
) -> Iterator[VllmServer]:
    """A server, until the end of the block; with further arguments and settings of weft. Without `kv_cache_gib` its KV
    cache gets all the memory it is given that nothing else has."""
    server = VllmServer(f"http://127.0.0.1:{free_port()}", log)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--host", "127.0.0.1", "--port", server.url.rpartition(":")[2]),
        *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--skip-tokenizer-init"),
        *("--enable-scale-out", "--weight-transfer-config", '{"backend": "weft"}', *more),
    ]
    settings = {f"WEFT_{name.upper()}": value for name, value in weft_settings.items()}
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment = ENVIRONMENT | settings | own | {"VLLM_CPU_KVCACHE_SPACE": kv_cache_gib}
    if not kv_cache_gib:
        del environment["VLLM_CPU_KVCACHE_SPACE"]
    with running(command, environment, server):
        yield server
