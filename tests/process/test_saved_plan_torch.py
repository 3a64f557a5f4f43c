"""A plan made from layout texts, run with the fused engine of the loop: it reports boxes of checkpoint tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import weft
from tests.support.executor import random_checkpoint
from tests.support.planned_members import trainer_arrays
from weft.core.case import Case, plan_case
from weft.errors import ProtocolError
from weft.rl.model.architecture import TINY, load_architecture
from weft.rl.model.engine_model import EngineModel
from weft.rl.settings import Precision

WAIT_S = 90.0
QUERIES = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"vocab_size": 32, "torch_dtype": "float32"}))
    return str(path)


def plan_for(config, engine="tp1", num_replicas=2):
    precision = {"dtype": "fp32", "trainer_dtype": "fp32"}
    layouts = {"trainer": "ddp2", "engine": engine, "num_replicas": num_replicas}
    where = {"memory": "cpu", "placement": "packed"}
    return plan_case(Case(model=config, policy="round_robin", **where, **layouts, **precision))


def run(plan, config, check):
    """Two trainers that hold what the plan says, two engines of the loop."""
    models = [EngineModel(load_architecture(config, vocab_size=32), dtype=Precision.FP32) for _ in range(2)]
    held = [trainer_arrays(plan, rank) for rank in range(2)]
    whole = random_checkpoint(plan, 1)
    for arrays, _ in held:
        for name, array in arrays.items():
            array[...] = whole[name]
    ranks_per_engine = 2 // plan.recipe.num_replicas
    with weft.Controller(num_trainers=2, num_engine_ranks=2, ranks_per_engine=ranks_per_engine, plan=plan) as c:
        receivers = [
            weft.Receiver(c.address, rank=rank, weights=weft.weights_of(model, parts=model.parts))
            for rank, model in enumerate(models)
        ]
        senders = [
            weft.Sender(c.address, rank=rank, weights=weft.Weights.from_arrays(arrays, parts=parts), timeout_s=WAIT_S)
            for rank, (arrays, parts) in enumerate(held)
        ]
        try:
            check(c, senders, receivers, models, whole)
        finally:
            for member in (*senders, *receivers):
                member.close()


def test_fused_parameters_take_the_routes_of_a_plan_that_names_them_otherwise(config):
    plan = plan_for(config)

    def check(controller, senders, receivers, models, whole):
        published = [sender.publish(version=1) for sender in senders]
        for receiver in receivers:
            receiver.wait(WAIT_S).commit()
        for publication in published:
            publication.wait_committed(WAIT_S)
        assert np.array_equal(controller._rounds.plan.pair_bytes, plan.pair_bytes)
        for model in models:
            assert torch.equal(model.blocks[1].qkv.weight[:64], torch.from_numpy(whole[QUERIES]))

    run(plan, config, check)


def test_an_engine_that_cuts_otherwise_is_refused_by_name(config):
    def check(controller, senders, receivers, models, whole):
        with pytest.raises(ProtocolError, match=r"members differ from the plan in \d+ points") as caught:
            senders[0].publish(version=1).wait_committed(WAIT_S)
        told = str(caught.value)
        assert f"the plan sends {QUERIES}[0:32, 0:64] as fp32 to engine rank 0, which has no place for it" in told
        assert f"{QUERIES}: engine rank 0 takes [0:64, 0:64] as fp32, which the plan does not send" in told

    run(plan_for(config, engine="tp2", num_replicas=1), config, check)
