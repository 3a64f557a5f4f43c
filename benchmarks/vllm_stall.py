"""How long a vLLM engine that generates stands still for a version: weft, and vLLM's own reloading, in one process.

Runs in the engines' environment: `.venv-engines/bin/python benchmarks/vllm_stall.py`. A dense model with random weights
generates without a pause; a trainer process publishes versions. Writes results/vllm.json.

The stall of a version is how much longer the steps around it take than the median step. What is served after the last
version is compared with an engine that loaded it from a file, by vLLM's own checksums.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import machine
import weft
from recording import RESULTS

NUM_VERSIONS = 20
LONGEST_S = 300.0
BETWEEN_STEPS = 8
"""Steps between two versions."""
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def save_checkpoints(folder: Path) -> dict[str, Path]:
    import torch  # noqa: PLC0415
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    paths = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        paths[name] = folder / name
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(paths[name])
    return paths


def publish(pipe: Any, address: str, paths: dict[str, Path]) -> None:
    """The trainer: publishes the weights of checkpoint A or B."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    from weft.integrations.torch import weights_of_tensors  # noqa: PLC0415

    torch.set_num_threads(1)
    values = {name: load_file(path / "model.safetensors") for name, path in paths.items()}
    tensors = {name: value.clone() for name, value in values["A"].items()}
    with weft.Sender(address, rank=0, weights=weights_of_tensors(tensors), timeout_s=60.0) as sender:
        pipe.send("ready")
        while (request := pipe.recv()) is not None:
            version, which = request
            for name, tensor in tensors.items():
                tensor.copy_(values[which][name])
            publication = sender.publish(version=version)
            publication.wait_committed(60.0)
            pipe.send(version)


class Generating:
    """An engine that always has something to generate; the time of every step."""

    def __init__(self, checkpoint: Path, *, controller: str = "", plain_linears: bool = False) -> None:
        import vllm  # noqa: PLC0415

        if plain_linears:
            _keep_plain_linears()
        ours = {
            "weight_transfer_config": {"backend": "weft"},
            "additional_config": {"weft": {"controller": controller}},
        }
        self._llm = vllm.LLM(
            str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
            dtype="float32",
            **(ours if controller else {}),
        )
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True, detokenize=False)
        self._num_requests = 0
        self.step_s: list[float] = []

    def step(self) -> float:
        engine = self._llm.llm_engine
        while engine.get_num_unfinished_requests() < 2:
            self._num_requests += 1
            prompt = {"prompt_token_ids": [self._num_requests % 100 + 1, 2, 3]}
            engine.add_request(str(self._num_requests), prompt, self._sampling)
        began = time.perf_counter()
        engine.step()
        self.step_s.append(time.perf_counter() - began)
        return self.step_s[-1]

    def reload(self, path: Path) -> float:
        """vLLM's own way, from a file: what an update costs without any plug-in."""
        began = time.perf_counter()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        self._llm.reset_prefix_cache(reset_running_requests=True)
        return time.perf_counter() - began

    def status(self) -> dict[str, Any]:
        return self._llm.collective_rpc("weft_status")[0]

    def checksums(self) -> Any:
        return self._llm.collective_rpc("compute_weight_checksums")


def _keep_plain_linears() -> None:
    """As on GPUs: linears compute with their parameters, not with packed copies."""
    from torch.nn.functional import linear  # noqa: PLC0415
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    utils.cpu_unquantized_gemm = lambda layer, x, weight, bias=None: linear(x, weight, bias)


def by_weft(pipe: Any, paths: dict[str, Path], mode: str, plain_linears: bool) -> None:
    """Versions into an engine that generates, beside steps without any."""
    settings = weft.TransferSettings(mode=mode, silence_s=20.0)
    with weft.Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller:
        ours, theirs = get_context("spawn").Pipe()
        trainer = get_context("spawn").Process(target=publish, args=(theirs, controller.address, paths), daemon=True)
        trainer.start()
        engine = Generating(paths["A"], controller=controller.address, plain_linears=plain_linears)
        assert ours.poll(120), "the trainer does not answer"
        assert ours.recv() == "ready"
        quiet = [engine.step() for _ in range(40)]
        stalls, pauses, latencies = [], [], []
        for version in range(1, NUM_VERSIONS + 1):
            began, first = time.perf_counter(), len(engine.step_s)
            ours.send((version, "B" if version % 2 else "A"))
            while not ours.poll(0):
                engine.step()
            assert ours.recv() == version
            latencies.append(time.perf_counter() - began)
            during = engine.step_s[first:]
            stalls.append(max(during) - statistics.median(quiet))
            pauses.append(engine.status()["pause_s"])
            for _ in range(BETWEEN_STEPS):
                engine.step()
        found = {"checksums": engine.checksums(), "staged_bytes": engine.status()["staged_bytes"]}
        ours.send(None)
    times = {"step_s": statistics.median(quiet), "stalls_s": stalls, "pauses_s": pauses, "latencies_s": latencies}
    pipe.send(found | times)


def by_reloading(pipe: Any, paths: dict[str, Path]) -> None:
    """vLLM alone: reloads from files while it generates."""
    engine = Generating(paths["A"])
    quiet = [engine.step() for _ in range(40)]
    stalls = []
    for version in range(1, NUM_VERSIONS + 1):
        stalls.append(engine.reload(paths["B" if version % 2 else "A"]))
        for _ in range(BETWEEN_STEPS):
            engine.step()
    pipe.send({"step_s": statistics.median(quiet), "stalls_s": stalls, "checksums": engine.checksums()})


def in_a_process(target: Any, *arguments: Any) -> dict[str, Any]:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    assert ours.poll(LONGEST_S), "it takes too long"
    found = ours.recv()  # raises EOFError if the process failed
    process.join(60)
    return found


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        paths = save_checkpoints(folder)
        num_bytes = (paths["A"] / "model.safetensors").stat().st_size
        rows = {
            "weft, shadow": in_a_process(by_weft, paths, "shadow", False),
            "weft, shadow, plain linears": in_a_process(by_weft, paths, "shadow", True),
            "vLLM reload_weights": in_a_process(by_reloading, paths),
        }
    finally:
        shutil.rmtree(folder)
    sums = {name: row.pop("checksums") for name, row in rows.items()}
    assert sums["weft, shadow"] == sums["vLLM reload_weights"], "the engines do not hold the same weights"
    for name, row in rows.items():
        print(f"{name:30s} stall {1e3 * statistics.median(row['stalls_s']):8.1f} ms a version")
    report = {"machine": machine.describe(), "num_versions": NUM_VERSIONS, "num_bytes": num_bytes, "rows": rows}
    (RESULTS / "vllm.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: statistics.median(row["stalls_s"]) for name, row in rows.items()}))


if __name__ == "__main__":
    main()
