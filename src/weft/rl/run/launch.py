"""Start a run: all members as processes of this machine, or this process as one of torchrun's.

    record = run_here(settings, run_dir=Path("runs/a"), watch=view.show)

The process that starts a run holds weft's controller and the coordinator; members are watched, and none outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from weft import Controller, TransferSettings
from weft.config import DeltaPolicy
from weft.core.version import CommitPolicy
from weft.errors import ConfigError, PeerLost
from weft.rl.learn import checkpoint
from weft.rl.learn.tasks import load_task
from weft.rl.model.architecture import load_architecture
from weft.rl.model.engine_model import check_divides
from weft.rl.model.policy import check_modules
from weft.rl.run.coordinator import Coordinator
from weft.rl.run.links import Links
from weft.rl.run.methods import check_method
from weft.rl.run.rank import run_rank
from weft.rl.run.record import Record
from weft.rl.settings import LoopSettings
from weft.runtime.control.security import security_in

TICK_S = 0.1
STOP_S = 5.0
"""How long members have to end by themselves, and again after being told to."""
LOG_LINES = 15
EVENTS = "events.jsonl"
"""In a run's folder: for `weft why`, `weft trace`, `weft dashboard` and `weft report`."""
SILENCE_S = 5.0
"""Longest `silence_s` of weft's controller: a version waits no longer for a silent engine, which may join again."""
Watch = Callable[[Record], None]


class RunServices:
    """Weft's controller and the coordinator of one run."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: str = "",
        events: Path | None = None,
    ) -> None:
        """`port`: the controller's; the coordinator takes the next. 0: any. `events`: file for events."""
        security = security_in(keys)
        if events is not None:
            events.parent.mkdir(parents=True, exist_ok=True)
        self.controller = Controller(
            f"tcp://{host}:{port or '*'}",
            num_trainers=settings.num_trainers,
            num_engine_ranks=settings.num_engine_ranks,
            ranks_per_engine=settings.ranks_per_engine,
            commit_policy=CommitPolicy.QUORUM,  # training continues while one engine is left
            quorum=1,
            settings=transfer_settings(settings),
            events=events,
            security=security,
        )
        try:
            self.coordinator = Coordinator(
                settings,
                f"tcp://{host}:{port + 1 if port else '*'}",
                transfers=self.controller.statistics,
                security=security,
            )
        except BaseException:
            self.controller.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.coordinator.close()
        self.controller.close()


def transfer_settings(settings: LoopSettings) -> TransferSettings:
    """How weft transfers the versions of a run."""
    return TransferSettings(
        mode=settings.mode,
        delta=DeltaPolicy.ON if settings.delta else DeltaPolicy.OFF,
        transport=settings.transport,
        version_s=settings.timeout_s,
        silence_s=min(settings.silence_s, SILENCE_S),
    )


@dataclass(slots=True)
class _MemberProcess:
    name: str
    engine: int | None
    process: subprocess.Popen[bytes]
    log: Path
    is_gone: bool = False

    def how(self) -> str:
        """How it ended."""
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.exists() else []
        return "\n".join(lines)


def check_runnable(settings: LoopSettings) -> None:
    """Raise the errors members would fail with, before any is started."""
    check_method(settings)
    architecture = load_architecture(settings.model, vocab_size=load_task(settings.task).vocab_size)
    check_modules(settings, architecture)
    check_divides(architecture, settings.ranks_per_engine)
    checkpoint.check(settings)
    if settings.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU", hint="use --device cpu")


def run_here(settings: LoopSettings, *, run_dir: Path, watch: Watch = lambda _: None) -> Record:
    """Run all members on this machine until they are done; raises if the run fails. Nothing is left running."""
    check_runnable(settings)
    with RunServices(settings, events=run_dir / EVENTS) as services, _store() as store:
        links = Links(
            controller=services.controller.address,
            coordinator=services.coordinator.address,
            store_host="127.0.0.1",
            store_port=store.port,
            run_dir=str(run_dir),
        )
        members: list[_MemberProcess] = []
        try:
            _write(run_dir, settings, links)
            for rank in range(settings.world_size):
                members.append(_start(settings, run_dir, rank))  # noqa: PERF401  # those that started must be stopped
            pids = {member.name: member.process.pid for member in members}
            (run_dir / "members.json").write_bytes(msgspec.json.encode(pids))
            with _interrupts() as is_interrupted:
                _watch_over(members, services.coordinator, watch, is_interrupted)
        finally:
            _stop(members)
            watch(services.coordinator.record)
        return services.coordinator.record


@contextlib.contextmanager
def _store() -> Iterator[Any]:
    """Torch's store, on loopback only: by itself it would listen everywhere."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        descriptor = os.dup(listening.fileno())  # the store closes it
        yield TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _write(run_dir: Path, settings: LoopSettings, links: Links) -> None:
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "settings.json").write_bytes(msgspec.json.encode(settings))
        (run_dir / "links.json").write_bytes(msgspec.json.encode(links))
    except OSError as error:
        raise ConfigError(f"the folder `{run_dir}` cannot be written: {error.strerror}") from error


def _start(settings: LoopSettings, run_dir: Path, rank: int) -> _MemberProcess:
    number = rank - settings.num_trainers
    name = f"trainer {rank}" if number < 0 else f"engine {number}"
    path = run_dir / "logs" / f"{name.replace(' ', '-')}.log"
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",  # the run is on this machine only
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WEFT_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.rl.run.member", str(run_dir)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt is for this process, which stops the members
        )
    return _MemberProcess(name, None if number < 0 else number // settings.ranks_per_engine, process, path)


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that an interrupt sets; a second one is raised where it arrives.

    Raised at once, it could arrive inside a finalizer, where Python prints it and continues.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _watch_over(
    members: list[_MemberProcess], coordinator: Coordinator, watch: Watch, is_interrupted: threading.Event
) -> None:
    """Watch until the run is over; raises PeerLost if it failed, KeyboardInterrupt if it was interrupted."""
    while not coordinator.ended.wait(TICK_S):
        if is_interrupted.is_set():
            raise KeyboardInterrupt
        for member in members:
            if not member.is_gone and member.process.poll() is not None:
                member.is_gone = True
                _gone(member, coordinator)
        watch(coordinator.record)
    deadline = time.monotonic() + STOP_S
    while (
        not coordinator.failure
        and time.monotonic() < deadline
        and any(member.process.poll() is None for member in members)
    ):
        time.sleep(0.02)
    if coordinator.failure:
        _stop(members)
        words = "\n".join(
            f"--- {member.name} ---\n{member.last_words()}"
            for member in members
            if member.name in coordinator.failure and member.last_words()
        )
        raise PeerLost(coordinator.failure, hint=words or "see the logs next to the report")


def _gone(member: _MemberProcess, coordinator: Coordinator) -> None:
    if coordinator.ended.is_set() or (member.process.returncode == 0 and member.engine is None):
        return
    if member.engine is None:
        coordinator.fail(f"{member.name} {member.how()}")
    else:
        coordinator.lose(member.engine, member.how())


def _stop(members: list[_MemberProcess]) -> None:
    """End all members that still run."""
    for tell in (signal.SIGTERM, signal.SIGKILL):
        for member in members:
            if member.process.poll() is None:
                member.process.send_signal(tell)
        for member in members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(STOP_S)


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_as_member(
    settings: LoopSettings, *, run_dir: Path, port: int, keys: str, watch: Watch = lambda _: None
) -> Record | None:
    """Run as the rank torchrun assigns; the first also holds controller and coordinator, and returns the record."""
    check_runnable(settings)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if world != settings.world_size:
        raise ConfigError(
            f"torchrun started {world} processes for {settings.num_trainers} trainers and "
            f"{settings.num_engine_ranks} engine ranks",
            hint="--nnodes × --nproc-per-node must be their sum",
        )
    if settings.check_bits and os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        raise ConfigError("--check-bits works on one machine only", hint="leave it out on several nodes")
    host = socket.gethostbyname(os.environ["MASTER_ADDR"])
    links = Links(
        controller=f"tcp://{host}:{port}",
        coordinator=f"tcp://{host}:{port + 1}",
        store_host=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        run_dir=str(run_dir),
        keys=keys,
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        run_rank(settings, links, rank=rank, local_rank=local_rank)
        return None
    with (
        RunServices(settings, host=host, port=port, keys=keys, events=run_dir / EVENTS) as services,
        _watching(services.coordinator, watch),
    ):
        try:
            run_rank(settings, links, rank=rank, local_rank=local_rank)
        except Exception as error:
            raise PeerLost(services.coordinator.failure or str(error)) from error
        if not services.coordinator.ended.wait(settings.timeout_s):
            raise PeerLost("other trainers have not finished")
        time.sleep(1.0)  # engines ask once more and are told to stop
        if services.coordinator.failure:
            raise PeerLost(services.coordinator.failure)
        return services.coordinator.record


@contextlib.contextmanager
def _watching(coordinator: Coordinator, watch: Watch) -> Iterator[None]:
    """Show the record while this process does its own work."""
    over = threading.Event()

    def show() -> None:
        while not over.wait(TICK_S):
            watch(coordinator.record)

    thread = threading.Thread(target=show, name="weft-rl-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        watch(coordinator.record)
