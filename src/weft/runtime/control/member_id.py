"""A member's identity: its side and its rank. `engine 3` in messages to users, and at the head of a connection's name.

member = MemberId.engine(3)
str(member)                        # "engine 3"
MemberId.parse("engine 3")         # the same again; None for anything that is not a side and a rank
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

_TEXT = re.compile(r"([a-z]+) (\d{1,9})")


class MemberId(NamedTuple):
    """A side and a rank: the name of a place, whichever process has it now."""

    side: str
    rank: int

    @classmethod
    def trainer(cls, rank: int) -> Self:
        """A trainer rank."""
        return cls("trainer", rank)

    @classmethod
    def engine(cls, rank: int) -> Self:
        """An engine rank."""
        return cls("engine", rank)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What a peer calls itself; None if that is not a side and a rank."""
        match = _TEXT.fullmatch(text)
        return cls(match[1], int(match[2])) if match is not None else None

    def __str__(self) -> str:
        return f"{self.side} {self.rank}"
