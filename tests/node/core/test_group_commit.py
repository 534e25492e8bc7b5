"""How schedules and settlements share entries of the log: nobody waits alone, many wait for each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.pacing import (
    GATHER_BYTES_MAX,
    RATE_MS,
    RETURN_MS_MAX,
    SPACING_MS_MAX,
    SPACING_MS_MIN,
    UNHURRIED_MS_MIN,
    ReturningCallers,
    Spacing,
)
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DELAY, IncomingBatch
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.proto.peer_pb2 import PeerFrame

NOW_MS, HOUR_MS = 1_800_000_000_000, 3_600_000
RATE_MIN = CoreConfig().spaced_rate_min


def message(topic: str = "t") -> IncomingBatch:
    """One, due in an hour."""
    return IncomingBatch(
        producer_id="",
        sequence=0,
        count=1,
        topics=[topic],
        topic_of=None,
        when=np.array([3_600_000], np.int64),
        kinds=KIND_DELAY,
        sizes=np.array([1], np.uint32),
        records=b"x",
    )


class Callers:
    """So many who schedule one message after the other, each when the one before is answered."""

    def __init__(self, world: World, count: int, pause_ms: float) -> None:
        self.world = world
        self.answered = 0
        self.took_ms: list[float] = []
        self._pause_ns = int(pause_ms * 1e6)
        self.calling = True
        for place in range(count):
            world.at(world.now_ns + 7_919 * place, self._call)

    def _call(self) -> None:
        node = self.world.master()
        assert node is not None and node.host is not None
        began_ns = self.world.now_ns

        def answered(outcome: BatchOutcome | Failure) -> None:
            assert isinstance(outcome, BatchOutcome)
            self.answered += 1
            self.took_ms.append((self.world.now_ns - began_ns) / 1e6)
            if self.calling:
                self.world.at(self.world.now_ns + self._pause_ns, self._call)

        node.host.core.parts.publisher.schedule(message(), Reply.either(answered))
        node.wake()


def entries(world: World) -> int:
    """Length of the log."""
    node = world.master()
    assert node is not None and node.host is not None
    return node.host.core.log.status().commit_index


def ready() -> World:
    """Three nodes that know the topic."""
    world = World()
    world.elect()
    Client(world).schedule([3_600_000])
    world.run(1_000)
    return world


def test_a_single_caller_waits_for_nobody() -> None:
    """With nothing under way a schedule leaves at once: its answer takes a round trip and a sync, no pause on top."""
    world = ready()
    alone = Callers(world, 1, pause_ms=20)
    world.run(1_000)
    assert alone.answered > 30
    assert max(alone.took_ms) <= 4, alone.took_ms


def test_a_topic_is_created_at_once_for_its_first_message() -> None:
    """Its creation is submitted while an entry is gathered: it must not wait for the next heartbeat to leave."""
    world = ready()
    node, took_ms = world.elect(), list[float]()
    assert node.host is not None
    for number in range(5):
        world.run(1_000 + 9 * number)
        began_ns = world.now_ns

        def answered(_: object, began_ns: int = began_ns) -> None:
            took_ms.append((world.now_ns - began_ns) / 1e6)

        node.host.core.parts.publisher.schedule(message(f"t-{number}"), Reply.either(answered))
        node.wake()
    world.run(1_000)
    assert len(took_ms) == 5 and max(took_ms) <= 8, took_ms


def test_many_callers_share_entries() -> None:
    """What comes while an entry is under way waits for its answer: otherwise 64 callers would fill the log with
    entries of a few messages, each of which costs three nodes a sync."""
    world = ready()
    before = entries(world)
    many = Callers(world, 64, pause_ms=1)
    world.run(1_000)
    assert many.answered / (entries(world) - before) > 20
    assert max(many.took_ms) <= 8, max(many.took_ms)


@pytest.mark.parametrize("pause_ms", [0.3, 1.0])
def test_callers_who_come_back_do_not_take_turns(pause_ms: float) -> None:
    """Those who come back at once share an entry with those who waited meanwhile: one entry and one round for all 64.
    Otherwise every second entry has half of them, and a call takes two rounds."""
    world = ready()
    before = entries(world)
    many = Callers(world, 64, pause_ms)
    world.run(1_000)
    assert many.answered / (entries(world) - before) > 60
    assert sum(many.took_ms) / len(many.took_ms) < 1.7


def awaited(returning: ReturningCallers, waiting: int, now_ms: int) -> bool:
    """Whether an entry of so many requests waits for more."""
    leaves_ms = returning.leaves_ms(waiting, now_ms)
    return leaves_ms is not None and leaves_ms > now_ms


def test_callers_who_stay_away_are_waited_for_less_and_less() -> None:
    returning = ReturningCallers()
    held = 0
    for round_ms in range(1_000, 9_000, 8):
        returning.answered(3, 300, 8, 1, round_ms)
        held += awaited(returning, 1, round_ms)
        while awaited(returning, 1, round_ms):
            round_ms += 1
    assert held < 25
    # One who comes back after all is noticed at the next look, and waited for again each time.
    returning = ReturningCallers()
    for round_ms in range(1_000, 2_000, 8):
        returning.answered(3, 300, 8, 1, round_ms)
        assert awaited(returning, 1, round_ms) and awaited(returning, 3, round_ms + 1)
        assert not awaited(returning, 4, round_ms + 1)


@pytest.mark.parametrize(
    ("size", "took_ms", "later_ms"),
    [(GATHER_BYTES_MAX, 8, 0), (300, 1, 0), (300, 8, RETURN_MS_MAX), (300, 2, 1), (300, 8, -1), (300, 8, -(1 << 40))],
    ids=["a flood", "a fast round", "long ago", "half a round ago", "time set back", "time set far back"],
)
def test_nobody_is_waited_for(size: int, took_ms: int, later_ms: int) -> None:
    returning = ReturningCallers()
    returning.answered(3, size, took_ms, 1, 1_000)
    assert not awaited(returning, 1, 1_000 + later_ms)


@pytest.mark.parametrize(
    ("rate", "took_ms", "shared", "spacing_ms"),
    [
        (RATE_MIN, 1, True, SPACING_MS_MIN),
        (5_000, 7, True, 13),
        (5_000, 500, True, SPACING_MS_MAX),
        (RATE_MIN - 1, 500, True, 0),
        (5_000, 500, False, 0),
    ],
    ids=["fast", "slower", "very slow", "few messages", "schedules alone"],
)
def test_entries_are_spaced_by_how_long_they_take(rate: int, took_ms: int, shared: bool, spacing_ms: int) -> None:
    spacing, now_ms = Spacing(RATE_MIN), NOW_MS
    for _ in range(2 * RATE_MS // 10):
        now_ms += 10
        spacing.answered(rate // 100, now_ms - took_ms, now_ms, shared=shared)
    assert spacing.ms == spacing_ms
    for now_ms in (NOW_MS + HOUR_MS, NOW_MS + HOUR_MS + RATE_MS):
        spacing.answered(1, now_ms - took_ms, now_ms, shared=shared)
    assert spacing.ms == 0, "a caller alone is not held up by what was before"


def test_spacing_takes_a_time_that_was_set_back() -> None:
    spacing = Spacing(RATE_MIN)
    for now_ms in [*range(NOW_MS, NOW_MS + 1_000, 10), NOW_MS - HOUR_MS, NOW_MS - HOUR_MS + RATE_MS]:
        spacing.answered(1_000, max(NOW_MS, now_ms), now_ms, shared=True)
    assert spacing.ms == SPACING_MS_MIN


def test_a_steady_flow_shares_its_entries() -> None:
    """Single messages that come, are delivered and settled all the time: a dispatch takes all that waits along, and
    nothing comes late for it."""
    world = ready()
    client = Client(world)
    client.consume()
    world.run(100)
    for place in range(1_000):
        world.at(world.now_ns + place * 10**6, partial(client.schedule, [100 + place % 50]))
    world.run(500)
    before = entries(world)
    world.run(500)
    assert entries(world) - before <= 1.1 * 500 / SPACING_MS_MIN
    world.run(500)
    late_ms = [client.got[record][0][0] - due_ms for record, due_ms in client.acked.items()]
    assert len(late_ms) == 1_000 and min(late_ms) >= 0 and max(late_ms) <= CoreConfig().delivery_period_ms + 1


def test_a_slow_majority_does_not_stop_the_log() -> None:
    """An entry that takes long (a disk that hangs) holds back those who come later for gather_busy_ms, no longer."""
    world = ready()
    master = world.master()
    assert master is not None and master.host is not None
    log = master.host.core.log
    for name in world.nodes:
        if name != master.name:
            world.cut.add(frozenset((name, master.name)))
    before = log.status().last_index
    waiting = Callers(world, 64, pause_ms=1)
    world.run(5)
    early = log.status().last_index
    world.run(3 * CoreConfig().gather_busy_ms)
    waiting.calling = False
    assert log.status().last_index > early >= before + 1


def test_without_a_pause_nothing_gathers() -> None:
    """0 switches it off: every flush makes an entry."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, gather_ms=0, gather_busy_ms=0))
    world.elect()
    Client(world).schedule([3_600_000])
    world.run(1_000)
    before = entries(world)
    many = Callers(world, 8, pause_ms=1)
    world.run(500)
    assert many.answered / (entries(world) - before) < 4


def test_settlements_and_the_word_of_a_commit_ride_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dispatches all the time settlements go with the next one, and slaves hear of a commit with the next entries:
    in entries and frames of their own they would cost the nodes half as much again."""
    bare = 0
    send = Node.send

    def counted(node: Node, peer_id: str, frame: PeerFrame) -> bool:
        nonlocal bare
        bare += frame.HasField("append_entries") and not frame.append_entries.entries
        return send(node, peer_id, frame)

    monkeypatch.setattr(Node, "send", counted)
    world = World()
    world.elect()
    client = Client(world)
    client.consume()
    world.run(500)
    client.schedule([300 + place for place in range(900)])
    world.run(800)
    before, bare = entries(world), 0
    world.run(300)
    # Of dispatches that take along what is due until the next one.
    assert 0.8 <= (entries(world) - before) / (300 / UNHURRIED_MS_MIN) <= 1.1
    assert bare <= 2 * (300 // 50 + 1), "a heartbeat every 50 ms to each of two slaves"
