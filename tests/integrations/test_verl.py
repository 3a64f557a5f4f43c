"""verl's own CheckpointEngineManager over real Ray workers, with weft's backend."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of Ray and verl
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    import ray  # noqa: PLC0415

    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    ray.init(
        num_cpus=40,  # Ray counts; nobody needs as many
        include_dashboard=False,
        object_store_memory=256 << 20,
        logging_level="ERROR",
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()


class Scene:
    """Actors, rollouts and verl's manager."""

    def __init__(self, num_actors: int, num_rollouts: int, *, direct: bool = False) -> None:
        from verl.checkpoint_engine import CheckpointEngineManager  # noqa: PLC0415
        from verl.workers.config import CheckpointEngineConfig, RolloutConfig  # noqa: PLC0415

        from tests.integrations.verl_workers import Actor, Replica, Rollout  # noqa: PLC0415

        config = CheckpointEngineConfig(**_example())
        rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config, tensor_model_parallel_size=1)
        self.actors = _group(Actor, num_actors, config=config)
        self.rollouts = _group(Rollout, num_rollouts, rollout_config=rollout_config, model_config=None)
        self.replicas = [
            Replica(replica_rank=rank, config=rollout_config, model_config=None) for rank in range(num_rollouts)
        ]
        asyncio.run(self._join())
        manager: Any = CheckpointEngineManager
        if direct:
            from weft.integrations.verl import WeftManager as manager  # noqa: PLC0415
        self.manager = manager(config=config, actor_wg=self.actors, replicas=list(self.replicas))
        self.with_others = not direct

    async def _join(self) -> None:
        for replica in self.replicas:
            await replica.init_hybrid(self.rollouts)

    def update(self, step: int) -> dict[str, float]:
        self.actors.train(step)
        return self.manager.update_weights(global_steps=step)

    def check(self, step: int) -> None:
        assert self.rollouts.differing(step, self.with_others) == [[] for _ in self.replicas]


def _example() -> dict[str, Any]:
    """The checkpoint engine's part of examples/verl_config.yaml."""
    from omegaconf import OmegaConf  # noqa: PLC0415

    config = OmegaConf.to_container(OmegaConf.load(ROOT / "examples/verl_config.yaml"))
    return config["actor_rollout_ref"]["rollout"]["checkpoint_engine"]


def _group(kind: Any, count: int, **arguments: Any) -> Any:
    import ray  # noqa: PLC0415
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: PLC0415

    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cuda")


def test_every_tensor_arrives_and_failures_are_got_over(cluster):
    """Two FSDP2 actors that both send, two rollouts; a broken step, a replica that goes and comes back."""
    scene = Scene(2, 2)
    for step in (1, 2, 3):
        metrics = scene.update(step)
        scene.check(step)
        assert metrics["weft/transfer_s"] > 0
    scene.actors.break_next()
    with pytest.raises(Exception, match="the training engine broke"):
        scene.update(4)
    scene.update(5)
    scene.check(5)
    scene.manager.remove_replicas([scene.replicas[0]])
    scene.update(6)
    scene.manager.add_replicas([scene.replicas[0]])
    scene.update(7)
    scene.check(7)


def test_shards_are_sent_without_being_gathered(cluster):
    """With weft's manager actors hand over what they hold; it must stay where it is."""
    scene = Scene(2, 1, direct=True)
    for step in (1, 2):
        scene.update(step)
        scene.check(step)
    scene.actors.move()
    with pytest.raises(Exception, match="have moved since the last update"):
        scene.update(3)
    scene.update(4)  # begins anew
    scene.check(4)
