"""Applies nacks, expired leases and dead letters: settles deliveries and copies their messages.

A retry costs one small command. Each node copies unit and record from its own files into a new unit of the wheel, for
this group alone and due when the command says. A message that has had all its deliveries becomes a dead letter instead,
with its record.

The copies are read while the command is applied, so reading is bounded: a command copies at most COPIES_MAX messages
and COPY_BYTES_MAX bytes (but at least one message), in the order of its rows. The result says how far it came
(`SettleResult.taken`), the same on every node, and the master proposes the rest again.

A message whose hour was removed by retention is settled by that (its position lies below the floor) and counted
there: nothing is left to copy.

The result of apply never depends on what a disk can read. A record that this node cannot read is copied as a gap of its
size with the flag LACKING; when it is to be delivered, the node asks the other members for it, as for any unreadable
record. Only an unreadable unit stops the process: without it the node does not know what to copy. A message that no
member can read becomes a dead letter by a command of its own cause (PAYLOAD_LOST), which has all of the letter's facts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import invalid
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.dead_letters import LETTER, Letters
from tickwheel.node.state.groups import WAITING, Group
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.publishing import DUE_MS_MAX
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import Attempts, Found, Places, Subscription
from tickwheel.node.state.targets import origins_of
from tickwheel.proto.log_pb2 import PAYLOAD_LOST, SETTLE_DEAD, SETTLE_RETRY, SettleColumns
from tickwheel.wheel.units import (
    LACKING,
    REPLAYED,
    CursorKey,
    Ids,
    Units,
    find_ids,
    hours_of,
    ids_of,
    indexes_of,
    picked,
)

COPIES_MAX = 128
"""Messages that one command copies: about 3 ms of reads, if each lies in another place and the system has it in
memory."""
COPY_BYTES_MAX = 1 << 20
"""Bytes that one command copies, unless a single message has more."""
ERROR_TEXT_MAX = 1_024
"""Characters of the last error kept with a dead letter."""
DELIVERIES_MAX = 255
"""Most deliveries of a message: a unit keeps the count in one byte."""


@dataclass(slots=True)
class Budget:
    """Messages and bytes that one command may still copy."""

    messages: int = COPIES_MAX
    bytes: int = COPY_BYTES_MAX
    begun: bool = False

    @property
    def spent(self) -> bool:
        """Whether nothing more may be copied."""
        return self.begun and (self.messages <= 0 or self.bytes <= 0)

    def take(self, units: Units) -> None:
        """Take the cost of copying these units."""
        self.begun = True
        self.messages -= len(units)
        self.bytes -= int(units["size"].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a batch as columns of equal length. `due_ms` is None for dead letters."""

    ids: Ids
    attempts: Attempts
    positions: NDArray[np.uint64] | None
    due_ms: NDArray[np.int64] | None

    def first(self, count: int) -> _Rows:
        return _Rows(
            self.ids[:count],
            self.attempts[:count],
            None if self.positions is None else self.positions[:count],
            None if self.due_ms is None else self.due_ms[:count],
        )


class Retrying:
    def __init__(self, state: ClusterState, wheel: WheelPort) -> None:
        self._state = state
        self._wheel = wheel
        self.retried = self.buried = self.set_aside = 0
        """Counts since this process started, replayed entries included: for metrics, no part of the state."""

    def settle(
        self,
        batch: SettleColumns,
        group: Group,
        subscription: Subscription,
        columns: tuple[Ids, Attempts, NDArray[np.uint64] | None],
        stamped_ms: int,
        budget: Budget,
        late: LateSearch,
        *,
        in_place: bool = False,
    ) -> SettleResult:
        """Settle a batch of kind RETRY (with due times) or DEAD. `in_place`: the topic is FIFO, so retries keep their
        positions."""
        ids, attempts, positions = columns
        dead = batch.kind == SETTLE_DEAD
        if not dead and len(batch.due_ms) != 8 * len(ids):
            failure = invalid("due_ms", f"{len(batch.due_ms)} bytes", f"{len(ids)} elements of 8 bytes").failure
            return SettleResult(unknown=len(ids), taken=len(ids), failure=failure)
        due = None if dead else np.frombuffer(batch.due_ms, "<i8")
        if due is not None and len(due) and not (int(due.min()) >= 0 and int(due.max()) <= DUE_MS_MAX):
            failure = invalid("due_ms", int(due.max()), f"0 to {DUE_MS_MAX}").failure
            return SettleResult(unknown=len(ids), taken=len(ids), failure=failure)
        if dead and batch.cause == PAYLOAD_LOST:
            return self._set_aside(batch, group, subscription, _Rows(ids, attempts, positions, None), stamped_ms)
        if budget.spent:
            return SettleResult()
        rows = _Rows(ids, attempts, positions, due).first(max(1, budget.messages))
        if in_place and not dead:
            return self._settle_in_place(batch, group, subscription, rows, stamped_ms, budget)
        found = subscription.find(rows.ids, rows.positions)
        acting, places = subscription.acting(rows.attempts, found)
        units, records = self._wheel.fetch(subscription.ids_of(places.astype(np.uint64)), max(0, budget.bytes))
        if len(units) < len(acting):
            rows = rows.first(int(acting[len(units)]))
            acting, places = acting[: len(units)], places[: len(units)]
            found = found.take(slice(len(rows.ids)))
        # A DEAD that comes after the lease ran out is answered as stale: the message comes again.
        too_late = late.count(group, subscription, rows.ids, found, dying=True) if dead else 0
        late.forget(group)
        result, changed = subscription.settle(batch.kind, rows.attempts, found, leaves=True)
        assert len(changed) == len(places), "what was to be copied is what is settled"
        result = SettleResult(
            result.settled - too_late,
            result.stale + too_late,
            result.unknown,
            taken=len(rows.ids),
            rows=_outcomes(acting, found),
        )
        if not len(acting):
            return result
        budget.take(units)
        deliveries = units["attempts"].astype(np.int64) + rows.attempts[acting]
        dying = np.full(len(acting), dead) | (deliveries >= self.attempts_max(group))
        if dying.any():
            some = np.flatnonzero(dying)
            self.bury(
                group, picked(units, some), [records[n] for n in some.tolist()], deliveries[some], batch, stamped_ms
            )
        if rows.due_ms is not None and not dying.all():
            some = np.flatnonzero(~dying)
            self._retry(
                group,
                picked(units, some),
                [records[n] for n in some.tolist()],
                deliveries[some],
                rows.due_ms[acting][some],
            )
        return result

    def _settle_in_place(
        self,
        batch: SettleColumns,
        group: Group,
        subscription: Subscription,
        rows: _Rows,
        stamped_ms: int,
        budget: Budget,
    ) -> SettleResult:
        """Settle a batch of a FIFO topic. Retries keep their positions, so that the messages behind them in their
        message group wait."""
        found = subscription.find(rows.ids, rows.positions)
        acting, places = subscription.acting(rows.attempts, found)
        attempts = rows.attempts[acting].astype(np.uint32)
        deliveries = subscription.deliveries(places.astype(np.uint64), attempts)
        dying = np.flatnonzero(deliveries >= self.attempts_max(group))
        if len(dying):
            units, records = self._wheel.fetch(subscription.ids_of(places[dying].astype(np.uint64)), budget.bytes)
            if len(units) < len(dying):
                cut = int(acting[dying[len(units)]])
                kept = int(np.searchsorted(acting, cut))
                rows, acting, places, dying = rows.first(cut), acting[:kept], places[:kept], dying[: len(units)]
            budget.take(units)
            self.bury(group, units, records, deliveries[dying].astype(np.int64), batch, stamped_ms)
        result = SettleResult(taken=len(rows.ids))
        outcomes = _outcomes(acting, found.take(slice(len(rows.ids))))
        # Dying messages first: a second row of the same message is then stale.
        others = np.setdiff1d(np.arange(len(rows.ids)), acting[dying])
        left = found.take(others)
        if len(dying):
            result += subscription.settle(SETTLE_DEAD, rows.attempts[acting[dying]], found.take(acting[dying]))[0]
            # The floor may have risen. Every version judges the others by the window as it is now.
            left = subscription.find(rows.ids[others], None if rows.positions is None else rows.positions[others])
        result += subscription.settle(SETTLE_RETRY, rows.attempts[others], left)[0]
        assert rows.due_ms is not None
        waits = np.setdiff1d(np.arange(len(acting)), dying)
        subscription.pauses.update(zip(places[waits].tolist(), rows.due_ms[acting[waits]].tolist(), strict=True))
        self.retried += len(waits)
        return replace(result, rows=outcomes)

    def _set_aside(
        self, batch: SettleColumns, group: Group, subscription: Subscription, rows: _Rows, stamped_ms: int
    ) -> SettleResult:
        """Make messages whose records no member can read dead letters without content; nothing is read."""
        count = len(rows.ids)
        for name, column in (("first_due_ms", batch.first_due_ms), ("key_hashes", batch.key_hashes)):
            if len(column) != 8 * count:
                failure = invalid(name, f"{len(column)} bytes", f"{count} elements of 8 bytes").failure
                return SettleResult(unknown=count, taken=count, failure=failure)
        found = subscription.find(rows.ids, rows.positions)
        acting, places = subscription.acting(rows.attempts, found)
        letters = np.zeros(len(acting), LETTER)
        letters["origin"] = subscription.names_of(places)
        letters["first_due_ms"] = np.frombuffer(batch.first_due_ms, "<i8")[acting]
        letters["key_hash"] = np.frombuffer(batch.key_hashes, "<u8")[acting]
        letters["topic_id"] = subscription.topic_id
        letters["attempts"] = subscription.deliveries(
            places.astype(np.uint64), rows.attempts[acting].astype(np.uint32) - np.uint32(1)
        )
        result, _ = subscription.settle(SETTLE_DEAD, rows.attempts, found)
        if len(acting):
            self._bury(group, letters, [b""] * len(acting), batch, stamped_ms)
            self.set_aside += len(acting)
        return replace(result, taken=count)

    def attempts_max(self, group: Group) -> int:
        """Deliveries of a message after which it becomes a dead letter."""
        return group.retry.attempts_max or self._state.settings.attempts_max

    def bury(
        self,
        group: Group,
        units: Units,
        records: list[bytes],
        deliveries: NDArray[np.int64],
        batch: SettleColumns,
        stamped_ms: int,
    ) -> None:
        """Make messages dead letters."""
        letters = np.zeros(len(units), LETTER)
        letters["origin"] = _names_of(units)
        letters["first_due_ms"] = _first_due_ms(units)
        letters["attempts"] = deliveries
        for name in ("topic_id", "tag_hash", "tag_mask", "key_hash", "meta_size"):
            letters[name] = units[name]
        letters["flags"] = units["flags"] & ~np.uint8(LACKING)
        self._bury(group, letters, records, batch, stamped_ms, (units["flags"] & LACKING) != 0)

    def _bury(
        self,
        group: Group,
        letters: Letters,
        records: list[bytes],
        batch: SettleColumns,
        stamped_ms: int,
        lacking: NDArray[np.bool_] | None = None,
    ) -> None:
        letters["died_ms"], letters["cause"] = stamped_ms, batch.cause
        text = batch.reason[:ERROR_TEXT_MAX].encode()
        group.dead.bury(letters, [text] * len(letters), records, lacking)
        self.buried += len(letters)

    def _retry(
        self, group: Group, units: Units, records: list[bytes], deliveries: NDArray[np.int64], due_ms: NDArray[np.int64]
    ) -> None:
        copies = units.copy()
        names = _names_of(units)
        copies["scheduled_ms"] = _first_due_ms(units)
        copies["origin_hour"] = hours_of(names)
        copies["origin_index"] = indexes_of(names)
        copies["target_group"] = group.group_id
        copies["attempts"] = np.minimum(deliveries, DELIVERIES_MAX)
        self._wait(group, copies, records, due_ms)
        self.retried += len(copies)

    def revive(self, group: Group, units: Units, records: list[bytes], due_ms: int) -> None:
        """Make dead letters messages again."""
        self._wait(group, units, records, np.full(len(units), due_ms, np.int64))

    def _wait(self, group: Group, copies: Units, records: list[bytes], due_ms: NDArray[np.int64]) -> None:
        """Append copies to the wheel, due at these times."""
        copies["due_requested_ms"] = due_ms
        for name in ("previous_index", "local_index", "run_index", "crc"):
            # A merge fills these fields, so their old values depend on where the message lay.
            copies[name] = 0
        order = np.argsort(due_ms, kind="stable")
        copies = picked(copies, order)
        ids = self._wheel.append(copies, b"".join(records[place] for place in order.tolist()))
        rows = np.zeros(len(copies), WAITING)
        rows["origin"], rows["id"], rows["due_ms"] = origins_of(copies), ids, copies["due_ms"]
        rows["topic_id"], rows["attempts"] = copies["topic_id"], copies["attempts"]
        rows["replayed"] = copies["flags"] & REPLAYED != 0
        group.waiting.add(rows, self._wheel.cursor)


def _outcomes(acting: Places, found: Found) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
    """`SettleResult.rows` of a batch."""
    if len(acting) == len(found.known):
        return None
    settled = np.zeros(len(found.known), np.bool_)
    settled[acting] = True
    return settled, ~found.known


def _names_of(units: Units) -> Ids:
    """The ids by which clients know messages."""
    origins = origins_of(units)
    names: Ids = np.where(origins != 0, origins, ids_of(units))
    return names


def _first_due_ms(units: Units) -> NDArray[np.int64]:
    """When messages were first due: a copy keeps that time in place of its scheduling time."""
    due: NDArray[np.int64] = np.where(origins_of(units) != 0, units["scheduled_ms"], units["due_ms"])
    return due


LOOK_BACK_ROWS = 16_384
"""Rows of each kind, the newest, that are searched."""
TARGETS_MAX = 8 * LOOK_BACK_ROWS
"""Positions of retries that are searched for one command: about 2 ms."""
GROUPS_KEPT = 8
"""Groups whose newest dead letters are kept in memory: 256 KB each."""


class _Column:
    """Ids to search in. A single id is compared with all of them; for more they are sorted, once."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._sorted: Ids | None = None

    def has(self, wanted: Ids) -> NDArray[np.bool_]:
        """Which of `wanted`, in any order, are among the ids."""
        if self._sorted is None:
            if len(wanted) == 1:
                return np.array([bool((self._ids == wanted[0]).any())])
            self._sorted = np.sort(self._ids)
        if not len(self._sorted):
            return np.zeros(len(wanted), np.bool_)
        at = np.minimum(self._sorted.searchsorted(wanted), len(self._sorted) - 1)
        found: NDArray[np.bool_] = self._sorted[at] == wanted
        return found


class LateSettlements:
    """What a node keeps between commands: the newest dead letters of the groups that were searched last."""

    def __init__(self) -> None:
        self._dead: OrderedDict[int, tuple[tuple[int, int, int], _Column]] = OrderedDict()

    def dead(self, group: Group) -> _Column:
        """Ids of the messages of a group's newest dead letters."""
        version = group.dead.version
        kept = self._dead.get(group.group_id)
        if kept is None or kept[0] != version:
            kept = (version, _Column(group.dead.newest_origins(LOOK_BACK_ROWS)))
            self._dead[group.group_id] = kept
            if len(self._dead) > GROUPS_KEPT:
                self._dead.popitem(last=False)
        self._dead.move_to_end(group.group_id)
        return kept[1]


class LateSearch:
    """Finds late settlements for one command: acknowledgements of deliveries that were nacked or whose lease expired.

    Such a delivery is settled at its position, but not by acknowledgement: its message comes again, has come again, or
    is dead. The late acknowledgement must be answered as stale, and not as done. The delivery shows it: a retry of the
    message waits in the wheel or was dispatched behind the delivery, or there is a dead letter. Only the answer depends
    on this.

    A settlement may name thousands of topics, so what a search costs must not grow with their number: what waits and
    what is dead is read once for a command, and the positions of retries, which are a topic's own, up to a limit. What
    lies beyond is answered as a repeat.
    """

    def __init__(self, kept: LateSettlements, cursor: CursorKey) -> None:
        self._kept = kept
        self._cursor = cursor
        self._waiting: dict[int, _Column] = {}
        self._targets_left = TARGETS_MAX

    def forget(self, group: Group) -> None:
        """Messages of the group began to wait."""
        self._waiting.pop(group.group_id, None)

    def count(
        self,
        group: Group,
        subscription: Subscription,
        ids: Ids,
        found: Found,
        *,
        dying: bool = False,
    ) -> int:
        """How many rows of a batch name deliveries whose messages come again or are dead; each of them is settled
        already.

        `found`: result of the subscription's `find` for the batch. `dying`: the batch declares messages dead, so for
        messages that are dead it is right.
        """
        if not (subscription.has_targets or group.waiting.used or group.dead.count):
            return 0
        places, names = subscription.settled_before(ids, found)
        if not len(places):
            return 0
        late = self._comes_again(subscription, names, places)
        if group.waiting.used:
            late |= self._waiting_of(group).has(names)
        if group.dead.count and not dying:
            late |= self._kept.dead(group).has(names)
        return int(np.count_nonzero(late))

    def _waiting_of(self, group: Group) -> _Column:
        column = self._waiting.get(group.group_id)
        if column is None:
            column = _Column(group.waiting.newest(LOOK_BACK_ROWS, self._cursor))
            self._waiting[group.group_id] = column
        return column

    def _comes_again(self, subscription: Subscription, names: Ids, places: Places) -> NDArray[np.bool_]:
        """Which messages were dispatched once more behind the place of their delivery."""
        rows = subscription.newest_targets(min(LOOK_BACK_ROWS, self._targets_left))
        self._targets_left -= len(rows)
        if not len(rows):
            return np.zeros(len(names), np.bool_)
        wanted, of_name = np.unique(names, return_inverse=True)
        at, of = find_ids(rows["origin"], wanted)
        own = rows["group"][at] == subscription.group_id
        at, of = at[own], of[own]
        last = np.full(len(wanted), -1, np.int64)
        np.maximum.at(last, of, rows["position"][at].astype(np.int64))
        behind: NDArray[np.bool_] = last[of_name] > places
        return behind
