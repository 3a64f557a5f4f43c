"""The Python examples of documents run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(example, id=f"{path.relative_to(ROOT)}-{number}")
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
]


def test_the_readme_has_one():
    assert any("README.md" in str(example.id) for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example):
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
