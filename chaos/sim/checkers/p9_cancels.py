"""P9: a cancel has a definite answer, whether of one message, of a topic with its deletion, or of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    Delivered,
    Label,
    RescheduleAnswered,
    RescheduleSent,
    ScheduleAcknowledged,
    ScheduleSent,
)
from tickwheel.chaos.sim.history_operators import (
    DeletionAnswered,
    DeletionAsked,
    PassingAccepted,
    PassingDelivered,
    Selected,
    SweepAsked,
    SweepBegan,
    SweepEnded,
    SweptSeen,
)

DISPATCH_SLACK_MS = 42
"""A dispatch may be proposed this much earlier than a right clock would."""


class DefiniteCancel(Checker):
    """P9: a cancel has a definite answer, and a cancelled message is never delivered.

    Push-first has one exception: a message delivered ahead of a lost dispatch may be cancelled afterwards.
    """

    promise = "P9"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._moving: set[int] = set()
        self._delivered: dict[int, int] = {}
        self._cancelled: dict[int, int] = {}
        self._too_late: set[int] = set()

    def _on_delivered(self, record: Delivered) -> None:
        if record.uid in self._cancelled:
            self.broken(
                f"{record.node} delivers message {record.uid}, whose cancel was acknowledged "
                f"at {self._cancelled[record.uid] / 1e9:.6f} s"
            )
        self._delivered.setdefault(record.uid, record.at_ns)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for uid, due_ms in zip(record.uids, record.due_ms, strict=True):
            self._due_ms.setdefault(uid, due_ms)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        self._moving.add(record.uid)

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        self._moving.discard(record.uid)
        if record.outcome == "RESCHEDULED":
            self._due_ms[record.uid] = record.due_ms

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        uid = record.uid
        if record.outcome == "CANCELLED":
            if uid in self._delivered and not self.run.push_first:
                self.broken(f"message {uid} is CANCELLED; it was delivered at {self._delivered[uid] / 1e9:.6f} s")
            if uid in self._too_late:
                self.broken(f"message {uid} is CANCELLED; the answer before was ALREADY_DISPATCHED")
            self._cancelled[uid] = record.at_ns
        elif record.outcome == "ALREADY_DISPATCHED":
            if uid in self._cancelled:
                self.broken(f"message {uid} is ALREADY_DISPATCHED; the answer before was CANCELLED")
            wall_ms = self.now_ms
            ahead_ms = self.run.dispatch_ahead_ms + DISPATCH_SLACK_MS
            if uid in self._due_ms and uid not in self._moving and wall_ms < self._due_ms[uid] - ahead_ms:
                self.broken(f"message {uid} is ALREADY_DISPATCHED {self._due_ms[uid] - wall_ms} ms before its due time")
            self._too_late.add(uid)
        elif record.outcome == "NOT_FOUND" and uid in self._due_ms:
            removed = self.is_gone(record.id)  # perhaps undelivered
            removed = removed or (uid in self._delivered and self.hour_may_be_gone(record.id, record.at_ns))
            if not removed:
                self.broken(f"cancel of message {uid}, which was acknowledged: NOT_FOUND")


SURELY_MS = 500
"""What is due this long after the answer, besides clock error and dispatching ahead, was not dispatched before it."""


class DeletionsHold(Checker):
    """P9 of deletions: once a topic is gone by the answer, none of its messages is delivered, and what it had pending
    was cancelled.

    Pending for certain is what was accepted before anybody asked for the deletion and is not due until a while after
    its answer. Nobody else cancels these messages, so the deletion counts at least as many. Messages accepted later are
    not judged, nor deleted groups: a late request may make a topic or group of the same name. So a repeat of the
    deletion may delete that one: only the first answer is judged.

    Judges topics that stewards delete.
    """

    promise = "P9 (deletion)"

    def __init__(self) -> None:
        self._accepted: dict[str, dict[int, int]] = {}
        """By topic: ids of what was accepted before its deletion was asked for, and their due times."""
        self._asked: set[str] = set()
        self._gone_ns: dict[str, int] = {}
        """By topic: time of the answer."""

    def _on_passing_accepted(self, record: PassingAccepted) -> None:
        if record.topic not in self._asked:
            rows = zip(record.ids, record.due_ms, strict=True)
            self._accepted.setdefault(record.topic, {}).update(rows)

    def _on_deletion_asked(self, record: DeletionAsked) -> None:
        if record.kind == "topic":
            self._asked.add(record.name)

    def _on_deletion_answered(self, record: DeletionAnswered) -> None:
        if record.kind == "topic" and record.name not in self._gone_ns:
            self._gone_ns[record.name] = record.at_ns
            self._counted(record)

    def _on_passing_delivered(self, record: PassingDelivered) -> None:
        if record.topic not in self._gone_ns:
            return
        gone = sorted(self._accepted.get(record.topic, {}).keys() & set(record.ids))
        if gone:
            self.broken(
                f"{record.node} delivers message {gone[0]:#x} of topic {record.topic}, which is gone since "
                f"{self._gone_ns[record.topic] / 1e9:.6f} s"
            )

    def _counted(self, record: DeletionAnswered) -> None:
        now_ms = self.now_ms
        surely_ms = now_ms + self.run.dispatch_ahead_ms + SURELY_MS + record.clock_error_ms
        pending = sum(due_ms > surely_ms for due_ms in self._accepted.get(record.name, {}).values())
        if record.cancelled < pending:
            self.broken(
                f"topic {record.name} is gone with {pending} pending messages, of which its deletion has cancelled "
                f"{record.cancelled}"
            )


@dataclass(slots=True)
class _Message:
    """`due_ms` and `id` by the receipt; -1 before it."""

    topic: str
    label: Label
    due_ms: int = -1
    id: int = -1


@dataclass(slots=True)
class _Sweep:
    selected: Selected
    asked_ns: int
    covered: set[int] = field(default_factory=set)
    touchable: set[int] = field(default_factory=set)
    began_ms: int = 0
    ended: SweepEnded | None = None
    ended_ms: int = 0

    @property
    def finished(self) -> bool:
        return self.ended is not None and self.ended.finished


class SweepsDone(Checker):
    """P9 in bulk: a sweep that has finished left nothing out, touched nothing else, and counts right.

    `covered`: messages that a sweep selects by text and time, acknowledged before anybody asked for it. `touchable`:
    all messages that it may have met, also those sent before its beginning was confirmed or moved meanwhile by another
    sweep. A sweep may miss messages dispatched while it runs, however long after its beginning they were due: a master
    may die, and the next one may dispatch due messages before the sweep reaches them. At the end the cluster is asked
    about every message that may have been swept and did not come.

    Judges messages sent with a key.
    """

    promise = "P9 (bulk)"

    def __init__(self) -> None:
        self._messages: dict[int, _Message] = {}
        self._sweeps: dict[str, _Sweep] = {}
        self._movable: set[int] = set()
        """Messages that a moving sweep may have met."""
        self._cancelled: set[int] = set()
        self._moved: set[int] = set()
        self._delivered: set[int] = set()
        self._early: dict[int, tuple[int, int, str]] = {}
        """By uid: id, due time and name of messages seen before their receipt."""

    def _on_delivered(self, record: Delivered) -> None:
        message = self._messages.get(record.uid)
        if message is not None:
            self._judge_delivery(record, message)

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        label = record.rows[0].label
        if label is not None and label.key:
            for row in record.rows:
                self._sent(row.uid, row.topic, row.label or label)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        if record.uids[0] in self._messages:
            for uid, id_, due_ms in zip(record.uids, record.ids, record.due_ms, strict=True):
                self._messages[uid].id, self._messages[uid].due_ms = id_, due_ms
                if uid in self._early:
                    self._judge_time(uid, *self._early.pop(uid))

    def _on_sweep_began(self, record: SweepBegan) -> None:
        self._sweeps[record.job].began_ms = self.now_ms

    def _sent(self, uid: int, topic: str, label: Label) -> None:
        if uid in self._messages:
            return
        self._messages[uid] = _Message(topic, label)
        for sweep in self._sweeps.values():
            if not sweep.began_ms and sweep.selected.by_text(topic, label):
                self._may_touch(sweep, uid)

    def _may_touch(self, sweep: _Sweep, uid: int) -> None:
        sweep.touchable.add(uid)
        if not sweep.selected.cancel:
            self._movable.add(uid)

    def _on_sweep_asked(self, record: SweepAsked) -> None:
        sweep = self._sweeps[record.job] = _Sweep(record.selected, record.at_ns)
        for uid, message in self._messages.items():
            if not record.selected.by_text(message.topic, message.label):
                continue
            timely = uid not in self._movable and message.due_ms >= 0
            if timely and not record.selected.by_time(message.due_ms):
                continue
            if timely:
                sweep.covered.add(uid)
            self._may_touch(sweep, uid)
            if not record.selected.cancel:
                self._may_come_into(uid, message)

    def _may_come_into(self, uid: int, message: _Message) -> None:
        """Count the message as touchable by every sweep not yet confirmed: a move may bring it into their range."""
        for sweep in self._sweeps.values():
            if not sweep.began_ms and sweep.selected.by_text(message.topic, message.label):
                self._may_touch(sweep, uid)

    def _on_sweep_ended(self, record: SweepEnded) -> None:
        sweep = self._sweeps[record.job]
        sweep.ended, sweep.ended_ms = record, self.now_ms
        met = record.done + record.too_late + record.gone + record.too_far
        if met > len(sweep.touchable):
            self.broken(f"{record.job} met {met} messages; it can mean {len(sweep.touchable)} at most")
        if not record.finished:
            return
        alone = sweep.covered - self._met_by_others(sweep)
        pending = sum(self._messages[uid].due_ms > sweep.ended_ms + self.ahead_ms for uid in alone)
        if met < pending:
            text = f"{record.job} met {met} messages; {pending} that it means were pending until it had ended"
            self.broken(text)

    def _met_by_others(self, sweep: _Sweep, cancels: bool = True) -> set[int]:
        """Messages that other sweeps may have moved (or cancelled), before or since: this one may have missed them."""
        others = [
            other.touchable
            for other in self._sweeps.values()
            if other is not sweep and (cancels or not other.selected.cancel)
        ]
        return set().union(*others)

    def _meaning(self, uid: int, *, cancel: bool) -> list[_Sweep]:
        return [sweep for sweep in self._sweeps.values() if sweep.selected.cancel == cancel and uid in sweep.touchable]

    def _must_have_met(self, uid: int, cancel: bool) -> str:
        """Name of a finished sweep that must have met the message, not dispatched by then; empty: none."""
        for job, sweep in self._sweeps.items():
            if (
                sweep.selected.cancel == cancel
                and sweep.finished
                and uid in sweep.covered
                and self._messages[uid].due_ms > sweep.ended_ms + self.ahead_ms
                and uid not in self._met_by_others(sweep, cancels=False)
            ):
                return job
        return ""

    def _judge_delivery(self, record: Delivered, message: _Message) -> None:
        uid = record.uid
        name = f"message {uid} ({message.label.key}), delivered by {record.node}"
        if uid in self._cancelled:
            self.broken(f"{name}, was cancelled in bulk")
        if uid in self._delivered:
            return
        self._delivered.add(uid)
        job = self._must_have_met(uid, cancel=True)
        if job:
            self.broken(f"{name}, was left out by {job}, which had finished before its time")
        self._judge_time(uid, record.id, record.due_ms, name)

    def _judge_time(self, uid: int, id_: int, due_ms: int, name: str, left_out: bool = True) -> None:
        """Judge if a message is where its receipt or a sweep put it; with `left_out` also if a sweep missed it."""
        message = self._messages[uid]
        if message.due_ms < 0:
            self._early[uid] = (id_, due_ms, name)  # its receipt will tell
            return
        moving = self._meaning(uid, cancel=False)
        if id_ == message.id:
            if due_ms != message.due_ms:
                self.broken(f"{name}, is due at {due_ms}, not at {message.due_ms}, under the same id")
            job = self._must_have_met(uid, cancel=False) if left_out else ""
            if job and not any(sweep.ended and sweep.ended.too_far for sweep in moving):
                self.broken(f"{name}, was left where it was by {job}")
            return
        if not moving:
            self.broken(f"{name}, has another id, and nobody moved it")
        self._moved.add(uid)
        targets = [sweep.selected.target_ms(message.due_ms) for sweep in moving]
        if not any(due_ms == target or (due_ms > target and target < self.now_ms) for target in targets):
            self.broken(f"{name}, was moved to {due_ms}; asked for was {targets}")

    def _on_swept_seen(self, record: SweptSeen) -> None:
        uid = record.uid
        message = self._messages[uid]
        name = f"message {uid} ({message.label.key}), looked up"
        if record.state == "MESSAGE_CANCELLED":
            if not self._meaning(uid, cancel=True):
                self.broken(f"{name}, is cancelled, and no sweep means it")
            if uid in self._delivered and not self.run.push_first:
                self.broken(f"{name}, is cancelled, and it was delivered")
            self._cancelled.add(uid)
            self._judge_time(uid, record.id, record.due_ms, name, left_out=False)
        elif record.state == "PENDING":
            for job, sweep in self._sweeps.items():
                met = sweep.finished and sweep.selected.cancel and uid in sweep.covered
                if met and uid not in self._met_by_others(sweep, cancels=False):
                    self.broken(f"{name}, was left out by {job}")
            self._judge_time(uid, record.id, record.due_ms, name)

    def settle_accounts(self, at_ns: int) -> None:
        if self.run.push_first:
            return  # what was delivered ahead of a lost dispatch may be cancelled or moved, and nobody looks it up
        for cancel, what, touched in ((True, "cancelled", self._cancelled), (False, "moved", self._moved)):
            sweeps = {job: sweep for job, sweep in self._sweeps.items() if sweep.selected.cancel == cancel}
            told = 0
            for job, sweep in sweeps.items():
                if sweep.ended is None:
                    return  # the run did not come to its end
                told += sweep.ended.done
                most = len(touched & sweep.touchable)
                if sweep.ended.done > most:
                    self.broken(f"{job} tells that it {what} {sweep.ended.done}; it was {most} at most")
            if told != len(touched):
                self.broken(f"all sweeps together tell that they {what} {told} messages; it was {len(touched)}")
