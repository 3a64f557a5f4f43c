"""A real AsyncGRPOTrainer on a CPU, with samples that are made up: no rewards, no server."""

from __future__ import annotations

import os
import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.integrations.fsdp_trainer import patient
from tests.integrations.tiny_models import make_model

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
NUM_GROUPS = 40


def save_with_tokenizer(folder: Path) -> Path:
    """A model and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    model = make_model("qwen3", 1)
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2])
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


class MadeUpSamples:
    """TRL's RolloutWorkerProtocol; every version fills the buffer once."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self._version = 0

    def start(self) -> None:
        self._fill()

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, version: int) -> None:
        self._version = version
        if version > 1:
            self._fill()

    def _fill(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: PLC0415

        random = np.random.default_rng(self._version)
        mask = np.array([0] * 10 + [1] * 12)
        for group in range(NUM_GROUPS):
            for advantage in (1.0, -1.0):
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.concatenate([np.arange(10 + group, 20 + group), random.integers(0, 256, 12)]),
                        completion_mask=mask,
                        old_log_probs=np.where(mask, -5.5, 0.0).astype(np.float32),
                        advantage=advantage,
                        model_version=self._version,
                        group_id=self._version * NUM_GROUPS + group,
                        metrics={"reward": advantage},
                        enqueued_at=time.time(),
                    )
                )


def attention_on_cpu() -> Any:
    """What the kernel TRL would download does."""

    def flash_attn_varlen_func(q, k, v, starts_q, starts_k, *_, softmax_scale=None, **__):
        found, group = [], q.shape[1] // k.shape[1]
        borders = zip(
            *(starts.tolist() for starts in (starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:])), strict=True
        )
        for a, b, c, d in borders:
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
            keys, values = (x[c:d].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q[a:b].transpose(0, 1), keys, values, attn_mask=mask, scale=softmax_scale
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def train(pipe: Any, model: Path, trained: Path, address: str, num_steps: int) -> None:
    """Train, and save what the last version was made of."""
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    from datasets import Dataset  # noqa: PLC0415
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing  # noqa: PLC0415

    from weft.integrations.trl import WeftWeightTransfer  # noqa: PLC0415

    packing._flash_attn = attention_on_cpu
    torch.cuda.get_device_name = lambda *_, **__: "cpu"  # asked without looking whether there is one
    config = AsyncGRPOConfig(
        output_dir=str(trained / "runs"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=num_steps,
        per_device_train_batch_size=4,
        num_generations=4,
        token_budget=256,
        weight_sync_steps=1,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
    )
    transfer = WeftWeightTransfer(listen=address, num_engine_ranks=1, settings=patient(), timeout_s=120.0)
    trainer = AsyncGRPOTrainer(
        model=str(model),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": str(i)}]} for i in range(32)]),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        rollout_worker=MadeUpSamples(),
        weight_transfer=transfer,
    )
    trainer.train()
    trainer.model.save_pretrained(trained)
    pipe.send(transfer.version)
