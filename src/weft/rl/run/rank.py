"""One process of the loop: a trainer rank or an engine rank. Started by `weft.rl.run.launch`, or by torchrun.

RANK=1 LOCAL_RANK=1 python -m weft.rl.run.member RUN_DIR
"""

from __future__ import annotations

import contextlib
import os

import torch

from weft.errors import WeftError
from weft.rl.run.engine import LoopEngine
from weft.rl.run.links import Conversation, Links
from weft.rl.run.messages import MemberFailed
from weft.rl.run.methods import use_plugins
from weft.rl.run.trainer import LoopTrainer
from weft.rl.settings import LoopSettings

LAST_WORDS_S = 5.0
"""How long a failing rank tries to report it."""


def run_rank(settings: LoopSettings, links: Links, *, rank: int, local_rank: int) -> None:
    """Run one rank until the run is over. Ranks of trainers come first, then those of engines."""
    torch.set_num_threads(settings.num_threads or max(1, (os.cpu_count() or 1) // settings.world_size))
    use_plugins(settings)
    is_trainer = rank < settings.num_trainers
    name = f"trainer {rank}" if is_trainer else f"engine {rank - settings.num_trainers}"
    member: LoopTrainer | LoopEngine | None = None
    try:
        if is_trainer:
            member = LoopTrainer(settings, links, rank=rank, local_rank=local_rank)
        else:
            member = LoopEngine(settings, links, rank=rank - settings.num_trainers, local_rank=local_rank)
        member.run()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(WeftError), Conversation(links, name, LAST_WORDS_S) as talk:
            talk.ask(MemberFailed(member=name, reason=reason))
        raise
    member.close()
