"""Every option of a run of the loop: default, meaning, limits. Shipped to members as JSON."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.config import ReceiverMode
from weft.errors import ConfigError


class Method(enum.StrEnum):
    """How weights get from trainers to engines."""

    WEFT = "weft"
    """Shard to shard, one-sided, while engines generate."""
    BROADCAST = "broadcast"
    """Tensor by tensor: assembled by all trainers, broadcast by the first (Gloo, NCCL)."""
    GATHER = "gather"
    """Everything gathered on the first trainer, then broadcast."""
    UCCL = "uccl"
    """As broadcast, with NCCL running over UCCL's network plugin."""


class Wrapping(enum.StrEnum):
    """How trainers share the model."""

    DDP = "ddp"
    FSDP2 = "fsdp2"


class Modules(enum.StrEnum):
    """The modules that trainers train."""

    BUILTIN = "builtin"
    TRANSFORMERS = "transformers"


class Precision(enum.StrEnum):
    """The precision weights are stored in."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"
    """Engines only: e4m3 with a scale for every row."""


Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Rate = Annotated[float, Meta(ge=0.0, le=1e3)]


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and task, the members, and how weights travel."""

    task: str = "sort"
    """A built-in task, or `module:object`."""
    model: str = "tiny"
    """`tiny`, a model of the catalog, or a path to a config.json (or its folder)."""
    weights: str = ""
    """A folder or file of safetensors to start from; empty: random weights."""
    modules: Modules = Modules.BUILTIN
    """Whose modules trainers train: `builtin`, or `transformers` for Hugging Face's."""
    dtype: Precision = Precision.BF16
    """Precision of trainers' weights; for BF16 the optimizer keeps FP32 masters."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    """Of weights, prompts and sampling."""
    device: str = "cpu"
    """`cpu`, or `cuda`: every rank takes the GPU of its local rank; ranks share GPUs if there are fewer."""

    num_trainers: Count = 1
    """Trainer ranks."""
    trainer: Wrapping = Wrapping.DDP
    """How trainers share the model: `ddp` or `fsdp2`."""
    num_engines: Count = 1
    """Replicas; each generates on its own."""
    ranks_per_engine: Count = 1
    """Tensor-parallel size of an engine."""
    engine_dtype: Precision | None = None
    """Precision of engines' weights; None: the trainers'."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of each member's arithmetic; 0: an equal share of the machine's cores."""

    method: Method = Method.WEFT
    """How weights get from trainers to engines."""
    mode: ReceiverMode = ReceiverMode.SHADOW
    """With `weft`: where versions land."""
    delta: bool = False
    """With `weft`: send only what changed."""
    transport: str = "auto"
    """With `weft`: `auto`, or one name for every link."""
    sync: bool = False
    """Generate, train and transfer in turn instead of at the same time."""
    max_staleness: Annotated[int, Meta(ge=0, le=1 << 20)] = 1
    """Most versions a sample may lag behind the policy it trains."""
    freeze_engines: bool = False
    """For comparison: engines keep version 0 forever."""
    check_bits: bool = False
    """After every commit engines compare all their weights with the trainers', bit for bit."""

    iterations: Count = 100
    """PPO iterations."""
    rollouts_per_rank: Count = 128
    """Samples each trainer rank uses in an iteration."""
    max_new_tokens: Annotated[int, Meta(ge=0, le=1 << 15)] = 0
    """Longest answer; 0: as long as the task needs."""
    temperature: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """Of sampling."""
    ppo_epochs: Count = 2
    """Passes over the samples of an iteration."""
    minibatches: Count = 2
    """Optimizer steps per pass."""
    lr: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-3
    """Learning rate of the first iteration."""
    last_lr: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Learning rate of the last iteration, as a fraction of the first; it falls linearly in between."""
    clip: Annotated[float, Meta(gt=0.0, le=10.0)] = 0.2
    """PPO's clip range of the probability ratio."""
    gamma: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Discount. The built-in tasks reward every token by itself; use 1.0 for tasks that reward the end."""
    gae_lambda: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.95
    """Of generalised advantage estimation."""
    value_coef: Rate = 0.5
    """Weight of the value loss."""
    entropy_coef: Rate = 0.02
    """Weight of the entropy bonus."""
    kl_coef: Rate = 0.0
    """Weight of the KL penalty towards the policy the run began with."""
    max_importance: Annotated[float, Meta(gt=0.0, le=1e6)] = 5.0
    """Samples of older versions are weighted by how likely they are now, up to this."""
    max_grad_norm: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    """Gradients are clipped to this norm."""
    weight_decay: Rate = 0.0
    """Of AdamW."""

    checkpoint_dir: str = ""
    """Folder for checkpoints."""
    checkpoint_every: Annotated[int, Meta(ge=0)] = 0
    """Iterations between checkpoints; 0: none."""
    resume: bool = False
    """Continue from the newest checkpoint."""
    silence_s: Annotated[float, Meta(gt=1.0, le=86_400.0)] = 20.0
    """An engine that has been silent for this long is lost; one whose process ends is lost at once."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 120.0
    """How long a member waits for another."""

    @property
    def stored_dtype(self) -> Precision:
        """The precision in which engines store weights."""
        return self.engine_dtype or self.dtype

    @property
    def num_engine_ranks(self) -> int:
        """Engine processes."""
        return self.num_engines * self.ranks_per_engine

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.num_trainers + self.num_engine_ranks

    @property
    def batch(self) -> int:
        """Samples of one iteration, of all trainers."""
        return self.num_trainers * self.rollouts_per_rank

    @property
    def allowed_staleness(self) -> int:
        """How old a sample may be, in versions."""
        return 0 if self.sync else self.max_staleness

    @classmethod
    def of(cls, **values: Any) -> LoopSettings:
        """Settings from plain values; raises ConfigError for a run that is not possible."""
        try:
            found = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"invalid setting: {error}", hint="see weft rl --help") from None
        found._check()
        return found

    def _check(self) -> None:
        if self.dtype is Precision.FP8:
            raise ConfigError("trainers cannot train in fp8", hint="use --dtype bf16 --engine-dtype fp8")
        if self.rollouts_per_rank % self.minibatches:
            raise ConfigError(
                f"{self.rollouts_per_rank} rollouts do not divide into {self.minibatches} minibatches",
                hint="rollouts_per_rank must be a multiple of minibatches",
            )
        if self.method is not Method.WEFT and (self.delta or self.mode is not ReceiverMode.SHADOW):
            raise ConfigError(f"method `{self.method}` has neither delta nor mode", hint="leave them out")
        if (self.mode is ReceiverMode.PATCH) and not self.delta:
            raise ConfigError("mode `patch` without delta", hint="add --delta")
        if (self.checkpoint_every and not self.checkpoint_dir) or (self.resume and not self.checkpoint_dir):
            raise ConfigError("checkpoints need a folder", hint="add --checkpoint-dir")
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ConfigError(f"unknown device `{self.device}`", hint="use cpu or cuda")
