"""Apply is total: whatever a master may propose gives a result, of every command, with every bound among its values."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

import numpy as np
from google.protobuf.message import EncodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.state.solo import HOUR_0, Solo
from tickwheel.chaos.fuzz.messages import Maker
from tickwheel.node.core.watch.counters import Totals
from tickwheel.node.core.watch.events import Events
from tickwheel.node.core.watch.topic_rates import TopicRates
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import Ignored, PublishResult
from tickwheel.node.state.schema import EARLIER_SCHEMAS, ENTRY_SCHEMA, read_entry
from tickwheel.node.state.settings import BOUNDS
from tickwheel.node.state.unique_keys import digest_of
from tickwheel.proto.log_pb2 import Command, LogEntry
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.units import HOUR_MS

A = TypeVar("A")
ENTRIES = 60
DELAY_MS_MAX = BOUNDS["delay_ms_max"][1]
ONE, TWO = b"\1\0\0\0", b"\2\0\0\0"


class AtOnce:
    """An executor without threads."""

    def submit(self, work: Callable[[], A], done: Callable[[A | None, BaseException | None], None]) -> None:
        """Run it here; an error is the test's."""
        done(work(), None)


class Masterful:
    """Commands over the schema of the log, as any master could propose them whatever clients ask for.

    A master says what it has read itself: when a message is due that it cancels or moves, what time it is. Everything
    else is by chance, columns that do not fit each other included.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.solo = Solo(seed)
        self.solo.create("g", "g2")
        now_ms = self.solo.now_ms
        self.due_ms = [now_ms + number * 100 for number in range(20)]
        self.ids = self.solo.publish(self.due_ms, b"payload")
        self.solo.dispatch(now_ms + 1_000)
        hints = {
            "group_id": lambda rng: rng.choice((1, 2)),
            "topic_id": lambda rng: 1,
            "ids": lambda rng: b"".join(rng.choice(self.ids).to_bytes(8, "little") for _ in range(rng.choice((1, 2)))),
            "topic_ids": lambda rng: ONE,
            "attempts": lambda rng: rng.choice((ONE, ONE + ONE, TWO, b"\0\0\0\0")),
            "count": lambda rng: rng.choice((0, 1, 1, 2)),
            "sizes": lambda rng: ONE,
            "records": lambda rng: b"x",
            "unique_keys": lambda rng: rng.choice((digest_of("a"), digest_of("b"), bytes(16))),
            "unique_key": lambda rng: rng.choice((digest_of("a"), digest_of("b"))),
            "key_rules": lambda rng: bytes([rng.randrange(8)]),
            "positions": lambda rng: np.array([rng.randrange(12)], "<u8").tobytes(),
        }
        self.maker = Maker(self.rng, now_ms, hints)
        self.events = Events(SimulatedDisk(Random(seed)), AtOnce(), self.solo.state, "a", 1 << 20)
        self.totals, self.rates = Totals(), TopicRates()

    def command(self) -> Command:
        """One, of any kind."""
        while True:
            made = self.maker.message(Command.DESCRIPTOR)
            assert isinstance(made, Command)
            kind = made.WhichOneof("body")
            if kind not in ("lead",) and not (kind == "admin" and made.admin.HasField("create_cluster")):
                self._as_read(made)
                return made

    def _as_read(self, made: Command) -> None:
        now_ms, rng = self.solo.now_ms, self.rng
        kind = made.WhichOneof("body")
        row = rng.randrange(len(self.ids))
        if kind == "cancel":
            made.cancel.id, made.cancel.due_ms = self.ids[row], self.due_ms[row]
        elif kind == "reschedule":
            made.reschedule.id, made.reschedule.due_ms = self.ids[row], self.due_ms[row]
            made.reschedule.new_due_ms = min(made.reschedule.new_due_ms, now_ms + DELAY_MS_MAX)
        elif kind == "dispatch":
            made.dispatch.due_ms, made.dispatch.index = now_ms + rng.randrange(-10, 300), rng.randrange(40)
        elif kind == "replay_dead":
            made.replay_dead.due_ms = now_ms
        elif kind == "sweep" and made.sweep.HasField("step"):
            made.sweep.step.ids = self.ids[row].to_bytes(8, "little")
            made.sweep.step.due_ms = self.due_ms[row].to_bytes(8, "little")
            self._soon(made.sweep.step.moved)
        elif kind == "publish":
            self._soon(made.publish)
        elif kind == "settle":
            for batch in made.settle.batches:
                self._column_soon(batch, "due_ms")

    def _soon(self, columns: object) -> None:
        self._column_soon(columns, "due_ms")

    def _column_soon(self, columns: object, name: str) -> None:
        data: bytes = getattr(columns, name)
        if data and len(data) % 8 == 0:
            due = np.frombuffer(data, "<i8")
            setattr(columns, name, np.minimum(due, self.solo.now_ms + DELAY_MS_MAX).tobytes())

    def entry(self, schema: int) -> LogEntry | None:
        """An entry of one to three commands, through the bytes that the log has; None: not one that can be written."""
        commands = [self.command() for _ in range(self.rng.choice((1, 1, 2, 3)))]
        entry = LogEntry(format_version=1, term=1, stamped_ms=self.solo.now_ms, commands=commands, schema=schema)
        try:
            return read_entry(entry.SerializeToString())
        except EncodeError:
            return None

    def observe(self, entry: LogEntry, results: list[AnyResult]) -> None:
        """Count and note, as a node does of what it has applied."""
        now_ms = self.solo.now_ms
        for command, result in zip(entry.commands, results, strict=True):
            self.totals.note(result)
            self.rates.applied(command, result)
            self.events.applied(self.solo.index, now_ms, entry, command, command.WhichOneof("body") or "", result)
        self.events.flush()

    def apply(self, entry: LogEntry) -> list[AnyResult]:
        """To the state; a restart applies it again."""
        solo = self.solo
        solo.index += 1
        solo.log[solo.index] = entry
        solo.now_ms += 50
        return solo.state.apply(solo.index, 1, entry)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0, ENTRY_SCHEMA, *EARLIER_SCHEMAS]))
def test_apply_gives_a_result_for_all_that_the_door_lets_through(seed: int, schema: int) -> None:
    """One result for each command; work beside it, checkpoints and a start from one go on; the digest is the same."""
    world = Masterful(seed)
    for number in range(ENTRIES):
        entry = world.entry(schema)
        if entry is None:
            continue
        results = world.apply(entry)
        assert len(results) == len(entry.commands)
        assert not any(result is None or isinstance(result, Ignored) for result in results), entry
        world.observe(entry, results)
        for command, result in zip(entry.commands, results, strict=True):
            if isinstance(result, PublishResult):
                assert len(result.requests) == len(command.publish.requests)
        if number % 20 == 19:
            world.solo.pump()
            world.solo.checkpoint()
    assert world.solo.now_ms > HOUR_0 * HOUR_MS
    assert (world.events.failures, world.events.lost) == (0, 0)
    before = world.solo.state.digest()
    world.solo.restart()
    assert world.solo.state.digest() == before
