"""What senders and receivers share: a thread that owns the control channel, beats, and hands messages on.

consumes      messages from the controller, requests from the member's own threads
produces      calls of `handle(message)`, `idle()` on the control thread
waits for     the network, a few milliseconds at most        unblocked by   the network, `close`
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from weft.errors import ProtocolError, WeftError
from weft.runtime.channel import Client
from weft.runtime.messages import Beat, Leave, ToMember

POLL_S = 0.002
BEAT_S = 0.5


class ControlThread:
    """Owns a member's channel; other threads post messages through it."""

    def __init__(
        self,
        client: Client,
        *,
        handle: Callable[[Any], None],
        idle: Callable[[], None] = lambda: None,
        failed: Callable[[WeftError], None],
    ) -> None:
        self._client, self._handle, self._idle, self._failed = client, handle, idle, failed
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-{client.member}", daemon=True)

    def start(self) -> None:
        """Begin listening."""
        self._thread.start()

    def post(self, message: Any) -> None:
        """Send a message soon, from any thread."""
        self._outgoing.put(message)

    def close(self) -> None:
        """Say goodbye and stop."""
        self._outgoing.put(Leave())
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        last_beat = 0.0
        try:
            while True:
                stopping = self._stop.is_set()
                self._send_all()
                if stopping:
                    time.sleep(0.05)  # let the goodbye leave before the socket closes
                    return
                if time.monotonic() - last_beat > BEAT_S:
                    last_beat = time.monotonic()
                    self._client.send(Beat())
                message = self._client.receive(POLL_S)
                if message is not None:
                    self._handle(message)
                self._idle()
        except WeftError as error:
            self._failed(error)
        except Exception as error:  # a defect of ours: the member's owner must hear of it, not only this thread
            self._failed(ProtocolError(f"{self._client.member}: {type(error).__name__} in the control thread: {error}"))
            raise
        finally:
            self._client.close()

    def _send_all(self) -> None:
        while True:
            try:
                self._client.send(self._outgoing.get_nowait())
            except queue.Empty:
                return


def open_channel(address: str, member: str, **security: Any) -> Client:
    """A member's channel to the controller."""
    return Client(address, member=member, messages=ToMember, **security)
