"""Errors that used to reach nobody: a machine that is out of something, a controller that is not there, a lost key."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process.runtime_members import Process
from tests.support.waiting import wait_until
from weft.config import TransferSettings
from weft.errors import AuthError, PeerLost, ProtocolError, TransferTimeout, VersionError, WeftError
from weft.runtime.control.keys import make_keys
from weft.runtime.control.security import Security
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Weights
from weft.transport.mapped import DirectBatch

BOUND_S = 30.0
NOWHERE = "tcp://127.0.0.1:9"


def weights(rows: int = 4) -> Weights:
    return Weights.from_arrays({"w": np.zeros((rows, 1024), np.float32)})


def limits() -> dict[str, tuple[int, int]]:
    """What a process may still have, when it is out of something; by the name of the error."""
    num_files = len(os.listdir("/proc/self/fd"))
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return {
        "EMFILE": (resource.RLIMIT_NOFILE, num_files),
        "EFBIG": (resource.RLIMIT_FSIZE, 4096),
        "ENOMEM": (resource.RLIMIT_AS, used_bytes + (8 << 20)),
    }


def starved_engine(pipe: Any, address: str, error: str) -> None:
    """Joins, is then out of something, and is told to open transports; answers what it was told."""
    with Receiver(address, rank=0, weights=weights(16_384)) as receiver:
        while not receiver._control.incarnation:
            time.sleep(0.01)
        which, soft = limits()[error]
        resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))
        pipe.send("joined")
        pipe.recv()
        try:
            receiver.wait(BOUND_S)
        except ProtocolError as raised:
            resource.setrlimit(which, (resource.getrlimit(which)[1],) * 2)
            pipe.send((str(raised), type(raised.__cause__).__name__))
        pipe.recv()


@pytest.mark.parametrize(
    ("error", "words"),
    [("EMFILE", "Too many open files"), ("EFBIG", "File too large"), ("ENOMEM", "Cannot allocate memory")],
)
def test_a_member_that_is_out_of_something_says_so_to_everybody(error, words):
    with Controller(num_trainers=1, num_engine_ranks=1) as controller:
        engine = Process(starved_engine, controller.address, error)
        try:
            assert engine.answer() == "joined"
            with Sender(controller.address, rank=0, weights=weights(16_384), timeout_s=BOUND_S) as sender:
                engine.ask("wait")
                with pytest.raises(VersionError, match=f"engine 0 left: .*{words}"):
                    sender.publish(version=1).wait_committed(BOUND_S)
                told, cause = engine.answer()
            assert words in told
            assert cause == "OSError"
            assert words in controller.statistics().lost["engine 0"]
        finally:
            engine.close()


def test_without_a_controller_everybody_says_so():
    with (
        Sender(NOWHERE, rank=0, weights=weights(), timeout_s=1.0) as sender,
        pytest.raises(TransferTimeout, match=f"allowed to write version 0 .*: no controller answers at `{NOWHERE}`"),
    ):
        sender.publish(version=0).wait_committed(BOUND_S)
    with (
        Receiver(NOWHERE, rank=0, weights=weights()) as receiver,
        pytest.raises(TransferTimeout, match=f"engine 0 received no version .*: no controller answers at `{NOWHERE}`"),
    ):
        receiver.wait(0.3)
    with (
        Sender(NOWHERE, rank=0, weights=weights(), timeout_s=BOUND_S) as sender,
        pytest.raises(PeerLost, match="no controller answers"),
    ):
        sender.publish(version=0).wait_committed(BOUND_S)


def test_a_wrong_controller_key_is_named(tmp_path):
    make_keys(tmp_path, ["controller", "trainer", "engine"])
    make_keys(tmp_path / "other", ["controller"])
    mistaken = Security(keys=tmp_path / "other", key=str(tmp_path / "trainer"))
    with (
        Controller(num_trainers=1, num_engine_ranks=1, security=Security(keys=tmp_path)) as controller,
        Sender(controller.address, rank=0, weights=weights(), timeout_s=BOUND_S, security=mistaken) as sender,
        pytest.raises(AuthError, match="ends every handshake"),
    ):
        sender.publish(version=0).wait_committed(BOUND_S)


def test_removing_a_key_revokes_it_and_adding_one_admits(tmp_path):
    make_keys(tmp_path, ["controller", "trainer", "engine"])
    settings = TransferSettings(silence_s=5.0)
    with (
        Controller(
            num_trainers=1, num_engine_ranks=1, settings=settings, security=Security(keys=tmp_path)
        ) as controller,
        Receiver(controller.address, rank=0, weights=weights(), security=Security(keys=tmp_path)),
        Sender(controller.address, rank=0, weights=weights(), security=Security(keys=tmp_path)) as sender,
    ):
        assert controller.wait_planned(BOUND_S)
        began = time.monotonic()
        (tmp_path / "trainer.pub").unlink()
        while "trainer 0" in controller.statistics().members:
            assert time.monotonic() - began < settings.silence_s
            time.sleep(0.01)
        assert controller.statistics().lost == {"trainer 0": "was refused: its key was removed"}
        deadline = time.monotonic() + BOUND_S
        while sender._error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(ProtocolError, match="its key was removed"):
            sender.publish(version=1)
        make_keys(tmp_path, ["trainer-b"])
        with Sender(controller.address, rank=0, weights=weights(), security=Security(keys=tmp_path, key="trainer-b")):
            assert controller.wait_planned(BOUND_S)


@pytest.mark.parametrize("transport", ["shm", "cma", "nixl"])
def test_a_revoked_trainer_reaches_nothing_that_is_used(tmp_path, transport):
    """It goes on writing, without being told to, when its successor's version waits to be committed."""
    make_keys(tmp_path, ["controller", "trainer", "trainer-b", "engine"])
    settings = TransferSettings(silence_s=5.0, transport=transport, nixl_devices="lo")
    mine, theirs, engine = (np.full(1 << 16, value, dtype=np.float32) for value in (1, 2, 0))
    with (
        Controller(
            num_trainers=1, num_engine_ranks=1, settings=settings, security=Security(keys=tmp_path)
        ) as controller,
        Receiver(
            controller.address,
            rank=0,
            weights=Weights.from_arrays({"w": engine}),
            security=Security(keys=tmp_path),
        ) as receiver,
        Sender(
            controller.address,
            rank=0,
            weights=Weights.from_arrays({"w": mine}),
            security=Security(keys=tmp_path),
        ) as revoked,
    ):
        publication = revoked.publish(version=1)
        receiver.wait(BOUND_S).commit()
        publication.wait_committed(BOUND_S)
        assert (engine == 1).all()
        (tmp_path / "trainer.pub").unlink()
        wait_until(lambda: not controller.statistics().members.count("trainer 0"), BOUND_S, "the trainer is refused")
        with Sender(
            controller.address,
            rank=0,
            weights=Weights.from_arrays({"w": theirs}),
            security=Security(keys=tmp_path, key="trainer-b"),
        ) as successor:
            assert controller.wait_planned(BOUND_S)
            publication = successor.publish(version=2)
            update = receiver.wait(BOUND_S)
            mine[:] = -1
            for way, batch in revoked._batches():
                with contextlib.suppress(WeftError):
                    post = way.post_direct if isinstance(batch, DirectBatch) else way.post_all
                    post([batch], tag=3)[0].wait(2.0)
            update.commit()
            publication.wait_committed(BOUND_S)
        assert (engine == 2).all()


def test_a_key_of_the_other_side_does_not_join(tmp_path):
    make_keys(tmp_path, ["controller", "trainer", "engine"])
    with (
        Controller(num_trainers=1, num_engine_ranks=1, security=Security(keys=tmp_path)) as controller,
        Receiver(
            controller.address, rank=0, weights=weights(), security=Security(keys=tmp_path, key="trainer")
        ) as engine,
        pytest.raises(AuthError, match=r"trainer\.pub` is for the trainer side, not for engine 0"),
    ):
        engine.wait(BOUND_S)
