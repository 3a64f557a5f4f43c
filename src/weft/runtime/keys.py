"""CURVE keys of members: made by `weft keys`, kept in files, checked against an allow-list.

Every member has a key pair in `NAME.key` (readable by its owner only) and its public half in `NAME.pub`. The controller
accepts the public keys in its folder; members need the controller's `.pub` and their own `.key`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from weft.config import read_toml
from weft.errors import AuthError, ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A key pair, in ZeroMQ's printable form."""

    public: str
    secret: str = field(repr=False)


def make_keys(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write a key pair for each name; refuses to replace one that exists. Returns the `.key` files."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"`{name}` cannot name a key", hint="use letters, digits, dots, dashes, underscores")
        for path in (folder / f"{name}.key", folder / f"{name}.pub"):
            if path.exists():
                raise ConfigError(f"`{path}` exists already", hint="remove it, or choose another name or folder")
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in names:
            public, secret = (half.decode() for half in zmq.curve_keypair())
            _write(folder / f"{name}.pub", f'public = "{public}"\n', 0o644)
            _write(folder / f"{name}.key", f'public = "{public}"\nsecret = "{secret}"\n', 0o600)
            made.append(folder / f"{name}.key")
    except OSError as error:
        raise ConfigError(f"cannot write keys to `{folder}`: {error.strerror}") from error
    return made


def _write(path: Path, text: str, mode: int) -> None:
    """A new file that nobody else could read before its mode was set."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def load_keys(path: Path) -> Keys:
    """A key pair; refuses one that others can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise AuthError(f"cannot read `{path}`: {error.strerror}", hint="make keys with `weft keys`") from error
    if mode & 0o077:
        raise AuthError(f"`{path}` can be read by others", hint=f"chmod 600 {path}")
    return Keys(public=_half(path, "public"), secret=_half(path, "secret"))


def load_public(path: Path) -> str:
    """The public half from a `.pub` or `.key` file."""
    return _half(path, "public")


def member_security(folder: str, name: str) -> dict[str, Any]:
    """What Sender and Receiver need to be let in: their own key and the controller's; nothing without a folder."""
    if not folder:
        return {}
    path = Path(folder)
    return {"keys": load_keys(path / f"{name}.key"), "server_public": load_public(path / "controller.pub")}


def load_allowed(folder: Path) -> frozenset[str]:
    """All public keys in a folder."""
    found = frozenset(load_public(path) for path in sorted(folder.glob("*.pub")))
    if not found:
        raise AuthError(f"no `.pub` file in `{folder}`", hint="make keys with `weft keys`")
    return found


def _half(path: Path, name: str) -> str:
    value = read_toml(path).get(name)
    if not isinstance(value, str) or not _Z85.fullmatch(value):
        raise AuthError(f"`{path}` holds no {name} key", hint="make keys with `weft keys`")
    return value
