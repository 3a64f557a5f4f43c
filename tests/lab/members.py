"""Programs that run on the hosts of a lab: `python -m tests.lab.members NAME ARGUMENTS`."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import weft

PORT = 7070
WAIT_S = 60.0


def receive(num_bytes: str) -> None:
    """A server that reads bytes and prints how long that took, from the first one on."""
    with socket.create_server((os.environ["WEFT_LAB_ADDRESS"], PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            left = int(num_bytes) - len(connection.recv(1))
            began = time.monotonic()
            while left and (found := connection.recv(1 << 20)):
                left -= len(found)
            print(left, time.monotonic() - began, flush=True)


def send(address: str, num_bytes: str) -> None:
    with socket.create_connection((address, PORT), timeout=WAIT_S) as connection:
        connection.sendall(bytes(int(num_bytes)))
        print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode(), flush=True)


def place() -> None:
    """Where weft believes this process to be."""
    from weft.transport.registry import place_here  # noqa: PLC0415 - the other programs start faster without

    print(place_here().host, socket.gethostname(), flush=True)


def control(keys: str, num_trainers: str = "1", num_engines: str = "1", rebalance: str = "") -> None:
    """A controller, until its input ends."""
    import weft  # noqa: PLC0415

    address = f"tcp://{os.environ['WEFT_LAB_ADDRESS']}:{PORT}"
    settings = weft.TransferSettings(silence_s=5.0, version_s=WAIT_S, nixl_devices=os.environ["UCX_NET_DEVICES"])
    security = weft.Security(keys=keys)
    with weft.Controller(
        address,
        num_trainers=int(num_trainers),
        num_engine_ranks=int(num_engines),
        settings=settings,
        rebalance=bool(rebalance),
        security=security,
        events=Path(keys) / "events.jsonl",
    ) as made:
        print("listening", flush=True)
        sys.stdin.read()
        found = made.statistics()
        print(sorted(found.links), found.slow_hosts, found.num_plans, flush=True)


def train(keys: str, controller: str, num_elements: str, rank: str = "0") -> None:
    """Publishes a version for each line of its input: numbers that say the version."""
    import weft  # noqa: PLC0415

    weights = np.zeros(int(num_elements), np.float32)
    with weft.Sender(
        f"tcp://{controller}:{PORT}",
        rank=int(rank),
        weights=_weights(weights),
        security=weft.Security(keys=keys),
        timeout_s=WAIT_S,
    ) as sender:
        for line in sys.stdin:
            weights[:] = np.arange(len(weights)) % 1000 + 1000 * int(line)
            try:
                sender.publish(version=int(line)).wait_committed(WAIT_S)
                print("committed", flush=True)
            except weft.WeftError as error:
                print(str(error).replace("\n", " "), flush=True)


def _weights(memory: np.ndarray) -> weft.Weights:
    """Sixteen tensors, so that trainers that hold the same can share the work."""
    import weft  # noqa: PLC0415

    return weft.Weights.from_arrays({f"w{number}": part for number, part in enumerate(np.split(memory, 16))})


def serve(keys: str, controller: str, num_elements: str, rank: str = "0") -> None:
    """Takes versions for ever, and says which it serves and whether all numbers are right."""
    import weft  # noqa: PLC0415

    weights = np.zeros(int(num_elements), np.float32)
    with weft.Receiver(
        f"tcp://{controller}:{PORT}",
        rank=int(rank),
        weights=_weights(weights),
        security=weft.Security(keys=keys),
    ) as receiver:
        while True:
            version = receiver.take(WAIT_S)
            right = np.array_equal(weights, (np.arange(len(weights)) % 1000 + 1000 * version).astype(np.float32))
            print(version, right, flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # shows what a program that hangs is doing
    {each.__name__: each for each in (receive, send, place, control, train, serve)}[sys.argv[1]](*sys.argv[2:])
