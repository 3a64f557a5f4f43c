"""Who has joined, which process of a rank counts, what a round waits for, and which links members get."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.raw_member import join_message
from weft.config import TransferSettings
from weft.errors import ProtocolError, TransportUnavailable
from weft.runtime.control.member_id import MemberId
from weft.runtime.control.messages import Join, Offered, Opened
from weft.runtime.controller import membership
from weft.runtime.controller.attendance import Numbers
from weft.runtime.controller.membership import MAX_CLOCK_STEP_NS, Member, Membership, choose_links
from weft.transport.registry import NAMES, Place

NOW = 10**18
SECOND = 10**9
ALL = ("trainer 0", "trainer 1", "engine 0", "engine 1")


class Clock:
    """The controller's clocks; they stand still unless a test moves them."""

    def __init__(self) -> None:
        self.seconds = 0

    def time_ns(self) -> int:
        return NOW + self.seconds * SECOND

    def monotonic(self) -> float:
        return float(self.seconds)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(membership, "time", made)
    return made


def members(*names: str, num_trainers: int = 2, num_engine_ranks: int = 2, ranks_per_engine: int = 1) -> Membership:
    """A membership of two trainers and two engine ranks in which these have joined; with all of them a round begins."""
    numbers = Numbers(
        num_trainers=num_trainers,
        num_engine_ranks=num_engine_ranks,
        ranks_per_engine=ranks_per_engine,
        needed_engines=num_engine_ranks // ranks_per_engine,
    )
    made = Membership(numbers)
    for name in names:
        add(made, name)
    if made.is_complete:
        made.begin_round()
    return made


def add(who: Membership, name: str, process: str = "first", *, incarnation: int = 1, **facts: Any) -> Member:
    side, rank = name.split()
    who.add(f"{name} {process}", join_message(side, int(rank), **facts), incarnation)
    return who.members[MemberId(side, int(rank))]


def open_all(who: Membership, *names: str) -> None:
    for name in names:
        side, rank = name.split()
        who.open(who.members[MemberId(side, int(rank))], Opened(round=who.round, offers={}))


# Incarnations


@pytest.mark.parametrize(
    ("member", "objection"),
    [
        ("trainer 1", None),
        ("engine 2", None),
        ("trainer 2", "trainer 2 is out of range: the trainer ranks are 0 to 1"),
        ("engine 3", "engine 3 is out of range: the engine ranks are 0 to 2"),
        ("observer 0", "`observer 0` is neither a trainer nor an engine"),
        ("trainer -1", "`trainer -1` is neither a trainer nor an engine"),
        ("trainer", "`trainer` is neither a trainer nor an engine"),
    ],
)
def test_who_cannot_join(member, objection):
    assert members(num_engine_ranks=3).objection(member) == objection


@pytest.mark.parametrize(
    ("incarnation", "age_s", "number"),
    [
        (0, 0.0, NOW),
        (0, 9.0, NOW - 9 * SECOND),
        (0, 10.0, NOW - 10 * SECOND),
        (NOW - 10 * SECOND, 99.0, NOW - 10 * SECOND),
        (NOW + MAX_CLOCK_STEP_NS, 0.0, NOW + MAX_CLOCK_STEP_NS),
    ],
)
def test_the_same_process_returns_and_a_newer_one_replaces_it(clock, incarnation, age_s, number):
    who = members()
    add(who, "trainer 0", incarnation=NOW - 10 * SECOND)
    assert who.incarnation_of(join_message("trainer", age_s=age_s, incarnation=incarnation)) == number


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(("incarnation", "age_s"), [(0, 11.0), (NOW - 11 * SECOND, 0.0), (1, 0.0)])
def test_an_older_process_never_replaces_a_newer_one(clock, is_lost, incarnation, age_s):
    """Not even when the newer one is gone: the older one may have been stopped for a while."""
    who = members()
    add(who, "trainer 0", incarnation=NOW - 10 * SECOND)
    if is_lost:
        who.remove(MemberId.trainer(0), "left")
    older = {"age_s": age_s, "incarnation": incarnation}
    with pytest.raises(ProtocolError, match="a newer process has joined as trainer 0") as raised:
        who.incarnation_of(join_message("trainer", **older))
    assert raised.value.hint == "end this one: each rank must be one process"
    for side, rank in (("trainer", 1), ("engine", 0)):
        assert who.incarnation_of(join_message(side, rank, **older)), "other ranks are other processes"


def test_a_number_from_the_future_is_refused(clock):
    number = NOW + MAX_CLOCK_STEP_NS + 1
    with pytest.raises(ProtocolError, match=rf"engine 0 claims incarnation {number}, which is in the future"):
        members().incarnation_of(join_message("engine", incarnation=number))


def test_every_process_has_a_number():
    """0 means that no controller has given one."""
    assert members().incarnation_of(join_message("engine", age_s=1e12)) == 1


@pytest.mark.parametrize(
    ("offered", "incarnation", "may_join"),
    [
        ([(0, 50)], 49, False),
        ([(0, 50)], 50, True),
        ([(0, 50), (0, 40)], 49, False),
        ([(1, 50)], 49, True),
        ([(0, NOW + SECOND)], NOW - 1, False),
        ([(0, NOW + SECOND)], NOW, True),  # nothing an engine says keeps a process out that was created now
    ],
)
def test_a_new_controller_learns_of_the_newest_trainers_from_engines(clock, offered, incarnation, may_join):
    who = members()
    add(who, "engine 0", offered=[Offered(rank=rank, incarnation=number) for rank, number in offered])
    join = join_message("trainer", incarnation=incarnation)
    if may_join:
        assert who.incarnation_of(join) == incarnation
    else:
        with pytest.raises(ProtocolError, match="a newer process has joined as trainer 0"):
            who.incarnation_of(join)


def test_a_process_that_was_replaced_speaks_for_nobody():
    who = members("trainer 0", "engine 0")
    open_all(who, "trainer 0", "engine 0")
    newer = add(who, "trainer 0", "second", incarnation=2)
    assert who.behind("trainer 0 first") is None
    assert who.behind("trainer 0 second") is newer
    assert who.name_of("trainer 0 first") == MemberId.trainer(0), "whether or not it has joined"
    assert len(who.members) == 2
    assert not who.lost, "its successor is there"
    assert who.open_ranks("trainer") == set(), "what its predecessor has opened does not count"
    assert who.open_ranks("engine") == {0}


def test_a_member_that_is_gone_is_lost_until_it_joins_again():
    who = members("trainer 0", "trainer 1")
    removed = who.remove(MemberId.trainer(1), "left")
    assert removed is not None
    assert removed.connection == "trainer 1 first"
    assert who.behind("trainer 1 first") is None
    assert who.lost == {MemberId.trainer(1): "left"}
    assert who.remove(MemberId.trainer(1), "was silent") is None
    assert who.lost == {MemberId.trainer(1): "left"}, "the first reason is kept"
    add(who, "trainer 1", "second")
    assert who.lost == {}


def test_all_members_can_be_removed_at_once():
    who = members(*ALL)
    open_all(who, *ALL)
    who.remove_all()
    assert (who.members, who.lost, who.is_complete, who.has_opened) == ({}, {}, False, False)
    assert [who.behind(f"{name} first") for name in ALL] == [None] * 4
    assert who.open_ranks("engine") == set()


# Rounds


def test_what_was_opened_in_an_earlier_round_does_not_count():
    who = members(*ALL)
    open_all(who, *ALL)
    who.has_plan, number = True, who.round
    assert who.has_opened
    who.begin_round()
    assert who.round == number + 1
    assert (who.has_plan, who.has_opened, who.live_engines()) == (False, False, [])
    assert who.is_complete


def test_rounds_of_two_controllers_are_not_confused():
    assert len({members().round for _ in range(8)}) == 8


@pytest.mark.parametrize(
    ("joined", "opened", "blocked", "obstacle"),
    [
        ((), (), {}, "waiting for trainer 0, trainer 1, engine 0, engine 1 to join"),
        (ALL[1:], ALL[1:], {}, "waiting for trainer 0 to join"),
        (ALL[:3], ALL[:2], {"engine 0": "engine 0 waits"}, "waiting for engine 1 to join"),
        (ALL, (), {}, "waiting for trainer 0, trainer 1, engine 0, engine 1 to open memory"),
        (ALL, ALL[:3], {}, "waiting for engine 1 to open memory"),
        (ALL, ALL[:2], {"engine 0": "engine 0 waits"}, "engine 0 waits"),
        (ALL, ALL[:2], {"engine 0": "engine 0 waits", "engine 1": "so does 1"}, "engine 0 waits, so does 1"),
        (ALL, ALL, {}, ""),
    ],
)
def test_what_a_round_waits_for(joined, opened, blocked, obstacle):
    who = members(*joined)
    for name, reason in blocked.items():
        who.behind(f"{name} first").blocked = reason
    open_all(who, *opened)
    assert who.obstacle == obstacle
    assert who.is_complete == (len(joined) == 4)
    assert who.has_opened == (obstacle == "")


@pytest.mark.parametrize(
    ("num_trainers", "named"),
    [
        (4, "trainer 0, trainer 1, trainer 2, trainer 3"),
        (6, "trainer 0, trainer 1, trainer 2, trainer 3 and 2 others"),
    ],
)
def test_members_are_named_while_they_are_few(num_trainers, named):
    who = members("engine 0", num_trainers=num_trainers, num_engine_ranks=1)
    assert who.obstacle == f"waiting for {named} to join"


def test_a_member_that_has_opened_is_no_longer_blocked():
    who = members(*ALL)
    who.behind("engine 1 first").blocked = "a writer may still write"
    assert who.blocked == {MemberId.engine(1): "a writer may still write"}
    open_all(who, "engine 1")
    assert who.blocked == {}
    assert who.opened("engine") == {1: Opened(round=who.round, offers={})}
    assert who.opened("trainer") == {}


def test_what_engines_have_to_hear_outlasts_members_and_rounds():
    """Trainers that are gone and were not writing, and engine ranks to which writes may be in flight, are forgotten
    when engines have heard of them in a round."""
    who = members(*ALL)
    who.settled.add(7)
    who.abandoned.add(1)
    who.remove(MemberId.engine(1), "was silent")
    who.begin_round()
    who.remove_all()
    add(who, "engine 1", "second")
    assert (who.settled, who.abandoned) == ({7}, {1})


def test_joins_are_in_the_order_of_ranks():
    who = members("engine 1", "trainer 1", "engine 0", "trainer 0")
    assert list(who.joins("engine")) == [0, 1]
    assert [(join.side, join.rank) for join in who.joins("trainer").values()] == [("trainer", 0), ("trainer", 1)]


@pytest.mark.parametrize(
    ("opened", "live"),
    [
        ([], []),
        ([0], []),
        ([0, 1], [0]),
        ([1, 2], []),
        ([2, 3], [1]),
        ([0, 1, 3, 4, 5], [0, 2]),
        ([0, 1, 2, 3, 4, 5], [0, 1, 2]),
    ],
)
def test_an_engine_is_live_while_all_its_ranks_are(opened, live):
    who = members(num_engine_ranks=6, ranks_per_engine=2)
    names = [f"engine {rank}" for rank in range(6)]
    for name in names:
        add(who, name)
    open_all(who, *(names[rank] for rank in opened))
    assert who.open_ranks("engine") == set(opened)
    assert who.open_ranks("trainer") == set()
    assert who.live_engines() == live
    if 3 in opened:
        who.remove(MemberId.engine(3), "left")
        assert who.live_engines() == [engine for engine in live if engine != 1]


@pytest.mark.parametrize(("ranks_per_engine", "engine", "ranks"), [(1, 3, [3]), (2, 0, [0, 1]), (4, 2, [8, 9, 10, 11])])
def test_the_ranks_of_one_engine(ranks_per_engine, engine, ranks):
    assert list(members(num_engine_ranks=12, ranks_per_engine=ranks_per_engine).ranks_of(engine)) == ranks


@pytest.mark.parametrize(("seconds", "silent"), [(5, {}), (6, {"engine 0": 6}), (9, {"engine 0": 9, "trainer 0": 6})])
def test_members_that_are_silent_for_too_long(clock, seconds, silent):
    who = members("engine 0")
    clock.seconds = 2
    add(who, "trainer 0").last_heard = 3.0
    clock.seconds = 8
    add(who, "trainer 1")
    clock.seconds = seconds
    assert {str(member): found for member, found in who.silent_for(5.0).items()} == silent


def test_hosts_list_their_members_and_cards():
    who = members()
    for name, host, nics in (
        ("engine 0", "a" * 10, ("mlx5_0",)),
        ("trainer 1", "b" * 10, ()),
        ("trainer 0", "a" * 10, ("mlx5_1", "mlx5_0")),
        ("engine 1", "c" * 10, tuple(f"n{number}" for number in range(17))),
    ):
        add(who, name, place=place(host, nics=nics))
    assert who.hosts() == [
        "host aaaaaaaa: trainer 0, engine 0; RDMA cards: mlx5_1, mlx5_0",
        "host bbbbbbbb: trainer 1; RDMA cards: none",
        f"host cccccccc: engine 1; RDMA cards: {', '.join(f'n{number}' for number in range(16))}",
    ]


# Links


def place(host: str, device: str = "cpu", *, shareable: bool = True, nics: tuple[str, ...] = ()) -> Place:
    return Place(host=host, container="pid:1", user=0, device=device, installed=NAMES, shareable=shareable, nics=nics)


def joins(side: str, *places: Place) -> dict[int, Join]:
    return {rank: join_message(side, rank, place=at) for rank, at in enumerate(places)}


def transports(trainers: list[Place], engines: list[Place], **settings: Any) -> dict[tuple[int, int], str]:
    chosen = choose_links(joins("trainer", *trainers), joins("engine", *engines), TransferSettings(**settings))
    return {link: choice.transport for link, choice in chosen.items()}


@pytest.mark.parametrize(
    ("src", "dst", "settings", "transport"),
    [
        ("cpu", "cpu", {"mode": "in_place"}, "cma"),
        ("cpu", "cpu", {"mode": "shadow"}, "shm"),
        ("cpu", "cpu", {"mode": "in_place", "delta": "on"}, "shm"),
        ("cpu", "cpu", {"mode": "patch", "delta": "on"}, "shm"),
        ("cuda:0", "cuda:1", {"mode": "in_place"}, "cuda_ipc"),
        ("cuda:0", "cpu", {"mode": "in_place"}, "cma"),
        ("cuda:0", "cpu", {"mode": "shadow"}, "shm"),
        ("cpu", "cuda:0", {"mode": "in_place"}, "shm"),  # into a window in host memory, which is weft's own
        ("cpu", "cpu", {"mode": "shadow", "transport": "nixl"}, "nixl"),
    ],
)
def test_weights_that_cannot_be_shared_matter_where_they_are_written(src, dst, settings, transport):
    assert transports([place("a", src)], [place("a", dst, shareable=False)], **settings) == {(0, 0): transport}


def test_every_link_has_the_transport_of_its_own_ends():
    assert transports([place("a"), place("b")], [place("a"), place("b")]) == {
        (0, 0): "shm",
        (0, 1): "nixl",
        (1, 0): "nixl",
        (1, 1): "shm",
    }


def test_one_member_on_another_kind_of_device_sends_all_links_through_host_memory():
    assert transports([place("a", "cuda:0"), place("a")], [place("a", "cuda:1")]) == {(0, 0): "shm", (1, 0): "shm"}


@pytest.mark.parametrize(
    ("trainer_hosts", "engine_hosts", "unlinked"),
    [
        ("ab", "a", ("trainer 1",)),
        ("a", "aba", ("engine 1",)),
        ("aac", "aab", ("trainer 2", "engine 2")),
        ("ab", "ab", ()),  # each has a link: neither side differs
        ("a", "b", ()),  # nobody has: it is not known who is wrong
        ("aa", "bb", ()),
    ],
)
def test_members_that_no_other_can_be_linked_to(trainer_hosts, engine_hosts, unlinked):
    trainers, engines = ([place(host) for host in hosts] for hosts in (trainer_hosts, engine_hosts))
    with pytest.raises(TransportUnavailable, match="shm works only within one host and container") as raised:
        transports(trainers, engines, transport="shm")
    assert raised.value.members == unlinked
    assert raised.value.hint == "use nixl between hosts and containers"


def test_a_slower_transport_is_used_where_that_was_allowed():
    trainers, engines = [place("a"), place("b")], [place("a")]
    assert transports(trainers, engines, transport="shm", allow_fallback=True) == {(0, 0): "shm", (1, 0): "nixl"}


def test_members_know_the_transports_of_their_round():
    who = members("trainer 0", "trainer 1", "engine 0", num_engine_ranks=1)
    who.behind("engine 0 first").transports = {5: "mooncake"}  # of the previous round
    links = choose_links(joins("trainer", place("a"), place("b")), joins("engine", place("a")), TransferSettings())
    who.use(links)
    found = {str(member): known.transports for member, known in who.members.items()}
    assert found == {"trainer 0": {0: "shm"}, "trainer 1": {0: "nixl"}, "engine 0": {0: "shm", 1: "nixl"}}
