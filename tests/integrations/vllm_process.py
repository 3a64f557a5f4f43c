"""vLLM engines in a process of their own: loaded one after the other, asked what they hold and say."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.tiny_models import PROMPTS
from tests.support.processes import Process

LOAD_S = 240.0
LOOK_S = 60.0
NUM_TOKENS = 16
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in the process that makes it; several ranks do not
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise a fraction of all memory
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What an engine holds and says at one moment."""

    tokens: list[list[int]]
    checksums: list[dict[str, str]]
    """vLLM's own, of every parameter of every rank."""
    versions: list[str]
    """Of the tokens, in order."""
    status: list[dict[str, Any]]
    """What weft's plug-in says of every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Which engine to load."""

    checkpoint: Path
    controller: str = ""
    """Where to get versions from; without one the engine is never written to."""
    num_ranks: int = 1
    expert_parallel: bool = False
    can_generate: bool = True
    cache: str = "keep"
    plain_linears: bool = False
    """Let linears compute with their parameters, as on GPUs; on CPUs vLLM computes with packed copies of them."""


@dataclass(frozen=True, slots=True)
class Continue:
    """What greedy tokens follow each of these beginnings?"""

    beginnings: list[list[int]]
    counts: list[int]


def run_engines(pipe: Any) -> None:
    """Load, look, unload, as asked."""
    os.environ.update(ENVIRONMENT)
    engine: _Engine | None = None
    while True:
        while not pipe.poll(0.005):
            if engine is not None:
                engine.step()
        match pipe.recv():
            case None:
                return
            case Load() as load:
                engine = _Engine(load)
                pipe.send("loaded")
            case "look":
                assert engine is not None
                pipe.send(engine.look())
            case Continue() as request:
                assert engine is not None
                pipe.send(engine.tokens_after(request))
            case "unload":
                assert engine is not None
                engine.close()
                engine = None
                gc.collect()
                pipe.send("unloaded")


_STOCK: dict[str, Any] = {}
"""vLLM's own functions, where they were replaced."""


def _choose_linears(*, plain: bool) -> None:
    from torch.nn.functional import linear  # noqa: PLC0415
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    replacements = {
        "dispatch_cpu_unquantized_gemm": lambda layer, remove_weight: None,
        "cpu_unquantized_gemm": lambda layer, x, weight, bias=None: linear(x, weight, bias),
    }
    for name, replacement in replacements.items():
        stock = _STOCK.setdefault(name, getattr(utils, name))
        setattr(utils, name, replacement if plain else stock)


class _Engine:
    def __init__(self, load: Load) -> None:
        import vllm  # noqa: PLC0415

        _choose_linears(plain=load.plain_linears)
        ours = {
            "weight_transfer_config": {"backend": "weft"},
            "additional_config": {"weft": {"controller": load.controller, "cache": load.cache}},
        }
        self._load = load
        self._llm = vllm.LLM(
            str(load.checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=1,  # requests that are computed together may differ in the last bit
            dtype="float32",
            tensor_parallel_size=load.num_ranks,
            enable_expert_parallel=load.expert_parallel,
            **(ours if load.controller else {}),
        )
        self._greedy = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)

    def step(self) -> None:
        """An engine core inside this process takes versions when it is called."""
        self._llm.llm_engine.engine_core.engine_core.step()

    def close(self) -> None:
        """End workers and process groups; the next model may need others."""
        self._llm.llm_engine.engine_core.shutdown()

    def tokens_after(self, request: Continue) -> list[list[int]]:
        import vllm  # noqa: PLC0415

        found = []
        for beginning, count in zip(request.beginnings, request.counts, strict=True):
            greedy = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            (answer,) = self._llm.generate([{"prompt_token_ids": beginning}], greedy, use_tqdm=False)
            found.append(list(answer.outputs[0].token_ids))
        return found

    def look(self) -> Look:
        answers = []
        if self._load.can_generate:
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            answers = [answer.outputs[0] for answer in self._llm.generate(prompts, self._greedy, use_tqdm=False)]
        return Look(
            tokens=[list(answer.token_ids) for answer in answers],
            checksums=self._llm.collective_rpc("compute_weight_checksums"),
            versions=[span.version for answer in answers for span in answer.weight_versions],
            status=self._llm.collective_rpc("weft_status") if self._load.controller else [],
        )


def look(process: Process) -> Look:
    """What a process's engine holds and says."""
    process.ask("look")
    return process.answer(LOOK_S)


@contextmanager
def loaded(process: Process, load: Load) -> Iterator[Process]:
    """A process with an engine, until the end of the block."""
    process.ask(load)
    with _loaded(process):
        yield process


@contextmanager
def both_loaded(one: Process, load: Load, other: Process, other_load: Load) -> Iterator[None]:
    """Two, at the same time."""
    one.ask(load)
    other.ask(other_load)
    with _loaded(one, other):
        yield


@contextmanager
def _loaded(*processes: Process) -> Iterator[None]:
    for process in processes:
        assert process.answer(LOAD_S) == "loaded"
    yield
    for process in processes:
        process.ask("unload")
    for process in processes:
        assert process.answer(LOOK_S) == "unloaded"
