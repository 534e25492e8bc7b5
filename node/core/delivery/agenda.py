"""What the delivery looks at next: which groups, in which of their topics, and when.

A topic of a group enters with a dispatch, a return or a change of the group, and leaves once a pass has found nothing
more to hand out there. One whose messages only wait for their time rests until then. So the cost depends on what
happens, never on how many topics a group has.

Soft state of one mastership, used by the delivery alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tickwheel.node.core.delivery.leases import ChannelKey
from tickwheel.node.core.delivery.sessions import Session

NEVER = 1 << 62
"""A time that does not come."""


@dataclass(slots=True, eq=False)
class Pace:
    """Keeps the batches of one group `period_ms` apart, whatever their topics. A pass hands out everything that is due,
    or nothing; messages that come due meanwhile share the next batch."""

    period_ms: int
    until_ms: int = 0
    open: bool = False
    """Whether the current pass may hand out messages."""
    used: bool = False
    """Whether it has handed out any."""

    def begin(self, now_ms: int) -> None:
        """A pass begins."""
        self.open, self.used = now_ms >= self.until_ms, False

    def end(self, now_ms: int) -> None:
        """The pass ends."""
        if self.open and self.used:
            self.until_ms = now_ms + self.period_ms
        self.open = False


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over the topics of a group with work, cut into slices. In a broadcasting group each consumer is served
    by itself."""

    topics: list[int] = field(default_factory=list)
    """Those still to be served."""
    readers: Iterator[tuple[int, Session]] = field(default_factory=lambda: iter(()))
    """Topic and consumer, in a broadcasting group: those still to be served."""
    again: deque[tuple[int, Session]] = field(default_factory=deque)
    """Those that have got what a tick hands out and may get more, after all others."""
    waits: bool = False
    """Prefetched messages are waiting in those that were served."""
    woken: bool = False
    """Something came while the pass ran, perhaps in a topic that was behind it."""

    def next_reader(self) -> tuple[int, Session] | None:
        """The topic and consumer to serve next; None: the pass is over."""
        return next(self.readers, None) or (self.again.popleft() if self.again else None)

    def slice(self, topics_max: int | None) -> list[int]:
        """The topics to serve now; None: all."""
        now = self.topics[:topics_max]
        del self.topics[:topics_max]
        return now


@dataclass(slots=True, eq=False)
class GroupAgenda:
    """Of one group with consumers."""

    pace: Pace
    turns: int = 0
    """How many times a consumer had its turn. With one count for all groups, two groups of two consumers would have
    each message go to the same consumer."""
    topics: dict[int, None] | None = None
    """Topics that may have something to hand out now, as an ordered set; None: nobody has looked yet."""
    unsettled: dict[int, None] | None = None
    """Topics that may have unsettled messages; None: nobody has looked yet. Only where what is out is limited."""


class Agenda:
    def __init__(self, period_ms: int, candidates: Callable[[int], Sequence[int]], is_open: Callable[[int, int], bool]):
        """`candidates`: the topics of a group that may be open; `is_open`: whether a topic is, for a group."""
        self._period_ms = period_ms
        self._candidates = candidates
        self._is_open = is_open
        self._groups: dict[int, GroupAgenda] = {}
        self._woken: set[int] = set()
        """Groups to look at in the next tick."""
        self.has_news = False
        """The next tick should come at once."""
        self._passes: dict[int, Pass | None] = {}
        """Groups that the next tick serves, which comes at once: their pass goes on, or (None) a new one begins. Those
        that have waited longest come first."""
        self._resting: list[tuple[int, int, int, bool]] = []
        """Heap of (time, group, topic, paced): there will be work at that time, or if `paced` when the group's pace
        allows the next batch after it, unless something else brings it before."""

    def clear(self) -> None:
        """The mastership is over."""
        self._groups.clear()
        self._woken.clear()
        self._passes.clear()
        self._resting.clear()

    def of_group(self, group_id: int) -> GroupAgenda:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = GroupAgenda(Pace(self._period_ms))
        return group

    # -- what to look at

    def wake(self, group_id: int) -> None:
        """Look at a group in the next tick."""
        self._woken.add(group_id)

    def credited(self, group_id: int) -> None:
        """A consumer has new credit: look at its group in the next tick, unless nothing in it waits for credit."""
        group = self._groups.get(group_id)
        if group is None or group.topics is None or group.topics:
            self._woken.add(group_id)

    def wake_all(self, group_ids: Iterable[int]) -> None:
        """As `wake`."""
        self._woken.update(group_ids)

    def add(self, group_id: int, topic_id: int) -> None:
        """A topic of this group may have something to hand out again: look at it in the next tick."""
        self._woken.add(group_id)
        group = self._groups.get(group_id)
        if group is not None:
            if group.topics is not None:
                group.topics[topic_id] = None
            if group.unsettled is not None:
                group.unsettled[topic_id] = None

    def rest(self, key: ChannelKey, until_ms: int, *, paced: bool) -> None:
        """A topic has nothing to hand out until then, or with NEVER until something comes. `paced`: then not before the
        group's pace allows a batch."""
        group = self._groups.get(key[0])
        if group is not None and group.topics is not None:
            group.topics.pop(key[1], None)
        if until_ms != NEVER:
            heapq.heappush(self._resting, (until_ms, *key, paced))

    def put_behind(self, group_id: int, topic_ids: Iterable[int]) -> None:
        """These topics of a group come behind its others: one with a long backlog must not take all credits of every
        pass."""
        topics = self.of_group(group_id).topics
        if topics is not None:
            for topic_id in [t for t in topic_ids if t in topics]:
                topics[topic_id] = topics.pop(topic_id)

    def forget(self, group_id: int) -> None:
        """Look at all topics of a group when it is served next."""
        if (group := self._groups.get(group_id)) is not None:
            group.topics = group.unsettled = None

    def retain(self, exists: Callable[[int], bool]) -> None:
        """Drop the groups that exist no more."""
        self._groups = {group_id: group for group_id, group in self._groups.items() if exists(group_id)}
        self._woken = set(filter(exists, self._woken))
        self._passes = {group_id: begun for group_id, begun in self._passes.items() if exists(group_id)}
        self._resting = [rest for rest in self._resting if exists(rest[1])]
        heapq.heapify(self._resting)

    def forget_all(self) -> None:
        """Look at all topics of all groups."""
        self._resting.clear()
        for group in self._groups.values():
            group.topics = group.unsettled = None

    def topics(self, group_id: int) -> dict[int, None]:
        """Topics in which this group may have something to hand out."""
        group = self.of_group(group_id)
        if group.topics is None:
            group.topics = {t: None for t in self._candidates(group_id) if self._is_open(group_id, t)}
        return group.topics

    def unsettled(self, group_id: int) -> dict[int, None]:
        """Topics in which this group has unsettled messages. Cost depends on how many these are."""
        group = self.of_group(group_id)
        if group.unsettled is None:
            group.unsettled = dict.fromkeys(self._candidates(group_id))
        for topic_id in [topic_id for topic_id in group.unsettled if not self._is_open(group_id, topic_id)]:
            del group.unsettled[topic_id]
        return group.unsettled

    # -- when

    @property
    def woken(self) -> set[int]:
        """Groups that the next tick looks at, whenever that comes."""
        return self._woken

    @property
    def goes_on(self) -> bool:
        """Whether the next tick should come at once: a pass goes on."""
        return bool(self._passes)

    def rested_ms(self) -> int | None:
        """When the first resting topic has work."""
        return self._resting[0][0] if self._resting else None

    def due(self, now_ms: int) -> list[int]:
        """The groups to serve in this tick, in order. Each is to be begun or postponed."""
        self.has_news = False
        while self._resting and self._resting[0][0] <= now_ms:
            _, group_id, topic_id, paced = heapq.heappop(self._resting)
            if paced and (until_ms := self._groups[group_id].pace.until_ms) > now_ms:
                heapq.heappush(self._resting, (until_ms, group_id, topic_id, paced))
                continue
            self.add(group_id, topic_id)
        woken, self._woken = self._woken, set()
        for group_id in woken.intersection(self._passes):
            if (begun := self._passes[group_id]) is not None:
                begun.woken = True
        return [*self._passes, *sorted(woken.difference(self._passes))]

    def begin(self, group_id: int) -> Pass | None:
        """The group's turn has come. Returns the pass that goes on; None: a new one begins."""
        return self._passes.pop(group_id, None)

    def go_on(self, group_id: int, begun: Pass | None) -> None:
        """Let a pass go on in the next tick; None: let a new one begin."""
        self._passes[group_id] = begun

    def postpone(self, group_id: int) -> None:
        """The tick has no room for this group: it comes first in the next."""
        self._passes.setdefault(group_id, None)
