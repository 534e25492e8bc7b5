"""What a node's client port says: refusals that are true and leave nothing behind, and an audit log that is whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_machines import DiskWiped
from tickwheel.chaos.sim.history_messages import Delivered
from tickwheel.chaos.sim.history_ports import (
    AuditedAnswer,
    AuditedCall,
    AuditSeen,
    CallAccepted,
    CallRefused,
    RepeatAnswered,
    ValueAnswered,
    ValueAsked,
)
from tickwheel.chaos.sim.world import MS, SECOND

LARGEST = 1 << 62
TIME_SLACK = 1_000
"""A time limit is judged by the cluster's clock, and at a moment within the try."""
CLOCKED = "delay_ms_max"
LOOK_NS = 2 * SECOND
"""Within this time a node ends the streams of a user that lost its right, if it runs."""
TAKEN = "the right of bob-of-port"
TAKEN_FROM = "wardens"
LIMITS = ("batch_messages_max", "payload_bytes_max", CLOCKED)
FILES_FAIL = ("disk-full", "failed-sync", "read-error", "broken-copy", "hung-disk")
"""Faults with which a line of the audit log may be lost: a change that cannot be noted is carried out."""


@dataclass(slots=True)
class _Span:
    """A value may hold from `since_ns` to `until_ns`. It `returns` if a try of its change was lost."""

    value: int
    since_ns: int
    until_ns: int = LARGEST
    returns: bool = False


class _Value:
    """The values that something may have had."""

    def __init__(self) -> None:
        self._spans = [_Span(LARGEST, 0)]

    def possible(self, from_ns: int, to_ns: int) -> set[int]:
        """The values that may have held at some moment of that time."""
        return {span.value for span in self._spans if span.since_ns <= to_ns and span.until_ns >= from_ns}

    def asked(self, value: int, at_ns: int) -> None:
        """A change begins."""
        self._spans.append(_Span(value, at_ns))

    def answered(self, at_ns: int, lost: bool) -> None:
        """The last change was carried out. What was before is over, unless it may come back."""
        for span in self._spans[:-1]:
            if not span.returns:
                span.until_ns = min(span.until_ns, at_ns)
        self._spans[-1].returns = lost


class PortsAnswer(Checker):
    """A refusal for a right or a limit is true at some moment between call and answer, and what it refuses never comes.
    What is accepted was allowed at such a moment. What came already is not refused. A consumer gets nothing long after
    its user lost the right.

    A change of a value whose try was lost may take effect at any later time.
    """

    promise = "ports"

    def __init__(self) -> None:
        self._values: dict[str, _Value] = {}
        self._void: dict[int, str] = {}
        """Messages that were refused for good, and why."""
        self._came_ns: dict[int, int] = {}

    def _on_value_asked(self, record: ValueAsked) -> None:
        self._value(record.what).asked(record.value, record.at_ns)

    def _on_value_answered(self, record: ValueAnswered) -> None:
        self._value(record.what).answered(record.at_ns, record.lost)

    def _value(self, what: str) -> _Value:
        return self._values.setdefault(what, _Value())

    def _on_call_refused(self, record: CallRefused) -> None:
        possible = self._value(record.what).possible(record.asked_ns, record.at_ns)
        slack = TIME_SLACK if record.what == CLOCKED else 0
        if not any(value < record.least + slack for value in possible):
            self.broken(
                f"{record.node} refuses messages {record.uids} for {record.what}: they need {record.least}, and it is "
                f"{sorted(possible)}"
            )
        came = [uid for uid in record.uids if self._came_ns.get(uid, LARGEST) < record.asked_ns]
        if came and record.what in LIMITS:
            self.broken(f"{record.node} refuses messages {record.uids} for {record.what}; {came} have come before")
        if record.certain:
            self._void.update(dict.fromkeys(record.uids, record.what))

    def _on_call_accepted(self, record: CallAccepted) -> None:
        possible = self._value(record.what).possible(record.asked_ns, record.at_ns)
        # While a try waits, its due times come nearer.
        slack = TIME_SLACK + (record.at_ns - record.asked_ns) // MS if record.what == CLOCKED else 0
        if not any(value >= record.least - slack for value in possible):
            self.broken(
                f"messages {record.uids} are accepted, which need {record.least} of {record.what}: it is "
                f"{sorted(possible)}"
            )

    def _on_delivered(self, record: Delivered) -> None:
        self._came_ns.setdefault(record.uid, record.at_ns)
        if record.uid in self._void:
            self.broken(f"message {record.uid} comes from {record.node}; it was refused for {self._void[record.uid]}")
        if record.group == TAKEN_FROM and "freeze" not in self.run.faults:
            possible = self._value(TAKEN).possible(record.at_ns - LOOK_NS, record.at_ns)
            if not any(possible):
                self.broken(f"{record.node} delivers message {record.uid} to a user that has lost its right")


class Remembered(Checker):
    """P5 of producers: a user that keeps to its part of the producers is not forgotten, whoever floods the cluster: a
    repeat gets its first receipt."""

    promise = "P5 (producers)"

    def _on_repeat_answered(self, record: RepeatAnswered) -> None:
        name = f"sequence {record.sequence} of {record.producer}"
        if record.reason:
            self.broken(f"{name} is refused with {record.reason}")
        if record.first != record.again:
            self.broken(f"{name} was accepted as {record.first}, and its repeat as {record.again}")


class AuditKept(Checker):
    """A change that was answered has one line in the audit log of the node that answered, and no try has two."""

    promise = "audit"

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}
        self._answered: dict[str, set[int]] = {}
        self._wiped: set[str] = set()

    def _on_audited_call(self, record: AuditedCall) -> None:
        self._nodes[record.number] = record.node

    def _on_audited_answer(self, record: AuditedAnswer) -> None:
        self._answered.setdefault(record.node, set()).add(record.number)

    def _on_disk_wiped(self, record: DiskWiped) -> None:
        self._wiped.add(record.node)

    def _on_audit_seen(self, record: AuditSeen) -> None:
        twice = [number for number, times in Counter(record.numbers).items() if times > 1]
        if twice:
            self.broken(f"{record.node} has noted changes {twice} twice in its audit log")
        others = [number for number in record.numbers if self._nodes.get(number) != record.node]
        if others:
            self.broken(f"{record.node} has noted changes {others} that nobody asked it for")
        excused = record.node in self._wiped or any(fault in self.run.faults for fault in FILES_FAIL)
        lost = self._answered.get(record.node, set()) - set(record.numbers)
        if lost and not excused:
            self.broken(f"{record.node} has answered changes {sorted(lost)}; its audit log has them not")
