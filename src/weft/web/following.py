"""An events file that grows, read line by line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.web.story import Story


class FollowedFile:
    """A file and the story it tells so far; for any thread. A file that is replaced or cut is read again."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise ConfigError(f"`{path}` is a folder", hint="give the file of `weft controller --events FILE`")
        self._path, self._lock = path, threading.Lock()
        self._story, self._at, self._rest, self._inode = Story(), 0, b"", 0
        self.num_invalid = 0
        """Lines that were not events."""

    def state(self) -> dict[str, Any]:
        """Everything but the details of versions, as of now."""
        with self._lock:
            return self._read().state() | {"num_invalid": self.num_invalid}

    def version(self, number: int) -> dict[str, Any] | None:
        """Details of one version."""
        with self._lock:
            return self._read().version(number)

    def links(self) -> list[dict[str, Any]]:
        """The plan in force, link by link."""
        with self._lock:
            return self._read().links()

    def revision(self) -> tuple[int, int]:
        """Changes when there is something new."""
        with self._lock:
            return self._inode, self._read().revision

    def _read(self) -> Story:
        """Take the lines that were added. A file that does not exist yet is empty."""
        try:
            with self._path.open("rb") as file:
                facts = self._path.stat()
                if facts.st_ino != self._inode or facts.st_size < self._at:
                    self._story, self._at, self._rest, self._inode = Story(), 0, b"", facts.st_ino
                file.seek(self._at)
                added = file.read()
        except FileNotFoundError:
            return self._story
        except OSError as error:
            raise ConfigError(f"`{self._path}` cannot be read: {error.strerror}") from error
        self._at += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            self._take(line)
        return self._story

    def _take(self, line: bytes) -> None:
        """One line; a damaged one is counted and left out."""
        try:
            facts = json.loads(line)
            self._story.take(facts if isinstance(facts, dict) else {})
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            self.num_invalid += 1
