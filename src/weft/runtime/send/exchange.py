"""Trainers exchange the largest magnitudes they found in FP8 blocks that lie on several of them.

consumes      magnitudes found here; what other trainers found
produces      magnitudes for other trainers; for each group the overall largest, for the version under way (`Job.agree`)
waits for     other trainers, on a thread of its own      unblocked by   the network, `found`, `close`

None of this goes through the controller, which only says which trainer connects to which. An exchange belongs to one
round: its server is gone in the next, and messages of other rounds are ignored. A cut connection costs nothing: both
sides introduce themselves again, and repeat what they found so far. The side that connects repeats this until it is
answered, because only it can notice that a message was lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from weft.codec.memory import Floats
from weft.errors import ProtocolError, WeftError
from weft.runtime.control.addresses import own_address
from weft.runtime.control.channel import Alarm, Received, Reset, member_of, wait_any
from weft.runtime.control.client import Client
from weft.runtime.control.keys import ClientKeys, Grant, KeyRing, ServerKeys
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import (
    PROTOCOL,
    Asking,
    BetweenTrainers,
    Holder,
    Introduction,
    Magnitudes,
    MagnitudeServer,
)
from weft.runtime.control.server import Server
from weft.runtime.send.job import Job
from weft.runtime.send.magnitudes import CutBlocks, Finding, Sharing

log = logging.getLogger(__name__)
LOOK_S = 0.5
"""How long the exchange waits for messages at once."""
LINGER_S, CLOSE_S = 1.0, 10.0
"""How long the last messages may take to leave, and the exchange to end."""
MAX_AT_ONCE = 100
"""Messages of one trainer that are handled before others get their turn."""
AGAIN_S, MAX_AGAIN_S = 1.0, 30.0
"""How long to wait for an answer before an introduction is repeated: at first, and after many."""
Say = Callable[[Introduction | Magnitudes], None]
"""Sends to one trainer."""


class _AskedTrainer:
    """A trainer this one connects to, and whether it has answered the last introduction."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._number = 0
        self._asked_at, self._patience_s = 0.0, AGAIN_S
        self._is_answered = False

    def introduce(self, number: int, blocks: bytes) -> None:
        """Introduce this trainer; earlier answers no longer count. `number`: of the round."""
        self._number += 1
        self._asked_at, self._is_answered = time.monotonic(), False
        self.client.send(Introduction(round=number, blocks=blocks, number=self._number))

    def answered(self, introduction: Introduction) -> None:
        """The other trainer has introduced itself."""
        if introduction.number == self._number:
            self._is_answered, self._patience_s = True, AGAIN_S

    def is_back(self) -> None:
        """The other trainer can be reached again: what it does not answer now is lost."""
        self._patience_s = AGAIN_S

    def must_repeat(self) -> bool:
        """Whether the answer is overdue; the wait grows, because the other trainer may be unreachable."""
        if self._is_answered or time.monotonic() - self._asked_at < self._patience_s:
            return False
        self._patience_s = min(2 * self._patience_s, MAX_AGAIN_S)
        return True


class Exchange:
    """One trainer's side, in one round."""

    def __init__(
        self, member: str, asking: Sequence[Asking], *, controller: str, keys: ClientKeys | None, silence_s: float
    ) -> None:
        """`asking`: trainers that will connect. `controller`: its address; others use the same network."""
        self._member, self._keys, self._silence_s = member, keys, silence_s
        self._names = {other.trainer: f"trainer {other.trainer}" for other in asking}
        """Names of trainers in errors."""
        self._asked_at = time.monotonic()
        """When trainers whose magnitudes are missing were last asked for them."""
        self._round = 0
        self._sharing = Sharing([], peers=())
        self._job: Job | None = None
        self._error: WeftError | None = None
        self._lock = threading.Lock()
        """Guards what other threads use: the four above."""
        self._say: dict[int, Say] = {}
        """Trainers that have introduced themselves."""
        self._asked: dict[int, _AskedTrainer] = {}
        self._stop, self._alarm = threading.Event(), Alarm()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._server = self._listen(asking, controller) if asking else None
        except WeftError:
            self._context.term()
            self._alarm.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"weft-{member}-magnitudes", daemon=True)

    def _listen(self, asking: Sequence[Asking], controller: str) -> Server:
        names = set(self._names.values())
        host = "127.0.0.1" if self._keys is None else own_address(controller)
        return Server(
            f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*",
            messages=BetweenTrainers,
            protocol=PROTOCOL,
            objection=lambda member: None if member in names else f"{member} shares no FP8 blocks with it",
            keys=None if self._keys is None else ServerKeys(own=self._keys.own, allowed=_ring(asking)),
            context=self._context,
        )

    @property
    def server(self) -> MagnitudeServer | None:
        """Where others connect; None if none will."""
        if self._server is None:
            return None
        return MagnitudeServer(address=self._server.address, key="" if self._keys is None else self._keys.own.public)

    def follow(self, number: int, blocks: Sequence[CutBlocks], holders: Sequence[Holder]) -> None:
        """The plan of this round has arrived: connect to these. Compiling a plan again changes nothing."""
        if self._round:
            return
        peers = {*self._names, *(holder.trainer for holder in holders)}
        with self._lock:
            self._round, self._sharing = number, Sharing(blocks, peers=peers)
        for holder in holders:
            self._connect(holder)
        self._thread.start()

    def _connect(self, holder: Holder) -> None:
        trainer, server = holder.trainer, holder.server
        keys = None if self._keys is None else ClientKeys(own=self._keys.own, server_public=server.key)
        self._names[trainer] = f"trainer {trainer} at {server.address}"
        client = Client(
            server.address,
            member=self._member,
            messages=BetweenTrainers,
            protocol=PROTOCOL,
            keys=keys,
            server=f"trainer {trainer}",
            context=self._context,
        )
        self._asked[trainer] = _AskedTrainer(client)
        self._introduce(self._asked[trainer])

    def _introduce(self, asked: _AskedTrainer) -> None:
        asked.introduce(self._round, self._sharing.introduction)

    def begin(self, job: Job) -> None:
        """A version is sent now."""
        assert self._round
        with self._lock:
            self._job, self._asked_at = job, time.monotonic()
            self._sharing.begin(job.go.version)
            job.flow.obstacle = self._obstacle
            if self._error is not None:
                job.stop(self._error)

    def found(self, group: int, values: Floats) -> None:
        """Magnitudes of a group's cut blocks, from the parts held here."""
        with self._lock:
            self._sharing.found(group, values)
            self._agree([group])
        self._alarm.ring()

    def _agree(self, groups: Sequence[int]) -> None:
        """With the lock held: pass on what is complete."""
        for group in groups:
            agreed = self._sharing.agreed(group)
            if agreed is not None and self._job is not None and group not in self._job.agreed:
                self._job.agree(group, agreed)

    def _obstacle(self) -> str:
        """Whose magnitudes are missing; empty if none are."""
        with self._lock:
            missing = ", ".join(self._names[trainer] for trainer in self._sharing.missing())
        return f"no magnitudes of FP8 blocks from {missing}; can trainers reach each other?" if missing else ""

    @property
    def _channels(self) -> list[Server | Client]:
        return [
            *(asked.client for asked in self._asked.values()),
            *((self._server,) if self._server is not None else ()),
        ]

    # On the exchange's own thread

    def _run(self) -> None:
        channels = self._channels
        try:
            while not self._stop.is_set():
                wait_any(channels, self._alarm, LOOK_S)
                self._hear_clients()
                for trainer, asked in self._asked.items():
                    self._hear_server(trainer, asked)
                self._tell()
                self._ask_again()
            self._tell()
        except WeftError as error:
            self._fail(error)
        except Exception as error:  # a bug in weft: nothing else watches this thread
            self._fail(ProtocolError(f"{self._member}: {type(error).__name__} in the exchange of magnitudes: {error}"))
        finally:
            self._disconnect()

    def _fail(self, error: WeftError) -> None:
        """Versions of this round cannot be sent."""
        with self._lock:
            self._error = error
        self._stop_version(error)

    def _stop_version(self, error: WeftError) -> None:
        """The version under way cannot be sent; later ones may."""
        log.warning("%s cannot exchange magnitudes: %s", self._member, error)
        with self._lock:
            if self._job is not None:
                self._job.stop(error)

    def _tell(self) -> None:
        """Send all trainers what is due."""
        for trainer, say in self._say.items():
            with self._lock:
                due, job = self._sharing.due(trainer), self._job
            for (version, group, is_final), magnitudes in due:
                values = magnitudes.astype("<f4").tobytes()
                if job is not None:
                    job.magnitude_bytes += len(values)
                say(Magnitudes(round=self._round, version=version, group=group, is_final=is_final, values=values))

    def _ask_again(self) -> None:
        """Introduce this trainer again to trainers that have not answered, and to those whose magnitudes have long been
        missing: they may have forgotten it."""
        for asked in self._asked.values():
            if asked.must_repeat() and not asked.client.is_blocked:
                self._introduce(asked)
        now = time.monotonic()
        if now - self._asked_at < self._silence_s:
            return
        self._asked_at = now
        with self._lock:
            missing = self._sharing.missing()
        for trainer in missing:
            if trainer in self._asked:
                self._introduce(self._asked[trainer])

    def _hear_clients(self) -> None:
        server = self._server
        if server is None:
            return
        for _ in range(MAX_AT_ONCE):
            received = server.receive(0.0)
            if received is None:
                break
            self._hear_client(server, received)
        for connection in server.stuck(self._silence_s):
            server.forget(connection)  # its trainer introduces itself again when it misses something

    def _hear_client(self, server: Server, received: Received) -> None:
        """A client that sends wrong messages is ignored from then on, which costs only its own version."""
        named = MemberId.parse(member_of(received.sender))
        try:
            if named is None or not isinstance(received.message, BetweenTrainers):
                raise ProtocolError(f"{received.sender} sent something other than magnitudes")
            self._learn(named.rank, received.message)
            if isinstance(received.message, Introduction) and received.message.round == self._round:
                server.send(received.sender, self._answer(received.message))
                self._say[named.rank] = lambda message: self._say_to(server, received.sender, message)
        except ProtocolError as error:
            log.warning("%s ignores %s: %s", self._member, received.sender, error)
            server.forget(received.sender)

    def _answer(self, introduction: Introduction) -> Introduction:
        return Introduction(round=self._round, blocks=self._sharing.introduction, number=introduction.number)

    @staticmethod
    def _say_to(server: Server, connection: str, message: Introduction | Magnitudes) -> None:
        server.send(connection, message)  # a trainer that is gone introduces itself again when it is back

    def _hear_server(self, trainer: int, asked: _AskedTrainer) -> None:
        client, num_before = asked.client, max(asked.client.num_connections, 1)
        for _ in range(MAX_AT_ONCE):
            message = client.receive(0.0)
            if message is None:
                break
            if isinstance(message, Reset):
                asked.is_back()
                self._introduce(asked)
                continue
            try:
                self._learn(trainer, message)
            except ProtocolError as error:
                self._stop_version(error)
                continue
            if isinstance(message, Introduction) and message.round == self._round:
                asked.answered(message)
                self._say[trainer] = client.send
        if client.num_connections > num_before:  # it was cut: what was in flight may be lost
            asked.is_back()
            self._introduce(asked)

    def _learn(self, trainer: int, message: Introduction | Magnitudes) -> None:
        """Handle a message of another trainer. Raises ProtocolError."""
        if message.round != self._round:
            return
        with self._lock:
            if isinstance(message, Introduction):
                self._sharing.met(trainer, message.blocks)
                self._agree(self._sharing.groups_found)
                return
            if len(message.values) % 4:
                raise ProtocolError(f"trainer {trainer} sent magnitudes of {len(message.values)} bytes")
            finding = Finding(message.version, message.group, message.is_final)
            self._sharing.told(trainer, finding, np.frombuffer(message.values, dtype="<f4"))
            self._agree([message.group])

    def _disconnect(self) -> None:
        for channel in self._channels:
            channel.close(linger_s=LINGER_S)  # others may still need what was found here
        self._context.term()

    def close(self) -> None:
        """Disconnect."""
        self._stop.set()
        self._alarm.ring()
        if self._thread.ident is None:
            self._disconnect()
        else:
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._alarm.close()


def _ring(asking: Sequence[Asking]) -> KeyRing:
    """The keys of the trainers that will connect; several may share one."""
    ranks: dict[str, list[range]] = {}
    for other in asking:
        ranks.setdefault(other.key, []).append(range(other.trainer, other.trainer + 1))
    return KeyRing(grants=[Grant(public=key, side="trainer", ranks=tuple(mine)) for key, mine in ranks.items()])
