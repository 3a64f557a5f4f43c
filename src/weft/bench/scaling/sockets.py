"""Plain sockets between hosts: the rate a network has for programs that do nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

WAIT_S = 300.0
PIECE_BYTES = 1 << 20


class Sink:
    """Reads so many bytes from each of some senders, and tells each when it has them."""

    def __init__(self, address: str, *, num_senders: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._server = socket.create_server((address, 0))
        self._server.settimeout(WAIT_S)
        self.port = int(self._server.getsockname()[1])
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_senders)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        connection.settimeout(WAIT_S)
        with connection:
            left = self._num_bytes
            while left and (found := connection.recv(min(PIECE_BYTES, left))):
                left -= len(found)
            connection.sendall(b"." if not left else b"")

    def close(self) -> None:
        """Wait for all senders."""
        for thread in self._threads:
            thread.join(WAIT_S)
        self._server.close()


def stream(sinks: Sequence[tuple[str, int]], num_bytes: int, start: float) -> tuple[float, float]:
    """Send so many bytes to each sink at once, from a moment on; returns when that began and ended."""
    connections = [socket.create_connection(sink, timeout=WAIT_S) for sink in sinks]
    piece = bytes(PIECE_BYTES)

    def send(connection: socket.socket) -> None:
        with connection:
            for first in range(0, num_bytes, PIECE_BYTES):
                connection.sendall(piece[: min(PIECE_BYTES, num_bytes - first)])
            connection.recv(1)

    threads = [threading.Thread(target=send, args=(connection,), daemon=True) for connection in connections]
    time.sleep(max(start - time.monotonic(), 0.0))
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return began, time.monotonic()
