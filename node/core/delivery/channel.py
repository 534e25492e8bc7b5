"""One group's progress through one topic's ready queue, on the master.

A channel reads ahead. It claims positions in order, fetches their units and records (from memory if they
were dispatched just now, else by jobs in a worker) and prefetches them. A prefetched message leaves to a
consumer when it is due and a consumer has credit. Returned messages go first. Records are read as far as
`staged_bytes_max` has room, at least one at a time; messages beyond that are parked, with their units, until some left.
Room is given in the order in which messages leave: what cannot leave yet must not take the room of what is before it.

A channel is soft state: the subscription in the replicated state records which messages are settled, and a
new master builds new channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.delivery.agenda import NEVER, Pace
from tickwheel.node.core.delivery.leases import ChannelKey
from tickwheel.node.core.delivery.partial_read import ReadRows
from tickwheel.node.core.delivery.prefetched import Prefetched, measure
from tickwheel.node.core.delivery.recent_units import RecentUnits
from tickwheel.node.state.subscription import ATTEMPT_MAX, Attempts, Positions, Subscription, mark_of
from tickwheel.wheel.units import Ids, Units, ids_of, picked

FETCHES_MAX = 8
"""Fetches that one channel has under way at a time."""
UNREAD_MAX = 1_000
"""Messages of one channel whose records cannot be read. A channel with this many claims nothing more."""
SCANNED_MAX = 16_384
"""Positions that one `advance` looks at: of messages that are held none is claimed, however many they are."""
CLAIMED_LEAST = 256
"""Returned positions that are looked at together."""


@dataclass(slots=True, eq=False)
class Share:
    """Messages of one channel that leave together. All arrays and lists have one element for each."""

    channel: Channel
    positions: Positions
    ids: Ids
    attempts: Attempts
    due_ms: NDArray[np.int64]
    units: Units
    records: list[bytes]


Fetch = Callable[["Channel", Prefetched], None]
"""Looks for the units of a Prefetched, asks the channel to `admit` it, and reads the records. Ends by calling one of
`fetched`, `fetch_again`, `withhold` and `give_up`."""


@dataclass(slots=True, eq=False)
class Channel:
    """`advance` claims and fetches messages, `take` hands them out."""

    key: ChannelKey
    group: str
    topic: str
    subscription: Subscription
    recent: RecentUnits
    config: CoreConfig
    fetch: Fetch
    pace: Pace
    next_position: int = 0
    seen_position: int = -1
    """`next_position` when an upkeep last found the channel idle."""
    hold_until_ms: int = 0
    """No message leaves before this time: a new master's clock may be behind the cursor."""
    epoch: int = 0
    """How often the group had been reset when the channel was made. Another reset makes the channel void."""
    _prefetched: deque[Prefetched] = field(default_factory=deque)
    _urgent: deque[Prefetched] = field(default_factory=deque)
    _claimed_again: dict[int, int] = field(default_factory=dict)
    """Returned positions that are prefetched or out again -> their attempt."""
    _held: set[int] = field(default_factory=set)
    _fetching: int = 0
    _prefetched_count: int = 0
    _parked: int = 0
    """How many Prefetched are parked."""
    _bytes: int = 0
    """Of all records that were read or are being read and are still here."""
    _unread: dict[int, int] = field(default_factory=dict)
    """Positions withheld because their records cannot be read -> their attempt (record_repair.py)."""
    scans: bool = False
    """The last `advance` stopped at SCANNED_MAX: the next one goes on, at once."""
    _claimed_to: int = 0
    """All returned positions below are claimed or held."""
    _forgotten: int = 0
    """Claims and holds are of positions from here on."""

    def hold(self, positions: Positions) -> None:
        """Do not hand out these positions: they are out under an earlier lease, or on their way back."""
        self._held.update(positions[positions >= self.subscription.floor].tolist())

    def release_hold(self, positions: Positions) -> None:
        """The lease of these positions is over. Unsettled ones come back as returned messages."""
        self._held.difference_update(positions.tolist())
        self._look_again_from(positions)

    def _look_again_from(self, positions: Positions) -> None:
        if len(positions):
            self._claimed_to = min(self._claimed_to, int(positions.min()))

    def came_back(self, positions: Positions) -> None:
        """These positions were given back: nobody holds them. At ATTEMPT_MAX their attempt does not tell that."""
        self.release_hold(positions)
        for position in positions[self.subscription.attempts_of(positions) >= ATTEMPT_MAX].tolist():
            self._end_attempt(position)

    def _end_attempt(self, position: int) -> None:
        """Let a position go out again under the attempt under which it was out."""
        self._claimed_again.pop(position, None)
        self._claimed_to = min(self._claimed_to, position)

    def claims(self, position: int, attempt: int) -> bool:
        """Whether a returned message is held, or is prefetched or out again in this attempt or a later one."""
        return self._claimed_again.get(position, 0) >= attempt or position in self._held

    @property
    def mark(self) -> int:
        """What deliveries name as their epoch."""
        return mark_of(self.key[0], self.epoch)

    @property
    def prefetched_count(self) -> int:
        """Messages prefetched, including those being read."""
        return self._prefetched_count

    def idle_at(self, ready_count: int) -> bool:
        """Whether the channel has nothing claimed, being read or held, and gave out nothing beyond `ready_count`, the
        length of the ready queue."""
        busy = self._fetching or self._prefetched_count or self._held or self._claimed_again or self._unread
        return not busy and self.next_position <= ready_count

    def wants(self, ready_count: int) -> bool:
        """Whether `advance` may find something to claim or to read."""
        return self.next_position < ready_count or self._parked > 0 or self.subscription.returned_count > 0

    @property
    def first_unsent(self) -> int:
        """Lowest position that has not been handed out. Returned messages do not count."""
        first = min((int(s.positions[s.taken]) for s in self._prefetched if s.count), default=self.next_position)
        return min(first, min(self._unread)) if self._unread else first

    def out(self) -> int:
        """Exactly how many messages are out with consumers or under an earlier master's lease. A returned message that
        waits for its next attempt is not out."""
        subscription = self.subscription
        below = subscription.unsettled_below(self.next_position)
        if subscription.returned_count:
            positions, _, attempts = subscription.returned(subscription.returned_count)
            here = np.searchsorted(positions, np.uint64(self.next_position))
            for position, attempt in zip(positions[:here].tolist(), attempts[:here].tolist(), strict=True):
                below -= not self.claims(position, attempt)
        return max(0, below - self._claimed_unsettled()) + self._held_ahead()

    def _held_ahead(self) -> int:
        """Held messages that are still to be claimed: a topic that nobody reads now may have some."""
        ahead = [position for position in self._held if position >= self.next_position]
        return int(np.count_nonzero(~self.subscription.is_settled(np.array(ahead, np.uint64)))) if ahead else 0

    def _claimed_unsettled(self) -> int:
        """Claimed messages that no consumer holds, without those that were settled since, as by a changed filter."""
        parts = [
            prefetched.positions[prefetched.taken :]
            for queue in (self._urgent, self._prefetched)
            for prefetched in queue
            if not prefetched.failed
        ]
        parts.append(np.fromiter(self._unread, np.uint64, len(self._unread)))
        return int(np.count_nonzero(~self.subscription.is_settled(np.concatenate(parts))))

    def advance(self, demand: int, ready_count: int) -> None:
        """Claim and fetch until `demand` messages are prefetched, within the channel's limits. `ready_count`: length of
        the topic's ready queue."""
        config = self.config
        self.scans = False
        resumed = self._resume()
        wanted = min(demand, config.staged_messages_max) - self._prefetched_count
        if resumed or self._parked or wanted <= 0 or self._fetching >= FETCHES_MAX or len(self._unread) >= UNREAD_MAX:
            return
        if self.subscription.returned_count:
            wanted -= self._claim_returned(wanted)
        scanned = 0
        while wanted > 0 and self._fetching < FETCHES_MAX and self.next_position < ready_count:
            if scanned >= SCANNED_MAX:
                self.scans = True
                return
            limit = min(wanted, config.batch_messages_max)
            positions, ids, attempts = self.subscription.deliverable(self.next_position, limit)
            if not len(positions):
                self.next_position = max(self.next_position, self.subscription.scanned_to(self.next_position))
                return
            self.next_position = int(positions[-1]) + 1
            scanned += len(positions)
            if self._held:
                keep = np.fromiter((p not in self._held for p in positions.tolist()), bool, len(positions))
                positions, ids, attempts = positions[keep], ids[keep], attempts[keep]
            if self.subscription.returned_count:
                # A returned message comes through `_claim_returned`.
                fresh = attempts == 1
                positions, ids, attempts = positions[fresh], ids[fresh], attempts[fresh]
            if len(positions):
                self._start(self._prefetched, positions, ids, attempts)
                wanted -= len(positions)

    def admit(self, prefetched: Prefetched) -> bool:
        """The units of a fetch are measured: keep as many messages as there is room for, and park the others. False:
        there is no room at all, or messages before them have none yet, and nothing is to be read."""
        if prefetched.failed:  # its dispatch was not applied, and it may have left the queue
            self._fetching -= 1
            return False
        queue = self._urgent if prefetched in self._urgent else self._prefetched
        place, count = queue.index(prefetched), len(prefetched.positions)
        room = self.config.staged_bytes_max - self._bytes
        fit, size = count, prefetched.bytes_of(0, count)
        if size > room:
            fit = int(prefetched.ends.searchsorted(prefetched.before + room, "right"))
        if not fit and not self._bytes:
            fit = 1  # larger than all of the room
        if place and any(before.has_no_room for before in islice(queue, place)):
            fit = 0
        if not fit:
            self._fetching -= 1
            prefetched.parked = True
            self._parked += 1
            return False
        if fit < count:
            behind = prefetched.split(fit)
            behind.parked = True
            queue.insert(place + 1, behind)
            self._parked += 1
            size = prefetched.bytes_of(0, fit)
        self._account(prefetched, size)
        return True

    def _account(self, prefetched: Prefetched, size: int) -> None:
        """Records of `size` bytes of this Prefetched are read or being read, and have not left."""
        self._bytes += size - prefetched.bytes_held
        prefetched.bytes_held = size

    def _resume(self) -> bool:
        """Read what is parked if there may be room by now: `admit` says for how much of it. False: nothing is read."""
        resumed = False
        for queue in (self._urgent, self._prefetched) if self._parked else ():
            for prefetched in queue:
                if self._fetching >= FETCHES_MAX or self._bytes >= self.config.staged_bytes_max:
                    return resumed
                if prefetched.parked:
                    prefetched.parked = False
                    self._parked -= 1
                    if not prefetched.failed:
                        self._fetching += 1
                        self.fetch(self, prefetched)
                        resumed = True
                elif prefetched.has_no_room:
                    break  # its units are being looked for; those behind have to wait
        return resumed

    def push(self, first_position: int, units: Units, credits: int) -> bool:
        """Prefetch units ahead of the dispatch that will bring them. False: they come after the dispatch."""
        count = len(units)
        room = min(credits, self.config.staged_messages_max) - self._prefetched_count
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
        self._start(self._prefetched, positions, ids_of(units), np.ones(count, np.uint32))
        return True

    def unpush(self, ready_count: int) -> None:
        """Drop messages prefetched ahead of a dispatch that failed: the ready queue ends before `ready_count`."""
        self.next_position = min(self.next_position, ready_count)
        for prefetched in self._prefetched:
            if prefetched.count and int(prefetched.positions[-1]) >= ready_count:
                prefetched.failed = "its dispatch was not applied"
        self._unread = {p: attempt for p, attempt in self._unread.items() if p < ready_count}

    def _claim_returned(self, limit: int) -> int:
        """Claim and fetch up to `limit` returned messages, of the next SCANNED_MAX or so; returns how many."""
        claimed, held, found, scanned = self._claimed_again, self._held, 0, 0
        parts: list[tuple[Positions, Ids, Attempts]] = []
        while found < limit and scanned < SCANNED_MAX:
            positions, ids, attempts = self.subscription.returned(max(limit - found, CLAIMED_LEAST), self._claimed_to)
            if not len(positions):
                break
            numbers = zip(positions.tolist(), attempts.tolist(), strict=True)
            free = [row for row, (p, attempt) in enumerate(numbers) if claimed.get(p, 0) < attempt and p not in held]
            rows = free[: limit - found]
            last = rows[-1] if len(rows) < len(free) else len(positions) - 1
            self._claimed_to = int(positions[last]) + 1
            scanned += last + 1
            found += len(rows)
            if rows:
                parts.append((positions[rows], ids[rows], attempts[rows]))
        if parts:
            positions, ids, attempts = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
            claimed.update(zip(positions.tolist(), attempts.tolist(), strict=True))
            self._start(self._urgent, positions, ids, attempts)
        self.scans = scanned >= SCANNED_MAX
        return found

    def _start(self, queue: deque[Prefetched], positions: Positions, ids: Ids, attempts: Attempts) -> None:
        prefetched = Prefetched(positions, ids, attempts, self.recent.find(positions))
        queue.append(prefetched)
        self._prefetched_count += len(positions)
        self._fetching += 1
        self.fetch(self, prefetched)

    def fetched(self, prefetched: Prefetched, records: list[bytes]) -> None:
        """A fetch brought the records of all its messages."""
        self._fetching -= 1
        prefetched.records = records

    def give_up(self, prefetched: Prefetched, why: str) -> None:
        """A fetch failed: its messages do not leave from here."""
        self._fetching -= 1
        prefetched.failed = why

    def fetch_again(self, prefetched: Prefetched, kept: NDArray[np.bool_]) -> None:
        """Some messages were removed with their hour during the fetch: fetch those that were `kept`."""
        if prefetched.failed:
            self.give_up(prefetched, prefetched.failed)
            return
        self._account(prefetched, 0)
        self._prefetched_count -= int(np.count_nonzero(~kept))
        prefetched.keep(kept)
        prefetched.units = None
        if len(prefetched.positions):
            self.fetch(self, prefetched)
        else:
            self.give_up(prefetched, "removed with its hour")

    def withhold(self, prefetched: Prefetched, found: ReadRows) -> None:
        """A fetch cannot read some records. Their messages wait for `supply` or `forsake`; the rest goes on."""
        if prefetched.failed:  # its dispatch was not applied, and it may have left the queue
            self.give_up(prefetched, prefetched.failed)
            return
        for row in found.failed:
            self._unread[int(prefetched.positions[row])] = int(prefetched.attempts[row])
        self._fetched_in_part(prefetched, found.units, found.records)

    def _fetched_in_part(self, prefetched: Prefetched, units: Units, records: list[bytes | None]) -> None:
        """A fetch brought these units and records. Messages without a record are dropped."""
        rows = [row for row, record in enumerate(records) if record is not None]
        brought = [record for record in records if record is not None]
        self._prefetched_count -= len(records) - len(rows)
        self._account(prefetched, sum(map(len, brought)))
        prefetched.units = units
        prefetched.keep(rows)
        if rows:
            measure([prefetched])
            self.fetched(prefetched, brought)
        else:
            self.give_up(prefetched, "cannot be read")

    def supply(self, position: int, id: int, unit: Units, record: bytes) -> None:
        """Prefetch a withheld message whose record was found. It leaves before other messages, like a returned one."""
        attempt = self._unread.pop(position, None)
        if attempt is None:
            return
        prefetched = Prefetched(
            np.array([position], np.uint64), np.array([id], np.uint64), np.array([attempt], np.uint32), unit, [record]
        )
        measure([prefetched])
        self._urgent.append(prefetched)
        self._prefetched_count += 1
        self._account(prefetched, len(record))

    def forsake(self, position: int) -> None:
        """Stop withholding a message: it is settled or gone."""
        self._unread.pop(position, None)

    def forget_settled(self) -> None:
        """Forget claims and holds below the subscription's floor: their messages are settled. Costs what the floor has
        risen by, or what there is if that is less."""
        first, floor = self._forgotten, self.subscription.floor
        self._forgotten = floor
        if self._unread:
            self._unread = {p: attempt for p, attempt in self._unread.items() if p >= floor}
        known = len(self._claimed_again) + len(self._held)
        if floor - first < known:
            for position in range(first, floor):
                self._claimed_again.pop(position, None)
                self._held.discard(position)
        elif known:
            self._claimed_again = {p: attempt for p, attempt in self._claimed_again.items() if p >= floor}
            self._held = {p for p in self._held if p >= floor}

    def earliest_ms(self) -> int | None:
        """When the first prefetched message may leave; None if no message that was read is waiting."""
        due_ms = self._first_due_ms()
        return None if due_ms is None else max(due_ms, self.pace.until_ms)

    def _first_due_ms(self) -> int | None:
        """As `earliest_ms`, whatever the pace."""
        for queue in (self._urgent, self._prefetched):
            if queue and queue[0].records is not None:
                head = queue[0]
                if self.subscription.checked is not None and not self._checked_of(head):
                    continue  # the filter sweep wakes the group when it has checked more
                return max(int(head.due_ms[head.taken]), self.hold_until_ms)
        return None

    def rests_until_ms(self, ready_count: int, full: int) -> int | None:
        """When the first prefetched message may leave, NEVER if there is none, if all that is ready has been claimed
        and read: until then only a dispatch, a return or a change of the group gives the channel work. None: it has
        some now. A batch of `full` messages does not wait for the pace."""
        if self._fetching or self._unread or self.wants(ready_count):
            return None
        if not self._prefetched_count:
            return NEVER
        due_ms = self._first_due_ms()
        return due_ms if due_ms is None or self._prefetched_count >= full else max(due_ms, self.pace.until_ms)

    def _checked_of(self, prefetched: Prefetched) -> int:
        """How many of the next messages the group's current filter has checked, if it has one. The filter may have
        changed after they were claimed."""
        place: np.intp = np.searchsorted(
            prefetched.positions[prefetched.taken :], np.uint64(self.subscription.unchecked)
        )
        return int(place)

    def take(self, now_ms: int, limit: int) -> Share | None:
        """Take up to `limit` due messages. None: none may leave now. Those that were settled or came back since they
        were claimed are left out, perhaps all: this delivery of them no longer counts."""
        if now_ms < self.hold_until_ms or limit <= 0:
            return None
        if not self.pace.open and self._prefetched_count < limit:
            return None
        for queue in (self._urgent, self._prefetched):
            while queue:
                head = queue[0]
                if head.failed:
                    self._drop_head(queue)
                    continue
                if head.records is None:
                    break
                if queue is self._prefetched and len(queue) > 1:
                    self._join(head, now_ms, limit)
                first, end = head.taken, len(head.positions)
                ready = end - first
                if queue is self._prefetched and int(head.due_ms[-1]) > now_ms:
                    ready = int(head.due_ms[first:].searchsorted(now_ms, "right"))
                count = min(ready, limit)
                if self.subscription.checked is not None:
                    count = min(count, self._checked_of(head))
                if count <= 0:
                    break
                head.taken = last = first + self._fitting(head, first, count)
                self.pace.used = True
                self._prefetched_count -= last - first
                self._account(head, head.bytes_of(last, end) if last < end else 0)
                if last == end:
                    queue.popleft()
                return self._share(head, first, last)
        return None

    def _share(self, prefetched: Prefetched, first: int, last: int) -> Share:
        """The rows [first, last) of what was read, without those that no longer count."""
        assert prefetched.records is not None and prefetched.units is not None
        rows: slice | NDArray[np.int64] = slice(first, last)
        records, units = prefetched.records[first:last], prefetched.units[first:last]
        if not self.subscription.is_untouched_from(int(prefetched.positions[first])):
            valid = self.subscription.attempts_of(prefetched.positions[rows]) == prefetched.attempts[rows]
            if not valid.all():
                rows = np.flatnonzero(valid) + first
                records, units = [prefetched.records[row] for row in rows.tolist()], picked(prefetched.units, rows)
        positions, ids, attempts = prefetched.positions[rows], prefetched.ids[rows], prefetched.attempts[rows]
        return Share(self, positions, ids, attempts, prefetched.due_ms[rows], units, records)

    def _drop_head(self, queue: deque[Prefetched]) -> Prefetched:
        head = queue.popleft()
        self._prefetched_count -= head.count
        self._parked -= head.parked
        self._account(head, 0)
        return head

    def _join(self, head: Prefetched, now_ms: int, limit: int) -> None:
        """Join the queue's next Prefetched into its first if both have due messages: they leave in one batch instead
        of two with a pause between."""
        queue = self._prefetched
        if self.config.delivery_order is DeliveryOrder.PUSH_FIRST:
            return  # `unpush` drops whole Prefetched: one must not mix dispatched messages with pushed ones
        while len(queue) > 1 and head.count < limit and int(head.due_ms[-1]) <= now_ms:
            behind = queue[1]
            if behind.failed or behind.records is None or int(behind.due_ms[behind.taken]) > now_ms:
                return
            head.join(behind)
            del queue[1]

    def _fitting(self, prefetched: Prefetched, first: int, count: int) -> int:
        """How many of the `count` messages from `first` on fit into a batch of `batch_bytes_max`; at least one."""
        bytes_max = self.config.batch_bytes_max
        if prefetched.bytes_of(first, first + count) <= bytes_max:
            return count
        end = int(prefetched.ends[first + count - 1]) - prefetched.bytes_of(first, first + count) + bytes_max
        return max(1, int(prefetched.ends.searchsorted(end, "right")) - first)
