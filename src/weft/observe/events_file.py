"""The file that `weft controller --events FILE` writes: a line for every member, plan and version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.errors import ConfigError


def read_versions(path: Path) -> list[dict[str, Any]]:
    """All versions, in the order they ended."""
    return [line for line in read_lines(path) if "moments" in line]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines. The last one may be incomplete while a controller writes."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"`{path}` line {number} is not an event: {error}") from error
    return [record for record in records if isinstance(record, dict)]


def find_version(path: Path, version: int | None) -> dict[str, Any]:
    """One version, as it ended last; None: the last of all."""
    known = read_versions(path)
    found = [record for record in known if version is None or record["version"] == version]
    if not found:
        what = "no version" if version is None else f"no version {version}"
        ended = ", ".join(str(record["version"]) for record in known[-5:])
        raise ConfigError(f"`{path}` has {what}", hint=f"the last that ended: {ended or 'none'}")
    return found[-1]
