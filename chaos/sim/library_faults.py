"""Faults that use pysyncobj's own mechanisms inside a node, for `faults.KINDS`. None may have an effect.

No code of a node uses these mechanisms. The guards make sure that no mistake can.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from itertools import count

from tickwheel.chaos.sim.fault import Counted, Going, Scene, excused
from tickwheel.chaos.sim.history_log import Unpickled
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS
from tickwheel.replication.entries import REGULAR
from tickwheel.replication.pysyncobj_seam import LEADER
from tickwheel.replication.raft import RaftLog

UNPROPOSED = (1 << 63).to_bytes(8, "little")
"""A command that no client ever sent."""
MEMBERSHIP = b"\x02"
"""How pysyncobj marks a command of its own that changes who is a member."""


def log_of(machine: Machine) -> RaftLog | None:
    """The log of the process that runs on a machine."""
    log = getattr(machine.process, "log", None)
    return log if isinstance(log, RaftLog) else None


def library_calls(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """pysyncobj is told to write a dump, and to take a command into its own queue: both must come to nothing."""

    def call() -> None:
        log = log_of(machine)
        if log is not None:
            going.hits += 1
            machine.deliver(log.engine.forceLogCompaction)
            machine.deliver(log.engine._applyCommand, REGULAR + UNPROPOSED, None)  # noqa: SLF001  (pysyncobj's own)

    going.again(call, lambda: rng.randrange(50 * MS, 500 * MS))
    yield


def foreign_entry(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """A node reads a command of pysyncobj's own in its log where there is one of a client: it must stop, once."""
    log = log_of(machine)
    with excused(scene, machine):
        if log is None:
            yield
            return
        apply_entry = log.apply_entry
        foreign = MEMBERSHIP + pickle.dumps(["add", "stranger:1", None])

        def altered(index: int, term: int, command: bytes) -> object:
            if command[:1] == REGULAR and not going.over:
                going.over = True
                going.hits += 1
                command = foreign
            return apply_entry(index, term, command)

        log.apply_entry = altered  # type: ignore[method-assign]
        yield


_witnesses: dict[int, Callable[[], None]] = {}
_numbers = count()


class _Stranger:
    """An object that runs code of its sender when it is unpickled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[int], tuple[()]], tuple[int]]:
        return _run, (self._number,)


def _run(number: int) -> tuple[()]:
    """The code that the sender wants to run."""
    _witnesses[number]()
    return ()


def pickled_frame(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Counted:
    """A slave's pysyncobj gets what a pysyncobj of the shelf would send: an entry in pieces, pickled. It must not read
    it: the process stops, once."""
    number = next(_numbers)

    def ran() -> None:
        machine.note(Unpickled)

    _witnesses[number] = ran

    def attempt() -> None:
        log = log_of(machine)
        if log is not None:
            machine.deliver(take, log)

    def take(log: RaftLog) -> None:
        engine = log.engine
        if going.over or engine.state == LEADER or engine.leader_id is None or log is not log_of(machine):
            return
        going.hits, going.over = 1, True
        message = {
            "type": "append_entries",
            "term": engine.term,
            "commit_index": engine.commit_index,
            "prevLogIdx": log.journal.last_index,
            "prevLogTerm": log.journal.last_term,
        }
        master = engine.leader_id
        engine.deliver(master, {**message, "transmission": "start", "data": pickle.dumps(_Stranger(number))})
        log.run_checked(lambda: engine.deliver(master, {**message, "transmission": "finish", "data": b""}))

    with excused(scene, machine):
        going.again(attempt, lambda: rng.randrange(20 * MS, 200 * MS))
        yield
        del _witnesses[number]
