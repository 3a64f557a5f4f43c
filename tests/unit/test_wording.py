"""What people read: error messages, hints and help texts keep to the rules of the house."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from weft import errors
from weft.cli import app

SOURCES = Path(__file__).parents[2] / "src" / "weft"
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
NOT_A_NOUN = {"cannot", "could", "error", "failed", "it", "must", "nobody", "should", "somebody", "there", "you"}
MAX_HELP = 120


def _texts() -> Iterator[tuple[str, str, str]]:
    """Where an error is made, its message and its hint, with `{}` for what is filled in."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
                where = f"{path.relative_to(SOURCES)}:{node.lineno}"
                yield where, _text(node.args[0]), _text(hints[0]) if hints else ""


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in values)
        case ast.IfExp(body=body):
            return _text(body)
    return ""


def test_messages_begin_with_the_noun_concerned():
    wrong = []
    for where, message, _ in _texts():
        first = message.split(" ", 1)[0].strip(":,").lower()
        starts_low = not message[:1].isupper() or message[:2].isupper() or message.startswith(("NIXL", "Mooncake"))
        if message and (first in NOT_A_NOUN or not starts_low or message.endswith((".", "!"))):
            wrong.append(f"{where}: {message}")
    assert wrong == []


def test_hints_say_what_to_do_in_one_line():
    wrong = [f"{where}: {hint}" for where, _, hint in _texts() if "\n" in hint or hint.endswith((".", "!"))]
    assert wrong == []


def _parameters(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every command and option, and the help it shows."""
    yield path, (command.help or "").split("\n\n")[0]
    for parameter in command.params:
        yield f"{path} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    for name, child in getattr(command, "commands", {}).items():
        yield from _parameters(child, f"{path} {name}")


@pytest.mark.parametrize(("where", "text"), list(_parameters(typer.main.get_command(app), "weft")))
def test_help_is_one_line_that_ends(where, text):
    assert "\n" not in text, where
    assert len(text) <= MAX_HELP, where
    assert text.rstrip('"`)').endswith((".", "…")), where
