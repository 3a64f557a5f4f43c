from __future__ import annotations

import pytest
import torch

from weft.rl.learn import ppo
from weft.rl.learn.optimizer import MasterAdamW
from weft.rl.settings import LoopSettings


def scored(*, ratio: float = 1.0, advantage: float = 1.0, importance: float = 1.0) -> tuple[torch.Tensor, ppo.Scored]:
    """One sample with one answer token, and logits under which it has half the probability."""
    logits = torch.zeros(1, 2, 2, requires_grad=True)
    proximal = torch.log(torch.tensor([[0.5 / ratio]]))
    batch = ppo.Scored(
        tokens=torch.tensor([[0, 1]]),
        proximal=proximal,
        importance=torch.tensor([[importance]]),
        advantages=torch.tensor([[advantage]]),
        returns=torch.zeros(1, 1),
        values=torch.zeros(1, 1),
        reference=None,
    )
    return logits, batch


SETTINGS = LoopSettings.of(entropy_coef=0.0, value_coef=0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.0, 1.0, True), (1.5, 1.0, False), (1.5, -1.0, True), (0.5, -1.0, False)]
)
def test_a_token_that_has_moved_far_enough_is_not_pushed_further(ratio, advantage, moves):
    logits, batch = scored(ratio=ratio, advantage=advantage)
    total, _ = ppo.loss(logits, torch.zeros(1, 2), batch, SETTINGS)
    total.backward()
    pushed = -logits.grad[0, 0, 1].item()
    assert (pushed != 0) is moves
    assert not moves or (pushed > 0) is (advantage > 0)


def test_samples_that_have_become_unlikely_count_for_less():
    grads = []
    for importance in (1.0, 0.25):
        logits, batch = scored(importance=importance)
        ppo.loss(logits, torch.zeros(1, 2), batch, SETTINGS)[0].backward()
        grads.append(logits.grad.abs().sum().item())
    assert grads[1] == pytest.approx(grads[0] / 4)


def test_advantages_are_sums_of_discounted_surprises():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 7), torch.randn(3, 7)
    gamma, lam = 0.9, 0.8
    found = ppo.advantages(rewards, values, gamma=gamma, gae_lambda=lam)
    following = torch.cat([values[:, 1:], torch.zeros(3, 1)], dim=1)
    surprise = rewards + gamma * following - values
    for t in range(7):
        expected = sum((gamma * lam) ** k * surprise[:, t + k] for k in range(7 - t))
        torch.testing.assert_close(found[:, t], expected)


def test_a_pull_towards_the_first_policy_is_least_where_both_agree():
    settings = LoopSettings.of(entropy_coef=0.0, value_coef=0.0, kl_coef=1.0)
    totals = []
    for gap in (-1.0, 0.0, 1.0):
        logits, batch = scored(advantage=0.0)
        apart = ppo.Scored(
            **{name: getattr(batch, name) for name in batch.__slots__} | {"reference": batch.proximal + gap}
        )
        totals.append(ppo.loss(logits, torch.zeros(1, 2), apart, settings)[0].item())
    assert totals[1] == pytest.approx(0.0)
    assert min(totals[0], totals[2]) > 0


def test_fp32_steps_are_those_of_torch():
    torch.manual_seed(0)
    start, grads = torch.randn(50), torch.randn(20, 50)
    mine, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = MasterAdamW([mine], lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for grad in grads:
        mine.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_steps_too_small_for_bf16_add_up():
    weight = torch.nn.Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=0.1, weight_decay=0.0)  # BF16 has steps of 2 here
    for _ in range(30):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight[0].item() == pytest.approx(253.0, abs=1.1)


def test_a_saved_optimizer_goes_on_exactly():
    torch.manual_seed(0)
    start = torch.randn(9).bfloat16()
    whole, first, second = (torch.nn.Parameter(start.clone()) for _ in range(3))
    optimizers = [MasterAdamW([weight], lr=0.01, weight_decay=0.0) for weight in (whole, first, second)]
    grads = torch.randn(6, 9).bfloat16()
    for number, grad in enumerate(grads):
        if number == 3:
            optimizers[2].load(optimizers[1].state())
        for optimizer, weight in zip(optimizers, (whole, first, second), strict=True):
            if weight is whole or (weight is first) == (number < 3):
                weight.grad = grad.clone()
                optimizer.step()
    assert torch.equal(whole, second)
