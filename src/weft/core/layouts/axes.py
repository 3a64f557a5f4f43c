"""The compact texts that describe parallel layouts: `pp2.ep8.fsdp16`, `hsdp8x16`, `tp32.ep32`.

A text is a dot-separated list of axis names with sizes; both layout modules read it with `parse_axes`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from weft.core.layout import MAX_RANKS
from weft.errors import ConfigError

_AXIS = re.compile(r"([a-z]+)(\d{1,9})(?:x(\d{1,9}))?")


def parse_axes(text: str, *, allowed: Collection[str], what: str, example: str) -> dict[str, tuple[int, ...]]:
    """The axes of a text, in order: `hsdp8x16` gives `{"hsdp": (8, 16)}`."""
    hint = f"write axes with sizes, for example `{example}`; axes: {', '.join(allowed)}"
    axes: dict[str, tuple[int, ...]] = {}
    for part in text.split("."):
        match = _AXIS.fullmatch(part)
        if match is None:
            raise ConfigError(f"{what} layout `{text}`: cannot read `{part}`", hint=hint)
        name, *sizes = match.groups()
        if name not in allowed:
            raise ConfigError(f"{what} layout `{text}`: unknown axis `{name}`", hint=hint)
        if name in axes:
            raise ConfigError(f"{what} layout `{text}`: axis `{name}` is given twice", hint=hint)
        if (sizes[1] is not None) != (name == "hsdp"):
            raise ConfigError(
                f"{what} layout `{text}`: `{part}`",
                hint="hsdp takes replicas x shards, as in hsdp8x16; other axes take one size",
            )
        axes[name] = tuple(int(size) for size in sizes if size is not None)
        if any(not 1 <= size <= MAX_RANKS for size in axes[name]):
            raise ConfigError(
                f"{what} layout `{text}`: size of `{part}` is out of range",
                hint=f"sizes go from 1 to {MAX_RANKS}",
            )
    return axes


def check_world(text: str, num_ranks: int, *, what: str) -> None:
    """Raise if a layout has more ranks than weft supports."""
    if num_ranks > MAX_RANKS:
        raise ConfigError(
            f"{what} layout `{text}` has {num_ranks} ranks", hint=f"at most {MAX_RANKS} ranks are supported"
        )
