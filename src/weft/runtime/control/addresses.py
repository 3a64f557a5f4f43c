"""Addresses of the control plane: `tcp://HOST:PORT`, read, checked, and found for this host."""

from __future__ import annotations

import ipaddress
import re
import socket

from weft.errors import AuthError, ConfigError

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5}|\*)")


def own_address(server: str) -> str:
    """This host's address on the route to a server; nothing is sent."""
    host = host_of(server)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_address(address: str) -> bool:
    """Whether a client can connect to this."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and match[2] != "*" and 0 < int(match[2]) < 65_536


def check_bind(address: str, *, has_keys: bool) -> None:
    """Raise if a server must not listen there."""
    if not _is_loopback(host_of(address)) and not has_keys:
        raise AuthError(
            f"listening on `{address}` without keys is refused: any process that reaches it could join",
            hint="make keys with `weft keys` and pass their folder, or listen on tcp://127.0.0.1",
        )


def host_of(address: str) -> str:
    """The host of a tcp:// address; raises if it is not one."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[2] != "*" and not 0 < int(match[2]) < 65_536):
        raise ConfigError(f"invalid address `{address}`", hint="for example tcp://127.0.0.1:7070")
    return match[1].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
