"""Plain sockets between hosts: the rate a network has for programs that do nothing else.

Connections stay open from one measurement to the next, as weft's do from one version to the next: a new connection
begins slowly.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from weft.errors import TransportError

WAIT_S = 300.0
PIECE_BYTES = 1 << 20
_HEADER_BYTES = 8


class Sink:
    """Reads what senders announce, and tells each when it is there."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        """Serve senders until this is closed."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    @staticmethod
    def _serve(connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        with connection:
            while header := connection.recv(_HEADER_BYTES, socket.MSG_WAITALL):
                left = int.from_bytes(header, "little")
                while left and (found := connection.recv(min(PIECE_BYTES, left))):
                    left -= len(found)
                connection.sendall(b"." if not left else b"")

    def close(self) -> None:
        """Accept no more senders; those that are connected end it."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Streams:
    """Connections to some sinks."""

    def __init__(self, sinks: Sequence[tuple[str, int]]) -> None:
        self._connections = [socket.create_connection(sink, timeout=WAIT_S) for sink in sinks]

    def send(self, num_bytes: int, start: float) -> tuple[float, float]:
        """Send so many bytes to each sink at once, from a moment on; returns when that began and ended."""
        piece = bytes(PIECE_BYTES)

        def send(connection: socket.socket) -> bytes:
            connection.sendall(num_bytes.to_bytes(_HEADER_BYTES, "little"))
            for first in range(0, num_bytes, PIECE_BYTES):
                connection.sendall(piece[: min(PIECE_BYTES, num_bytes - first)])
            return connection.recv(1)

        with ThreadPoolExecutor(max_workers=len(self._connections)) as threads:
            time.sleep(max(start - time.monotonic(), 0.0))
            began = time.monotonic()
            answers = list(threads.map(send, self._connections))
            ended = time.monotonic()
        if not all(answers):
            raise TransportError("a receiver of plain sockets has ended")
        return began, ended

    def close(self) -> None:
        """End the connections."""
        for connection in self._connections:
            connection.close()
