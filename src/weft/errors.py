"""The exception tree. Every error weft raises on purpose is a `WeftError`.

    WeftError
    ├── ConfigError       a setting, text or file given by the user
    ├── LayoutError       tensors and shards that do not fit together; names every one of them
    ├── PlanError         a plan that is not exact, or a damaged plan file
    ├── TransportError    bytes that could not be moved
    │   ├── TransportUnavailable    not on this machine
    │   ├── RegistrationError       memory that is not registered, or cannot be
    │   ├── PeerLost                a member that is gone or silent
    │   └── TransferTimeout         a deadline that has passed
    ├── CodecError        bytes that cannot be decoded, or converted
    ├── IntegrityError    bytes that differ from those that were sent
    ├── ProtocolError     an invalid message
    ├── AuthError         a key that does not permit this
    └── VersionError      a version that cannot be published, or was aborted

A message says what happened to which noun, what was expected and what was found; the remedy is `error.hint`. The
command line prints `error:` and `hint:` and exits with code 2.

    raise ConfigError("`tp3` cannot split 8 attention heads", hint="use a divisor of 8: 1, 2, 4, 8")
"""

from __future__ import annotations


class WeftError(Exception):
    """Base of all weft errors. `hint` says what to do about it.

    >>> import weft
    >>> try:
    ...     weft.load_topology("h100-ib4000")
    ... except weft.WeftError as error:
    ...     print(error.hint)
    did you mean h100-ib400? presets: ...
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(WeftError):
    """A setting, text or file given by the user is wrong."""


class LayoutError(WeftError):
    """Tensors and shards do not fit together. `problems` names every tensor concerned.

    `members` are those that differ from the others, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        problems: tuple[str, ...] = (),
        members: tuple[str, ...] = (),
        hint: str | None = None,
    ) -> None:
        shown = problems[:20]
        more = len(problems) - len(shown)
        lines = [message, *(f"  - {problem}" for problem in shown)]
        if more:
            lines.append(f"  … and {more} more")
        super().__init__("\n".join(lines), hint=hint)
        self.problems, self.members = problems, members


class PlanError(WeftError):
    """A plan does not write every destination byte exactly once, or a plan file is damaged."""


class TransportError(WeftError):
    """Bytes could not be moved."""


class TransportUnavailable(TransportError):
    """This transport does not work on this machine; the hint says what to install or use instead.

    `members` are those no other member can be linked to, where that is not true of all.
    """

    def __init__(self, message: str, *, hint: str | None = None, members: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.members = members


class RegistrationError(TransportError):
    """Memory is not registered, or cannot be."""


class PeerLost(TransportError):
    """The other side is gone."""


class TransferTimeout(TransportError):
    """A transfer did not finish before its deadline."""


class ProtocolError(WeftError):
    """A control message is invalid, or out of place."""


class AuthError(WeftError):
    """A member has no key, or one that is not allowed."""


class VersionError(WeftError):
    """A version is out of order, has the wrong base, or was aborted."""


class CodecError(WeftError):
    """A patch or a conversion failed, or its data is damaged."""


class IntegrityError(WeftError):
    """The bytes that arrived differ from the bytes that were sent."""
