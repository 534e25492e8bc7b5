"""Programs that share a producer id by accident: two of each id, each with sequences and messages of its own.

One pair identifies its programs, so the id belongs to the first of them; the other pair does not. A program whose
sequence is taken continues with the same messages: under the next sequence, or under an id of its own where the other
program owns the id. No other refusal is allowed, and messages refused this way were never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.history_messages import Row, ScheduleAcknowledged, ScheduleRefused, ScheduleSent
from tickwheel.chaos.sim.producers import TOPICS, plain_batch
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2

IDS = ("twin", "owned-twin")
EVERY_NS = 900 * MS
AGAIN_NS_MOST = 150 * MS


@dataclass(eq=False)
class _Program:
    id: str
    owner: str
    """Name given to the cluster; empty: the program does not identify itself."""
    connection: str
    sequence: int = 1
    rows: tuple[Row, ...] = ()
    asked: int = 0
    """Number of the request under way; answers to earlier ones are ignored."""
    target: int = 0


class Twins:
    """`clients.Clients`."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = wires.world.stream("clients/twins")
        owned = IDS[1]
        self._programs = [
            _Program(id, f"{id}/{side}" if id == owned else "", f"{id}-{side}") for id in IDS for side in range(2)
        ]

    def start(self) -> None:
        for program in self._programs:
            self._world.after(SECOND + self._rng.randrange(SECOND), self._go_on, program)

    def unfinished(self) -> str:
        waiting = [program.id for program in self._programs if program.rows]
        return f"answers to {', '.join(waiting)}" if waiting else ""

    def _go_on(self, program: _Program) -> None:
        if self._wires.winding_down:
            return
        rng, wall_ms = self._rng, self._world.wall_ms
        program.rows = tuple(
            Row(self._wires.number(), TOPICS[0], wall_ms + rng.randrange(2_000), None)
            for _ in range(rng.choice((1, 1, 2)))
        )
        self._send(program)

    def _send(self, program: _Program) -> None:
        machine = self._wires.machine(program.target)
        program.asked = asked = self._wires.number()
        id, sequence, rows = program.id, program.sequence, program.rows
        self._history.note(ScheduleSent, id, sequence, machine.name, rows)
        batch = plain_batch(id, sequence, rows)
        batch.owner, batch.connection = program.owner, program.connection

        def answered(outcome: BatchOutcome | Failure) -> None:
            if self._rng.random() < 0.9:  # else the answer is lost on the way
                self._wires.back(heard, outcome)

        def heard(outcome: BatchOutcome | Failure) -> None:
            if program.asked != asked:
                return
            program.asked = 0
            if isinstance(outcome, Failure):
                self._refused(program, outcome)
            else:
                self._accepted(program, outcome)

        def timed_out() -> None:
            if program.asked == asked:
                program.target += 1
                self._send(program)

        self._wires.call(machine, lambda core: core.parts.publisher.schedule(batch, Reply.either(answered)))
        self._world.after(TIMEOUT_NS, timed_out)

    def _accepted(self, program: _Program, outcome: BatchOutcome) -> None:
        uids = tuple(row.uid for row in program.rows)
        ids, due = tuple(outcome.ids.tolist()), tuple(outcome.due_ms.tolist())
        self._history.note(ScheduleAcknowledged, program.id, program.sequence, uids, ids, due, outcome.repeated)
        program.rows = ()
        program.sequence += 1
        self._world.after(self._wires.pause_ns(EVERY_NS, self._rng, cheap=True), self._go_on, program)

    def _refused(self, program: _Program, failure: Failure) -> None:
        uids = tuple(row.uid for row in program.rows)
        reason = common_pb2.ErrorReason.Name(failure.reason)
        self._history.note(ScheduleRefused, program.id, program.sequence, reason, uids)
        if failure.reason == common_pb2.SEQUENCE_TAKEN:
            if failure.metadata["field"] == "producer_id":
                program.id, program.sequence = f"{program.id}-{self._wires.number()}", 1
            else:
                program.sequence = int(failure.metadata.get("accepted_sequence", program.sequence)) + 1
        elif failure.reason == common_pb2.SEQUENCE_GAP:
            # An earlier try of these may still arrive and be accepted: they are not sent again.
            program.sequence = int(failure.metadata["expected"])
            program.rows = ()
            self._world.after(self._rng.randrange(AGAIN_NS_MOST), self._go_on, program)
            return
        else:
            program.target = self._wires.redirect(failure, program.target)
        self._world.after(self._rng.randrange(AGAIN_NS_MOST), self._send, program)
