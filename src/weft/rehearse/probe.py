"""A process that keeps asking the controller for a heartbeat and records how long the answers take.

It is not a member: the controller answers it like any unknown process, after its other work.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from weft.runtime.control.client import Client
from weft.runtime.control.messages import PROTOCOL, Beat, ToMember

ASK_S = 0.02
SLICE_S = 0.5


def probe(pipe: Connection, address: str) -> None:
    """Run until the pipe ends. Each message from it is answered with the longest silence since the last one."""
    longest_s = 0.0
    with Client(address, member="engine 0", messages=ToMember, protocol=PROTOCOL) as client:
        asked_at = 0.0
        while True:
            if not asked_at:
                asked_at = time.monotonic()
                client.send(Beat())
            if client.receive(SLICE_S) is not None:
                longest_s, asked_at = max(longest_s, time.monotonic() - asked_at), 0.0
            elif asked_at:
                longest_s = max(longest_s, time.monotonic() - asked_at)
            if pipe.poll(0 if asked_at else ASK_S):
                try:
                    pipe.recv()
                except EOFError:
                    return
                pipe.send(longest_s)
                longest_s = 0.0
