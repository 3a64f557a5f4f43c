"""The labs of this machine: one file each, so that other commands find them and leftovers are removed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from weft.errors import ConfigError
from weft.lab.network import remove
from weft.lab.spec import LabSpec
from weft.transport.host import ProcessIdentity

FOLDER = Path("/run/weft-lab")


class LabRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A lab, and the process it belongs to."""

    name: str
    spec: LabSpec
    owner: ProcessIdentity

    @property
    def is_left(self) -> bool:
        """Whether its process has ended without removing it."""
        try:
            return ProcessIdentity.of(self.owner.pid) != self.owner
        except OSError:
            return True


def write(name: str, spec: LabSpec) -> None:
    """Note a lab of this process. Raises ConfigError if there is one of that name."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    record = LabRecord(name=name, spec=spec, owner=ProcessIdentity.of(os.getpid()))
    try:
        with open(_file(name), "xb") as file:
            file.write(msgspec.json.encode(record))
    except FileExistsError:
        raise ConfigError(f"a lab `{name}` is running", hint="choose another --name") from None


def forget(name: str) -> None:
    """The lab is gone."""
    _file(name).unlink(missing_ok=True)


def boot_file(name: str, host: int) -> Path:
    """The file a host's processes see as the identity of their boot."""
    return FOLDER / f"{name}.h{host}.boot"


def all_labs() -> list[LabRecord]:
    """Labs that are running."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=LabRecord))
    return found


def remove_leftovers() -> list[str]:
    """Remove labs whose process was killed; returns their names."""
    left = [record for record in all_labs() if record.is_left]
    for record in left:
        remove_lab(record.name)
    return [record.name for record in left]


def remove_lab(name: str) -> None:
    """Remove everything of a lab."""
    remove(name)
    for path in FOLDER.glob(f"{name}.h*.boot"):
        path.unlink(missing_ok=True)
    forget(name)


def find(name: str | None) -> LabRecord:
    """The lab of a name, or the only one. Raises ConfigError."""
    labs = {record.name: record for record in all_labs()}
    if name is None and len(labs) == 1:
        return next(iter(labs.values()))
    if name is None or name not in labs:
        running = f"running: {', '.join(labs)}" if labs else "start one with `weft lab run`"
        wrong = f"unknown lab `{name}`" if name is not None else "several labs are running: give --name"
        raise ConfigError(wrong if labs else "no lab is running", hint=running)
    return labs[name]


def _file(name: str) -> Path:
    return FOLDER / f"{name}.json"
