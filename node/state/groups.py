"""Consumer groups by name and id, with their subscriptions, retry policy and dead letters.

Ids rise from 1 and are never used again.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import invalid
from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.subscription import Subscription
from tickwheel.proto import admin_pb2
from tickwheel.wheel.units import CursorKey, Ids, find_ids, indexes_of

WAITING = np.dtype(
    [
        ("origin", "<u8"),
        ("id", "<u8"),
        ("due_ms", "<i8"),
        ("topic_id", "<u4"),
        ("attempts", "<u2"),  # deliveries so far
        ("replayed", "<u2"),  # 1: it was a dead letter
    ]
)
WAITING_ROWS_LEAST = 256
WAITING_ROWS_MAX = 1 << 20
Rows = NDArray[Any]


class WaitingRetries:
    """Messages of a group that wait in the wheel for their next attempt, so that a request about a message can show it.

    Owns one row for each appended retry, until it is found dispatched. Rows are in the order of the log. Dispatched
    ones (their key lies below the cursor) are dropped when the number of rows has doubled since the last time. At most
    WAITING_ROWS_MAX: beyond it the oldest rows are forgotten, and their messages merely appear as dispatched.

    Nothing else depends on it. It is replicated state all the same: equal on all nodes, in checkpoint and digest.
    """

    def __init__(self, content: bytes = b"", limit: int = 0) -> None:
        self._count = len(content) // WAITING.itemsize
        self._limit = limit or WAITING_ROWS_LEAST
        """Number of rows at which dispatched ones are dropped next."""
        self._rows: Rows = np.zeros(max(WAITING_ROWS_LEAST, self._count), WAITING)
        self._rows[: self._count] = np.frombuffer(content, WAITING)

    def add(self, rows: Rows, cursor: CursorKey) -> None:
        """Add rows of retries that were appended to the wheel."""
        needed = self._count + len(rows)
        if needed > len(self._rows):
            grown = np.zeros(2 * needed, WAITING)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : needed] = rows
        self._count = needed
        if needed >= self._limit:
            kept = self._waiting(cursor)[-WAITING_ROWS_MAX // 2 :]
            self._rows = np.zeros(max(WAITING_ROWS_LEAST, 2 * len(kept)), WAITING)
            self._rows[: len(kept)] = kept
            self._count = len(kept)
            self._limit = max(WAITING_ROWS_LEAST, 2 * len(kept))

    def forget_topic(self, topic_id: int) -> None:
        """Drop the rows of a deleted topic."""
        if not self._count:
            return
        kept = self._rows[: self._count]
        kept = kept[kept["topic_id"] != topic_id]
        self._rows[: len(kept)] = kept
        self._count = len(kept)

    def of(self, origin: int, cursor: CursorKey) -> tuple[int, int, int] | None:
        """(id, due_ms, deliveries so far) of the retry that a message waits for; None: it waits for none."""
        rows = self._rows[: self._count]
        rows = rows[rows["origin"] == np.uint64(origin)]
        if not len(rows):
            return None
        row = rows[-1]
        if not _is_waiting(rows[-1:], cursor)[0]:
            return None
        return int(row["id"]), int(row["due_ms"]), int(row["attempts"])

    def waits(self, origins: Ids, cursor: CursorKey) -> NDArray[np.bool_]:
        """Which messages wait for a retry; replayed dead letters do not count. `origins` rise, each once."""
        rows = self._rows[: self._count]
        rows = rows[rows["replayed"] == 0]
        places, of = find_ids(rows["origin"], origins)
        newest = np.full(len(origins), -1, np.int64)
        np.maximum.at(newest, of, places)
        found = newest >= 0
        found[found] = _is_waiting(rows[newest[found]], cursor)
        return found

    @property
    def used(self) -> bool:
        """Whether there are rows; without rows no retry waits."""
        return self._count > 0

    def newest(self, limit: int, cursor: CursorKey) -> Ids:
        """First ids of messages whose retry waits, among the last `limit` rows."""
        rows = self._rows[max(0, self._count - limit) : self._count]
        found: Ids = rows["origin"][_is_waiting(rows, cursor)]
        return found

    def count(self, cursor: CursorKey) -> int:
        """Number of waiting retries."""
        return len(self._waiting(cursor))

    def _waiting(self, cursor: CursorKey) -> Rows:
        rows = self._rows[: self._count]
        return rows[_is_waiting(rows, cursor)]

    def content(self) -> tuple[bytes, int]:
        """Values for the constructor."""
        return self._rows[: self._count].tobytes(), self._limit

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self._count * WAITING.itemsize

    def digest(self) -> bytes:
        """Digest of the whole content."""
        content, limit = self.content()
        return hashlib.sha256(struct.pack("<Q", limit) + content).digest()


def _is_waiting(rows: Rows, cursor: CursorKey) -> NDArray[np.bool_]:
    waiting: NDArray[np.bool_] = (rows["due_ms"] > cursor.due_ms) | (
        (rows["due_ms"] == cursor.due_ms) & (indexes_of(rows["id"]) >= cursor.index)
    )
    return waiting


RETRY_LEVEL_FIRST = 3
"""Delay level of the first retry; each further retry is one level higher."""
ATTEMPTS_MOST = 255
"""Most deliveries of a message: a unit keeps the count in one byte."""
BACKOFF_FACTOR_MOST = 100.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """After which pauses a message comes again to a group (delay levels or exponential backoff), and how often.

    The policy is replicated. Only the master turns it into times (and draws the jitter); the command holds the times.
    The fields are those of RetryPolicy in admin.proto.

    `initial_ms` 0: the delay levels. `attempts_max` 0: the setting.
    """

    initial_ms: int = 0
    factor: float = 0.0
    max_ms: int = 0
    jitter: float = 0.0
    attempts_max: int = 0

    def message(self) -> admin_pb2.RetryPolicy:
        """The policy as a message."""
        message = admin_pb2.RetryPolicy(attempts_max=self.attempts_max)
        if self.initial_ms:
            backoff = message.exponential
            backoff.initial_ms, backoff.factor = self.initial_ms, self.factor
            backoff.max_ms, backoff.jitter = self.max_ms, self.jitter
        return message

    def pauses_ms(
        self, attempts: NDArray[np.uint32], levels_ms: NDArray[np.int64], draw: Callable[[], float]
    ) -> NDArray[np.int64]:
        """The pause of each message after it failed in this attempt (1: the first). `draw` returns a number from 0 to
        below 1."""
        failed = np.maximum(attempts.astype(np.int64), 1)
        if not self.initial_ms:
            pauses: NDArray[np.int64] = levels_ms[np.minimum(RETRY_LEVEL_FIRST + failed - 1, len(levels_ms)) - 1]
            return pauses
        grown = self.initial_ms * np.power(self.factor, np.minimum(failed - 1, ATTEMPTS_MOST).astype(np.float64))
        capped = np.minimum(grown, float(self.max_ms))
        if self.jitter:
            capped *= 1 + self.jitter * (2 * np.array([draw() for _ in range(len(failed))]) - 1)
        drawn: NDArray[np.int64] = capped.astype(np.int64)
        return drawn


def policy_of(message: admin_pb2.RetryPolicy, delay_ms_max: int) -> RetryPolicy:
    """A requested policy, checked. Raises RequestError."""
    if message.attempts_max > ATTEMPTS_MOST:
        raise invalid("retry.attempts_max", message.attempts_max, f"0 to {ATTEMPTS_MOST}")
    if not message.HasField("exponential"):
        return RetryPolicy(attempts_max=message.attempts_max)
    backoff = message.exponential
    if not 1 <= backoff.initial_ms <= delay_ms_max:
        raise invalid("retry.exponential.initial_ms", backoff.initial_ms, f"1 to {delay_ms_max}")
    if not backoff.initial_ms <= backoff.max_ms <= delay_ms_max:
        raise invalid("retry.exponential.max_ms", backoff.max_ms, f"initial_ms to {delay_ms_max}")
    if not 1.0 <= backoff.factor <= BACKOFF_FACTOR_MOST:
        raise invalid("retry.exponential.factor", backoff.factor, f"1 to {BACKOFF_FACTOR_MOST:g}")
    if not 0.0 <= backoff.jitter <= 1.0:
        raise invalid("retry.exponential.jitter", backoff.jitter, "0 to 1")
    return RetryPolicy(backoff.initial_ms, backoff.factor, backoff.max_ms, backoff.jitter, message.attempts_max)


@dataclass(slots=True)
class Group:
    """A consumer group. `subscriptions`: by topic id, in the order they were added."""

    group_id: int
    name: str
    filter: str
    broadcasting: bool
    dead: DeadLetters
    paused: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    waiting: WaitingRetries = field(default_factory=WaitingRetries)
    subscriptions: dict[int, Subscription] = field(default_factory=dict)
    owner: str = ""
    """User who created the group; empty: nobody owns it."""
    closing: bool = False
    """A sweep is deleting the group."""

    def message(self, topics: list[str]) -> admin_pb2.Group:
        """The group as operators see it, without facts that only the master knows."""
        return admin_pb2.Group(
            name=self.name,
            group_id=self.group_id,
            topics=topics,
            filter=self.filter,
            broadcasting=self.broadcasting,
            paused=self.paused,
            backlog=sum(subscription.backlog for subscription in self.subscriptions.values()),
            retry=self.retry.message(),
            dead=self.dead.count,
        )


class Groups:
    """All groups, and the subscriptions by topic."""

    def __init__(self) -> None:
        self._by_id: dict[int, Group] = {}
        self._ids: list[int] = []
        self._by_name: dict[str, Group] = {}
        self.get: Callable[[int], Group | None] = self._by_id.get
        """The group of an id; None: there is none."""
        self.named: Callable[[str], Group | None] = self._by_name.get
        """The group of a name; None: there is none."""
        self._by_topic: dict[int, list[Subscription]] = {}
        self.last_id = 0
        self._owned: Counter[str] = Counter()
        self.subscription_count = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Group]:
        """Groups by rising id."""
        return iter(self._by_id.values())

    def after(self, group_id: int) -> Iterator[Group]:
        """Groups with higher ids, by rising id; groups may come and go between two of them."""
        while (place := bisect_right(self._ids, group_id)) < len(self._ids):
            group_id = self._ids[place]
            yield self._by_id[group_id]

    def add(self, group: Group) -> None:
        """Add a group; its id is above all earlier ones."""
        self.last_id = max(self.last_id, group.group_id)
        self._by_id[group.group_id] = group
        self._ids.append(group.group_id)
        self._by_name[group.name] = group
        if group.owner:
            self._owned[group.owner] += 1
        self.subscription_count += len(group.subscriptions)
        for subscription in group.subscriptions.values():
            self._by_topic.setdefault(subscription.topic_id, []).append(subscription)

    def owned_by(self, user: str) -> int:
        """Number of existing groups that a user created."""
        return self._owned[user]

    def subscribe(self, group: Group, subscription: Subscription) -> None:
        """Give a group one more topic."""
        group.subscriptions[subscription.topic_id] = subscription
        self.subscription_count += 1
        self._by_topic.setdefault(subscription.topic_id, []).append(subscription)

    def remove(self, group: Group) -> None:
        """Remove a group and its subscriptions."""
        del self._by_id[group.group_id]
        del self._ids[bisect_left(self._ids, group.group_id)]
        del self._by_name[group.name]
        if group.owner:
            self._owned[group.owner] -= 1
            if not self._owned[group.owner]:
                del self._owned[group.owner]
        self.subscription_count -= len(group.subscriptions)
        for subscription in group.subscriptions.values():
            subscription.forget()
            self._by_topic[subscription.topic_id].remove(subscription)

    def forget_topic(self, topic_id: int) -> None:
        """Remove a deleted topic's subscriptions from all groups."""
        for subscription in self._by_topic.pop(topic_id, ()):
            subscription.forget()
            self.subscription_count -= 1
            del self._by_id[subscription.group_id].subscriptions[topic_id]

    def of_topic(self, topic_id: int) -> list[Subscription]:
        """Subscriptions of a topic, in the order they were added."""
        return self._by_topic.get(topic_id, [])

    def subscriptions(self) -> Iterator[Subscription]:
        """All subscriptions, by group."""
        return (s for group in self for s in group.subscriptions.values())


DISPATCHED = ("ALREADY_DISPATCHED", "NOT_FOUND")
"""How a message stands that was dispatched: with its hour, and without."""


def unsettled(groups: Groups, wheel: WheelPort, topic_id: int, id: int, due_ms: int) -> bool:
    """Whether a message is pending, or a group of its topic has not settled it. `id` and `due_ms` as it was scheduled
    or moved.

    A message whose hour was removed may still be owed: one that failed waits for its next attempt as a unit of its own.
    """
    id, due_ms, outcome = wheel.standing(id, due_ms)
    if outcome is None:
        return True
    return outcome.name in DISPATCHED and owed(groups, wheel, topic_id, id, due_ms)


def owed(groups: Groups, wheel: WheelPort, topic_id: int, id: int, due_ms: int) -> bool:
    """Whether a group of the topic has not settled a dispatched message. `id` and `due_ms`: of its own unit."""
    return bool(owed_many(groups, wheel, topic_id, np.array([id], np.uint64), np.array([due_ms], np.int64))[0])


def owed_many(
    groups: Groups, wheel: WheelPort, topic_id: int, ids: Ids, due_ms: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which of a topic's dispatched messages a group has not settled. Reads what the topic dispatched of one tick at
    most once, however many messages and groups that concerns; a retry is found among the topic's newest."""
    ids, first, back = np.unique(ids, return_index=True, return_inverse=True)
    due_ms = due_ms[first]
    found = np.zeros(len(ids), np.bool_)
    subscriptions = sorted(groups.of_topic(topic_id), key=lambda s: s.first_open, reverse=True)
    for subscription in subscriptions:
        group = groups.get(subscription.group_id)
        if group is not None and group.waiting.used:
            found |= group.waiting.waits(ids, wheel.cursor)
        found |= subscription.retries_open(ids)
    if subscriptions:
        ticks = due_ms // subscriptions[0].ready.slot_ms
        for tick in np.unique(ticks[~found]).tolist():
            rows = np.flatnonzero((ticks == tick) & ~found)
            found[rows] = _open_in_tick(subscriptions, ids[rows], int(due_ms[rows[0]]))
    return found[back]


def _open_in_tick(subscriptions: list[Subscription], ids: Ids, due_ms: int) -> NDArray[np.bool_]:
    """Which messages of one tick a subscription has open. These are of one topic, by falling `first_open`: what one of
    them reads is read for those behind it too."""
    ready = subscriptions[0].ready
    start, end = ready.position_of_due(due_ms), ready.end_of_due(due_ms)
    found = np.zeros(len(ids), np.bool_)
    left = np.arange(len(ids))
    for number, subscription in enumerate(subscriptions):
        first = max(start, subscription.first_open)
        if first >= end:
            continue
        positions, rows = ready.search(first, end, ids[left])
        for other in subscriptions[number:]:
            found[left[rows[~other.is_settled(positions.astype(np.uint64))]]] = True
        left, end = np.delete(left, rows), first
        if not len(left):
            break
    return found
