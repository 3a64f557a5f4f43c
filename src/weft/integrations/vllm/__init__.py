"""vLLM: a weight-transfer backend called `weft`, discovered through vLLM's plug-in entry point.

    WEFT_CONTROLLER=tcp://ctl:7070 vllm serve MODEL --weight-transfer-config '{"backend": "weft"}'

Every worker rank becomes a Receiver. Versions arrive while it generates; the engine core commits them on all its
workers between two steps. Nothing else has to be called; vLLM's own weight-transfer routes work too.

| module | process | does |
|---|---|---|
| `loading` | worker | where a checkpoint tensor goes in this model, and how the engine's own packing is repeated |
| `worker` | worker | the Receiver; what the engine core and vLLM's routes ask of a worker |
| `core` | engine core | when to commit: between two steps, on all workers together; caches and version |
| `trainer` | trainer | vLLM's own client protocol, over a Sender |
"""

from __future__ import annotations

BACKEND = "weft"


def register() -> None:
    """Called by vLLM in each of its processes, before a model is loaded; may be called again."""
    from vllm.distributed.weight_transfer import (  # noqa: PLC0415
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    from weft.integrations.vllm import core, loading, worker  # noqa: PLC0415

    loading.watch_loading()
    worker.extend_workers()
    core.extend_engine_core()
    WeightTransferEngineFactory.register_engine(BACKEND, "weft.integrations.vllm.worker", "WeftTransfer")
    WeightTransferTrainerFactory.register_engine(BACKEND, "weft.integrations.vllm.trainer", "WeftTrainer")
