"""Two FSDP2 trainer ranks feed a vLLM engine: every optimizer step is served, shard to shard, without a gather.

    python examples/fsdp_to_vllm.py             # two trainer processes and vLLM, on a CPU, with a tiny model

The trainer learns to repeat one token; the engine generates with what has been learned so far, and is never reloaded.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import weft
from weft.integrations.hf import checkpoint_weights

NUM_TRAINERS, NUM_STEPS, TOKEN = 2, 12, 7
LONGEST_S = 240.0
PATIENT = weft.TransferSettings(silence_s=30.0)
"""Engine and trainers share a few cores: one that computes may say nothing for seconds."""


def trainer(rank: int, port: int, model_dir: str, controller: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_TRAINERS)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (NUM_TRAINERS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    tokens = torch.full((4, 16), TOKEN)
    with weft.Sender(controller, rank=rank, weights=checkpoint_weights(model)) as sender:
        publication = sender.publish(version=0)
        for step in range(1, NUM_STEPS + 1):
            model(tokens, labels=tokens).loss.backward()
            publication.wait_released()  # the transfer has overlapped the backward pass; now the weights may change
            optimizer.step()
            optimizer.zero_grad()
            publication = sender.publish(version=step)
        publication.wait_committed()
    dist.destroy_process_group()


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm  # noqa: PLC0415  # after its variables are set

    with (
        tempfile.TemporaryDirectory() as folder,
        weft.Controller(num_trainers=NUM_TRAINERS, num_engine_ranks=1, settings=PATIENT) as controller,
    ):
        model_dir, port = tiny_model(Path(folder)), free_port()
        llm = vllm.LLM(
            model_dir,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            dtype="float32",
            weight_transfer_config={"backend": "weft"},
            additional_config={"weft": {"controller": controller.address}},
        )
        context = get_context("spawn")
        ranks = [
            context.Process(target=trainer, args=(rank, port, model_dir, controller.address), daemon=True)
            for rank in range(NUM_TRAINERS)
        ]
        for process in ranks:
            process.start()
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        seen, answer, deadline = "", None, time.monotonic() + LONGEST_S
        while seen != str(NUM_STEPS):
            if time.monotonic() > deadline:
                sys.exit(f"no version came after {seen}")
            (request,) = llm.generate([{"prompt_token_ids": [TOKEN]}], sampling, use_tqdm=False)
            answer = request.outputs[0]
            if answer.weight_versions[-1].version != seen:
                seen = answer.weight_versions[-1].version
                print(f"version {seen:>7}: {list(answer.token_ids)}", flush=True)
            if any(process.exitcode not in (None, 0) for process in ranks):
                sys.exit("a trainer failed")
        for process in ranks:
            process.join(60)
        if list(answer.token_ids) != [TOKEN] * 12:
            sys.exit("the engine has not learned what the trainer has")


def tiny_model(folder: Path) -> str:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "initializer_range": 0.1}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=False)).save_pretrained(folder)
    return str(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
