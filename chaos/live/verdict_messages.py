"""The fate of every message of a run: P1, P2, P3, P4, P5, P9 and the deliveries' side of P7.

Fed with the records of the workload in the order of time (`observe`), then asked for the end (`finish`). Shares no
code with a node or a client: all it knows is what the workload wrote down. Times are true time, ms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tickwheel.chaos.live.history import Record

Report = Callable[[str, float, str], None]
"""(promise, when, what): something is broken."""

EARLY_MS = 5.0
"""P3 by true time: allowed earliness beyond the clock error that the master reports."""
CROSSING_MS = 1_000.0
"""A delivery on its way while another event was recorded may be recorded this much later."""
SESSION_MS = 250.0
"""Most time between the end of a session and its record, in either direction."""
AFTER_HEAL_MS, LATE_MS_MAX = 1_000.0, 5_000.0
"""P4: messages due more than AFTER_HEAL_MS after the heal come within LATE_MS_MAX."""


@dataclass(slots=True)
class Delivered:
    """The newest delivery of a message to a group."""

    at_ms: float
    until_ms: float
    term: int
    attempt: int
    consumer: str
    session: str


@dataclass(slots=True)
class Message:
    """All that is known of one message."""

    sent_ms: float
    asked_ms: float
    holds_ms: float = 0.0
    """The time that holds, as acknowledged, if that is not what was asked: a delay counts from its arrival."""
    acknowledged: bool = False
    acknowledged_ms: float = 0.0
    refused: bool = False
    """Surely not accepted."""
    id: int = 0
    """As acknowledged or, without an answer, as first delivered."""
    cancel: str = ""
    """The outcome; `asked` until there is one."""
    move: str = ""
    moved_to_ms: float = 0.0
    first_ms: dict[str, float] = field(default_factory=dict)
    """Group to its first delivery."""
    last: dict[str, Delivered] = field(default_factory=dict)
    nacked: dict[str, set[int]] = field(default_factory=dict)
    """By group: the attempts handed back, in any order."""
    settled_ms: dict[str, float] = field(default_factory=dict)

    @property
    def earliest_ms(self) -> float:
        """The message must not come before this."""
        if self.move == "RESCHEDULED":
            return self.moved_to_ms
        if self.move in ("asked", "ALREADY_DISPATCHED"):
            # Its first try may have moved the message, and have lost its answer; a repeat then comes too late.
            return min(self.asked_ms, self.moved_to_ms)
        return self.asked_ms

    @property
    def due_ms(self) -> float:
        """Time from which the message is late."""
        if self.move == "RESCHEDULED":
            return max(self.moved_to_ms, self.sent_ms)
        return max(self.asked_ms, self.sent_ms, self.holds_ms, self.moved_to_ms if self.move else 0.0)

    @property
    def wanted(self) -> bool:
        """Whether every group must get the message."""
        return self.acknowledged and self.cancel not in ("CANCELLED", "asked")


@dataclass(frozen=True, slots=True)
class _Got:
    group: str
    uids: list[int]
    attempts: list[int]


class Messages:
    """One run's messages."""

    def __init__(self, broken: Report) -> None:
        self._broken = broken
        self._messages: dict[int, Message] = {}
        self._requests: dict[int, list[int]] = {}
        self._ids: dict[int, list[int]] = {}
        self._got: dict[int, _Got] = {}
        self._settles: dict[int, tuple[_Got, str, list[int]]] = {}
        self._sessions: dict[str, list[tuple[float, str]]] = {}
        self._unexplained: list[tuple[str, Delivered, Delivered]] = []
        """Second deliveries whose only reason can be a session that was gone; that may be written down later."""
        self.groups: list[str] = []
        self.first_of_term: dict[int, float] = {}
        self.last_of_term: dict[int, float] = {}
        self.duplicates: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._clock_error_ms: Callable[[float], float] = lambda at_ms: 0.0
        self.earliest_ms = -math.inf
        """How much before its time the earliest one came; below 0: none did."""
        self.lost: set[tuple[int, str]] = set()
        """(id, group) of messages that had to come and never came."""
        self.early: set[tuple[int, str]] = set()
        """Came more than EARLY_MS before its time by true time, whatever the nodes knew of theirs."""
        self._attempts: set[tuple[int, str, int]] = set()
        self._twice: set[tuple[int, str, int]] = set()
        self.lateness: list[tuple[float, float, float]] = []
        """(time of arrival, due time, lateness) of each first delivery, in ms."""
        self.acknowledged_ms: list[tuple[float, int]] = []
        self.got_ms: list[tuple[float, int]] = []
        self.settled_ms: list[tuple[float, int]] = []

    def observe(self, record: Record) -> None:
        """Take the next record of the workload; others are left alone."""
        take = getattr(self, f"_on_{record['k']}", None)
        if take is not None:
            take(record)

    # -- scheduling

    def _on_groups(self, record: Record) -> None:
        self.groups = record["groups"]

    def _on_send(self, record: Record) -> None:
        self._requests[record["b"]] = record["uids"]
        self.counts["sent"] += len(record["uids"])
        for uid, asked_ms in zip(record["uids"], record["asked"], strict=True):
            self._messages[uid] = Message(record["t"], asked_ms)

    def _on_ack(self, record: Record) -> None:
        uids, ids = self._requests[record["b"]], record["ids"]
        self._ids[record["b"]] = ids
        self.acknowledged_ms.append((record["t"], len(uids)))
        self.counts["acknowledged"] += len(uids)
        for uid, due_ms in zip(uids, record.get("due", ()), strict=False):
            self._messages[uid].holds_ms = due_ms
        for uid, id64 in zip(uids, ids, strict=True):
            message = self._messages[uid]
            message.acknowledged = True
            message.acknowledged_ms = record["t"]
            self._same_id(record["t"], uid, message, id64)

    def _same_id(self, at_ms: float, uid: int, message: Message, id64: int) -> None:
        if message.id and message.id != id64 and not message.move:
            self._broken("P5", at_ms, f"message {uid} has two ids, {message.id:#x} and {id64:#x}: scheduled twice")
        message.id = message.id or id64

    def _on_again(self, record: Record) -> None:
        self.counts["repeats"] += 1
        before = self._ids.get(record["b"])
        if before != record["ids"]:
            self._broken(
                "P5", record["t"], f"a repeat of request {record['b']} got other ids: {before}, {record['ids']}"
            )

    def _on_fail(self, record: Record) -> None:
        uids = self._requests.get(record["b"], [])
        self.counts["without outcome" if record["unknown"] else "refused"] += len(uids)
        for uid in uids:
            self._messages[uid].refused = not record["unknown"]

    # -- changing

    def _on_cancel(self, record: Record) -> None:
        self._messages[record["uid"]].cancel = "asked"

    def _on_cancelled(self, record: Record) -> None:
        self.counts[f"cancel {record['outcome']}"] += 1
        self._messages[record["uid"]].cancel = record["outcome"]
        if record["outcome"] not in ("CANCELLED", "ALREADY_DISPATCHED"):
            self._broken("P9", record["t"], f"cancel of acknowledged message {record['uid']}: {record['outcome']}")

    def _on_move(self, record: Record) -> None:
        message = self._messages[record["uid"]]
        message.move, message.moved_to_ms = "asked", record["asked"]

    def _on_moved(self, record: Record) -> None:
        self.counts[f"move {record['outcome']}"] += 1
        self._messages[record["uid"]].move = record["outcome"]
        if record["outcome"] not in ("RESCHEDULED", "ALREADY_DISPATCHED"):
            self._broken("P9", record["t"], f"move of acknowledged message {record['uid']}: {record['outcome']}")

    # -- delivering

    def _on_session(self, record: Record) -> None:
        self._sessions.setdefault(record["consumer"], []).append((record["t"], record["session"]))

    def _on_alien(self, record: Record) -> None:
        self._broken("P2", record["t"], f"group {record['group']} got what nobody sent: {record['payload'][:60]}")

    def _on_got(self, record: Record) -> None:
        at_ms, term, group, uids = record["t"], record["term"], record["group"], record["uids"]
        self._got[record["g"]] = _Got(group, uids, record["attempts"])
        self.counts["delivered"] += len(uids)
        self.got_ms.append((at_ms, len(uids)))
        self._note_term(at_ms, term, group)
        for uid, id64, attempt in zip(uids, record["ids"], record["attempts"], strict=True):
            message = self._messages.get(uid)
            if message is None:
                self._broken("P2", at_ms, f"group {group} got message {uid}, which was never sent")
                continue
            self._same_id(at_ms, uid, message, id64)
            now = Delivered(at_ms, record["until"], term, attempt, record["consumer"], record["session"])
            self._note_attempt((uid, group, attempt))
            before = message.last.get(group)
            message.last[group] = now
            if before is None:
                message.first_ms[group] = at_ms
            else:
                reason = self._reason(uid, group, message, before, now)
                if reason is not None:
                    self.duplicates[reason] += 1

    def _note_attempt(self, attempt: tuple[int, str, int]) -> None:
        if attempt in self._attempts:
            self._twice.add(attempt)
        self._attempts.add(attempt)

    def _note_term(self, at_ms: float, term: int, group: str) -> None:
        self.first_of_term.setdefault(term, at_ms)
        self.last_of_term[term] = at_ms
        newest = max(self.first_of_term)
        if term < newest and at_ms > self.first_of_term[newest] + CROSSING_MS:
            since_ms = at_ms - self.first_of_term[newest]
            self._broken(
                "P7",
                at_ms,
                f"a delivery of term {term} to {group}, {since_ms:,.0f} ms after the first of term {newest}",
            )

    def _reason(self, uid: int, group: str, message: Message, before: Delivered, now: Delivered) -> str | None:
        """The reason why a message came again; None: known only at the end."""
        settled_ms = message.settled_ms.get(group)
        what = (
            f"message {uid} to {group}, attempt {now.attempt} in term {now.term}, "
            f"{now.at_ms - before.at_ms:,.0f} ms after attempt {before.attempt} in term {before.term}"
        )
        if settled_ms is not None and now.at_ms > settled_ms + CROSSING_MS:
            self._broken("P5", now.at_ms, f"{what}: its acknowledgement was committed")
            return "no reason"
        if before.attempt in message.nacked.get(group, ()):
            return "handed back"
        if now.at_ms >= before.until_ms - SESSION_MS:
            return "lease over"
        if now.term != before.term:
            return "failover"
        if now.consumer == before.consumer and now.session != before.session:
            return "session gone"
        self._unexplained.append((what, before, now))
        return None

    def _explain(self) -> None:
        """Explain these duplicates now that all sessions are known: an end may be recorded after its effects."""
        for what, before, now in self._unexplained:
            if any(
                before.at_ms - SESSION_MS <= at_ms <= now.at_ms + SESSION_MS and session != before.session
                for at_ms, session in self._sessions.get(before.consumer, ())
            ):
                self.duplicates["session gone"] += 1
            else:
                self.duplicates["no reason"] += 1
                self._broken("P5", now.at_ms, f"{what}: not handed back, lease holds, session and term are the same")

    def _on_settle(self, record: Record) -> None:
        got = self._got[record["g"]]
        self._settles[record["s"]] = (got, record["what"], record["rows"])
        if record["what"] == "retry":
            for row in record["rows"]:
                message = self._messages.get(got.uids[row])
                if message is not None:
                    message.nacked.setdefault(got.group, set()).add(got.attempts[row])

    def _on_settled(self, record: Record) -> None:
        got, what, rows = self._settles.pop(record["s"])
        committed = record.get("committed", 0)
        self.settled_ms.append((record["t"], committed))
        if what == "ack" and committed == len(rows):
            self.counts["settled"] += committed
            for row in rows:
                message = self._messages.get(got.uids[row])
                if message is not None:
                    message.settled_ms[got.group] = record["t"]

    # -- the end

    def finish(self, end_ms: float, heal_ms: float, clock_error_ms: Callable[[float], float]) -> None:
        """Judge what only the end can tell. `heal_ms`: when the faults were over; `clock_error_ms`: how far the time
        that the cluster went by at a moment may have been off, as it said itself."""
        self._clock_error_ms = clock_error_ms
        self._explain()
        for uid, message in self._messages.items():
            self._judge(uid, message, end_ms)
            for at_ms in message.first_ms.values():
                late_ms = at_ms - message.due_ms
                self.lateness.append((at_ms, message.due_ms, late_ms))
                if message.due_ms > heal_ms + AFTER_HEAL_MS and late_ms > LATE_MS_MAX:
                    self._broken("P4", at_ms, f"message {uid} came {late_ms:,.0f} ms late, after the heal")
        self.lateness.sort()

    def _judge(self, uid: int, message: Message, end_ms: float) -> None:
        for group, at_ms in message.first_ms.items():
            early_ms = message.earliest_ms - at_ms
            if math.floor(at_ms) + EARLY_MS < math.floor(message.earliest_ms):
                self.early.add((message.id, group))
            self.earliest_ms = max(self.earliest_ms, early_ms)
            if early_ms > EARLY_MS and early_ms > EARLY_MS + max(self._clock_error_ms(at_ms), self._error_at(message)):
                self._broken("P3", at_ms, f"message {uid} came to {group} {early_ms:,.0f} ms early")
        if message.cancel == "CANCELLED" and message.first_ms:
            at_ms = min(message.first_ms.values())
            self._broken("P9", at_ms, f"message {uid} was cancelled and came to {', '.join(message.first_ms)}")
        if message.refused and message.first_ms:
            at_ms = min(message.first_ms.values())
            self._broken("P2", at_ms, f"message {uid} was refused for good and came to {', '.join(message.first_ms)}")
        if message.wanted and message.earliest_ms < math.floor(end_ms) - LATE_MS_MAX:
            missing = _missing(self.groups, message.first_ms)
            self.lost.update((message.id, group) for group in self.groups if group not in message.first_ms)
            if missing:
                self.counts["lost"] += 1
                due_ago_s = (end_ms - message.due_ms) / 1_000
                self._broken(
                    "P1",
                    message.due_ms,
                    f"message {uid}, due {due_ago_s:,.1f} s before the end, never came to {missing}",
                )

    def _error_at(self, message: Message) -> float:
        """How far the time may have been off by which a delay was counted."""
        return max(map(self._clock_error_ms, (message.sent_ms, message.acknowledged_ms or message.sent_ms)))

    @property
    def duplicated(self) -> set[tuple[int, str, int]]:
        """Id, group and attempt of what came more than once under one attempt."""
        return {(self._messages[uid].id, group, attempt) for uid, group, attempt in self._twice}


def _missing(groups: Iterable[str], came: dict[str, float]) -> str:
    return ", ".join(group for group in groups if group not in came)
