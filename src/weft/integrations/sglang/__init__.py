"""SGLang: a plug-in, discovered through its entry point, that serves versions as they arrive.

    WEFT_CONTROLLER=tcp://ctl:7070 python -m sglang.launch_server --model-path MODEL

Every scheduler process (one for each rank) becomes a Receiver. Versions arrive while it generates and are committed
between two of its iterations, on all ranks in the same one. Answers carry the version of every token
(`meta_info.weight_versions`). Without the variable the plug-in does nothing.

| module | process | does |
|---|---|---|
| `scheduler` | every scheduler | the Receiver; commits, caches, versions |
| `front_end` | tokenizer manager | lets unfinished answers and `/model_info` report the version |
"""

from __future__ import annotations

from weft.config import engine_settings

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def plug_in() -> None:
    """Called by SGLang in each of its processes."""
    if not engine_settings({}).controller:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from weft.integrations.sglang import front_end, scheduler  # noqa: PLC0415

    hooks = {
        "sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights": (
            scheduler.processing,
            HookType.AROUND,
        ),
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (scheduler.loaded, HookType.AFTER),
        f"{SCHEDULER}.run_event_loop": (scheduler.running, HookType.AROUND),
        f"{SCHEDULER}.ingest_requests": (scheduler.between_iterations, HookType.AFTER),
        f"{UPDATER}.release_memory_occupation": (scheduler.releasing_memory, HookType.AROUND),
        f"{UPDATER}.resume_memory_occupation": (scheduler.resuming_memory, HookType.AROUND),
        f"{SCHEDULER}._poll_timeout_aborts": (scheduler.with_own_requests, HookType.AFTER),
        f"{SCHEDULER}._maybe_namespace_elastic_radix_cache": (scheduler.with_new_request, HookType.AFTER),
        "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep": (
            scheduler.sleeping,
            HookType.REPLACE,
        ),
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_request_dispatcher": (
            front_end.listening,
            HookType.AFTER,
        ),
    }
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    scheduler.HOOKED.extend(target for target in hooks if "TokenizerManager" not in target)
