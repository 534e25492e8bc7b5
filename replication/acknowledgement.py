"""The acknowledgement that a slave owes its master until the acknowledged entries are on its disk.

At most one is owed: a later one covers the earlier. While a slow disk delays it, the master gets an unsuccessful answer
in between, so that it keeps its lease. This module decides what to send; conversation.py sends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import AppendResult


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that must be sent now."""

    leader_id: str
    connection_id: int
    result: AppendResult


@dataclass(slots=True)
class _Owed:
    leader_id: str
    term: int
    connection_id: int
    next_index: int
    echo_sent_ns: int
    silent_since_ns: int
    """Since when the master has had no answer because of this one."""


class Acknowledgement:
    def __init__(self, answer_within_ns: int) -> None:
        self._answer_within_ns = answer_within_ns
        self._owed: _Owed | None = None

    def owe(
        self, leader_id: str, term: int, connection_id: int, next_index: int, echo_sent_ns: int, now_ns: int
    ) -> bool:
        """Owe a success up to `next_index` until the disk has it. False: the master has waited too long, answer now."""
        silent_since_ns = now_ns if self._owed is None else self._owed.silent_since_ns
        overdue = now_ns - silent_since_ns >= self._answer_within_ns
        if overdue:
            silent_since_ns = now_ns
        self._owed = _Owed(leader_id, term, connection_id, next_index, echo_sent_ns, silent_since_ns)
        return not overdue

    def entries_durable(self, durable_index: int, now_ns: int) -> Answer | None:
        """Entries up to `durable_index` are durable: the success that may be sent now, if one is owed."""
        owed = self._owed
        if owed is None:
            return None
        if durable_index + 1 >= owed.next_index:
            self._owed = None
        owed.silent_since_ns = now_ns
        next_index = min(owed.next_index, durable_index + 1)
        result = AppendResult(next_index=next_index, success=True, echo_sent_ns=owed.echo_sent_ns)
        return Answer(owed.leader_id, owed.connection_id, result)

    def overdue(self, durable_index: int, now_ns: int) -> Answer | None:
        """The unsuccessful answer for a master that has waited too long: it says how far the log is durable."""
        owed = self._owed
        if owed is None or now_ns - owed.silent_since_ns < self._answer_within_ns:
            return None
        owed.silent_since_ns = now_ns
        result = AppendResult(next_index=durable_index + 1, echo_sent_ns=owed.echo_sent_ns)
        return Answer(owed.leader_id, owed.connection_id, result)

    def wanted_ns(self) -> int:
        """When `overdue` will return an answer; 0 for never."""
        return 0 if self._owed is None else self._owed.silent_since_ns + self._answer_within_ns

    def forget(self) -> None:
        """Drop the owed answer."""
        self._owed = None

    def keep(self, term: int, leader_id: str | None = None) -> None:
        """Drop the owed answer unless it is for this term and this master (None: any master)."""
        owed = self._owed
        if owed is not None and (owed.term != term or leader_id not in (None, owed.leader_id)):
            self._owed = None

    def hung_up(self, peer_id: str) -> None:
        """Drop the answer owed to this peer: its connection has ended."""
        if self._owed is not None and self._owed.leader_id == peer_id:
            self._owed = None
