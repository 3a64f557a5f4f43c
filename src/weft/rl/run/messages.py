"""Messages between members of the loop and its coordinator. They carry samples, but no weights."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class Array(msgspec.Struct, frozen=True):
    """A NumPy array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(array: NDArray[Any]) -> Array:
    """An array as it travels."""
    return Array(array.dtype.str, array.shape, array.tobytes())


def unpack(array: Array) -> NDArray[Any]:
    """An array that has travelled; it can be written to."""
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape).copy()


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts with their answers: one sample per row, all answers of equal length."""

    prompts: Array
    answers: Array
    rewards: Array
    """Of each answer token."""
    logprobs: Array
    """Of each answer token, when it was sampled."""
    versions: Array
    """The version that made each answer token."""


# From members


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A member has started."""

    member: str
    iteration: int = 0
    """Where a trainer resumes."""
    copy_s: float = 0.0
    """How long an engine rank's device takes to copy its weights once: the limit of any transfer."""


class Ask(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine has nothing to do; answered at once."""

    engine: int
    version: int
    """The version it serves; -1 before the first."""


class Busy(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine is still generating."""

    engine: int


class SamplesMade(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine has done a job."""

    engine: int
    job: int
    samples: Samples


class Take(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A trainer wants its samples of an iteration; answered when they are complete."""

    rank: int
    iteration: int


class Trained(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first trainer has finished an iteration."""

    iteration: int
    metrics: dict[str, float]


class BroadcastOffer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first trainer is about to broadcast a version: engines must take part."""

    version: int


class VersionSent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """How a version ended; times since the epoch."""

    version: int
    published_at: float
    released_at: float
    committed_at: float
    write_s: float = 0.0
    """How long the first trainer's writes took."""
    num_bytes: int = 0
    """On the wire, where the controller does not know it."""
    reason: str = ""
    """Why it was given up, if it was."""


class VersionServed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine rank serves a version."""

    engine_rank: int
    version: int
    at: float
    pause_s: float
    exact: bool | None = None
    """Whether all weights equal the trainers'; None if not checked."""


class Done(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A trainer has finished all iterations; answered, when all have, by Stop, or by Again."""

    rank: int


class MemberFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A member cannot continue; answered by Stop."""

    member: str
    reason: str


ToCoordinator = (
    Hello
    | Ask
    | Busy
    | SamplesMade
    | Take
    | Trained
    | BroadcastOffer
    | VersionSent
    | VersionServed
    | Done
    | MemberFailed
)


# From the coordinator


class RolloutJob(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Prompts to answer; made from the seed."""

    job: int
    count: int
    seed: int


class Hold(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Nothing to do now: ask again soon."""


class Receive(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A version is being broadcast: take part."""

    version: int


class SampleBatch(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A trainer's samples."""

    iteration: int
    samples: Samples


class Again(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To all trainers, which wait for samples or are done: the last version was given up, and is sent once more."""


class Stop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The run is over; `reason` says why, if it failed."""

    reason: str = ""


ToMember = RolloutJob | Hold | Receive | SampleBatch | Again | Stop
