"""Documents name what exists, lead to each other, and can be read in any window."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft import errors
from weft.runtime.control import messages

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
WIDTH = 120


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_exists(name):
    paths = re.findall(
        r"`((?:src|tests|docs|benchmarks)/[\w./-]*|pyproject\.toml|Makefile)`", (ROOT / name).read_text()
    )
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_message_of_the_sequence_exists_where_it_is_said_to_be():
    """In the table of messages: the file that sends each, and those that handle it."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (`src/[^|]+`) \| (`src/[^|]+`) \|$", text, flags=re.MULTILINE)
    named = [(name, files) for names, *files in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(named) >= 8
    for name, files in named:
        assert hasattr(messages, name)
        for file in re.findall(r"`(src/[^`]+)`", " ".join(files)):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{file} does not know {name}"
    drawn = set(re.findall(r"^    \w+->>\w+: (\w+)", text, flags=re.MULTILINE)) - {"bytes"}
    assert drawn == {name for name, _ in named}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_fits_a_window(path):
    """Tables and what programs print may be wider."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith(("|", "!"))] == []


def test_the_index_names_every_document():
    index = (ROOT / "docs/README.md").read_text()
    missing = [path.name for path in ROOT.glob("docs/*.md") if path.name != "README.md" and path.name not in index]
    assert missing == []


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn = re.findall(r"^    (?:[│ ]   )?[├└]── (\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    made = [name for name, kind in vars(errors).items() if isinstance(kind, type) and kind is not errors.WeftError]
    assert sorted(drawn) == sorted(made)
    under = re.findall(r"^    │   [├└]── (\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    assert {name for name in made if issubclass(getattr(errors, name), errors.TransportError)} == {
        "TransportError",
        *under,
    }
