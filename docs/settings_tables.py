"""Tables of settings, from the classes that define them: names, defaults, and what their docstrings say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src" / "weft"


def settings_table(path: str, *names: str, prefix: str = "") -> str:
    """One row for each field of classes of settings; `prefix` makes environment variables of the names."""
    rows = [
        f"| `{prefix + field.upper() if prefix else field}` | {default} | {_cell(meaning)} |"
        for name in names
        for field, default, meaning in _fields(_class(path, name))
    ]
    return "\n".join(["| setting | default | what it does |", "|---|---|---|", *rows])


def _class(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((SOURCES / path).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def _fields(settings: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, default and docstring of each field."""
    for node, after in zip(settings.body, [*settings.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, _default(node.value), _docstring(after)


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _default(value: ast.expr | None) -> str:
    """As a user writes it: members of enumerations by their values."""
    match value:
        case None:
            return "required"
        case ast.Attribute(attr=member):
            return f"`{member.lower()}`"
        case ast.Constant(value=""):
            return "empty"
        case ast.Constant(value=None):
            return "none"
        case ast.Constant(value=str(text)):
            return f"`{text}`"
    return f"`{ast.unparse(value)}`"


def _cell(text: str) -> str:
    assert text, "every setting has a docstring"
    return " ".join(text.split()).replace("|", "\\|").rstrip(".")
