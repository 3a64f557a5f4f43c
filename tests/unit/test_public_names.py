from __future__ import annotations

import subprocess
import sys

import weft


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
