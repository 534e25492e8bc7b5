"""One group's way through one topic's ready queue, on the master.

A channel reads ahead: positions are claimed in order, their units and records fetched (from memory if
they were dispatched just now, else by jobs in a worker), and staged. Staged messages leave to a
consumer when their time has come and a consumer has credit. Returned messages go first.

All of it is soft state: the subscription in the replicated state says what is settled, and a new
master builds new channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.leases import Attempts, ChannelKey, Positions
from tickwheel.node.core.recent import RecentUnits
from tickwheel.node.core.sift import Sifted
from tickwheel.node.state.subscription import Subscription
from tickwheel.wheel.units import Ids, Units, ids_of, join_units

FETCHES_MAX = 8
"""Fetches of one channel under way at a time."""
UNREAD_MAX = 1_000
"""Messages of one channel whose records cannot be read; while there are so many, nothing more is claimed."""


@dataclass(slots=True)
class Staged:
    """Messages on their way to a consumer; `records` is None while they are being read."""

    positions: Positions
    ids: Ids
    attempts: Attempts
    due_ms: NDArray[np.int64]
    units: Units | None = None
    records: list[bytes] | None = None
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Where each record ends if they stood one after the other."""
    taken: int = 0
    """How many of them have left."""
    failed: str = ""
    kept: NDArray[np.bool_] | None = None
    """Set if some were removed with their hour while they were read: which were not."""

    @property
    def count(self) -> int:
        """Messages not yet taken."""
        return len(self.positions) - self.taken


Fetch = Callable[["Channel", Staged], None]
"""Fills units and records of a Staged, then tells its channel: `fetched`, or `withhold` with what cannot be read."""


@dataclass(slots=True, eq=False)
class Channel:
    """See the module. `advance` claims and fetches, `take` hands out."""

    key: ChannelKey
    group: str
    topic: str
    subscription: Subscription
    recent: RecentUnits
    config: CoreConfig
    fetch: Fetch
    next_position: int = 0
    hold_until_ms: int = 0
    """Nothing leaves before: a new master's clock may be behind the cursor."""
    epoch: int = 0
    """How often the group had been reset when this was made: it is void after another time."""
    _pace_until_ms: int = 0
    """What comes due before this shares the next batch."""
    _staged: deque[Staged] = field(default_factory=deque)
    _urgent: deque[Staged] = field(default_factory=deque)
    _claimed_again: dict[int, int] = field(default_factory=dict)
    """Returned positions that are staged or out again, and with which attempt."""
    _held: set[int] = field(default_factory=set)
    _fetching: int = 0
    _staged_count: int = 0
    _unread: dict[int, int] = field(default_factory=dict)
    """Positions that are withheld because their records cannot be read, and in which attempt (salvage.py)."""

    def hold(self, positions: Positions) -> None:
        """These are out under a lease of an earlier master: do not hand them out."""
        self._held.update(positions.tolist())

    def release_hold(self, positions: Positions) -> None:
        """Their lease is over; what is not settled comes back as returned."""
        self._held.difference_update(positions.tolist())

    def claims(self, position: int, attempt: int) -> bool:
        """Whether a message that came back is staged or out again in this attempt, or held."""
        return self._claimed_again.get(position, 0) >= attempt or position in self._held

    @property
    def staged_count(self) -> int:
        """Messages staged or being read."""
        return self._staged_count

    def idle_at(self, ready_count: int) -> bool:
        """Nothing is claimed, read, held, or was given out ahead of its dispatch, with so many in the ready queue."""
        busy = self._fetching or self._staged_count or self._held or self._claimed_again or self._unread
        return not busy and self.next_position <= ready_count

    @property
    def first_unsent(self) -> int:
        """The first position that was not handed out."""
        first = min((int(s.positions[s.taken]) for s in self._staged if s.count), default=self.next_position)
        return min(first, min(self._unread)) if self._unread else first

    @property
    def not_out(self) -> int:
        """Messages claimed that no consumer holds."""
        return self._staged_count + len(self._unread)

    def advance(self, demand: int, ready_count: int) -> None:
        """Claim and fetch up to `demand` messages more than are staged."""
        config = self.config
        wanted = min(demand, config.staged_messages_max) - self._staged_count
        if wanted <= 0 or self._fetching >= FETCHES_MAX or len(self._unread) >= UNREAD_MAX:
            return
        wanted -= self._claim_returned(wanted)
        while wanted > 0 and self._fetching < FETCHES_MAX and self.next_position < ready_count:
            limit = min(wanted, config.batch_messages_max)
            positions, ids, attempts = self.subscription.deliverable(self.next_position, limit)
            if not len(positions):
                self.next_position = max(self.next_position, self.subscription.scanned_to(self.next_position, limit))
                return
            self.next_position = int(positions[-1]) + 1
            if self._held:
                keep = np.fromiter((p not in self._held for p in positions.tolist()), bool, len(positions))
                positions, ids, attempts = positions[keep], ids[keep], attempts[keep]
            fresh = attempts == 1
            if not fresh.all():
                # Returned before: the returned list brings them.
                positions, ids, attempts = positions[fresh], ids[fresh], attempts[fresh]
            if len(positions):
                self._start(self._staged, positions, ids, attempts)
                wanted -= len(positions)

    def push(self, first_position: int, units: Units, credits: int) -> bool:
        """Stage units that a dispatch under way will bring; False: they come after it, like any others."""
        count = len(units)
        room = min(credits, self.config.staged_messages_max) - self._staged_count
        subscription = self.subscription
        if (
            self.next_position != first_position
            or count > room
            or count > self.config.batch_messages_max
            or self._fetching >= FETCHES_MAX
            or self._held
            or subscription.returned_count
            or subscription.checked is not None
            or subscription.start_ms
            or first_position < subscription.floor
            or first_position + count > subscription.floor + subscription.window_messages_max
            or units["target_group"].any()
        ):
            return False
        positions = np.arange(first_position, first_position + count, dtype=np.uint64)
        self.next_position = first_position + count
        self._start(self._staged, positions, ids_of(units), np.ones(count, np.uint32))
        return True

    def unpush(self, ready_count: int) -> None:
        """Forget what was staged ahead: nothing is in the ready queue from `ready_count` on."""
        self.next_position = min(self.next_position, ready_count)
        for staged in self._staged:
            if staged.count and int(staged.positions[-1]) >= ready_count:
                staged.failed = "its dispatch was not applied"
        self._unread = {p: attempt for p, attempt in self._unread.items() if p < ready_count}

    def _claim_returned(self, limit: int) -> int:
        if not self.subscription.returned_count:
            return 0
        positions, ids, attempts = self.subscription.returned(limit + len(self._claimed_again) + len(self._held))
        claimed, held = self._claimed_again, self._held
        keep = np.fromiter(
            (
                claimed.get(position, 0) < attempt and position not in held
                for position, attempt in zip(positions.tolist(), attempts.tolist(), strict=True)
            ),
            bool,
            len(positions),
        )
        positions, ids, attempts = positions[keep][:limit], ids[keep][:limit], attempts[keep][:limit]
        if len(positions):
            self._claimed_again.update(zip(positions.tolist(), attempts.tolist(), strict=True))
            self._start(self._urgent, positions, ids, attempts)
        return len(positions)

    def _start(self, queue: deque[Staged], positions: Positions, ids: Ids, attempts: Attempts) -> None:
        staged = Staged(positions, ids, attempts, np.zeros(len(positions), np.int64))
        staged.units = self.recent.find(positions)
        queue.append(staged)
        self._staged_count += len(positions)
        self._fetching += 1

        self.fetch(self, staged)

    def fetched(self, staged: Staged) -> None:
        """Its units and records are there, or it failed, or some of it was removed: then the rest is fetched anew."""
        if staged.kept is not None:
            keep, staged.kept = staged.kept, None
            self._staged_count -= int(np.count_nonzero(~keep))
            staged.positions, staged.ids = staged.positions[keep], staged.ids[keep]
            staged.attempts = staged.attempts[keep]
            staged.units, staged.due_ms = None, np.zeros(len(staged.positions), np.int64)
            if len(staged.positions):
                self.fetch(self, staged)
                return
            staged.failed = "removed with its hour"
        self._fetching -= 1
        if staged.units is not None:
            staged.due_ms = staged.units["due_ms"].astype(np.int64)
            staged.ends = np.cumsum(staged.units["size"], dtype=np.int64)

    def withhold(self, staged: Staged, found: Sifted) -> None:
        """Some of what was staged cannot be read: the rest goes on, these wait for `supply` or `forsake`."""
        for row in found.failed:
            self._unread[int(staged.positions[row])] = int(staged.attempts[row])
        self._cut(staged, found.units, found.records)
        self.fetched(staged)

    def _cut(self, staged: Staged, units: Units, records: list[bytes | None]) -> None:
        """Only what has a record stays."""
        rows = [row for row, record in enumerate(records) if record is not None]
        self._staged_count -= len(records) - len(rows)
        staged.positions, staged.ids, staged.attempts = staged.positions[rows], staged.ids[rows], staged.attempts[rows]
        if rows:
            staged.units, staged.records = units[rows], [record for record in records if record is not None]
        else:
            staged.units, staged.failed = None, "cannot be read"

    def supply(self, position: int, id: int, unit: Units, record: bytes) -> None:
        """The record of a message that was withheld, when its time has come."""
        attempt = self._unread.pop(position, None)
        if attempt is None:
            return
        staged = Staged(
            positions=np.array([position], np.uint64),
            ids=np.array([id], np.uint64),
            attempts=np.array([attempt], np.uint32),
            due_ms=unit["due_ms"].astype(np.int64),
            units=unit,
            records=[record],
            ends=np.array([len(record)], np.int64),
        )
        self._urgent.append(staged)
        self._staged_count += 1

    def forsake(self, position: int) -> None:
        """A message that was withheld is settled, or gone."""
        self._unread.pop(position, None)

    def forget_settled(self) -> None:
        """Claims and holds below the floor are settled."""
        if not (self._unread or self._claimed_again or self._held):
            return
        floor = self.subscription.floor
        self._unread = {p: attempt for p, attempt in self._unread.items() if p >= floor}
        self._claimed_again = {p: attempt for p, attempt in self._claimed_again.items() if p >= floor}
        self._held = {p for p in self._held if p >= floor}

    def earliest_ms(self) -> int | None:
        """When the first staged message may leave; None if nothing that was read waits."""
        for queue in (self._urgent, self._staged):
            if queue and queue[0].records is not None:
                head = queue[0]
                if not self._checked_of(head):
                    continue  # the sweep that checks wakes the group
                return max(int(head.due_ms[head.taken]), self.hold_until_ms, self._pace_until_ms)
        return None

    def _checked_of(self, staged: Staged) -> int:
        """How many of the next of it have met the group's filter: it may have changed since they were claimed."""
        if self.subscription.checked is None:
            return staged.count
        place: np.intp = np.searchsorted(staged.positions[staged.taken :], np.uint64(self.subscription.unchecked))
        return int(place)

    def take(self, now_ms: int, limit: int) -> tuple[Staged, int, int] | None:
        """Up to `limit` messages whose time has come: a Staged and the part [first, last) of it."""
        if now_ms < self.hold_until_ms or limit <= 0:
            return None
        if now_ms < self._pace_until_ms and self._staged_count < limit:
            return None
        for queue in (self._urgent, self._staged):
            while queue:
                head = queue[0]
                if head.failed:
                    queue.popleft()
                    self._staged_count -= head.count
                    continue
                if head.records is None:
                    break
                if queue is self._staged and len(queue) > 1:
                    self._join(head, now_ms, limit)
                first = head.taken
                ready = (
                    int(np.searchsorted(head.due_ms[first:], now_ms, "right")) if queue is self._staged else head.count
                )
                count = min(ready, limit, self._checked_of(head), self._fitting(head, first))
                if count <= 0:
                    break
                if now_ms >= self._pace_until_ms:
                    self._pace_until_ms = now_ms + self.config.delivery_period_ms
                head.taken = first + count
                self._staged_count -= count
                if head.count == 0:
                    queue.popleft()
                return head, first, first + count
        return None

    def _join(self, head: Staged, now_ms: int, limit: int) -> None:
        """What is due of the next leaves with what is left of the first, not in a batch of its own after a pause."""
        queue = self._staged
        if self.config.delivery_order is DeliveryOrder.PUSH_FIRST:
            return  # `unpush` drops what is not dispatched, and only that
        while len(queue) > 1 and head.count < limit and int(head.due_ms[-1]) <= now_ms:
            behind = queue[1]
            if behind.failed or behind.records is None or int(behind.due_ms[behind.taken]) > now_ms:
                return
            assert head.records is not None and head.units is not None and behind.units is not None
            head.positions = np.concatenate((head.positions[head.taken :], behind.positions[behind.taken :]))
            head.ids = np.concatenate((head.ids[head.taken :], behind.ids[behind.taken :]))
            head.attempts = np.concatenate((head.attempts[head.taken :], behind.attempts[behind.taken :]))
            head.due_ms = np.concatenate((head.due_ms[head.taken :], behind.due_ms[behind.taken :]))
            head.units = join_units((head.units[head.taken :], behind.units[behind.taken :]))
            head.records = head.records[head.taken :] + behind.records[behind.taken :]
            head.ends = np.cumsum(head.units["size"], dtype=np.int64)
            head.taken = 0
            del queue[1]

    def _fitting(self, staged: Staged, first: int) -> int:
        """How many messages from `first` on fit a batch by bytes; at least one."""
        ends = staged.ends
        start = int(ends[first - 1]) if first else 0
        return max(1, int(np.searchsorted(ends, start + self.config.batch_bytes_max, "right")) - first)
