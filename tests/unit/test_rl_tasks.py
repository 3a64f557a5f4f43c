from __future__ import annotations

import numpy as np
import pytest

from weft.errors import ConfigError
from weft.rl.learn.tasks import TASKS, load_task


@pytest.mark.parametrize("name", TASKS)
def test_a_perfect_answer_earns_one_and_a_wrong_token_costs_its_share(name):
    task = load_task(name)
    prompts = task.prompts(np.random.default_rng(0), 50)
    assert prompts.shape == (50, task.prompt_tokens)
    assert prompts.max() < task.vocab_size
    right = task.answers(prompts)
    assert right.shape == (50, task.answer_tokens)
    np.testing.assert_allclose(task.rewards(prompts, right).sum(axis=1), 1.0, rtol=1e-6)
    wrong = right.copy()
    wrong[:, 0] += 1
    np.testing.assert_allclose(task.rewards(prompts, wrong).sum(axis=1), 1 - 1 / task.answer_tokens, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("sort", "52903>", "02359"),
        ("reverse", "52903<", "30925"),
        ("brackets", "([{{([=", "])}}])"),
        ("add", "37+85=", "122"),
    ],
)
def test_tasks_mean_what_their_names_say(name, prompt, answer):
    task = load_task(name)
    tokens = np.array([[index for sign in prompt for index in range(32) if task.text(np.array([index])) == sign]])
    assert task.text(task.answers(tokens)[0]) == answer


def test_longer_answers_earn_nothing_more_and_shorter_ones_less():
    task = load_task("sort")
    prompts = task.prompts(np.random.default_rng(1), 4)
    right = task.answers(prompts)
    longer = np.concatenate([right, right], axis=1)
    assert task.rewards(prompts, longer).sum() == pytest.approx(4.0)
    assert task.rewards(prompts, right[:, :2]).sum() == pytest.approx(4 * 2 / 5)


def test_the_same_seed_gives_the_same_prompts():
    task = load_task("add")
    one, other, third = (task.prompts(np.random.default_rng(seed), 8) for seed in (3, 3, 4))
    assert (one == other).all()
    assert (one != third).any()


@pytest.mark.parametrize("name", ["poetry", "json:nothing", "no.such.module:task", "json:dumps", ":", "a:"])
def test_unknown_tasks_are_refused(name):
    with pytest.raises(ConfigError):
        load_task(name)


def test_somebody_elses_task_can_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from weft.rl.learn.tasks import Sort\ntask = Sort(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_task("mine:task").answer_tokens == 3
    (tmp_path / "broken.py").write_text("undefined_name\n")
    with pytest.raises(ConfigError, match="NameError"):
        load_task("broken:task")
