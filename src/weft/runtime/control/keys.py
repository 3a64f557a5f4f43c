"""CURVE keys of members: made by `weft keys`, kept in files, and what each of them permits.

Every member has a key pair in `NAME.key` (readable by its owner only) and its public half in `NAME.pub`. Both say which
side the key is for, and optionally which ranks:

    public = "…"
    side = "engine"          # trainer, engine or controller
    ranks = "0-7,9"          # optional; default: all ranks of the side

The controller admits the public keys in its folder (a `KeyRing`), each for its side and ranks; members need the
controller's `.pub` and their own `.key`. The folder is read again while the controller runs: a `.pub` file that is
added admits a member, one that is removed revokes its key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from weft.config import read_toml
from weft.errors import AuthError, ConfigError, WeftError

log = logging.getLogger(__name__)
SIDES = ("controller", "trainer", "engine")
REREAD_S = 0.5
"""How long a folder's contents may be cached."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIDE_OF_NAME = re.compile(rf"({'|'.join(SIDES)})(?:[0-9._-].*)?")
_RANKS = re.compile(r"\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*")
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A key pair, in ZeroMQ's printable form."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a public key permits."""

    public: str
    side: str
    """Empty for keys from before keys had sides: they permit nothing."""
    ranks: tuple[range, ...] = ()
    """Empty: all ranks of the side."""
    source: str = "the key"
    """The file, as named in errors."""

    def objection(self, side: str, rank: int) -> str | None:
        """Why the key may not be used to join as this rank; None if it may."""
        if not self.side:
            return f'{self.source} names no side: add the line `side = "{side}"` to it'
        if self.side != side:
            return f"{self.source} is for the {self.side} side, not for {side} {rank}"
        if self.ranks and not any(rank in ranks for ranks in self.ranks):
            shown = ",".join(f"{r.start}-{r.stop - 1}" if len(r) > 1 else f"{r.start}" for r in self.ranks)
            return f"{self.source} is for {side} ranks {shown}, not for rank {rank}"
        return None


def new_keys() -> Keys:
    """A new pair."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    return Keys(public=public, secret=secret)


def make_keys(folder: Path, names: Sequence[str], *, side: str | None = None, ranks: str = "") -> list[Path]:
    """Write a key pair for each name; refuses to replace one that exists. Returns the `.key` files.

    `side`: by default taken from the name: `trainer`, `engine3`, `engine-east`.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"invalid key name `{name}`", hint="use letters, digits, dots, dashes, underscores")
    sides = {name: side or _side_of(name) for name in names}
    if unknown := set(sides.values()) - set(SIDES):
        raise ConfigError(f"unknown side `{unknown.pop()}`", hint=f"one of {', '.join(SIDES)}")
    _parse_ranks(ranks, "`ranks`")
    for name in names:
        for path in (folder / f"{name}.key", folder / f"{name}.pub"):
            if path.exists():
                raise ConfigError(f"`{path}` already exists", hint="remove it, or choose another name or folder")
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in names:
            keys = new_keys()
            permits = f'side = "{sides[name]}"\n' + (f'ranks = "{ranks}"\n' if ranks else "")
            _write(folder / f"{name}.pub", f'public = "{keys.public}"\n{permits}', 0o644)
            _write(folder / f"{name}.key", f'public = "{keys.public}"\nsecret = "{keys.secret}"\n{permits}', 0o600)
            made.append(folder / f"{name}.key")
    except OSError as error:
        raise ConfigError(f"keys cannot be written to `{folder}`: {error.strerror}") from error
    return made


def _side_of(name: str) -> str:
    match = _SIDE_OF_NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"the key `{name}` needs a side",
            hint="--side trainer or engine, or a name such as `trainer-a` or `engine3`",
        )
    return match[1]


def _parse_ranks(text: object, where: str) -> tuple[range, ...]:
    """`0-7,9` as ranges."""
    if text == "":
        return ()
    if not isinstance(text, str) or not _RANKS.fullmatch(text):
        raise AuthError(f"{where}: `{text}` is not a list of ranks", hint='for example ranks = "0-7,9"')
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.append(range(int(first), int(last or first) + 1))
    return tuple(found)


def _write(path: Path, text: str, mode: int) -> None:
    """Write a new file that no other user can read before its mode is set."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def load_keys(path: Path) -> Keys:
    """A key pair; refuses a file that others can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise AuthError(f"`{path}` cannot be read: {error.strerror}", hint="make keys with `weft keys`") from error
    if mode & 0o077:
        raise AuthError(f"`{path}` can be read by others", hint=f"chmod 600 {path}")
    return Keys(public=_half(path, "public"), secret=_half(path, "secret"))


def load_public(path: Path) -> str:
    """The public half from a `.pub` or `.key` file."""
    return _half(path, "public")


def load_grant(path: Path) -> Grant:
    """What a `.pub` file permits."""
    found = read_toml(path)
    side = found.get("side", "")
    if side not in ("", *SIDES):
        raise AuthError(f"`{path}`: unknown side `{side}`", hint=f"one of {', '.join(SIDES)}")
    ranks = _parse_ranks(found.get("ranks", ""), f"`{path}`")
    return Grant(public=_half(path, "public"), side=side, ranks=ranks, source=f"`{path}`")


def is_key(text: str) -> bool:
    """Whether this can be a public key."""
    return _Z85.fullmatch(text) is not None


class KeyRing:
    """The public keys a controller admits, and what each of them permits. Usable from any thread; never raises.

    Rereads its folder when files in it have changed. A file that cannot be read counts as absent and is logged.
    """

    def __init__(self, folder: Path | None = None, *, grants: Iterable[Grant] = ()) -> None:
        """`grants`: keys that are not in files."""
        self._folder = folder
        self._fixed = {grant.public: grant for grant in grants}
        self._grants = dict(self._fixed)
        self._lock = threading.Lock()
        self._seen: Files | None = None
        self._complaints: list[str] = []
        self._looked_at = 0.0
        self._look(max_age_s=0.0)
        if not self._grants:
            raise AuthError(f"no usable `.pub` file in `{folder}`", hint="make keys with `weft keys`")

    def knows(self, public: str) -> bool:
        """Whether a key is present at this moment."""
        self._look(max_age_s=0.0)
        return public in self._grants

    def objection(self, public: str, side: str, rank: int) -> str | None:
        """Why a key may not be used by this member; None if it may."""
        self._look(max_age_s=REREAD_S)
        grant = self._grants.get(public)
        return "its key was removed" if grant is None else grant.objection(side, rank)

    def _look(self, *, max_age_s: float) -> None:
        with self._lock:
            now = time.monotonic()
            if self._folder is None or now - self._looked_at < max_age_s:
                return
            self._looked_at = now
            seen = _files(self._folder)
            if seen is not None and seen != self._seen:
                self._read(self._folder, seen)

    def _read(self, folder: Path, seen: Files) -> None:
        """With the lock held: read all files; read them again next time if one cannot be read now."""
        grants: dict[str, Grant] = {}
        complaints = []
        for name, *_ in seen:
            try:
                grant = load_grant(folder / name)
            except WeftError as error:
                complaints.append(str(error))
                continue
            if grant.public in grants:
                complaints.append(f"{grant.source} holds the same key as {grants[grant.public].source}")
            grants.setdefault(grant.public, grant)
        for complaint in complaints:
            if complaint not in self._complaints:
                log.warning("ignoring a key: %s", complaint)
        self._complaints = complaints
        self._seen = None if complaints else seen
        self._grants = self._fixed | grants


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """What a `Server` uses: its own key, and those it allows to connect."""

    own: Keys
    allowed: KeyRing


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """What a `Client` uses: its own key, and its server's."""

    own: Keys
    server_public: str


Files = tuple[tuple[str, int, int, int], ...]
"""`.pub` files, and a stamp that changes when a file does."""


def _files(folder: Path) -> Files | None:
    """The `.pub` files of a folder; None if it cannot be read now, which revokes nothing."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed just now
                    if entry.name.endswith(".pub"):
                        status = entry.stat()
                        found.append((entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
    except FileNotFoundError:
        return ()
    except OSError as error:
        log.warning("keys in `%s` cannot be read: %s", folder, error.strerror)
        return None
    return tuple(sorted(found))


def _half(path: Path, name: str) -> str:
    value = read_toml(path).get(name)
    if not isinstance(value, str) or not _Z85.fullmatch(value):
        raise AuthError(f"`{path}` holds no {name} key", hint="make keys with `weft keys`")
    return value
