"""A vLLM server that a trainer keeps fresh, from start to end on one machine without a GPU.

    python examples/vllm_server.py              # a tiny model with random weights
    python examples/vllm_server.py MODEL_DIR    # any checkpoint vLLM can serve; it is "trained" by adding noise

All you add to your own server are the option and the variable on the two lines marked below. The rest of this file is
a trainer: it changes the weights, publishes them, and queries the server before and after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import weft
from weft.integrations.hf import checkpoint_weights

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
PATIENT = weft.TransferSettings(silence_s=30.0)
"""Engine and trainer share a few cores: one that computes may say nothing for seconds."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_model(Path(folder))
        with weft.Controller(num_trainers=1, num_engine_ranks=1, settings=PATIENT) as controller:
            server = start_server(path, controller.address)
            try:
                wait_until_up(server)
                train(path, controller.address)
            finally:
                server.terminate()
                server.wait(60)


def start_server(model: Path, controller: str) -> subprocess.Popen[bytes]:
    """vLLM as usual, with two additions."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT)),
        *("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
        *("--skip-tokenizer-init", "--enable-scale-out"),  # token IDs in and out: no tokenizer needed
        *("--weight-transfer-config", '{"backend": "weft"}'),  # 1. weft's backend
    ]
    env = os.environ | {
        "WEFT_CONTROLLER": controller,  # 2. where versions come from
        "VLLM_SERVER_DEV_MODE": "1",  # for /weight_info
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(command, env=env)


def train(model_dir: Path, controller: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    print("before:   ", ask())
    with weft.Sender(controller, rank=0, weights=checkpoint_weights(model)) as sender:
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            began = time.monotonic()
            sender.publish(version=version).wait_committed()  # the server keeps answering
            took = time.monotonic() - began
            print(f"version {version}: {ask()}  (published and served in {1e3 * took:.0f} ms)")
    served = request("weight_info")["weight_version"]
    print(f"the server says it serves version {served}")
    if served != "3":
        sys.exit("that is not the last version that was published")


def ask() -> str:
    """The server's answer to a prompt, and the versions of the weights that produced it."""
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    choice = request("inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": sampling})["choices"][0]
    return f"{choice['token_ids']} by {[span['version'] for span in choice['weight_versions']]}"


def request(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{URL}/{path}", data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.loads(response.read() or b"null")


def wait_until_up(server: subprocess.Popen[bytes], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            request("health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    sys.exit("the server did not start")


def tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "initializer_range": 0.5}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
