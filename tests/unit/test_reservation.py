"""Memory an engine sets aside for versions: held until it is needed, and never more of it given out."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import weft
from weft.errors import WeftError
from weft.runtime.receive.reachable import ReachableMemory
from weft.runtime.receive.reservation import OutOfReserve, Reservation
from weft.runtime.weights import Weights
from weft.transport.base import ordinary_memory

MB = 1_000_000
SOON_S = 20.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_what_is_reserved_is_held_until_it_is_needed():
    before = resident_bytes()
    reservation = Reservation("cpu", 64 * MB)
    assert resident_bytes() - before > 60 * MB
    memory = reservation.take(48 * MB, ordinary_memory)
    assert memory.num_bytes == reservation.in_use == 48 * MB
    assert resident_bytes() - before < 30 * MB, "what was not needed is still held, the rest made way"
    del memory
    assert reservation.in_use == 0
    reservation.hold()
    assert resident_bytes() - before > 60 * MB
    reservation.close()
    assert resident_bytes() - before < 10 * MB


def test_more_than_was_reserved_is_refused_with_both_figures():
    reservation = Reservation("cpu", 10 * MB)
    kept = reservation.take(6 * MB, ordinary_memory)
    with pytest.raises(OutOfReserve, match=r"need 0\.005 GB .* 0\.010 GB were reserved, of which 0\.006 GB are in use"):
        reservation.take(5 * MB, ordinary_memory)
    assert reservation.in_use == kept.num_bytes


def test_memory_that_was_given_up_does_not_count():
    """Its pages are freed, although its addresses are kept out of use for a lost writer."""
    reservation = Reservation("cpu", 10 * MB)
    quarantined = reservation.take(8 * MB, ordinary_memory)
    assert quarantined.give_up()
    assert reservation.in_use == 0
    following = reservation.take(8 * MB, ordinary_memory)
    del quarantined
    assert reservation.in_use == following.num_bytes


def test_nothing_can_be_taken_of_what_was_closed():
    reservation = Reservation("cpu", 10 * MB)
    reservation.close()
    with pytest.raises(OutOfReserve):
        reservation.take(MB, ordinary_memory)


def test_what_cannot_be_allocated_stays_reserved():
    reservation = Reservation("cpu", 10 * MB)

    def fail(_: int) -> None:
        raise MemoryError("the transport has none")

    with pytest.raises(MemoryError, match="the transport has none"):
        reservation.take(5 * MB, fail)
    assert reservation.in_use == 0
    assert reservation.take(10 * MB, ordinary_memory).num_bytes == 10 * MB


def test_an_engine_with_too_little_says_so_on_both_sides():
    """Weights of 4 MB, in mode shadow; 1 MB was reserved."""
    trained, served = np.ones(1_000_000, dtype=np.float32), np.zeros(1_000_000, dtype=np.float32)
    with (
        weft.Controller(num_trainers=1, num_engine_ranks=1) as controller,
        weft.Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": trained}), timeout_s=3.0) as sender,
        weft.Receiver(
            controller.address,
            rank=0,
            weights=Weights.from_arrays({"w": served}),
            reservation=Reservation("cpu", MB),
        ) as receiver,
    ):
        with pytest.raises(
            WeftError, match=r"versions need 0\.004 GB to land in, but 0\.001 GB were reserved"
        ) as raised:
            receiver.wait(SOON_S)
        assert "WEFT_RESERVE=4MB" in (raised.value.hint or "")
        with pytest.raises(WeftError, match=r"0\.001 GB were reserved"):
            sender.publish(version=1).wait_committed(SOON_S)


class Transports:
    """Transports of an engine on a GPU, as far as memory is concerned."""

    def pass_host(self, through_host: bool) -> None: ...

    def close_all(self) -> None: ...


def test_what_is_reserved_beside_the_weights_is_released_while_versions_land_in_host_memory(caplog):
    caplog.set_level(logging.INFO)
    before = resident_bytes()
    reservation = Reservation("cpu", 64 * MB)
    memory = ReachableMemory(SimpleNamespace(device="cuda:0"), Transports(), reservation)
    memory.pass_host(False)
    assert resident_bytes() - before > 60 * MB
    memory.pass_host(True)
    with reservation.aside():
        pass
    assert resident_bytes() - before < 10 * MB
    assert "0.064 GB that were reserved for them on cuda:0 are released" in caplog.text
    memory.pass_host(False)
    assert resident_bytes() - before > 60 * MB, "another trainer has come, on a GPU"


def _refuse_memory(_: int) -> None:
    raise MemoryError("the machine has none")


@pytest.mark.parametrize(
    ("reserved_bytes", "allocate", "told"),
    [
        (MB, None, r"engine 0 in mode in_place: versions need 0\.002 GB to land in, but 0\.001 GB were reserved"),
        (4 * MB, _refuse_memory, "engine 0 cannot open memory: MemoryError: the machine has none"),
    ],
    ids=["reservation too small", "machine too small"],
)
def test_an_engine_whose_window_does_not_fit_leaves_and_says_why(reserved_bytes, allocate, told, monkeypatch):
    """In place the engine's own thread opens memory: 2 MB, through which weights pass that are converted."""
    trained, served = np.ones(1_000_000, dtype=np.float32), np.zeros(1_000_000, dtype=np.float16)
    settings = weft.TransferSettings(mode="in_place", transport="cma")
    weights = Weights.from_arrays({"w": trained})
    with (
        weft.Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller,
        weft.Sender(controller.address, rank=0, weights=weights, timeout_s=SOON_S) as sender,
        weft.Receiver(
            controller.address,
            rank=0,
            weights=Weights.from_arrays({"w": served}),
            reservation=Reservation("cpu", reserved_bytes),
        ) as receiver,
    ):
        if allocate is not None:
            monkeypatch.setattr(receiver._transports, "allocate", allocate)
        with pytest.raises(WeftError, match=told) as raised:
            receiver.wait(SOON_S)
        hint = "start the engine with WEFT_RESERVE=3MB, or lower window_bytes or patch_share of the controller"
        assert raised.value.hint == (hint if allocate is None else None)
        with pytest.raises(WeftError, match=told):
            receiver.poll()
        with pytest.raises(WeftError, match=told):
            sender.publish(version=1).wait_committed(SOON_S)


@pytest.mark.parametrize(
    ("mode", "delta"),
    [("shadow", "off"), ("in_place", "off"), ("shadow", "on"), ("in_place", "on"), ("patch", "on")],
)
def test_the_bound_of_a_mode_is_enough_for_it(mode, delta):
    trained, served = np.ones(1_000_000, dtype=np.float32), np.zeros(1_000_000, dtype=np.float32)
    bound = weft.config.EngineSettings(reserve=mode).reserved_bytes(served.nbytes, "cpu")
    settings = weft.TransferSettings(mode=mode, delta=delta)
    reservation = Reservation("cpu", bound)
    with (
        weft.Controller(num_trainers=1, num_engine_ranks=1, settings=settings) as controller,
        weft.Sender(controller.address, rank=0, weights=Weights.from_arrays({"w": trained})) as sender,
        weft.Receiver(
            controller.address, rank=0, weights=Weights.from_arrays({"w": served}), reservation=reservation
        ) as receiver,
    ):
        publication = sender.publish(version=1)
        receiver.wait(SOON_S).commit(SOON_S)
        publication.wait_committed(SOON_S)
        np.testing.assert_array_equal(served, trained)
        assert reservation.in_use <= bound
