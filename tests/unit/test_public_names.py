from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weft

DOCUMENT = Path(__file__).parents[2] / "docs" / "transfer.md"
SOON_S = 20.0


def test_the_export_list_is_exact():
    assert weft.__all__ == [
        "Controller",
        "Layout",
        "Part",
        "Piece",
        "Plan",
        "Receiver",
        "Recipe",
        "Security",
        "Sender",
        "Shard",
        "Tensor",
        "Topology",
        "TransferSettings",
        "WeftError",
        "Weights",
        "load_topology",
        "make_plan",
        "simulate",
        "weights_of",
    ]
    for name in weft.__all__:
        assert getattr(weft, name).__name__ == name


def test_importing_weft_imports_nothing_heavy():
    code = "import sys, weft; print([m for m in ('numpy', 'torch', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_users_see_what_is_documented_and_nothing_else():
    cells = [line.split("|")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    documented: dict[str, set[str]] = {}
    for name, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)", " ".join(cells)):
        documented.setdefault(name, set()).add(attribute)
    weights = [weft.Weights.from_arrays({"w": np.zeros(4, np.float32)}) for _ in range(2)]
    with (
        weft.Controller(num_trainers=1, num_engine_ranks=1) as controller,
        weft.Sender(controller.address, rank=0, weights=weights[0]) as sender,
        weft.Receiver(controller.address, rank=0, weights=weights[1]) as receiver,
    ):
        publication = sender.publish(version=1)
        update = receiver.wait(SOON_S)
        seen = (controller, sender, receiver, publication, update)
        assert documented == {type(one).__name__: {name for name in dir(one) if name[0] != "_"} for one in seen}
        update.commit()
        publication.wait_committed(SOON_S)


@pytest.mark.parametrize("name", weft.__all__)
def test_every_public_name_has_an_example_that_runs(name):
    shown = getattr(weft, name)
    home = importlib.import_module(shown.__module__)
    (found,) = doctest.DocTestFinder(recurse=False).find(shown, name, module=home, globs=dict(vars(home)))
    assert found.examples, f"weft.{name} has no example in its docstring"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found, out=said.append)
    assert "".join(said) == ""
