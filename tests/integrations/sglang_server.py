"""An SGLang server with weft's plug-in; on CPUs what it imports and does not need is stubbed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.engine_server import Answer, Server, running
from tests.integrations.fsdp_trainer import free_port

STUBS = Path(__file__).parent / "sglang_stubs"


@dataclass(frozen=True)
class SglangServer(Server):
    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        greedy = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        said = self.post("generate", {"input_ids": prompt, "sampling_params": greedy})
        spans = [(span["version"], span["start"], span["end"]) for span in said["meta_info"]["weight_versions"]]
        return Answer(prompt, said["output_ids"], spans)

    @property
    def version(self) -> str:
        return self.get("model_info")["weight_version"]


@contextmanager
def serving(checkpoint: Path, log: Path, *, num_ranks: int = 1, **weft_settings: str) -> Iterator[SglangServer]:
    """A server, until the end of the block."""
    server = SglangServer(f"http://127.0.0.1:{free_port()}", log)
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)),
        *("--host", "127.0.0.1", "--port", server.url.rpartition(":")[2], "--tp-size", str(num_ranks)),
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-overlap-schedule"),
        *("--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--context-length", "512"),
        *("--skip-server-warmup", "--skip-tokenizer-init", "--sleep-on-idle"),
    ]
    env = {
        "PYTHONPATH": os.pathsep.join([str(STUBS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(":"),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if num_ranks == 2 else "0,1",
    }
    settings = {f"WEFT_{name.upper()}": value for name, value in weft_settings.items()}
    with running(command, env | settings, server):
        yield server
