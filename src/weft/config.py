"""Every setting: default, unit, meaning, validation. The only reader of TOML files and `WEFT_*` variables.

load_settings(Settings)                                  # defaults, then WEFT_CHUNK_BYTES and friends
load_settings(TransferSettings, Path("weft.toml"))       # defaults, then the file's [weft] table, then the variables
"""

from __future__ import annotations

import enum
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from weft.errors import ConfigError

MIB = 1 << 20
LARGEST_CHUNK = 1024 * MIB
"""The largest chunk size chosen by default."""
MAX_BEATS_PER_S = 200
"""Heartbeats that may reach a controller in a second, if each member still sends enough of them."""
BEATS_IN_SILENCE = 4
"""Heartbeats that always fit into the silence after which a member is lost."""


class ReceiverMode(enum.StrEnum):
    """Where a receiver lets writes land."""

    SHADOW = "shadow"
    """In staging memory, while the engine generates; the pause is the commit's local copy."""
    IN_PLACE = "in_place"
    """In the live tensors; the pause lasts from the first write to the commit."""
    PATCH = "patch"
    """Only what changes is staged; the pause is the time it takes to apply it. Needs `delta`."""


class DigestPolicy(enum.StrEnum):
    """Whether both ends digest what was sent."""

    ON = "on"
    """Every version is compared before it is committed."""
    OFF = "off"
    """Bytes are counted, not compared."""


class DeltaPolicy(enum.StrEnum):
    """Whether only what changed is sent."""

    OFF = "off"
    """Every version is sent whole."""
    ON = "on"
    """Versions are sent as patches to what each engine holds, with anchors in between."""


class CompressionPolicy(enum.StrEnum):
    """Whether patches are compressed."""

    NONE = "none"
    """As they are: memory speed."""
    ZSTD = "zstd"
    """By Zstandard: fewer bytes, more work."""


class StagingPolicy(enum.StrEnum):
    """Where a trainer keeps what it sends."""

    NONE = "none"
    """Sent straight from the weights where no conversion is needed; the weights are released once they are sent."""
    CPU = "cpu"
    """A copy in host memory, in the engines' format; the weights are released after one pass, and the copy is sent
    while training continues."""


AnyEnum = TypeVar("AnyEnum", bound=enum.StrEnum)


def _member_of(kind: type[AnyEnum], value: str, name: str) -> AnyEnum:
    """A policy by its name."""
    if value not in list(kind):
        raise ConfigError(f"unknown {name} `{value}`", hint=f"use {' or '.join(kind)}")
    return kind(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How bytes travel: what a plan says, and controllers ship to their members."""

    mode: ReceiverMode = ReceiverMode.SHADOW
    """Where receivers let writes land."""
    delta: DeltaPolicy = DeltaPolicy.OFF
    """Whether only what changed is sent. Trainers keep two copies of what they send; on GPUs one, if unconverted."""
    patch_share: float = 0.05
    """With `delta`: memory for patches on an engine rank, as a share of the bytes it receives. A version with longer
    patches is sent whole."""
    staging: StagingPolicy = StagingPolicy.NONE
    """Whether trainers keep a copy of what they send, so that the weights may change while it is on its way."""
    chunk_bytes: int = 0
    """Bytes converted, compared and sent at a time, where they change on the way; at most 256 MiB over a network. 0: 32
    MiB, on GPUs 1 GiB."""
    staging_bytes: int = 0
    """Limit on chunk bytes that one trainer has converted or compared but not yet sent. 0: 256 MiB, on GPUs 4 GiB."""
    min_write_bytes: int = 0
    """Runs shorter than this are packed instead of being written one by one, over transports that take descriptors.
    0: derived from the topology's costs."""
    window_bytes: int = 0
    """Memory of an engine rank through which packed chunks reach its live weights: in mode `in_place` where the
    transport takes descriptors, in mode `patch` for versions that are sent whole. 0: 256 MiB, on GPUs 1 GiB."""
    transport: str = "auto"
    """`auto` takes the fastest for each link; a name is used for every link, or refused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _member_of(ReceiverMode, self.mode, "mode"))
        object.__setattr__(self, "delta", _member_of(DeltaPolicy, self.delta, "delta"))
        object.__setattr__(self, "staging", _member_of(StagingPolicy, self.staging, "staging"))
        if self.mode is ReceiverMode.PATCH and self.delta is DeltaPolicy.OFF:
            raise ConfigError("mode `patch` without delta", hint="set delta to `on`: there are no patches without it")
        if not 0.0 < self.patch_share <= 1.0:
            raise ConfigError(f"patch_share is {self.patch_share}", hint="expected more than 0 and at most 1")
        self._check_sizes()

    def _check_sizes(self) -> None:
        chunk, staging = self.chunk_bytes, self.staging_bytes
        if chunk and (not 4096 <= chunk <= 1 << 32 or chunk % 64):
            raise ConfigError(f"chunk_bytes is {chunk}", hint="expected 4096 to 4 GiB, a multiple of 64; or 0")
        least = 4 * (chunk or LARGEST_CHUNK)
        if staging and not least <= staging <= 1 << 42:
            raise ConfigError(f"staging_bytes is {staging}", hint=f"expected 4 × chunk_bytes ({least}) or more; or 0")
        if not 0 <= self.min_write_bytes <= 1 << 40:
            raise ConfigError(f"min_write_bytes is {self.min_write_bytes}", hint="expected 0 or more")
        if self.window_bytes and not MIB <= self.window_bytes <= 1 << 42:
            raise ConfigError(f"window_bytes is {self.window_bytes}", hint="expected 1 MiB or more; or 0")

    def chunk_bytes_on(self, device: str) -> int:
        """Chunk size of a member with weights on a device, or in a kind of memory."""
        return self.chunk_bytes or (32 * MIB if device == "cpu" else LARGEST_CHUNK)

    def window_bytes_on(self, device: str) -> int:
        """The window of an engine rank with weights on a device."""
        return self.window_bytes or (256 * MIB if device == "cpu" else 1024 * MIB)

    def staging_bytes_on(self, device: str) -> int:
        """Limit on chunk bytes that a trainer holds."""
        return self.staging_bytes or max(4 * self.chunk_bytes_on(device), 256 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings(Settings):
    """How members transfer versions. They live with the controller, which ships them to every member that joins.

    >>> TransferSettings(mode="in_place", delta="on").mode
    <ReceiverMode.IN_PLACE: 'in_place'>
    """

    digest: DigestPolicy = DigestPolicy.ON
    """Whether versions are verified by digests."""
    anchor_every: int = 20
    """With `delta`: one version in this many is sent whole."""
    compression: CompressionPolicy = CompressionPolicy.NONE
    """With `delta`: whether patches are compressed; for slow links."""
    allow_nonfinite: bool = False
    """Quantise NaN and infinities (to NaN and ±448) instead of refusing the version."""
    allow_fallback: bool = False
    """Use a slower transport, with a warning, where the intended one does not work."""
    num_threads: int = 1
    """Copy threads per trainer."""
    nixl_devices: str = ""
    """Network devices UCX may use, such as `mlx5_0:1`; empty: `UCX_NET_DEVICES`, or all. Several Ethernet cards, like
    `eth0,eth1`, get writes of their own, by their rates; name them in the same order on all hosts."""
    beat_s: float = 0.5
    """Heartbeat interval of members and the controller. Longer for more than 100 members, so that 200 heartbeats a
    second reach the controller, but never more than a quarter of silence_s."""
    silence_s: float = 5.0
    """A member, or the controller, that has been silent for this long is lost."""
    version_s: float = 60.0
    """A version that is not ready everywhere in this time is aborted."""
    commit_s: float = 30.0
    """An engine that has not committed a version this long after it was decided is dropped; it joins again when its
    thread is back."""
    pause_s: float = 30.0
    """The same for an engine that does not pause for an in-place version, or whose thread does not open its memory
    while others, by a quorum, can go on without it."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        object.__setattr__(self, "digest", _member_of(DigestPolicy, self.digest, "digest"))
        object.__setattr__(self, "compression", _member_of(CompressionPolicy, self.compression, "compression"))
        if self.compression is not CompressionPolicy.NONE and self.delta is DeltaPolicy.OFF:
            raise ConfigError(
                "compression without delta", hint="set delta to `on`: patches are compressed, not weights"
            )
        if not 1 <= self.anchor_every <= 1_000_000:
            raise ConfigError(f"anchor_every is {self.anchor_every}", hint="expected 1 to 1000000")
        for name in ("beat_s", "silence_s", "version_s", "commit_s", "pause_s"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="expected more than 0 and at most 86400 s")
        if self.silence_s < 2 * self.beat_s:
            raise ConfigError(
                f"silence_s ({self.silence_s}) is less than two heartbeats ({self.beat_s} s each)",
                hint="a member would be declared lost between two heartbeats",
            )
        if not 1 <= self.num_threads <= 64:
            raise ConfigError(f"num_threads is {self.num_threads}", hint="expected 1 to 64")

    def paced(self, num_members: int) -> Self:
        """These settings for a fleet of this size: heartbeats of many members are rarer."""
        beat_s = min(num_members / MAX_BEATS_PER_S, self.silence_s / BEATS_IN_SILENCE)
        return self if beat_s <= self.beat_s else replace(self, beat_s=beat_s)

    @property
    def planned(self) -> Settings:
        """The part that a plan says."""
        return Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})


SPARE_BYTES = 64 * MIB
"""On top of the weights: alignment, and room for small patches."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parsed_size(text: str) -> int:
    """Bytes of a size such as `20GiB`; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"`{text}` is not a size", hint="use a size such as 20GiB or 500MB, a receiver mode, or none")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class CachePolicy(enum.StrEnum):
    """What happens to KV cache entries computed with older weights when an engine commits a version."""

    KEEP = "keep"
    """Running requests keep their entries; later requests do not find them."""
    RECOMPUTE = "recompute"
    """All entries are dropped; running requests recompute theirs with the new weights."""
    REUSE = "reuse"
    """Nothing is dropped: later requests may reuse entries computed with older weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How an inference engine (vLLM, SGLang) takes part. Given to the engine, or as `WEFT_*` variables."""

    controller: str = ""
    """Address of the controller. Empty: the engine joins none (vLLM: until its own protocol names one)."""
    first_rank: int = 0
    """Rank of the engine's first worker among all engine ranks; 2 for the second engine of two ranks each."""
    cache: CachePolicy = CachePolicy.KEEP
    """What happens to KV cache entries computed with older weights."""
    keys: str = ""
    """Folder with `controller.pub` and the member's own key."""
    key: str = "engine"
    """Name of the member's key in that folder."""
    stand_still_s: float = 120.0
    """Longest time an engine pauses for a version."""
    reserve: str = "shadow"
    """Memory set aside for versions before the KV cache takes the rest: what a mode needs (`shadow`, `in_place`,
    `patch`) with the default `patch_share` and `window_bytes`, a size such as `20GiB`, or `none`."""

    def reserved_bytes(self, weight_bytes: int, device: str) -> int:
        """Bytes to reserve for so many bytes of weights. For modes an upper bound, with or without patches, while the
        controller has the default `patch_share` and `window_bytes`; the plan has the exact figure."""
        settings = TransferSettings()
        patches = settings.patch_share * weight_bytes + SPARE_BYTES
        match self.reserve:
            case "none":
                return 0
            case "shadow":
                return int(weight_bytes + patches)
            case "patch" | "in_place":
                return int(patches) + settings.window_bytes_on(device)
        return parsed_size(self.reserve)

    def __post_init__(self) -> None:
        if self.reserve not in ("none", *ReceiverMode):
            parsed_size(self.reserve)
        object.__setattr__(self, "cache", _member_of(CachePolicy, self.cache, "cache policy"))
        if not isinstance(self.first_rank, int) or self.first_rank < 0:
            raise ConfigError(f"first_rank is {self.first_rank!r}", hint="expected 0 or more")
        if not 0 < self.stand_still_s <= 86_400:
            raise ConfigError(f"stand_still_s is {self.stand_still_s}", hint="expected more than 0 and at most 86400 s")


def engine_settings(given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> EngineSettings:
    """Defaults, overridden by `WEFT_*` variables, overridden by what is given."""
    kinds: dict[str, Any] = {"first_rank": int, "stand_still_s": float}
    variables = os.environ if env is None else env
    values: dict[str, Any] = {}
    names = [field.name for field in fields(EngineSettings)]
    for name in names:
        text = variables.get(f"WEFT_{name.upper()}")
        if text is not None:
            try:
                values[name] = kinds.get(name, str)(text)
            except ValueError:
                raise ConfigError(f"WEFT_{name.upper()} is {text!r}", hint="expected a number") from None
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(f"unknown engine settings {', '.join(unknown)}", hint=f"settings: {', '.join(names)}")
    return EngineSettings(**(values | dict(given)))


AnySettings = TypeVar("AnySettings", bound=Settings)


def load_settings(
    kind: type[AnySettings],
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    given: Mapping[str, Any] | None = None,
) -> AnySettings:
    """Defaults, overridden by a file's [weft] table, overridden by `WEFT_*` variables, overridden by what is given.

    The file may have settings of controllers beside those of plans.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values |= _values(TransferSettings, read_toml(path).get("weft", {}), where=f"`{path}` [weft]")
    variables = os.environ if env is None else env
    named = {field.name: f"WEFT_{field.name.upper()}" for field in fields(kind)}
    values |= _values(
        kind, {name: variables[key] for name, key in named.items() if key in variables}, where="environment"
    )
    values |= given or {}
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def settings_from(table: Any, *, where: str) -> Settings:
    """Settings from a table of names and values."""
    return Settings(**_values(Settings, table, where=where))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary, with errors that name the file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not TOML: {error}") from error


def _values(kind: type[Settings], table: Any, *, where: str) -> dict[str, Any]:
    """The entries of a table as values of their settings."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}", hint="expected a table of settings")
    defaults = {field.name: field.default for field in fields(kind)}
    unknown = [name for name in table if name not in defaults]
    if unknown:
        raise ConfigError(f"{where}: unknown setting `{unknown[0]}`", hint=f"settings: {', '.join(defaults)}")
    return {name: _value(name, value, defaults[name], where=where) for name, value in table.items()}


def _value(name: str, value: Any, default: Any, *, where: str) -> Any:
    """A value of the default's type; variables are texts."""
    expected = "a text"
    try:
        match default:
            case bool():
                expected = "true or false"
                return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
            case int():
                expected = "a whole number"
                return value if isinstance(value, int) else int(str(value))
            case float():
                expected = "a number"
                return float(value)
            case _ if isinstance(value, str):
                return value
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{where}: {name} is {value!r}", hint=f"expected {expected}")
