"""Which keys a controller or a member uses: one value, given to Controller, Sender, Receiver and the integrations.

    Controller("tcp://10.0.0.1:7070", …, security=Security(keys="~/weft-keys"))                      # controller.key
    Sender("tcp://10.0.0.1:7070", …, security=Security(keys="~/weft-keys"))                          # trainer.key
    Receiver("tcp://10.0.0.1:7070", …, security=Security(keys="~/weft-keys", key="engine-east"))     # engine-east.key

Files are read when a channel is opened (`client_keys`, `server_keys`), not when the value is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.errors import AuthError, ConfigError
from weft.runtime.control.keys import ClientKeys, Grant, KeyRing, Keys, ServerKeys, load_keys, load_public

CONTROLLER = "controller"
"""Name of the controller's key: its own by default, and the one members expect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysInMemory:
    """Keys that are not in files: made by a program, which hands them out itself."""

    own: Keys
    server_public: str = ""
    """For a member: the controller's public key."""
    grants: tuple[Grant, ...] = ()
    """For a controller: the keys it admits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Which keys a controller or a member uses; without a Security, a controller listens on loopback only.

    >>> security = Security(keys="~/weft-keys", key="engine-east")   # reads controller.pub and engine-east.key there
    """

    keys: str | Path | KeysInMemory
    """Folder of keys made by `weft keys`.

    A member needs its own `.key` and `controller.pub`. A controller needs its own `.key` and the `.pub` of every member
    it admits; it reads them again while it runs.
    """
    key: str | None = None
    """Name of the caller's own key in that folder, or its path without `.key`.

    By default the key is named after its side: `controller`, `trainer` or `engine`.
    """

    def __post_init__(self) -> None:
        hint = 'for example Security(keys="~/weft-keys", key="trainer"), with a folder made by `weft keys`'
        if not isinstance(self.keys, str | Path | KeysInMemory) or self.keys == "":
            raise ConfigError(f"`keys` is {self.keys!r}, expected a folder", hint=hint)
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise ConfigError(f"`key` is {self.key!r}, expected the name of a key", hint=hint)
        if self.key is not None and isinstance(self.keys, KeysInMemory):
            raise ConfigError(f"`key` is {self.key!r}, but keys in memory have no names", hint="leave `key` out")


def security_in(folder: str | Path | None, key: str | None = None) -> Security | None:
    """The Security that a setting or an option describes; None if it names no folder."""
    return Security(keys=folder, key=key) if folder else None


def client_keys(security: Security | None, side: str) -> ClientKeys | None:
    """What a member on this side needs to be admitted; raises AuthError if its files cannot be used."""
    if security is None:
        return None
    _check(security)
    if isinstance(security.keys, KeysInMemory):
        if not security.keys.server_public:
            raise AuthError(f"a {side} needs the controller's public key in addition to its own")
        return ClientKeys(own=security.keys.own, server_public=security.keys.server_public)
    folder = Path(security.keys).expanduser()
    own = load_keys(folder / f"{security.key or side}.key")
    return ClientKeys(own=own, server_public=load_public(folder / f"{CONTROLLER}.pub"))


def server_keys(security: Security | None) -> ServerKeys | None:
    """What a controller needs to admit members; raises AuthError if its files cannot be used."""
    if security is None:
        return None
    _check(security)
    if isinstance(security.keys, KeysInMemory):
        if not security.keys.grants:
            raise AuthError("a controller needs the keys it admits in addition to its own")
        return ServerKeys(own=security.keys.own, allowed=KeyRing(grants=security.keys.grants))
    folder = Path(security.keys).expanduser()
    return ServerKeys(own=load_keys(folder / f"{security.key or CONTROLLER}.key"), allowed=KeyRing(folder))


def _check(security: Security) -> None:
    if not isinstance(security, Security):
        raise ConfigError(
            f"`security` is a {type(security).__name__}, expected a Security",
            hint='for example security=weft.Security(keys="~/weft-keys")',
        )
