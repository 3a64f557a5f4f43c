"""How many BF16 weights change in one optimiser step at RL learning rates, and what a patch of them costs.

A small transformer is trained with AdamW on FP32 master weights; engines would serve their BF16 rounding. After every
step the BF16 weights are compared with those of the step before, and the patch weft would send is made and applied.
Writes results/sparsity.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import machine
from weft.codec import compress, delta

RESULTS = Path(__file__).parent / "results"
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
WARM_UP, STEPS = 200, 40
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 512, 256, 4, 4, 64, 16
PUBLISHED = {
    "PULSE (lr 3e-6, several models)": {"changed": "about 1%", "bytes": "14 GB → 108 MB"},
    "TRL (Qwen3-0.6B)": {"changed": "about 1%, never more than 2%", "bytes": "1.2 GB → 20–35 MB"},
    "verl (72B dense)": {"changed": "1–3%", "bytes": "145 GB → 8.6–10.9 GB"},
}


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        gate, value = self.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * value)


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(generator: torch.Generator) -> torch.Tensor:
    """Sequences with a rule to learn: each token is a function of the two before it, sometimes disturbed."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    for i in range(2, LENGTH + 1):
        follows = (3 * tokens[:, i - 1] + 5 * tokens[:, i - 2] + 7) % VOCABULARY
        tokens[:, i] = torch.where(torch.rand(BATCH, generator=generator) < 0.9, follows, tokens[:, i])
    return tokens


def step(model: Model, optimiser: torch.optim.Optimizer, generator: torch.Generator) -> float:
    tokens = batch(generator)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()


def served(model: Model) -> np.ndarray[Any, Any]:
    """The BF16 weights as engines have them, as bits."""
    parts = [p.detach().to(torch.bfloat16).view(torch.int16).flatten() for p in model.parameters()]
    return torch.cat(parts).numpy().view(np.uint16).copy()


def patch_of(now: np.ndarray[Any, Any], old: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The patch; applied to the old weights it must give the new ones."""
    out = np.zeros(delta.max_bytes(len(now), 2), dtype=np.uint8)
    where = {"width": 2, "num_elements": len(now)}
    out_at = int(out.ctypes.data)
    size = delta.encode(
        int(now.ctypes.data), int(old.ctypes.data), **where, out=out_at, capacity=len(out), base=0, version=1
    )
    held = old.copy()
    delta.check(out_at, size, **where, base=0, version=1)
    delta.apply(out_at, size, **where, rows=delta.ImageRows.contiguous(int(held.ctypes.data), held.nbytes))
    assert (held == now).all()
    return out[:size]


def measure(learning_rate: float) -> dict[str, float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(WARM_UP):  # weights that have learned something, and settled moments
        loss = step(model, optimiser, generator)
    for group in optimiser.param_groups:
        group["lr"] = learning_rate
    for _ in range(5):
        step(model, optimiser, generator)
    found: dict[str, list[float]] = {"changed": [], "bytes_per_change": [], "reduction": [], "reduction_zstd": []}
    old = served(model)
    for _ in range(STEPS):
        step(model, optimiser, generator)
        now = served(model)
        patch = patch_of(now, old)
        changes = max(int((now != old).sum()), 1)
        found["changed"].append(changes / len(now))
        found["bytes_per_change"].append(len(patch) / changes)
        found["reduction"].append(now.nbytes / len(patch))
        found["reduction_zstd"].append(now.nbytes / len(compress.compress(patch)))
        old = now
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"learning_rate": learning_rate, "elements": len(old), "loss_before": loss, **medians}


def at_one_percent() -> dict[str, float]:
    """One percent of many BF16 weights, each to a neighbouring number: the bytes the format needs."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(1 << 25, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    hit = rng.random(len(old)) < 0.01
    now = old.copy()
    now[hit] += rng.choice(np.array([1, 0xFFFF], dtype=np.uint16), int(hit.sum()))
    patch = patch_of(now, old)
    return {
        "bytes_per_change": len(patch) / int(hit.sum()),
        "reduction": now.nbytes / len(patch),
        "reduction_zstd": now.nbytes / len(compress.compress(patch)),
    }


def main() -> None:
    rows = [measure(rate) for rate in LEARNING_RATES]
    report = {
        "machine": machine.describe(),
        "rows": rows,
        "one_percent": at_one_percent(),
        "published": PUBLISHED,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sparsity.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(report["rows"]), json.dumps(report["one_percent"]))


if __name__ == "__main__":
    main()
