"""Trainer, engine and controller processes for runtime tests: weights both sides can derive from a seed, driven over
pipes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.processes import quick_context, stop_here
from weft.codec.patching import CpuPatcher
from weft.config import TransferSettings
from weft.core.geometry.scaling import QUANT_BLOCK, Scaling
from weft.core.version import CommitPolicy
from weft.errors import WeftError
from weft.runtime.controller.controller import Controller
from weft.runtime.receive.arrivals import Arrivals
from weft.runtime.receive.receiver import Receiver
from weft.runtime.send.sender import Sender
from weft.runtime.weights import Part, Weights

SHAPES = {"a": (64, 48), "b": (7, 5), "c": (1000,), "d": (33, 16)}
LARGE = {f"layer{i}": (512, 1024) for i in range(4)}
"""8 MiB: several chunks, so that a moment inside a transfer can be hit."""
ANSWER_S = 90.0


def checkpoint(
    version: int, shapes: dict[str, tuple[int, ...]] = SHAPES, density: float = 1.0
) -> dict[str, np.ndarray]:
    """The whole weights of a version; below a density of 1 most of them are those of the version before."""
    if density == 1.0:
        rng = np.random.default_rng(version)
        return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    weights = checkpoint(0, shapes)
    for number in range(1, version + 1):
        rng = np.random.default_rng(number)
        for array in weights.values():
            hit = rng.random(array.shape) < density
            array[hit] = rng.standard_normal(hit.sum(), dtype=np.float32)
    return weights


def parts_of(rank: int, num_ranks: int, dim: int, shapes: dict[str, tuple[int, ...]] = SHAPES):
    """One rank's boxes along a dimension (PyTorch's uneven rule), and what they are parts of."""
    boxes = {}
    for name, shape in shapes.items():
        cut = min(dim, len(shape) - 1)
        step = -(-shape[cut] // num_ranks)
        mine = slice(min(rank * step, shape[cut]), min((rank + 1) * step, shape[cut]))
        boxes[name] = tuple(mine if d == cut else slice(0, n) for d, n in enumerate(shape))
    parts = {name: Part(shape=shapes[name], lo=tuple(s.start for s in box)) for name, box in boxes.items()}
    return boxes, parts


def _arrays(rank: int, num_ranks: int, dim: int, shapes: dict[str, tuple[int, ...]]):
    boxes, parts = parts_of(rank, num_ranks, dim, shapes)
    arrays = {name: np.zeros_like(value[boxes[name]], order="C") for name, value in checkpoint(0, shapes).items()}
    return boxes, arrays, Weights.from_arrays(arrays, parts=parts)


def _trainer(
    pipe: Any,
    address: str,
    rank: int,
    num_ranks: int,
    shapes: dict[str, tuple[int, ...]],
    density: float,
    batch_bytes: int,
    patience_s: float,
) -> None:
    """Publishes the versions it is asked for; answers what became of each. `batch_bytes`: of patches, as on a GPU.

    `patience_s`: how long it waits for its turn, and for the end of a version.
    """
    CpuPatcher.batch_bytes = batch_bytes
    boxes, arrays, weights = _arrays(rank, num_ranks, 0, shapes)
    with Sender(address, rank=rank, weights=weights, timeout_s=patience_s) as sender:
        pipe.send("there")
        while (version := pipe.recv()) is not None:
            for name, value in checkpoint(version, shapes, density).items():
                arrays[name][...] = value[boxes[name]]
            try:
                publication = sender.publish(version=version)
                publication.wait_released(patience_s)
                publication.wait_committed(patience_s)
                pipe.send("committed")
            except WeftError as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _engine_arrays(rank: int, num_ranks: int, shapes: dict[str, tuple[int, ...]], precision: str):
    """An engine rank's arrays; in `fp8` matrices are quantised and come with the scales of their blocks."""
    boxes, arrays, weights = _arrays(rank, num_ranks, 1, shapes)
    if precision == "fp32":
        return arrays, weights
    _, parts = parts_of(rank, num_ranks, 1, shapes)
    for name, shape in shapes.items():
        if len(shape) == 2:
            _, columns = boxes[name]
            first, last = columns.start // QUANT_BLOCK, -(-columns.stop // QUANT_BLOCK)
            rows = -(-shape[0] // QUANT_BLOCK)
            arrays[name] = np.zeros(arrays[name].shape, dtype=ml_dtypes.float8_e4m3fn)
            arrays[f"{name}_scale_inv"] = np.zeros((rows, last - first), dtype=np.float32)
            parts[f"{name}_scale_inv"] = Part(shape=(rows, -(-shape[1] // QUANT_BLOCK)), lo=(0, first))
    return arrays, Weights.from_arrays(arrays, parts=parts)


def _engine(
    pipe: Any, address: str, rank: int, num_ranks: int, shapes: dict[str, tuple[int, ...]], precision: str
) -> None:
    """Serves: polls between steps, answers with its version and weights; notices torn weights by itself."""
    arrays, weights = _engine_arrays(rank, num_ranks, shapes, precision)
    with Receiver(address, rank=rank, weights=weights) as receiver:
        pipe.send("there")
        while True:
            with contextlib.suppress(WeftError):
                update = receiver.poll()
                if update is not None:
                    update.commit()
            if pipe.poll(0.001):
                request = pipe.recv()
                if request is None:
                    break
                if request == "fail":
                    _fail_next_commit(receiver)
                    continue
                if request in ("freeze inside", "fail inside"):
                    _break_inside(receiver, freezes=request == "freeze inside")
                    continue
                version = None if receiver.is_poisoned else receiver.version
                pipe.send((version, {name: _plain(array) for name, array in arrays.items()}))


def _fail_next_commit(receiver: Receiver) -> None:
    """Let the engine break off the next time it makes a version visible."""
    mode = receiver._mode
    visible = mode.make_visible

    def broken(version: int, *, whole: bool) -> None:
        mode.make_visible = visible
        raise WeftError(f"version {version} breaks off")

    mode.make_visible = broken


def _break_inside(receiver: Receiver, *, freezes: bool) -> None:
    """Let the engine break off, or its process stop, when some of the next version has landed."""
    following = receiver._following
    arriving = following._arriving

    def breaking(version: int, links: Any) -> Arrivals:
        following._arriving = arriving
        arrivals = arriving(version, links)
        follow = arrivals.follow

        def broken() -> bool:
            if not follow():
                return False
            assert not arrivals.is_whole
            arrivals.follow = follow
            if not freezes:
                raise WeftError("it breaks off")
            stop_here()
            return True

        arrivals.follow = broken
        return arrivals

    following._arriving = breaking


def _plain(array: np.ndarray) -> np.ndarray:
    """A copy that can be compared; FP8 as its codes."""
    return (array.view(np.uint8) if array.dtype.itemsize == 1 else array).copy()


def _controller(pipe: Any, address: str, options: dict[str, Any]) -> None:
    """A controller that can be killed."""
    options["settings"] = TransferSettings(**options["settings"])
    with Controller(address, **options) as controller:
        pipe.send(controller.address)
        while (request := pipe.recv()) is not None:
            pipe.send(controller.wait_planned(request) if isinstance(request, float) else controller.statistics())


class Process:
    """One process, driven over a pipe."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = quick_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: Any) -> None:
        self._pipe.send(request)

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(timeout_s), "the process does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def stall(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(ANSWER_S)
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Fleet:
    """A controller, trainers (cut along rows) and engine ranks (cut along columns), each a process."""

    def __init__(
        self,
        *,
        num_trainers: int = 2,
        num_engines: int = 2,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        density: float = 1.0,
        precision: str = "fp32",
        quorum: int = 0,
        ranks_per_engine: int = 1,
        batch_bytes: int = 0,
        patience_s: float = 20.0,
        **settings: Any,
    ) -> None:
        self.shapes, self.density, self.precision = shapes, density, precision
        self._sending = batch_bytes, patience_s
        defaults = {"silence_s": 5.0, "version_s": 20.0, "nixl_devices": "lo"}
        self._options = {
            "num_trainers": num_trainers,
            "num_engine_ranks": num_engines,
            "commit_policy": CommitPolicy.QUORUM if quorum else CommitPolicy.ALL,
            "quorum": quorum,
            "ranks_per_engine": ranks_per_engine,
            "settings": defaults | settings,
        }
        self.mode = settings.get("mode", "shadow")
        self.controller = Process(_controller, "tcp://127.0.0.1:*", self._options)
        self.address = self.controller.answer()
        self.trainers = [self.new_trainer(rank) for rank in range(num_trainers)]
        self.engines = [self.new_engine(rank) for rank in range(num_engines)]
        for member in (*self.trainers, *self.engines):
            assert member.answer() == "there"

    def new_trainer(self, rank: int) -> Process:
        num_ranks = self._options["num_trainers"]
        return Process(_trainer, self.address, rank, num_ranks, self.shapes, self.density, *self._sending)

    def new_engine(self, rank: int) -> Process:
        return Process(_engine, self.address, rank, self._options["num_engine_ranks"], self.shapes, self.precision)

    def restart_controller(self) -> None:
        self.controller.close()
        self.controller = Process(_controller, self.address, self._options)
        assert self.controller.answer() == self.address

    def statistics(self) -> Any:
        self.controller.ask("statistics")
        return self.controller.answer()

    def wait_planned(self, timeout_s: float = 20.0) -> None:
        self.controller.ask(timeout_s)
        assert self.controller.answer(timeout_s + 5.0), "the members are not planned"

    def wait_lost(self, member: str, timeout_s: float = 20.0) -> None:
        """Until the controller has noticed that a member is gone."""
        deadline = time.monotonic() + timeout_s
        while member not in self.statistics().lost:
            assert time.monotonic() < deadline, f"{member} is not missed"
            time.sleep(0.05)

    def lose(self, name: str, *, stalls: bool = False) -> None:
        """A member ends, or stands still, and is missed."""
        member = self._role(name)
        member.stall() if stalls else member.kill()
        self.wait_lost(name)

    def replace(self, name: str) -> None:
        """Another process takes a member's place, and has joined."""
        side, rank = name.split()
        new = self.new_trainer if side == "trainer" else self.new_engine
        self._role(name).close()
        members = self.trainers if side == "trainer" else self.engines
        members[int(rank)] = new(int(rank))
        assert members[int(rank)].answer() == "there"
        self.wait_joined(name)

    def _role(self, name: str) -> Process:
        side, rank = name.split()
        return (self.trainers if side == "trainer" else self.engines)[int(rank)]

    def wait_joined(self, *names: str, timeout_s: float = 20.0) -> None:
        """Until these are members, again."""
        deadline = time.monotonic() + timeout_s
        while not set(names) <= set(self.statistics().members):
            assert time.monotonic() < deadline, f"{', '.join(names)} have not joined"
            time.sleep(0.05)

    def publish(self, version: int) -> list[str]:
        for trainer in self.trainers:
            trainer.ask(version)
        return [trainer.answer() for trainer in self.trainers]

    def holdings(self, engines: list[Process] | None = None) -> list[tuple[int | None, dict[str, np.ndarray]]]:
        asked = self.engines if engines is None else engines
        for engine in asked:
            engine.ask("holdings")
        return [engine.answer() for engine in asked]

    def check(self, version: int | None, ranks: tuple[int, ...] | None = None) -> None:
        """These engine ranks (all, by default) hold exactly their part of one version."""
        chosen = tuple(range(len(self.engines))) if ranks is None else ranks
        whole = checkpoint(version, self.shapes, self.density) if version is not None else None
        for rank, (visible, arrays) in zip(chosen, self.holdings([self.engines[r] for r in chosen]), strict=True):
            boxes, _ = parts_of(rank, len(self.engines), 1, self.shapes)
            if whole is not None and self.precision == "fp8":
                self._check_fp8(rank, arrays, whole, boxes)
            assert visible == version, f"engine {rank} serves {visible}, not {version}"
            for name, array in arrays.items():
                if self.precision == "fp8" and array.ndim == 2:
                    continue
                expected = np.zeros_like(array) if whole is None else whole[name][boxes[name]]
                assert np.array_equal(array, expected), f"{name} on engine {rank}"

    def _check_fp8(self, rank: int, arrays: dict[str, np.ndarray], whole: dict[str, np.ndarray], boxes: Any) -> None:
        import torch  # noqa: PLC0415 - members import this module, and do not need torch

        from tests.support.fp8_reference import quantized  # noqa: PLC0415

        for name, value in whole.items():
            if value.ndim == 2:
                codes, scale = quantized(torch.from_numpy(value), Scaling.BLOCK)
                columns = boxes[name][1]
                blocks = slice(columns.start // QUANT_BLOCK, -(-columns.stop // QUANT_BLOCK))
                expected = codes.view(torch.uint8).numpy()[boxes[name]]
                assert np.array_equal(arrays[name], expected), f"{name} on engine {rank}"
                assert np.array_equal(arrays[f"{name}_scale_inv"], scale.numpy()[:, blocks]), f"scales of {name}"

    def close(self) -> None:
        for member in (*self.trainers, *self.engines, self.controller):
            member.close()


def lockstep_engine(pipe: Any, address: str, rank: int, barrier: Any, seed: int, num_versions: int, mode: str) -> None:
    """A rank of a tensor-parallel engine: every step all ranks meet, look at all weights, then poll.

    Answers with the version it served at every step; raises if two versions are mixed.
    """
    arrays = {name: np.full((64, 256), -1.0, dtype=np.float32) for name in ("a", "b", "c")}
    parts = {name: Part(shape=(64, 512), lo=(0, 256 * (rank % 2))) for name in arrays}
    served: list[int] = []
    rng = random.Random(seed)
    with Receiver(address, rank=rank, weights=Weights.from_arrays(arrays, parts=parts)) as receiver:
        pipe.send("there")
        deadline = time.monotonic() + 120.0
        while (not served or served[-1] < num_versions) and time.monotonic() < deadline:
            values = {float(value) for array in arrays.values() for value in np.unique(array)}
            assert len(values) == 1, f"rank {rank} sees versions {values} mixed at step {len(served)}"
            served.append(int(values.pop()))
            time.sleep(rng.random() * 0.002)
            barrier.wait(60.0)
            if (update := receiver.poll()) is not None:
                update.commit()
        barrier.wait(60.0)
        pipe.send((mode, served))
        pipe.recv()


def constant_trainer(pipe: Any, address: str, rank: int, num_versions: int) -> None:
    """Publishes versions whose every element is the version's number, as fast as engines take them."""
    arrays = {name: np.zeros((32, 512), dtype=np.float32) for name in ("a", "b", "c")}
    parts = {name: Part(shape=(64, 512), lo=(32 * rank, 0)) for name in arrays}
    with Sender(address, rank=rank, weights=Weights.from_arrays(arrays, parts=parts)) as sender:
        pipe.send("there")
        for version in range(1, num_versions + 1):
            for array in arrays.values():
                array[...] = version
            publication = sender.publish(version=version)
            publication.wait_released(60.0)
        publication.wait_committed(60.0)
        pipe.send("done")
        pipe.recv()
