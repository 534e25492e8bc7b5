"""The master's queue of settlements that copy messages: nacks, expired leases, dead letters.

Each makes every node read and append while it applies the command. So they go into the log in bounded pieces, one
command at a time: however many leases end at once, an entry holds the core's thread for a few milliseconds. What a part
of a command costs hardly depends on its rows, so deliveries of one channel that end alike share a part (a `_Line`),
whoever settled them. Lines take turns; rows that a command did not reach wait for their line's next turn.

Bounded by ROWS_MAX; beyond it callers get LIMIT_REACHED. Every reply is told exactly once. All is soft state: a
deposed master forgets it, and the leases of unsettled messages end under the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.delivery.leases import ChannelKey
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.failure import Failure, limit_reached, outcome_unknown
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.retrying import COPIES_MAX
from tickwheel.node.state.subscription import Attempts
from tickwheel.proto.log_pb2 import SETTLE_RETRY, Command, DeadCause, Settle, SettleColumns, SettleKind
from tickwheel.wheel.units import Ids

ROWS_MAX = 1_000_000
PART_ROWS = 4
"""Rows that a part of a command counts at least. A part of one row takes half a millisecond on each node, more rows
hardly more: 128 single nacks in one command took 65 ms."""
RETRY_AFTER_MS = 200


@dataclass(slots=True, eq=False)
class Leaving:
    """Deliveries that leave their positions, as columns; `due_ms` is None for dead letters."""

    channel: ChannelKey
    kind: SettleKind.ValueType
    ids: Ids
    attempts: Attempts
    positions: NDArray[np.uint64] | None
    due_ms: NDArray[np.int64] | None
    cause: DeadCause.ValueType
    reason: str
    reply: Reply[SettleResult]
    epoch: int | None = None
    """How often the group had been reset at the delivery; None: not compared."""
    at: int = 0
    """Rows applied so far."""
    result: SettleResult = field(default_factory=SettleResult)

    @property
    def left(self) -> int:
        """Rows not yet applied."""
        return len(self.ids) - self.at

    @property
    def line(self) -> Hashable:
        """Key of its line: that of all which may share a part with it."""
        if self.kind != SETTLE_RETRY:
            return self
        return self.channel, self.kind, self.cause, self.reason, self.epoch, self.positions is None


@dataclass(slots=True)
class _Line:
    """Deliveries that go into one part of a command together, in the order in which they came."""

    waiting: OrderedDict[Leaving, None] = field(default_factory=OrderedDict)
    proposed: list[tuple[Leaving, int]] = field(default_factory=list)
    """Those in the command under way, and how many of their rows."""

    def take(self, room: int) -> SettleColumns:
        """The next rows, at most `room`, as columns of the log. They stay at the head until they are applied."""
        for leaving in self.waiting:
            if room <= 0:
                break
            count = min(room, leaving.left)
            self.proposed.append((leaving, count))
            room -= count
        first = self.proposed[0][0]
        rows = [(leaving, slice(leaving.at, leaving.at + count)) for leaving, count in self.proposed]
        columns = SettleColumns(
            group_id=first.channel[0],
            topic_id=first.channel[1],
            kind=first.kind,
            ids=b"".join([leaving.ids[part].tobytes() for leaving, part in rows]),
            attempts=b"".join([leaving.attempts[part].astype("<u4").tobytes() for leaving, part in rows]),
            cause=first.cause,
            reason=first.reason,
            epoch=first.epoch,
        )
        if first.positions is not None:
            columns.positions = b"".join(
                [leaving.positions[part].tobytes() for leaving, part in rows if leaving.positions is not None]
            )
        if first.due_ms is not None:
            columns.due_ms = b"".join(
                [leaving.due_ms[part].astype("<i8").tobytes() for leaving, part in rows if leaving.due_ms is not None]
            )
        return columns

    def applied(self, part: SettleResult) -> list[tuple[Leaving, SettleResult]]:
        """The result of each of those in the command, as far as it reached their rows. None is in a command now."""
        results = []
        first = 0
        for leaving, count in self.proposed:
            taken = min(count, part.taken - first)
            result = part.of_rows(first, taken) if len(self.proposed) > 1 else part
            first += taken
            results.append((leaving, result))
        self.proposed = []
        return results


class RetryQueue:
    """Puts the rows into the log, one command at a time."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()
        """By key; none is empty. The first has the next turn."""
        self._rows = 0
        self._proposed: list[_Line] = []
        """Lines that have a part in the command under way, in the order of its parts."""
        self._mastership = 0

    @property
    def rows(self) -> int:
        """Rows waiting or under way."""
        return self._rows

    def refusal(self, rows: int) -> Failure | None:
        """Why `rows` more would not be taken now; None: they would."""
        if not rows or self._rows + rows <= ROWS_MAX:
            return None
        return limit_reached("waiting_retries", ROWS_MAX, RETRY_AFTER_MS)

    def add(self, leaving: Leaving) -> None:
        """Queue deliveries; their `reply` is told once all rows are applied, or gets a Failure."""
        refusal = self.refusal(leaving.left)
        if refusal is not None:
            leaving.reply.fail(refusal)
            return
        serving = self._proposer.serving
        leaving.reply = serving.bound_reply(leaving.reply)
        self._rows += leaving.left
        line = self._lines.get(leaving.line)
        if line is None:
            line = self._lines[leaving.line] = _Line()
        line.waiting[leaving] = None
        serving.own(self._propose)

    def _propose(self) -> None:
        if self._proposed or not self._lines:
            return
        room = COPIES_MAX
        batches: list[SettleColumns] = []
        for line in self._lines.values():
            if room <= 0:
                break
            columns = line.take(room)
            batches.append(columns)
            self._proposed.append(line)
            room -= max(len(columns.ids) // 8, PART_ROWS)
        mastership = self._mastership
        command = Command(settle=Settle(batches=batches))
        self._proposer.submit(command, Reply(partial(self._applied, mastership), self._failed), may_gather=True)

    def lose(self, failure: Failure) -> None:
        """Answer the waiting deliveries with `failure`. Those under way still get the log's answer."""
        self._mastership += 1
        under_way = {leaving for line in self._proposed for leaving, _ in line.proposed}
        for leaving in [leaving for line in self._lines.values() for leaving in line.waiting]:
            if leaving not in under_way:
                self._forget(leaving)
                leaving.reply.fail(failure)

    def _applied(self, mastership: int, result: CommandResult) -> None:
        # `_proposed` is kept until all are answered: a callback that adds more must not propose these rows again.
        assert isinstance(result, SettleResult) and len(result.parts) == len(self._proposed)
        for line, part in zip(self._proposed, result.parts, strict=True):
            for leaving, own in line.applied(part):
                leaving.at += own.taken
                leaving.result += own
                self._rows -= own.taken
                if own.failure is not None or not leaving.left:
                    self._forget(leaving)
                    leaving.reply.done(leaving.result)
                elif mastership != self._mastership:
                    self._forget(leaving)
                    leaving.reply.fail(outcome_unknown())
        self._take_turns()

    def _failed(self, failure: Failure) -> None:
        for line in self._proposed:
            for leaving, _ in line.proposed:
                self._forget(leaving)
                leaving.reply.fail(failure)
            line.proposed = []
        self._take_turns()

    def _take_turns(self) -> None:
        """Let the lines go on that had no part in the last command."""
        proposed, self._proposed = self._proposed, []
        for line in proposed:
            if line.waiting:
                self._lines.move_to_end(next(iter(line.waiting)).line)
        self._propose()

    def _forget(self, leaving: Leaving) -> None:
        self._rows -= leaving.left
        line = self._lines[leaving.line]
        del line.waiting[leaving]
        if not line.waiting:
            del self._lines[leaving.line]
