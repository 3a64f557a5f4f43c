"""weft (WEight Fast Transfer): fresh policy weights from trainer ranks to engine ranks.

The public names; everything is imported on first use, so `import weft` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.core.layout import Layout as Layout
    from weft.core.layout import Shard as Shard
    from weft.core.layout import Tensor as Tensor
    from weft.core.plan import Plan as Plan
    from weft.core.planner import make_plan as make_plan
    from weft.core.recipe import Piece as Piece
    from weft.core.recipe import Recipe as Recipe
    from weft.core.topology import Topology as Topology
    from weft.core.topology import load_topology as load_topology
    from weft.errors import WeftError as WeftError
    from weft.sim.simulator import simulate as simulate

__version__ = "0.1.0"

_HOMES = {
    "Layout": "weft.core.layout",
    "Piece": "weft.core.recipe",
    "Plan": "weft.core.plan",
    "Recipe": "weft.core.recipe",
    "Shard": "weft.core.layout",
    "Tensor": "weft.core.layout",
    "Topology": "weft.core.topology",
    "WeftError": "weft.errors",
    "load_topology": "weft.core.topology",
    "make_plan": "weft.core.planner",
    "simulate": "weft.sim.simulator",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
