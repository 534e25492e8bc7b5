"""Due messages whose records this node cannot read: other members are asked for them; a message whose record is lost
everywhere is set aside.

A bad page is the fault of one disk. So this node tries an unreadable record again with growing pauses, and asks every
other member for it at the same time. An answer is checked (CRC32C, id, size) and delivered as if it had been read here.
Only when this node has failed TRIES times, and each other member has said as often that it cannot read the record
either, a command settles the message for its group with PAYLOAD_LOST: it becomes a dead letter without content, with
everything else that is known of it.

While a member that may have the record does not answer, the message waits: alone, or in a FIFO topic with the messages
behind it, since nobody can tell its message group. Status and metrics say so.

Soft state of the master, dropped with its mastership: the next master reads for itself. Bounded by the messages that
channels withhold (channel.UNREAD_MAX), and by ROUND_MAX messages a question.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.fetching import Unreadable
from tickwheel.node.core.delivery.partial_read import PartialRead, ReadRows
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.message_ids import id_text
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.repair.record_answers import ASKED_MAX, unit_in
from tickwheel.node.core.world import Now, Reported
from tickwheel.node.failure import Failure
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.targets import origins_of
from tickwheel.proto.log_pb2 import PAYLOAD_LOST, SETTLE_DEAD, SettleColumns
from tickwheel.proto.peer_pb2 import PeerFrame, RecordAnswer, RecordAsk, RecordFound
from tickwheel.wheel.units import HOUR_MS, Units

TRIES = 7
"""Failed reads of this node, and of each other member, before a record counts as lost. With the pauses that takes over
six seconds: a disk may fail to read for a while."""
ROUNDS_TOLD = 3
"""Questions without a decision after which status tells of the message."""
ROUND_MAX = ASKED_MAX
PAUSE_MS = 100
PAUSE_MS_MAX = 5_000


@dataclass(slots=True, eq=False)
class _Case:
    """A message that waits for its record. `unit` is None until somebody has read the unit."""

    channel: Channel
    position: int
    id: int
    unit: Units | None
    error: str
    rounds: int = 0
    said: dict[str, int] = field(default_factory=dict)
    """Member (this node too) -> how often it said that it cannot read the record."""
    record: bytes | None = None
    """The record once found; it then waits for the message's due time."""
    proposed: bool = False
    turn: int = 0
    """Number of the case's valid entry in the agenda; earlier entries are void."""


class RecordRepair(Part):
    """Has work only on a master."""

    of_master = True

    def __init__(self, core: Kernel, delivery: Delivery) -> None:
        self._core = core
        self._delivery = delivery
        self._cases: dict[tuple[Channel, int], _Case] = {}
        self._by_id: dict[int, list[_Case]] = {}
        self._agenda: list[tuple[int, int, _Case]] = []
        self._order = itertools.count()
        self._mastership = 0
        self.repaired = 0
        """Records that other members sent."""

    @property
    def waiting(self) -> int:
        """Messages that cannot be read here and are still undecided."""
        return len(self._cases)

    @property
    def reason(self) -> str:
        """The records that the node waits for, for an operator; empty if none has waited for long."""
        case = next((case for case in self._cases.values() if case.rounds > ROUNDS_TOLD), None)
        if case is None:
            return ""
        silent = ", ".join(name for name in self._others() if not case.said.get(name, 0))
        waits = f"not heard from {silent} whether it can" if silent else "no other member can either"
        return f"{len(self._cases)} messages cannot be read here; of {self._name(case)} {waits}: {case.error}"

    def _report(self, level: str, event: str, fields: dict[str, object]) -> None:
        self._core.report(Reported(level, event, fields))

    def add(self, unread: Unreadable) -> None:
        """Look after an unreadable message; its channel has withheld it."""
        channel, position, id = unread.channel, unread.position, unread.id
        unit, error = unread.unit, unread.error
        case = _Case(channel, position, id, unit, error, said={self._core.identity.node_id: 1})
        if (channel, position) in self._cases:
            self._drop(self._cases[channel, position])
        if id not in self._by_id:
            self._report(
                "warning",
                "a message that is due cannot be read here; the other members are asked",
                {"message": self._name(case), "topic": channel.topic, "hour": id >> 32, "error": error},
            )
        self._cases[channel, position] = case
        self._by_id.setdefault(id, []).append(case)
        self._look_again(case, 0)

    def _drop(self, case: _Case) -> None:
        del self._cases[case.channel, case.position]
        self._by_id[case.id].remove(case)
        if not self._by_id[case.id]:
            del self._by_id[case.id]

    def end(self, failure: Failure) -> None:
        self._mastership += 1
        self._cases.clear()
        self._by_id.clear()
        self._agenda.clear()

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"unreadable_messages": float(self.waiting), "salvaged_records": float(self.repaired)}

    def wait_ms(self, now: Now) -> int | None:
        """Until the next case is due."""
        return self._agenda[0][0] - now.steady_ms if self._agenda else None

    def tick(self, now: Now) -> None:
        """Carry on the cases that are due."""
        steady_ms = now.steady_ms
        if not now.acting or not self._agenda or self._agenda[0][0] > steady_ms:
            return
        unread: list[_Case] = []
        for _ in range(ROUND_MAX):
            if not self._agenda or self._agenda[0][0] > steady_ms:
                break
            _, turn, case = heapq.heappop(self._agenda)
            if case.turn == turn and self._cases.get((case.channel, case.position)) is case and not self._over(case):
                if case.record is not None:
                    self._supply(case)
                elif self._is_lost(case):
                    self._set_aside(case)
                else:
                    unread.append(case)
        if unread:
            self._try(unread)

    def _look_again(self, case: _Case, pause_ms: int) -> None:
        case.turn = next(self._order)
        heapq.heappush(self._agenda, (self._core.steady_ms() + pause_ms, case.turn, case))

    def _over(self, case: _Case) -> bool:
        """Whether the message was settled in another way, reset or removed: then its channel forgets it."""
        channel, state = case.channel, self._core.state
        subscription = state.subscription(*channel.key)
        if subscription is channel.subscription and subscription.epoch == channel.epoch:
            position, id = np.array([case.position], np.uint64), np.array([case.id], np.uint64)
            if subscription.attempts_of(position)[0] and not self._core.wheel.holdings.removed(id)[0]:
                # Delivered ahead of a dispatch that failed, another message may have its place by now.
                dispatched = case.position < state.ready_count(channel.key[1])
                if not dispatched or int(subscription.ids_of(position)[0]) == case.id:
                    return False
        self._drop(case)
        channel.forsake(case.position)
        self._delivery.wake_group(channel.key[0])
        return True

    # -- looking for it

    def _try(self, cases: list[_Case]) -> None:
        """Read the records here once more, and ask all other members."""
        core, mastership = self._core, self._mastership
        ids = np.unique(np.array([case.id for case in cases], np.uint64))
        ask = RecordAsk(ids=ids.astype("<u8").tobytes())
        for peer_id in self._others():
            core.log.send_beside(peer_id, PeerFrame(record_ask=ask))
        for case in cases:
            self._look_again(case, min(PAUSE_MS_MAX, PAUSE_MS << min(case.rounds, 10)))
            case.rounds += 1

        def answered(found: ReadRows) -> None:
            if mastership != self._mastership:
                return
            for row, id in enumerate(ids.tolist()):
                record = found.records[row]
                if record is not None:
                    self._found(id, found.units[row : row + 1], record)
                elif row in found.failed:
                    self._cannot(core.identity.node_id, id)

        def broken(error: BaseException) -> None:
            core.fatal(f"messages that are due could not be looked for: {error}", error)

        PartialRead(core.background, ids, None, answered, broken).go()

    def answer_in(self, peer_id: str, answer: RecordAnswer) -> None:
        """Take a member's answer."""
        for found in answer.records:
            if found.state == RecordFound.UNREADABLE:
                self._cannot(peer_id, found.id)
            elif found.state == RecordFound.READABLE and (unit := _checked(found)) is not None:
                self.repaired += self._found(found.id, unit, found.record)

    def _found(self, id: int, unit: Units, record: bytes) -> bool:
        """Take a message's record; returns whether anybody waits for it."""
        cases = [case for case in self._by_id.get(id, ()) if case.record is None and not case.proposed]
        for case in cases:
            if case.unit is None or int(case.unit["size"][0]) == len(record):
                case.unit, case.record = unit, record
                self._supply(case)
        return bool(cases)

    def _cannot(self, node_id: str, id: int) -> None:
        for case in self._by_id.get(id, ()):
            case.said[node_id] = case.said.get(node_id, 0) + 1
            if case.record is None and not case.proposed and self._is_lost(case):
                self._look_again(case, 0)

    def _supply(self, case: _Case) -> None:
        """Give the record to its channel, not before the message is due."""
        assert case.unit is not None and case.record is not None
        wait_ms = int(case.unit["due_ms"][0]) - self._core.clock.now_ms()
        if wait_ms > 0:
            self._look_again(case, wait_ms)
            return
        self._drop(case)
        case.channel.supply(case.position, case.id, case.unit, case.record)
        self._delivery.wake_group(case.channel.key[0])

    # -- setting it aside

    def _others(self) -> list[str]:
        """All other members, including learners: any may have a record that nobody else has."""
        own_id = self._core.identity.node_id
        return [member.node_id for member in self._core.log.members() if member.node_id != own_id]

    def _is_lost(self, case: _Case) -> bool:
        if case.position >= self._core.state.ready_count(case.channel.key[1]):
            return False  # delivered ahead of its dispatch: not to be settled yet
        return all(case.said.get(name, 0) >= TRIES for name in (self._core.identity.node_id, *self._others()))

    def _set_aside(self, case: _Case) -> None:
        """Settle the message as a dead letter: no member can read its record."""
        if case.proposed:
            return
        channel, mastership = case.channel, self._mastership
        case.proposed = True
        position = np.array([case.position], np.uint64)
        hour = case.id >> 32
        due_ms, key_hash = hour * HOUR_MS, 0
        if case.unit is not None:
            first = "scheduled_ms" if origins_of(case.unit)[0] else "due_ms"
            due_ms, key_hash = int(case.unit[first][0]), int(case.unit["key_hash"][0])
        reason = f"no member can read its record (hour {hour}): {case.error}"
        columns = SettleColumns(
            group_id=channel.key[0],
            topic_id=channel.key[1],
            kind=SETTLE_DEAD,
            ids=np.array([case.id], "<u8").tobytes(),
            attempts=channel.subscription.attempts_of(position).astype("<u4").tobytes(),
            positions=position.tobytes(),
            epoch=channel.epoch,
            cause=PAYLOAD_LOST,
            reason=reason,
            first_due_ms=np.array([due_ms], "<i8").tobytes(),
            key_hashes=np.array([key_hash], "<u8").tobytes(),
        )

        def ended(*, set_aside: bool) -> None:
            if mastership != self._mastership:
                return
            case.proposed = False
            if set_aside:
                self._report(
                    "error",
                    "no member can read a message: it is set aside among the dead letters of its group",
                    {
                        "message": self._name(case),
                        "topic": channel.topic,
                        "group": channel.group,
                        "hour": hour,
                        "error": case.error,
                    },
                )
            self._look_again(case, 0 if set_aside else PAUSE_MS)

        reply: Reply[SettleResult] = Reply(
            lambda result: ended(set_aside=result.settled > 0), lambda failure: ended(set_aside=False)
        )
        self._delivery.settlements.propose([columns], reply)

    def _name(self, case: _Case) -> str:
        return id_text(case.id, self._core.identity.wheel_group)


def _checked(found: RecordFound) -> Units | None:
    """The unit in a member's answer, if all its checks hold and the record is its own."""
    unit = unit_in(found)
    return unit if unit is not None and int(unit["size"][0]) == len(found.record) else None
