"""The control connections of members, each through a port of its own, so that either direction can be held.

What is held arrives late, in order, and nothing is lost: a network that stalls.
"""

from __future__ import annotations

import contextlib
import socket
import threading

TO_MEMBER, TO_CONTROLLER = "to_member", "to_controller"
BLOCK_BYTES = 1 << 16


class Wire:
    """Carries the connections of one member (whatever its process) to the controller's port."""

    def __init__(self, controller_port: int) -> None:
        self._port = controller_port
        self._flows = {TO_MEMBER: threading.Event(), TO_CONTROLLER: threading.Event()}
        self.release()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, direction: str) -> None:
        """From now on nothing arrives in this direction."""
        self._flows[direction].clear()

    def release(self) -> None:
        """Everything arrives again, and what was held."""
        for flows in self._flows.values():
            flows.set()

    def close(self) -> None:
        """Cut all connections."""
        self._is_closed = True
        self.release()
        for end in (self._listener, *list(self._open)):
            _cut(end)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                member, _ = self._listener.accept()
            except OSError:
                return
            try:
                controller = socket.create_connection(("127.0.0.1", self._port), timeout=1.0)
            except OSError:  # there is none now; the member tries again
                _cut(member)
                continue
            self._join(member, controller)

    def _join(self, member: socket.socket, controller: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut meanwhile
            controller.settimeout(None)
            for end in (member, controller):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(end)
            for src, dst, way in ((member, controller, TO_CONTROLLER), (controller, member, TO_MEMBER)):
                threading.Thread(target=self._carry, args=(src, dst, self._flows[way]), daemon=True).start()

    def _carry(self, src: socket.socket, dst: socket.socket, flows: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while block := src.recv(BLOCK_BYTES):
                flows.wait()
                dst.sendall(block)
        self._open.discard(src)
        _cut(dst)
        _cut(src)


def _cut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
