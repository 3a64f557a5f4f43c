"""`weft.Security`: which files it means, and mistakes in it."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.errors import AuthError, ConfigError
from weft.integrations.trl import WeftWeightTransfer
from weft.runtime.control.keys import Grant, load_public, make_keys, new_keys
from weft.runtime.control.security import KeysInMemory, Security, client_keys, security_in, server_keys

SOON_S = 20.0
WEIGHTS = weft.Weights.from_arrays({"w": np.zeros(4, np.float32)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path, ["controller", "trainer", "engine", "engine-east"])
    return tmp_path


def test_everybody_uses_the_key_of_its_side_unless_one_is_named(folder, monkeypatch):
    public = {name: load_public(folder / f"{name}.pub") for name in ("controller", "trainer", "engine", "engine-east")}
    for side in ("trainer", "engine"):
        keys = client_keys(Security(keys=folder), side)
        assert (keys.own.public, keys.server_public) == (public[side], public["controller"])
    assert client_keys(Security(keys=str(folder), key="engine-east"), "engine").own.public == public["engine-east"]
    server = server_keys(Security(keys=folder))
    assert server.own.public == public["controller"]
    assert all(server.allowed.knows(key) for key in public.values())
    monkeypatch.setenv("HOME", str(folder.parent))
    assert client_keys(Security(keys=f"~/{folder.name}"), "engine").own.public == public["engine"]


def test_a_key_may_be_kept_outside_the_folder(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    make_keys(elsewhere, ["controller"])
    own = load_public(elsewhere / "controller.pub")
    server = server_keys(Security(keys=folder, key=str(elsewhere / "controller")))
    assert server.own.public == own
    assert not server.allowed.knows(own)


def test_no_folder_means_no_keys():
    assert security_in("") is security_in(None) is client_keys(None, "engine") is server_keys(None) is None
    assert security_in("keys", "engine") == Security(keys="keys", key="engine")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keys": ""}, "`keys` is '', expected a folder"),
        ({"keys": None}, "`keys` is None, expected a folder"),
        ({"keys": b"keys"}, "`keys` is b'keys', expected a folder"),
        ({"keys": "keys", "key": ""}, "`key` is '', expected the name of a key"),
        ({"keys": "keys", "key": 3}, "`key` is 3, expected the name of a key"),
        ({"keys": KeysInMemory(own=new_keys()), "key": "trainer"}, "keys in memory have no names"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Security(**given)


@pytest.mark.parametrize("given", ["keys", {"keys": "keys"}, Path("keys")])
def test_what_is_not_a_security_is_refused_by_name(given: Any):
    message = f"`security` is a {type(given).__name__}, expected a Security"
    with pytest.raises(ConfigError, match=message):
        weft.Controller(num_trainers=1, num_engine_ranks=1, security=given)
    for member in (weft.Sender, weft.Receiver):
        with pytest.raises(ConfigError, match=message):
            member("tcp://127.0.0.1:1", rank=0, weights=WEIGHTS, security=given)


def test_files_that_are_missing_are_named(folder):
    with pytest.raises(AuthError, match=r"`.*nobody\.key` cannot be read"):
        weft.Sender("tcp://127.0.0.1:1", rank=0, weights=WEIGHTS, security=Security(keys=folder, key="nobody"))
    (folder / "controller.pub").unlink()
    with pytest.raises(ConfigError, match=r"controller\.pub"):
        weft.Receiver("tcp://127.0.0.1:1", rank=0, weights=WEIGHTS, security=Security(keys=folder))
    with pytest.raises(AuthError, match=r"`.*controller\.key` cannot be read"):
        weft.Controller(num_trainers=1, num_engine_ranks=1, security=Security(keys=folder / "nowhere"))


def test_listening_beyond_loopback_needs_security(folder):
    ranks = {"num_trainers": 1, "num_engine_ranks": 1}
    with pytest.raises(AuthError, match="without keys"):
        weft.Controller("tcp://0.0.0.0:*", **ranks)
    with weft.Controller("tcp://0.0.0.0:*", **ranks, security=Security(keys=folder)) as controller:
        assert controller.address.startswith("tcp://0.0.0.0:")


def test_keys_in_memory_travel_and_admit_their_own_side_only():
    own, theirs = new_keys(), {"trainer": new_keys(), "engine": new_keys()}
    grants = tuple(Grant(public=keys.public, side=side) for side, keys in theirs.items())
    of = {side: Security(keys=KeysInMemory(own=keys, server_public=own.public)) for side, keys in theirs.items()}
    of = pickle.loads(pickle.dumps(of))
    assert not any(keys.secret in repr(of) for keys in theirs.values())
    server = Security(keys=KeysInMemory(own=own, grants=grants))
    with weft.Controller(num_trainers=1, num_engine_ranks=1, security=server) as controller:
        address = controller.address
        with (
            weft.Receiver(address, rank=0, weights=WEIGHTS, security=of["trainer"]) as wrong,
            pytest.raises(AuthError, match="is for the trainer side, not for engine 0"),
        ):
            wrong.wait(SOON_S)
        with (
            weft.Sender(address, rank=0, weights=WEIGHTS, security=of["trainer"]),
            weft.Receiver(address, rank=0, weights=WEIGHTS, security=of["engine"]),
        ):
            assert controller.wait_planned(SOON_S)
    with pytest.raises(AuthError, match="the keys it admits"):
        server_keys(of["engine"])
    with pytest.raises(AuthError, match="the controller's public key"):
        client_keys(server, "engine")


@pytest.mark.parametrize("key", [None, "trainer"])
def test_trl_uses_the_controllers_key_and_the_trainers(folder, key):
    engine, security = np.zeros(4, np.float32), Security(keys=folder)
    transfer = WeftWeightTransfer(
        listen="tcp://127.0.0.1:*", timeout_s=SOON_S, security=Security(keys=str(folder), key=key)
    )
    transfer.init_weight_transfer()
    weights = weft.Weights.from_arrays({"w": engine})
    with (
        weft.Receiver(transfer._controller.address, rank=0, weights=weights, security=security) as receiver,
        ThreadPoolExecutor(max_workers=1) as serving,
    ):
        served = serving.submit(receiver.take, SOON_S)
        transfer.send_weights(iter([("w", torch.full((4,), 2.0))]))
        assert served.result(SOON_S) == 1
        transfer.destroy()
    assert engine.tolist() == [2.0] * 4
