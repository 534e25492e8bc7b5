"""The master's queue of settlements that copy messages: nacks, expired leases, dead letters.

Each makes every node read and append while it applies the command. So they go into the log in bounded pieces, one
command at a time: however many leases end at once, an entry holds the core's thread for a few milliseconds. A command
takes rows of several callers; rows that it did not reach stay at the head of the queue.

Bounded by ROWS_MAX; beyond it callers get LIMIT_REACHED. Every reply is told exactly once. All is soft state: a
deposed master forgets it, and the leases of unsettled messages end under the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.delivery.leases import Attempts, ChannelKey
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.failure import Failure, limit_reached, outcome_unknown
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.retrying import COPIES_MAX
from tickwheel.proto.log_pb2 import Command, DeadCause, Settle, SettleColumns, SettleKind
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

    def columns(self, count: int) -> SettleColumns:
        """The next `count` rows as columns of the log."""
        part = slice(self.at, self.at + count)
        columns = SettleColumns(
            group_id=self.channel[0],
            topic_id=self.channel[1],
            kind=self.kind,
            ids=self.ids[part].tobytes(),
            attempts=self.attempts[part].astype("<u4").tobytes(),
            cause=self.cause,
            reason=self.reason,
            epoch=self.epoch,
        )
        if self.positions is not None:
            columns.positions = self.positions[part].tobytes()
        if self.due_ms is not None:
            columns.due_ms = self.due_ms[part].astype("<i8").tobytes()
        return columns


class RetryQueue:
    """Puts the rows into the log in order, one command at a time."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._waiting: deque[Leaving] = deque()
        self._rows = 0
        self._proposed: list[Leaving] = []
        """Entries whose rows are in the command under way."""
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
        self._waiting.append(leaving)
        serving.own(self._propose)

    def _propose(self) -> None:
        if self._proposed or not self._waiting:
            return
        room = COPIES_MAX
        batches: list[SettleColumns] = []
        for leaving in self._waiting:
            if room <= 0:
                break
            count = min(room, leaving.left)
            batches.append(leaving.columns(count))
            self._proposed.append(leaving)
            room -= max(count, PART_ROWS)
        mastership = self._mastership
        command = Command(settle=Settle(batches=batches))
        self._proposer.submit(command, Reply(partial(self._applied, mastership), self._failed), may_gather=True)

    def lose(self, failure: Failure) -> None:
        """Answer the waiting deliveries with `failure`. Those under way still get the log's answer."""
        self._mastership += 1
        for leaving in [leaving for leaving in self._waiting if leaving not in self._proposed]:
            self._forget(leaving)
            leaving.reply.fail(failure)

    def _applied(self, mastership: int, result: CommandResult) -> None:
        # `_proposed` is kept until all are answered: a callback that adds more must not propose these rows again.
        proposed = self._proposed
        assert isinstance(result, SettleResult) and len(result.parts) == len(proposed)
        for leaving, part in zip(proposed, result.parts, strict=True):
            leaving.at += part.taken
            leaving.result += part
            self._rows -= part.taken
            if part.failure is not None or not leaving.left:
                self._forget(leaving)
                leaving.reply.done(leaving.result)
            elif mastership != self._mastership:
                self._forget(leaving)
                leaving.reply.fail(outcome_unknown())
        self._proposed = []
        self._propose()

    def _failed(self, failure: Failure) -> None:
        for leaving in self._proposed:
            self._forget(leaving)
            leaving.reply.fail(failure)
        self._proposed = []
        self._propose()

    def _forget(self, leaving: Leaving) -> None:
        self._waiting.remove(leaving)
        self._rows -= leaving.left
