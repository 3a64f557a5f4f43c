"""Everything that travels on the control plane.

    member → controller   Join, Opened, Blocked, Want, Written, Stopped, Reopened, At, Paused, Ready, Failed, Committed,
                          Beat, Leave
    controller → member   Welcome, Refused, Unknown, Open, CutOff, SendPlan, ReceivePlan, Reconnect, Expect, Go,
                          LeftOut, Verify, Boundary, Decide, Alive
    trainer → trainer     Introduction, Magnitudes

Tables travel compressed (weft.runtime.control.columns), other columns as little-endian 8-byte integers.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from weft.config import TransferSettings
from weft.core.geometry.planes import Column
from weft.core.streams.carriage import Carriage
from weft.runtime.control.held import HeldColumns
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.write_reports import WriteReports
from weft.transport.base import Descriptor, Endpoint
from weft.transport.host import ProcessIdentity
from weft.transport.registry import Place

PROTOCOL = 15
STEPS_AHEAD = 2
"""How many steps an engine rank may advance while the ranks of its engine agree on a boundary."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One incarnation of a trainer that an engine rank offers memory to."""

    rank: int
    incarnation: int
    process: ProcessIdentity
    place: Place
    transport: str
    """The transport it writes through."""


class Offered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An incarnation of a trainer that an engine has offered memory to."""

    rank: int
    incarnation: int


class Join(_Message, frozen=True):
    """A member joins with these weights; also what it knows of versions, for a controller that was restarted."""

    side: Literal["trainer", "engine"]
    rank: int
    held: HeldColumns
    place: Place
    process: ProcessIdentity
    age_s: float
    """How long ago the member was created, by its own clock."""
    incarnation: int = 0
    """The number a controller gave it before; 0: none has."""
    last: int | None = None
    """Trainers: the highest version they were told to write. Engines: the version they serve."""
    seen: int | None = None
    """Engines: the highest version they were told of."""
    pending: int | None = None
    """Engines: a version that was decided but is not visible yet."""
    ready: int | None = None
    """Engines: a version that is complete and verified, but not decided as far as they know."""
    holds: int | None = None
    """Engines: the version a patch could be applied to."""
    offered: list[Offered] = []
    """Engines: the newest trainers they know of."""
    abandoned: list[int] = []
    """Trainers: engine ranks to which writes may still be in flight, since the last plan they had a part in."""

    @property
    def member(self) -> MemberId:
        """The member that joins."""
        return MemberId(self.side, self.rank)


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a member is reached through one transport."""

    endpoint: Endpoint
    descriptors: list[Descriptor]


class MagnitudeServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a trainer exchanges with others the largest magnitudes of FP8 blocks they hold together."""

    address: str
    key: str
    """Its public key; empty without keys."""


class Opened(_Message, frozen=True):
    """A member has opened its transports and registered its memory."""

    round: int
    offers: dict[str, Offer]
    """Engines: how writers reach the memory below."""
    live: bytes = b""
    """Engines whose live weights are written: address of each shard."""
    landing: int = 0
    """Engines with a landing area, or a window in front of their live weights: its address."""
    patches: int = 0
    """Engines that take patches: the address of the memory for them."""
    magnitudes: MagnitudeServer | None = None
    """Trainers that others connect to, to exchange magnitudes: where."""


class Blocked(_Message, frozen=True):
    """An engine rank cannot open yet: a writer that was lost could still write into its live weights, or its engine's
    thread has to do it."""

    round: int
    reason: str
    by_thread: bool = False
    """Whether it waits for its engine's thread."""


class Want(_Message, frozen=True):
    """A trainer wants to write a version; all trainers are then told to, each when it has published it."""

    version: int


def tag_of(version: int, *, whole: bool) -> int:
    """The tag under which a version's bytes are counted; its second round, where it is sent whole, has its own."""
    return 2 * version + (2 if whole else 1)


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine rank a trainer could not write to."""

    engine: int
    reason: str


class Written(_Message, frozen=True):
    """A trainer has written all it owes for a version, except to engine ranks it could not write to."""

    version: int
    reports: WriteReports
    losses: list[Loss]
    whole: list[int] = []
    """Engine ranks for which no patches were made, or patches are too long: they need the version whole."""
    magnitude_bytes: int = 0
    """Approximate bytes sent to other trainers about its FP8 blocks: some may be sent later."""
    stages: dict[str, float] = {}
    """Seconds each stage of sending was busy, where weights are converted on the way; stages overlap."""
    late_s: float = 0.0
    """From when it was told to write until it published the version; 0 if it had published it before."""


class Stopped(_Message, frozen=True):
    """A trainer that was told to write a version is not writing it, and has not written all of it."""

    version: int
    reason: str
    has_written: bool
    """Whether any of its bytes may have been written."""
    abandoned: list[int] = []
    """Engine ranks that did not accept it: what was in flight to them may still land, until they close."""


class Reopened(_Message, frozen=True):
    """A trainer tore transports down to stop writing, and can be reached at other endpoints now."""

    endpoints: list[Endpoint]


class At(_Message, frozen=True):
    """The step an engine rank has reached; it will not pass the boundary before it is told."""

    version: int
    step: int


class Paused(_Message, frozen=True):
    """An engine rank has stopped serving; its live weights may be written."""

    version: int


class Ready(_Message, frozen=True):
    """An engine rank holds a version, complete and verified."""

    version: int


class Failed(_Message, frozen=True):
    """A member cannot do its part of a version."""

    version: int
    reason: str


class ArrivalReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """What one engine rank received from one trainer."""

    trainer: int
    num_bytes: int
    seconds: float
    """From when its first Chunk was found until its last was verified, and drained where it lay in a window."""


class Committed(_Message, frozen=True):
    """An engine rank serves a version."""

    version: int
    pause_s: float = 0.0
    """How long the engine stood still for it."""
    arrivals: list[ArrivalReport] = []
    """What came from each trainer, if the controller records it."""


class Beat(_Message, frozen=True):
    """A member is still there."""


class Leave(_Message, frozen=True):
    """A member leaves, on purpose or because it cannot continue."""

    reason: str = ""


class Welcome(_Message, frozen=True):
    """A member has joined; how transfers are done here."""

    controller: str
    """Identifies this run of the controller."""
    incarnation: int
    """This process's number from now on; later processes of the same rank have higher ones."""
    settings: TransferSettings
    ranks_per_engine: int
    num_trainers: int
    records: bool = False
    """Whether the controller records what arrives: engines report it with every commit."""


class Refused(_Message, frozen=True):
    """A member cannot take part."""

    reason: str
    hint: str = ""
    may_return: bool = False
    """Whether other members may be at fault: this one can wait for matching ones."""


class Unknown(_Message, frozen=True):
    """The controller does not know the member: it was restarted, or gave up on the member, which should join again."""

    controller: str
    stalled: str = ""
    """Why, if an engine's thread did not respond: the member should join when it does."""


class Asking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trainer that will connect to another one, to exchange magnitudes."""

    trainer: int
    key: str
    """The public key it joined with; empty without keys."""


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trainer that holds parts of the same FP8 blocks, and where it exchanges magnitudes."""

    trainer: int
    server: MagnitudeServer


class Open(_Message, frozen=True):
    """All members have joined: open these transports and register memory with them."""

    round: int
    transports: list[str]
    writers: list[Writer] = []
    """Engines: the trainers of this round. None of them is writing."""
    settled: list[int] = []
    """Engines: incarnations that are gone, and were not writing."""
    abandoned: bool = False
    """Engines: whether writes to them may still be in flight; closing their side ends these."""
    through_host: bool = False
    """Whether transports move host memory, also between members with weights on GPUs."""
    landing_bytes: int = 0
    """Engines: the landing area they need, or the window, where live memory is written."""
    patch_bytes: int = 0
    """Engines: the memory they need for patches."""
    is_near: bool = False
    """Trainers: whether any engine rank is on their host."""
    asking: list[Asking] | None = None
    """Trainers that hold FP8 blocks together with others: those that will connect to them."""


class CutOff(_Message, frozen=True):
    """Trainers that have lost their right to write: close what they reach, now."""

    incarnations: list[int]


class EngineTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one trainer sends to one engine rank."""

    engine: int
    offer: Offer
    carriage: Carriage
    boxes: bytes
    """A table of weft.runtime.compile.link_boxes.LinkBoxes."""
    places: bytes
    """Where the tensors of that table lie: in the digest's space, and in live memory if that is written."""
    is_live: bool = False
    """Whether live memory is written."""
    stream: int = 0
    """Address of the stream in the landing area, or of the link's window."""
    patches: int = 0
    """Where patches go, if they are sent."""
    patch_bytes: int = 0
    """Room for them."""


class SendPlan(_Message, frozen=True):
    """A trainer's part of the plan."""

    plan_digest: str
    targets: list[EngineTarget]
    grids: bytes = b""
    """Matrices of which a trainer sends something as FP8: a table of weft.runtime.compile.grids."""
    roles: bytes = b""
    """Which trainer collects the magnitudes of each of these matrices: a table of weft.runtime.compile.sharing."""
    round: int = 0
    """The round it was opened in."""
    holders: list[Holder] = []
    """Trainers that hold parts of the same FP8 blocks and that this one connects to."""


class TrainerSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one engine rank gets from one trainer."""

    trainer: int
    transport: str
    carriage: Carriage
    boxes: bytes
    stream: int = 0
    """Where this trainer's stream, or its window, begins in the landing area."""
    endpoint: Endpoint | None = None
    """Where credits for Chunks in the window are returned to."""
    patches: int = 0
    """Where its patches begin in the memory for them."""
    patch_bytes: int = 0
    """Room for them."""


class ReceivePlan(_Message, frozen=True):
    """An engine rank's part of the plan."""

    plan_digest: str
    sources: list[TrainerSource]


class Reconnect(_Message, frozen=True):
    """A trainer can be reached here from now on: credits are returned to this endpoint."""

    endpoint: Endpoint


class Expect(_Message, frozen=True):
    """A version is coming; engines that receive in place must pause first."""

    version: int
    whole: bool = False
    """Not as patches, whatever was announced before: the patches of some trainer do not fit."""


class Go(_Message, frozen=True):
    """A trainer may write a version, to these engine ranks, as soon as it has published it."""

    version: int
    engines: list[int]
    holds: list[int | None]
    """The version each of them serves, if that is known."""
    whole: bool = False
    """The second round of a version for which patches did not suffice: from the kept copy, to these ranks only."""


class LeftOut(_Message, frozen=True):
    """Engine ranks that no longer take part in a version that trainers write: nobody drains their windows."""

    version: int
    engines: list[int]


class Verify(_Message, frozen=True):
    """All trainers have written a version; this is what an engine rank should hold."""

    version: int
    reports: WriteReports


class Boundary(_Message, frozen=True):
    """The step at which all ranks of an engine commit (or, in place, pause for) a version."""

    version: int
    step: int


class Decide(_Message, frozen=True):
    """The fate of a version."""

    version: int
    commit: bool
    torn: bool = False
    """Aborted after writing had begun: the memory written to is neither the old nor the new version."""
    reason: str = ""


class Alive(_Message, frozen=True):
    """The controller is still there."""

    controller: str
    status: str = ""
    """What it is doing, or waiting for, before versions can be written; empty when they can."""


class Introduction(_Message, frozen=True):
    """A trainer has parts of these FP8 blocks. The one that connects introduces itself first, and the other answers."""

    round: int
    blocks: bytes
    """A table of weft.runtime.send.magnitudes."""
    number: int = 0
    """Chosen by the trainer that connects; the answer carries the same number."""


class Magnitudes(_Message, frozen=True):
    """The largest magnitudes of the blocks of a group that two trainers have parts of."""

    round: int
    version: int
    group: int
    is_final: bool
    """Whether these are of all holders, as the sender collected them; otherwise what the sender found."""
    values: bytes
    """FP32, in the order of the blocks."""


FromTrainer = Join | Opened | Want | Written | Stopped | Reopened | Failed | Beat | Leave
FromEngine = Join | Opened | Blocked | At | Paused | Ready | Failed | Committed | Beat | Leave
ToController = FromTrainer | FromEngine
ToMember = (
    Welcome
    | Refused
    | Unknown
    | Open
    | CutOff
    | SendPlan
    | ReceivePlan
    | Reconnect
    | Expect
    | Go
    | LeftOut
    | Verify
    | Boundary
    | Decide
    | Alive
)
BetweenTrainers = Introduction | Magnitudes


def pack(column: Column) -> bytes:
    """A column as bytes for the wire."""
    return np.ascontiguousarray(column, dtype="<u8").tobytes()


def unpack(data: bytes) -> Column:
    """A column from the wire."""
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)
