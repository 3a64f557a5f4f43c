"""weft (WEight Fast Transfer): fresh policy weights from trainer ranks to engine ranks.

The public names. Each is imported on first use, so `import weft` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config import TransferSettings as TransferSettings
    from weft.core.layout import Layout as Layout
    from weft.core.layout import Shard as Shard
    from weft.core.layout import Tensor as Tensor
    from weft.core.planner import make_plan as make_plan
    from weft.core.plans.plan import Plan as Plan
    from weft.core.recipe import Piece as Piece
    from weft.core.recipe import Recipe as Recipe
    from weft.core.topology import Topology as Topology
    from weft.core.topology import load_topology as load_topology
    from weft.errors import WeftError as WeftError
    from weft.integrations.torch import weights_of as weights_of
    from weft.runtime.control.security import Security as Security
    from weft.runtime.controller.controller import Controller as Controller
    from weft.runtime.receive.receiver import Receiver as Receiver
    from weft.runtime.send.sender import Sender as Sender
    from weft.runtime.weights import Part as Part
    from weft.runtime.weights import Weights as Weights
    from weft.sim.simulator import simulate as simulate

__version__ = "0.1.0"

_HOMES = {
    "Controller": "weft.runtime.controller.controller",
    "Layout": "weft.core.layout",
    "Part": "weft.runtime.weights",
    "Piece": "weft.core.recipe",
    "Plan": "weft.core.plans.plan",
    "Receiver": "weft.runtime.receive.receiver",
    "Recipe": "weft.core.recipe",
    "Security": "weft.runtime.control.security",
    "Sender": "weft.runtime.send.sender",
    "Shard": "weft.core.layout",
    "Tensor": "weft.core.layout",
    "Topology": "weft.core.topology",
    "TransferSettings": "weft.config",
    "WeftError": "weft.errors",
    "Weights": "weft.runtime.weights",
    "load_topology": "weft.core.topology",
    "make_plan": "weft.core.planner",
    "simulate": "weft.sim.simulator",
    "weights_of": "weft.integrations.torch",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
