"""P1 of messages: what was acknowledged comes, a nacked message comes again, and what is settled stays so."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_keys import KeyedSeen
from tickwheel.chaos.sim.history_machines import HoursRemoved
from tickwheel.chaos.sim.history_messages import (
    SETTLING,
    CancelAnswered,
    CancelSent,
    DeadPurged,
    DeadReplayAsked,
    DeadReplayed,
    Delivered,
    Looked,
    RescheduleAnswered,
    RescheduleRefused,
    RescheduleSent,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
    Settled,
    SettledSeen,
    SettleSent,
)
from tickwheel.chaos.sim.history_operators import ResetAnswered, ResetAsked, SweptSeen
from tickwheel.chaos.sim.world import HOUR_MS, MS
from tickwheel.node.state.settings import RETENTION_MS

RETENTION_SLACK_MS = 500
"""The cluster's time may be ahead of the true one by this."""


class NoLoss(Checker):
    """P1: an acknowledged schedule is delivered to every group, or cancelled, or still pending because it is not due.

    Where retention is over within the run, it may remove a message instead, for every group that has not got it. The
    cluster counts at least these. A message with an open move may be in several hours. It need not come if one of
    them is removed, and is counted if it was in that one.

    Also tells the drain which messages are still missing.
    """

    promise = "P1"
    what_is_owed = "acknowledged messages (group, message)"

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}
        self._missing: dict[str, set[int]] = {}  # group -> acknowledged, not yet delivered
        self._delivered: dict[str, set[int]] = {}
        self._cancelled: set[int] = set()
        self._cancel_open: dict[int, int] = {}  # uid -> cancels sent and not answered
        self._reschedule_open: dict[int, list[int]] = {}
        """By message: times of moves that may have taken effect, or may yet."""
        self._hours: dict[int, int] = {}
        """By message: the hour that it is in, but for an open move."""
        self._counted: dict[int, int] = {}
        """By index: messages that the removal there counts."""

    def _on_hours_removed(self, record: HoursRemoved) -> None:
        self._counted[record.index] = record.unsettled

    def _may_be_gone(self, uid: int) -> bool:
        """Whether retention has removed an hour that the message may be in."""
        return self._hours[uid] < self.gone_below or any(map(self.was_due_in_gone, self._reschedule_open.get(uid, ())))

    def _removed(self) -> list[tuple[str, int]]:
        """(group, message) that retention must have removed: nobody may have moved or cancelled the message."""
        doubtful = self._reschedule_open.keys() | self._cancel_open.keys()
        return [
            (group, uid)
            for group, missing in self._missing.items()
            for uid in sorted(missing - doubtful)
            if self._hours[uid] < self.gone_below
        ]

    def settle_accounts(self, at_ns: int) -> None:
        super().settle_accounts(at_ns)
        counted, removed = sum(self._counted.values()), self._removed()
        if counted < len(removed):
            self.broken(
                f"{len(removed)} messages (group, message) never came and are in removed hours; the cluster counts "
                f"{counted}: {removed[:5]}"
            )

    def _on_delivered(self, record: Delivered) -> None:
        self._delivered.setdefault(record.group, set()).add(record.uid)
        self._missing.setdefault(record.group, set()).discard(record.uid)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        for uid, id64, due_ms in zip(record.uids, record.ids, record.due_ms, strict=True):
            if uid not in self._due_ms:
                self._due_ms[uid] = due_ms
                self._hours[uid] = id64 >> 32
                for group in record.groups or self.run.groups:
                    if uid not in self._delivered.get(group, ()) and uid not in self._cancelled:
                        self._missing.setdefault(group, set()).add(uid)

    def _on_cancel_sent(self, record: CancelSent) -> None:
        self._cancel_open[record.uid] = self._cancel_open.get(record.uid, 0) + 1

    def _on_cancel_answered(self, record: CancelAnswered) -> None:
        self._cancel_open.pop(record.uid, None)
        if record.outcome == "CANCELLED":
            self._cancel(record.uid)

    def _cancel(self, uid: int) -> None:
        self._cancelled.add(uid)
        for missing in self._missing.values():
            missing.discard(uid)

    def _on_reschedule_sent(self, record: RescheduleSent) -> None:
        self._reschedule_open.setdefault(record.uid, []).append(record.due_ms)

    def _on_reschedule_answered(self, record: RescheduleAnswered) -> None:
        self._reschedule_open.pop(record.uid, None)
        if record.outcome == "RESCHEDULED":
            self._due_ms[record.uid] = record.due_ms
            self._hours[record.uid] = record.new_id >> 32

    def _on_reschedule_refused(self, record: RescheduleRefused) -> None:
        moves = self._reschedule_open.get(record.uid, [])
        if record.due_ms in moves:  # an answer to another move of the message ends the doubt about all
            moves.remove(record.due_ms)
            if not moves:
                del self._reschedule_open[record.uid]

    def _on_swept_seen(self, record: SweptSeen) -> None:
        # p9_cancels judges whether the sweep was right: here the message is cancelled or has this due time.
        self._is_due(record.uid, record.due_ms)
        if record.state == "MESSAGE_CANCELLED":
            self._cancel(record.uid)

    def _is_due(self, uid: int, due_ms: int) -> None:
        """The cluster says so."""
        self._reschedule_open.pop(uid, None)
        self._due_ms[uid], self._hours[uid] = due_ms, due_ms // HOUR_MS

    def _on_keyed_seen(self, record: KeyedSeen) -> None:
        # p13_keys judges whether it may be so.
        if record.owed:
            self._is_due(record.uid, record.due_ms)
        else:
            self._cancel(record.uid)

    def owed(self, at_ns: int) -> list[tuple[str, int]]:
        wall_ms = self.wall_ms(at_ns)
        return [
            (group, uid)
            for group, missing in self._missing.items()
            for uid in sorted(missing)
            if self._latest_due_ms(uid) <= wall_ms and uid not in self._cancel_open and not self._may_be_gone(uid)
        ]

    def not_due(self, at_ns: int) -> list[int]:
        """Acknowledged, not delivered, due after `at_ns`."""
        wall_ms = self.wall_ms(at_ns)
        missing = set().union(*self._missing.values()) if self._missing else set()
        return sorted(uid for uid in missing if self._latest_due_ms(uid) > wall_ms and uid not in self._cancel_open)

    def _latest_due_ms(self, uid: int) -> int:
        return max([self._due_ms[uid], *self._reschedule_open.get(uid, [])])

    def _on_looked(self, record: Looked) -> None:
        known = record.uid in self._due_ms
        doubtful = record.uid in self._cancel_open or record.uid in self._cancelled
        if known and record.state == "NOT_FOUND" and not self.is_gone(record.id):
            self.broken(f"message {record.uid} was acknowledged as {record.id:#x}; now it is not found")
        if known and record.state == "MESSAGE_CANCELLED" and not doubtful:
            self.broken(f"message {record.uid} is cancelled; nobody asked for that")
        if known and record.state == "PENDING" and record.uid in self._cancelled:
            self.broken(f"message {record.uid} is pending after its cancel was acknowledged")


class RetentionHolds(Checker):
    """P1 of retention: nothing is removed unsettled before its retention is over."""

    promise = "P1 (retention)"

    def _on_hours_removed(self, record: HoursRemoved) -> None:
        kept_ms = self.run.retention_ms or RETENTION_MS
        oldest_ms = self.now_ms + RETENTION_SLACK_MS - kept_ms
        hour = min(record.below, record.forced_below)
        if hour * HOUR_MS > oldest_ms:
            self.broken(f"{record.node} removes the hours below {hour} though not settled; retention is {kept_ms} ms")
        if record.dead_before_ms > oldest_ms:
            early_ms = record.dead_before_ms - oldest_ms
            self.broken(
                f"{record.node} removes dead letters {early_ms} ms before their retention of {kept_ms} ms is over"
            )


CLOCK_STEP_MS = 5
"""Most difference between two masters' readings of the cluster's time, beyond the errors that they report."""
LATE_NS = 2_000 * MS
"""Time allowed for a retry at the end: a slow consumer may nack when the run is nearly over."""

NEVER_NS = 1 << 62
"""A reset is under way."""

_Key = tuple[str, int]
"""(group, uid)"""
_Place = tuple[str, str]
"""(group, topic)"""


class RetriesCome(Checker):
    """P1 and P3 of retries: a nacked message comes again, not before its pause is over; a dead one does not.

    Judged by the consumer's requests and by committed receipts, in true time.

    A reset may leave out a retry that waits, and brings back what is dead. So it ends what is owed, and a message is
    judged only in the epoch in which it came first: later its deliveries have the same attempts as retries from before.
    """

    promise = "P1"
    what_is_owed = "retries (group, message)"

    def __init__(self) -> None:
        self._asked: dict[tuple[_Key, int], tuple[int, int, int]] = {}
        """By attempt nacked with a delay: end of the earliest pause asked for, its delay in ms, and the longest delay.
        Two masters in a row may both deliver an attempt, and it is not known which of two nacks counts."""
        self._sent_ns: dict[tuple[_Key, int], int] = {}
        """Time of the first nack of each."""
        self._committed: set[tuple[_Key, int]] = set()
        self._owed: dict[_Key, int] = {}
        """Attempts whose nack was committed, until the next one comes."""
        self._owed_from_ns: dict[_Key, int] = {}
        """End of the pause of each owed retry."""
        self._dead: dict[_Key, int] = {}
        self._replayed: set[_Key] = set()
        """Dead ones that were asked to be replayed, until they come."""
        self._newest: dict[_Key, int] = {}
        self._error_ms: dict[tuple[_Key, int], float] = {}
        """Clock error that the master reported at each delivery. The error at the nack was about the same."""
        self._born: dict[_Key, tuple[str, int]] = {}
        """Topic and epoch of the first delivery."""
        self._reset_ns: dict[_Place, int] = {}
        """By group and topic: what was sent before may be void through a reset."""
        self._ids: dict[_Key, int] = {}

    def forget_gone(self) -> None:
        for key in [key for key in self._owed if self.is_gone(self._ids[key])]:
            del self._owed[key]

    def _judged(self, record: Delivered | Settled | SettleSent) -> bool:
        """Whether this is of the epoch in which the message came first."""
        born = self._born.get((record.group, record.uid))
        return born is not None and born[1] == record.epoch

    def _on_reset_asked(self, record: ResetAsked) -> None:
        self._forget(record, NEVER_NS)

    def _on_reset_answered(self, record: ResetAnswered) -> None:
        self._forget(record, record.at_ns)

    def _forget(self, record: ResetAsked | ResetAnswered, until_ns: int) -> None:
        self._reset_ns[record.group, record.topic] = until_ns
        for key in [key for key in self._owed if key[0] == record.group and self._born[key][0] == record.topic]:
            del self._owed[key]

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.outcome == "RETRY" and record.delay_ms and self._judged(record):
            asked = (record.group, record.uid), record.attempt
            over = record.at_ns + record.delay_ms * MS, record.delay_ms
            self._sent_ns.setdefault(asked, record.at_ns)
            over_ns, delay_ms, longest_ms = self._asked.get(asked, (*over, 0))
            self._asked[asked] = (*min(over, (over_ns, delay_ms)), max(longest_ms, record.delay_ms))

    def _on_settled(self, record: Settled) -> None:
        key = (record.group, record.uid)
        if not self._judged(record):
            return
        reset_ns = self._reset_ns.get((record.group, self._born[key][0]), -1)
        if record.outcome == "RETRY" and (key, record.attempt) in self._asked:
            self._committed.add((key, record.attempt))
            if self._newest.get(key, 0) <= record.attempt and self._sent_ns[key, record.attempt] > reset_ns:
                if not self.is_gone(record.id):
                    self._owed[key] = record.attempt
                self._owed_from_ns[key] = record.at_ns + self._asked[key, record.attempt][2] * MS
        elif record.outcome == "DEAD" and key not in self._replayed:
            self._dead[key] = record.attempt  # not the late answer of a settlement from before the replay

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        for uid in record.uids:
            self._dead.pop((record.group, uid), None)
            self._replayed.add((record.group, uid))

    def _on_delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        self._born.setdefault(key, (record.topic, record.epoch))
        self._ids[key] = record.id
        self._replayed.discard(key)
        if key in self._dead and self._judged(record):
            self.broken(f"message {record.uid} to {record.group} comes again after its death was committed")
        self._newest[key] = max(record.attempt, self._newest.get(key, 0))
        if record.attempt > self._owed.get(key, record.attempt):
            del self._owed[key]
        if not self._judged(record):
            return
        nacked_ms = self._error_ms.get((key, record.attempt - 1), 0.0)
        before_ms = self._error_ms.get((key, record.attempt), 0.0)
        self._error_ms[key, record.attempt] = max(record.clock_error_ms, before_ms)
        asked = self._asked.get((key, record.attempt - 1))
        if asked is None or (key, record.attempt - 1) not in self._committed:
            return  # it may have come back on another way: given back, or its lease ran out
        over_ns, delay_ms, _ = asked
        error_ms = max(record.clock_error_ms, nacked_ms)
        allowed_ms = 2 * self.run.clock_allowance_ms + 2 * error_ms + CLOCK_STEP_MS
        early_ms = (over_ns - record.at_ns) / MS - allowed_ms
        if early_ms > 0:
            self.broken(
                f"message {record.uid} to {record.group}: attempt {record.attempt} comes {early_ms:.1f} ms before the "
                f"pause of {delay_ms} ms is over"
            )

    def owed(self, at_ns: int) -> list[_Key]:
        """Also while their pause lasts: the drain waits for them."""
        return sorted(self._owed)

    def settle_accounts(self, at_ns: int) -> None:
        late = [key for key in self.owed(at_ns) if self._owed_from_ns[key] < at_ns - LATE_NS]
        if late:
            group, uid = late[0]
            self.broken(f"{len(late)} nacked messages never came again: {uid} to {group}")


class SettledHolds(Checker):
    """P1 of settlements: at the end each node lists every message with a final receipt as settled, and no others.

    Judged by receipts: ACK, SKIP and DEAD end a message for a group. Replayed dead letters are left out.

    Judges groups that are never reset, and hours that are kept.
    """

    promise = "P1"

    def __init__(self) -> None:
        self._asked: dict[str, set[int]] = {}
        """By group: ids for which a consumer has sent a final answer."""
        self._settled: dict[str, dict[int, int]] = {}
        """By group and id: time of the first receipt for such an answer."""
        self._ids: dict[tuple[str, int], set[int]] = {}
        """By group and message: the ids for which a consumer has answered."""
        self._replayed: dict[str, set[int]] = {}
        """By group: ids of dead letters of which a replay was asked."""

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        for uid in record.uids:
            self._replayed.setdefault(record.group, set()).update(self._ids.get((record.group, uid), ()))

    def _on_settle_sent(self, record: SettleSent) -> None:
        self._ids.setdefault((record.group, record.uid), set()).add(record.id)
        if record.outcome in SETTLING:
            self._asked.setdefault(record.group, set()).add(record.id)

    def _on_settled(self, record: Settled) -> None:
        if record.outcome in SETTLING:
            self._settled.setdefault(record.group, {}).setdefault(record.id, record.at_ns)

    def _on_settled_seen(self, record: SettledSeen) -> None:
        replayed = self._replayed.get(record.group, set())
        done = set(record.done) - replayed
        open_still = [
            (id64, at_ns)
            for id64, at_ns in self._settled.get(record.group, {}).items()
            if at_ns <= record.asked_ns
            and id64 not in done
            and id64 not in replayed
            and id64 >> 32 >= record.hour_min_kept
        ]
        if open_still:
            id64, at_ns = open_still[0]
            self.broken(
                f"{record.node} holds {len(open_still)} messages of {record.group} for open that were answered as "
                f"settled, {id64:#x} at {at_ns / 1e9:.6f} s"
            )
        nobody = done - self._asked.get(record.group, set())
        if nobody:
            self.broken(
                f"{record.node} holds {len(nobody)} messages of {record.group} for settled that no consumer has "
                f"answered for: {min(nobody):#x}"
            )


class DeadLetters(Checker):
    """P1 of dead letters: replayed messages come again, purged ones do not.

    Where retention is over within the run, a letter may be gone before its replay, and its retry after it.
    """

    promise = "P1"
    what_is_owed = "replayed dead letters (group, message)"

    def __init__(self) -> None:
        self._replaying: set[_Key] = set()
        """Messages whose replay was asked for, not delivered since."""
        self._owed: set[_Key] = set()
        """Replayed messages not delivered since."""
        self._purged: dict[_Key, int] = {}

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        self._replaying.update((record.group, uid) for uid in record.uids)

    def _on_dead_replayed(self, record: DeadReplayed) -> None:
        if not self.run.retention_ms:
            self._owed |= self._replaying & {(record.group, uid) for uid in record.uids}

    def _on_dead_purged(self, record: DeadPurged) -> None:
        self._purged.update(((record.group, uid), record.at_ns) for uid in record.uids)

    def _on_delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        self._replaying.discard(key)
        self._owed.discard(key)
        what = f"message {record.uid} to {record.group} attempt {record.attempt} by {record.node}"
        if key in self._purged:
            self.broken(f"{what}: it was purged from the dead letters at {self._purged[key] / 1e9:.6f} s")

    def owed(self, at_ns: int) -> list[_Key]:
        return sorted(self._owed)


OTHER_ENDS = ("SEQUENCE_GAP", "SEQUENCE_FORGOTTEN")
"""Refusals for other reasons of the sequence."""

_Sequence = tuple[str, int]
"""(producer, sequence)"""


class OneContent(Checker):
    """P1 of producers: one id and sequence accept one content, and a sender of another content is told so.

    A sequence accepted with other messages is answered with SEQUENCE_TAKEN: never with a receipt, nor with another
    refusal that a program would take as final. A program that does not share its id is never told SEQUENCE_TAKEN.

    The uid of its first message identifies a content: no message is in two.
    """

    promise = "P1"

    def __init__(self) -> None:
        self._sent: dict[_Sequence, dict[int, int]] = {}
        """Contents, and the time at which each was first sent."""
        self._shared: set[str] = set()
        """Ids under which one sequence was sent with several contents."""
        self._accepted: dict[_Sequence, tuple[int, int]] = {}
        """The content accepted, and the time of its first receipt."""

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        sent = self._sent.setdefault((record.producer, record.sequence), {})
        sent.setdefault(record.rows[0].uid, record.at_ns)
        if len(sent) > 1:
            self._shared.add(record.producer)

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        key = (record.producer, record.sequence)
        content, _ = self._accepted.setdefault(key, (record.uids[0], record.at_ns))
        if content != record.uids[0]:
            self.broken(
                f"sequence {record.sequence} of {record.producer} was acknowledged with message {content}, and "
                f"now with message {record.uids[0]}"
            )

    def _on_schedule_refused(self, record: ScheduleRefused) -> None:
        key = (record.producer, record.sequence)
        if record.reason == "SEQUENCE_TAKEN" and record.producer not in self._shared:
            self.broken(f"{record.producer} is told that its sequence {record.sequence} is taken: by nobody")
        if record.reason == "INVALID_FIELD" and record.uids:
            self.broken(f"sequence {record.sequence} of {record.producer} is refused as no valid request")
        if record.reason not in OTHER_ENDS or not record.uids or key not in self._accepted:
            return
        content, accepted_ns = self._accepted[key]
        if content != record.uids[0] and accepted_ns < self._sent[key][record.uids[0]]:
            self.broken(
                f"{record.producer} is refused sequence {record.sequence} with {record.reason}; it was accepted with "
                f"message {content} before"
            )
