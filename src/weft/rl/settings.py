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
    """Shard to shard, one-sided, beside generation."""
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
    """Whose modules trainers train."""

    BUILTIN = "builtin"
    TRANSFORMERS = "transformers"


class Precision(enum.StrEnum):
    """What weights are stored in."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"
    """Engines only: e4m3 with a scale for every row."""


Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Rate = Annotated[float, Meta(ge=0.0, le=1e3)]


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained, by whom, and how weights travel."""

    task: str = "sort"
    """A task of ours, or `module:object`."""
    model: str = "tiny"
    """`tiny`, a model of the catalog, or a path to a config.json (or its folder)."""
    weights: str = ""
    """A folder or file of safetensors to start from; random weights without one."""
    modules: Modules = Modules.BUILTIN
    dtype: Precision = Precision.BF16
    """Of trainers' weights; their optimizer keeps FP32 masters of BF16."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    device: str = "cpu"
    """`cpu`, or `cuda`: every rank takes the GPU its local rank names, or shares what there is."""

    num_trainers: Count = 1
    trainer: Wrapping = Wrapping.DDP
    num_engines: Count = 1
    """Replicas; each generates on its own."""
    ranks_per_engine: Count = 1
    """Tensor parallel."""
    engine_dtype: Precision | None = None
    """Of engines' weights; as trainers' without one."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Of each member's arithmetic; 0: the machine's cores, shared."""

    method: Method = Method.WEFT
    mode: ReceiverMode = ReceiverMode.SHADOW
    delta: bool = False
    transport: str = "auto"
    sync: bool = False
    """Generate, train and transfer in turn instead of at the same time."""
    max_staleness: Annotated[int, Meta(ge=0, le=1 << 20)] = 1
    """Versions a sample may be older than the policy it trains."""
    freeze_engines: bool = False
    """For comparison: engines keep version 0 for ever."""
    check_bits: bool = False
    """After every commit engines compare all their weights with the trainers', bit for bit."""

    iterations: Count = 100
    rollouts_per_rank: Count = 128
    """Samples each trainer rank uses in an iteration."""
    max_new_tokens: Annotated[int, Meta(ge=0, le=1 << 15)] = 0
    """Longest answer; 0: as long as the task needs."""
    temperature: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    ppo_epochs: Count = 2
    minibatches: Count = 2
    lr: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-3
    last_lr: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Of the last iteration, as a fraction of the first; in between it falls evenly."""
    clip: Annotated[float, Meta(gt=0.0, le=10.0)] = 0.2
    gamma: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """The tasks here reward every token by itself; 1.0 for tasks that reward the end."""
    gae_lambda: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.95
    value_coef: Rate = 0.5
    entropy_coef: Rate = 0.02
    kl_coef: Rate = 0.0
    """Pull towards the policy the run began with."""
    max_importance: Annotated[float, Meta(gt=0.0, le=1e6)] = 5.0
    """Samples of older versions are weighed by how likely they are now, up to this."""
    max_grad_norm: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    weight_decay: Rate = 0.0

    checkpoint_dir: str = ""
    checkpoint_every: Annotated[int, Meta(ge=0)] = 0
    resume: bool = False
    silence_s: Annotated[float, Meta(gt=1.0, le=86_400.0)] = 20.0
    """An engine that has been silent for this long is lost; one whose process ends is lost at once."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 120.0
    """How long any member waits for any other."""

    @property
    def stored_dtype(self) -> Precision:
        """What engines store weights in."""
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
        """Settings from plain values; raises ConfigError for what cannot be run."""
        try:
            found = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"wrong setting: {error}", hint="see weft rl --help") from None
        found._check()
        return found

    def _check(self) -> None:
        if self.dtype is Precision.FP8:
            raise ConfigError("trainers cannot train in fp8", hint="--dtype bf16 --engine-dtype fp8")
        if self.rollouts_per_rank % self.minibatches:
            raise ConfigError(
                f"{self.rollouts_per_rank} rollouts do not divide into {self.minibatches} minibatches",
                hint="rollouts_per_rank must be a multiple of minibatches",
            )
        if self.method is not Method.WEFT and (self.delta or self.mode is not ReceiverMode.SHADOW):
            raise ConfigError(f"delta and mode are weft's, not those of {self.method}", hint="leave them out")
        if (self.mode is ReceiverMode.PATCH) and not self.delta:
            raise ConfigError("mode patch sends only what changed", hint="add --delta")
        if (self.checkpoint_every and not self.checkpoint_dir) or (self.resume and not self.checkpoint_dir):
            raise ConfigError("checkpoints need a folder", hint="add --checkpoint-dir")
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ConfigError(f"unknown device `{self.device}`", hint="cpu or cuda")
