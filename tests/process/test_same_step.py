"""All ranks of one engine commit the same version at the same step, and no reader ever sees two versions mixed."""

from __future__ import annotations

import pytest

from tests.process.runtime_members import Process, constant_trainer, lockstep_engine
from tests.support.processes import quick_context
from weft.config import TransferSettings
from weft.runtime.controller.controller import Controller

NUM_VERSIONS = 100


@pytest.mark.parametrize(("mode", "num_versions"), [("shadow", NUM_VERSIONS), ("in_place", 30)])
def test_ranks_of_an_engine_change_versions_together(mode, num_versions):
    """Two tensor-parallel engines of two ranks. The ranks of each meet at every step, as an all-reduce makes them, and
    look at every element of every tensor; each is slow at random."""
    barriers = [quick_context().Barrier(2) for _ in range(2)]
    settings = TransferSettings(mode=mode)
    with Controller(num_trainers=2, num_engine_ranks=4, ranks_per_engine=2, settings=settings) as controller:
        engines = [
            Process(lockstep_engine, controller.address, rank, barriers[rank // 2], rank, num_versions, mode)
            for rank in range(4)
        ]
        trainers = [Process(constant_trainer, controller.address, rank, num_versions) for rank in range(2)]
        members = [*engines, *trainers]
        assert [member.answer() for member in members] == ["there"] * 6
        assert [trainer.answer(120.0) for trainer in trainers] == ["done", "done"]
        served = [engine.answer(120.0)[1] for engine in engines]
        for member in members:
            member.close()
    for first in (0, 2):
        assert served[first] == served[first + 1], "two ranks of one engine served different versions at one step"
        assert served[first][-1] == num_versions
        assert served[first] == sorted(served[first])
    seen = set(served[0]) - {-1}
    assert len(seen) == num_versions, "an engine skipped a version"
