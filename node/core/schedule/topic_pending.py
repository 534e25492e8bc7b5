"""How many messages are pending by topic: known to a master while the setting `topic_pending_max` or a user's quota
needs it.

A count is taken from one pinned moment (wheel/reads.py; workers read it page by page). Schedules and dispatches
applied since are added and subtracted. Commands that do not name the topics of their messages (cancels, sweeps,
retries, bulk loads) make the count stale: messages are then counted again, while the old count stays in use. After a
count there is a pause of PAUSES times its duration.

Soft state of one mastership. Until the first count of a mastership has ended, its figure so far is
used: a limit may be exceeded by messages that the new master has not counted yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice

import numpy as np

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT
from tickwheel.node.core.work import UnreadableError
from tickwheel.node.core.world import Now
from tickwheel.node.failure import Failure
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import DispatchResult, PublishResult, ScheduleResult, SettleResult
from tickwheel.node.state.schedules import MESSAGES
from tickwheel.node.state.settings import QUOTA_OTHERS, parse_quotas
from tickwheel.node.state.subscription import largest
from tickwheel.proto.log_pb2 import SETTLE_DEAD, SETTLE_RETRY, Command
from tickwheel.wheel.reads import Pinned
from tickwheel.wheel.units import CursorKey

PAGE_UNITS_MAX = 65_536
"""Units of one page: six megabytes of index."""
COUNT_PERIOD_MS = 200
PAUSES = 20
METRIC_TOPICS_MAX = 100
"""Topics with a limit that the metrics show: the fullest ones."""
UNTOLD = {"cancel", "sweep", "ingest", "staging", "replay_dead", "cold"}
"""Commands that make counts stale. A reschedule keeps its topic, so it does not."""


class _Count:
    """A count under way."""

    def __init__(self, pinned: Pinned, began_ms: int) -> None:
        self.pinned = pinned
        self.began_ms = began_ms
        self.hours: list[int] = pinned.hours.tolist()[::-1]
        self.start: CursorKey | None = None
        self.found: dict[int, int] = {}
        self.since: dict[int, int] = {}
        """Topic id -> change of pending messages since the pinned moment."""
        self.stale = False
        """A command since then did not name its topics."""


class TopicPending(Part):
    of_master = True

    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._known: dict[int, int] | None = None
        self._stale = False
        self._count: _Count | None = None
        self._not_before_ms = 0
        self._mastership = 0

    @property
    def wanted(self) -> bool:
        """Whether a limit exists and this node is the one that applies it. Cheap: called at every tick."""
        if not self._core.leading:
            return False
        state = self._core.state
        return bool(state.settings.topic_pending_max) or (state.settings.rights and state.access.limits_pending)

    @property
    def counted(self) -> bool:
        """The first count of this mastership has ended, and is not stale."""
        return self._known is not None and not self._stale

    def of(self, topic_id: int | None) -> int:
        """Pending messages of a topic."""
        if topic_id is None:
            return 0
        if self._known is not None:
            return max(0, self._known.get(topic_id, 0))
        count = self._count
        return 0 if count is None else max(0, count.found.get(topic_id, 0) + count.since.get(topic_id, 0))

    def limit(self, name: str) -> int:
        """The limit of a topic; 0: it has none."""
        limits = parse_quotas(self._core.state.settings.topic_pending_max) or {}
        return limits.get(name) or limits.get(QUOTA_OTHERS, 0)

    def fullest(self, count: int) -> dict[str, tuple[int, int]]:
        """Topic with a limit -> (pending messages, limit): the `count` topics that are nearest to theirs, nearest
        first. Those without a limit of their own share one, so only the fullest of them can be among these."""
        limits, topics = parse_quotas(self._core.state.settings.topic_pending_max) or {}, self._core.state.topics
        named = [topic for name in limits if (topic := topics.named(name)) is not None]
        if limits.get(QUOTA_OTHERS):
            pending = self._known if self._known is not None else self._count.found if self._count is not None else {}
            ids = largest(pending, count + len(named))
            named += [topic for topic_id in ids if (topic := topics.get(topic_id)) is not None]
            named += islice(topics.after(0), count)  # there may be fewer with messages
        found = {t.name: (self.of(t.topic_id), limit) for t in named if (limit := self.limit(t.name))}
        nearest = sorted(found, key=lambda name: (-found[name][0] / found[name][1], name))
        return {name: found[name] for name in nearest[:count]}

    def end(self, failure: Failure) -> None:
        self._forget()

    def _forget(self) -> None:
        self._mastership += 1
        self._known = None
        self._count = None
        self._stale = False
        self._not_before_ms = 0

    # -- applied commands

    def applied(self, command: Command, result: AnyResult, published: Mapping[int, int]) -> None:
        """Count an applied command. `published`: messages of a publish by topic, some perhaps repeats."""
        if self._known is None and self._count is None:
            return
        if isinstance(result, PublishResult):
            self._published(result, published)
            return
        if isinstance(result, DispatchResult):
            for ready in result.ready:
                self._add(ready.topic_id, -len(ready.units))
            return
        if isinstance(result, ScheduleResult):
            for note in result.notes:
                if note.run.outcome in MESSAGES:
                    self._add(note.topic_id, 1)
                elif note.run.id:
                    self.spoil()  # cancelled
            return
        kind = command.WhichOneof("body")
        retries = isinstance(result, SettleResult) and any(
            batch.kind in (SETTLE_RETRY, SETTLE_DEAD) for batch in command.settle.batches
        )
        if kind in UNTOLD or retries:
            self.spoil()

    def _published(self, result: PublishResult, by_topic: Mapping[int, int]) -> None:
        # A message that replaces another leaves as many pending.
        count = result.scheduled - len(result.replaced)
        if not count:
            return
        if len(by_topic) == 1:
            (topic_id,) = by_topic
            self._add(topic_id, count)
        elif count == sum(by_topic.values()):
            for topic_id, part in by_topic.items():
                self._add(topic_id, part)
        else:
            self.spoil()  # some of it was a repeat, or met the unique key of another

    def _add(self, topic_id: int, count: int) -> None:
        if self._known is not None:
            self._known[topic_id] = self._known.get(topic_id, 0) + count
        if self._count is not None:
            since = self._count.since
            since[topic_id] = since.get(topic_id, 0) + count

    def spoil(self) -> None:
        """Count again: something was applied that the counts do not know of."""
        self._stale = True
        if self._count is not None:
            self._count.stale = True

    # -- counting

    def metrics(self) -> Mapping[str, MetricValue]:
        """Counts and limits of the fullest topics that have a limit."""
        if not self.wanted:
            return {}
        fullest = self.fullest(METRIC_TOPICS_MAX)
        return {
            "topic_pending_messages": {(name,): float(pending) for name, (pending, _) in fullest.items()},
            "topic_pending_limit": {(name,): float(limit) for name, (_, limit) in fullest.items()},
        }

    def tick(self, now: Now) -> None:
        """Begin a count if one is needed."""
        if not self.wanted:
            if self._known is not None or self._count is not None:
                self._forget()
            return
        if not self._lacking or now.steady_ms < self._not_before_ms or self._core.wheel.ingestion.absorbing:
            return
        serving, count = self._core.serving, _Count(self._core.wheel.reads.pin(0, DUE_MS_LIMIT), now.steady_ms)
        self._count = count
        serving.run(lambda _: self._again(count), lambda: serving.start(self._read(count), lambda _: None))

    @property
    def _lacking(self) -> bool:
        """A count must begin."""
        return self._count is None and not self.counted

    def wait_ms(self, now: Now) -> int | None:
        """Until the next count may begin, if there must be one. Arrivals that are being absorbed bring ticks."""
        lacking = self.wanted and self._lacking and not self._core.wheel.ingestion.absorbing
        return self._not_before_ms - now.steady_ms if lacking else None

    async def _read(self, count: _Count) -> None:
        """Count what a pin holds, page by page."""
        mastership, core = self._mastership, self._core
        while count.hours:
            hour, job = count.hours[-1], None
            with suppress(UnreadableError):
                job = await core.background.scan_pinned(
                    count.pinned, range(hour, hour + 1), count.start, 0, DUE_MS_LIMIT, PAGE_UNITS_MAX
                )
            if mastership != self._mastership or self._count is not count:
                return
            if job is None:  # removed under the reader, or not readable now
                self._again(count)
                return
            units = count.pinned.known(job.units)
            for topic_id, number in zip(*np.unique(units["topic_id"], return_counts=True), strict=True):
                count.found[int(topic_id)] = count.found.get(int(topic_id), 0) + int(number)
            count.start = job.next_key
            if job.next_key is None:
                count.hours.pop()
        self._ended(count)

    def _again(self, count: _Count) -> None:
        """The count failed: begin another one, later."""
        if self._count is count:
            self._count = None
            self._not_before_ms = self._core.steady_ms() + PAUSES * COUNT_PERIOD_MS

    def _ended(self, count: _Count) -> None:
        known = count.found
        for topic_id, number in count.since.items():
            known[topic_id] = known.get(topic_id, 0) + number
        self._known, self._stale, self._count = known, count.stale, None
        now_ms = self._core.steady_ms()
        self._not_before_ms = now_ms + max(COUNT_PERIOD_MS, PAUSES * (now_ms - count.began_ms))
