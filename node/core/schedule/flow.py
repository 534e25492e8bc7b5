"""Flow control of schedules: which requests the master admits to the log, by replicated settings.

- `pending_max`, `topic_pending_max`: limits on pending messages, of the cluster and of a topic. Messages admitted and
  not yet applied count, and so do staged rows.
- `topic_quotas`, `client_quotas`: messages a second by topic and by client.
- Quotas of a user while rights are on: messages and bytes a second, messages pending in the topics it may schedule to.
- `tick_messages_max` (N): messages due in one tick. While a tick has fewer than N, all are accepted; above 2 N, none;
  in between a random share of (2 N - count) / N.

A request is admitted or refused whole, before it reaches the log. A refusal names the limit and when to try again, and
repeating the request under the same producer id and sequence is safe. A repeat of an accepted request passes, because
it adds nothing.

Counts of ticks are the master's own, soft and bounded. Messages from before this mastership are added once a tick
has filled by a quarter: then a worker asks the wheel. Called by the publisher, for requests in order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.schedule.intake import IncomingBatch
from tickwheel.node.core.schedule.staged_rows import StagedRows
from tickwheel.node.core.schedule.topic_pending import TopicPending
from tickwheel.node.core.work import UnreadableError
from tickwheel.node.core.world import Now, fractions
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.rights import NO_QUOTAS, Rights
from tickwheel.node.state.schema import KEYS_LEVEL
from tickwheel.node.state.settings import QUOTA_OTHERS, parse_quotas
from tickwheel.node.state.unique_keys import SHARD_ROWS_MAX, UNIQUE_KEYS_MAX, UniqueKeys
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.access_pb2 import RIGHT_SCHEDULE, UserQuotas
from tickwheel.wheel.queries import Wanted

TICKS_MAX = 100_000
"""Ticks counted at a time; beyond it, counts of the ticks counted longest ago are dropped."""
TICK_WAIT_MS = 1_000
PENDING_WAIT_MS = 1_000
KEYS_WAIT_MS = 1_000
USER_SUM_MS = 100
"""How long the sum over a user's topics is reused: a user may have thousands of topics, too many to sum for each batch.
With 10,000 a sum takes some milliseconds."""
BUCKETS_MAX = 10_000
WAIT_MS_MAX = 60_000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_ms: int


class Buckets:
    """Rates by name: a bucket of tokens for each name, one second deep, refilled by the cluster's time.

    A request passes while its bucket holds anything, and may leave it in debt. So a batch larger than a second's worth
    passes too, and its sender waits longer afterwards. Bounded: the least recently used bucket is forgotten, and starts
    full if its name comes again. Soft: a new master starts with full ones.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_ms(self, name: str, rate: int, now_ms: int) -> int:
        """0: a request may pass now; else after how many milliseconds to ask again. `rate`: messages or bytes a
        second."""
        bucket = self._refilled(name, rate, now_ms)
        if bucket.tokens > 0:
            return 0
        return min(WAIT_MS_MAX, int(-bucket.tokens * 1_000 / rate) + 1)

    def take(self, name: str, rate: int, count: int, now_ms: int) -> None:
        """Take `count` tokens for a request that passed."""
        self._refilled(name, rate, now_ms).tokens -= count

    def _refilled(self, name: str, rate: int, now_ms: int) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(float(rate), now_ms)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        passed_ms = max(0, now_ms - bucket.at_ms)
        bucket.tokens = min(float(rate), bucket.tokens + passed_ms * rate / 1_000)
        bucket.at_ms = now_ms
        return bucket

    def clear(self) -> None:
        self._buckets.clear()


@dataclass(slots=True)
class _UserPending:
    """Messages pending in the topics that a user may schedule to."""

    rights: Rights
    topic_ids: list[int] = field(default_factory=list)
    """Of the topics up to `last_id` those that these rights allow; some may have been deleted since the last sum."""
    last_id: int = 0
    messages: int = 0
    until_ms: int = 0
    """Cluster time until which `messages` is used."""


class FlowControl(Part):
    """Works only while the node leads."""

    def __init__(self, core: Kernel, topic_pending: TopicPending, all_understand: Callable[[int], bool]) -> None:
        """`all_understand` tells whether every member reads a log of a level."""
        self._state = core.state
        self._wheel = core.wheel
        self._background = core.background
        self._serving = core.serving
        self._random_bits = core.random_bits
        self._topic_pending = topic_pending
        self._all_understand = all_understand
        self._under_way: dict[int, int] = {}
        """Admitted batches not yet answered, by identity -> how often; kept only while a limit on pending messages is
        set."""
        self._in_all = 0
        self._by_topic: dict[str, int] = {}
        """Topic -> messages of these batches."""
        self._staged = StagedRows(core.state.staging)
        self._topics = Buckets()
        self._clients = Buckets()
        self._user_messages = Buckets()
        self._user_bytes = Buckets()
        self._user_pending: dict[str, _UserPending] = {}
        """By user; of those with a limit."""
        self._ticks: dict[int, int] = {}
        self._asked: set[int] = set()
        self._to_ask: deque[int] = deque()
        self._asking = False
        self._mastership = 0
        self.refused: dict[str, int] = {}
        """Limit -> messages refused by it since the process started."""

    def end(self, failure: Failure) -> None:
        """Forget all counts: the next mastership begins with its own."""
        self._mastership += 1
        self._topics.clear()
        self._clients.clear()
        self._user_messages.clear()
        self._user_bytes.clear()
        self._user_pending.clear()
        self._ticks.clear()
        self._asked.clear()
        self._to_ask.clear()
        self._asking = False
        self._under_way.clear()
        self._in_all = 0
        self._by_topic.clear()
        self._staged.clear()

    def limits(self, actor: str) -> bool:
        """Whether any limit may apply to requests of a user; empty: of nobody that has quotas."""
        settings = self._state.settings
        return bool(
            settings.tick_messages_max
            or settings.topic_quotas
            or settings.client_quotas
            or settings.pending_max
            or settings.topic_pending_max
            or (actor and self._user_quotas(actor) != NO_QUOTAS)
        )

    def admit(self, batch: IncomingBatch, due_ms: NDArray[np.int64], now_ms: int) -> Failure | None:
        """Admit and count the request (None), or return its refusal."""
        if batch.unique_keys is not None and (refusal := self.keys_refusal(batch)) is not None:
            return self._refuse(batch, refusal)
        settings = self._state.settings
        if not self.limits(batch.actor) or self._brings_nothing(batch):
            return None
        full = self._pending_refusal(batch, now_ms) or self._user_pending_refusal(batch, now_ms)
        if full is not None:
            return self._refuse(batch, full)
        rates = self._rates(batch)
        for buckets, name, setting, rate, _ in rates:
            wait_ms = buckets.wait_ms(name, rate, now_ms)
            if wait_ms:
                failure = limit_reached(setting, rate, wait_ms)
                failure.metadata["value"] = name
                return self._refuse(batch, failure)
        if settings.tick_messages_max:
            full = self._tick_refusal(due_ms, settings.tick_messages_max)
            if full is not None:
                return self._refuse(batch, full)
        for buckets, name, _, rate, count in rates:
            buckets.take(name, rate, count, now_ms)
        if settings.pending_max or settings.topic_pending_max or self._quotas(batch).pending_max:
            self._under_way[id(batch)] = self._under_way.get(id(batch), 0) + 1
            self._count(batch, 1)
        return None

    def _brings_nothing(self, batch: IncomingBatch) -> bool:
        """Whether apply will repeat the first answer to the request, or refuse its sequence."""
        try:
            return bool(batch.producer_id) and self._state.producers.repeated(batch.sender, batch.count) is not None
        except RequestError:
            return True

    def keys_refusal(self, batch: IncomingBatch) -> Failure | None:
        """Why the messages may not take their unique keys now: a member does not know keys, there are too many, or too
        many in the shard of one of these. A topic that does not exist yet has no shard to look at."""
        if batch.unique_keys is None:
            return None
        keys = self._state.unique_keys
        if keys.count >= UNIQUE_KEYS_MAX:
            return limit_reached("unique_keys_max", UNIQUE_KEYS_MAX, KEYS_WAIT_MS)
        if not keys.used and not self._all_understand(KEYS_LEVEL):
            text = "a member of the cluster runs a version without unique keys, or has not been heard yet"
            return Failure(pb.RECOVERING, text, {"field": "members", "retry_after_ms": "200"})
        return self._shard_refusal(batch, keys) if keys.crowded else None

    def _shard_refusal(self, batch: IncomingBatch, keys: UniqueKeys) -> Failure | None:
        assert batch.unique_keys is not None
        topic_ids = np.array([self._state.topic_id(name) or 0 for name in batch.topics], np.uint32)
        by_row = topic_ids[np.zeros(batch.count, np.uint32) if batch.topic_of is None else batch.topic_of]
        row = keys.no_room(by_row, batch.unique_keys.digests)
        if row is None:
            return None
        failure = limit_reached("unique_keys_shard_max", SHARD_ROWS_MAX, KEYS_WAIT_MS)
        failure.metadata["value"] = f"meta[{row}].unique_key"
        return failure

    def answered(self, batches: Iterable[IncomingBatch]) -> None:
        """Admitted requests have been applied, or never will be."""
        if not self._under_way:
            return
        for batch in batches:
            times = self._under_way.pop(id(batch), 0)
            if times:
                self._count(batch, -1)
            if times > 1:
                self._under_way[id(batch)] = times - 1

    def staged(self, job_id: str, number: int, batch: IncomingBatch) -> None:
        """An admitted block of a job's batch `number` was staged."""
        self._staged.take(job_id, number, dict(_by_topic(batch)))

    def _refuse(self, batch: IncomingBatch, failure: Failure) -> Failure:
        field = failure.metadata["field"]
        self.refused[field] = self.refused.get(field, 0) + batch.count
        return failure

    # -- pending messages

    def _count(self, batch: IncomingBatch, sign: int) -> None:
        self._in_all += sign * batch.count
        for name, count in _by_topic(batch):
            left = self._by_topic.get(name, 0) + sign * count
            if left:
                self._by_topic[name] = left
            else:
                self._by_topic.pop(name, None)

    def _pending(self) -> int:
        """Messages pending in all, with those admitted and the rows staged."""
        return self._wheel.pending + self._in_all + self._state.staging.waiting_rows

    def _pending_refusal(self, batch: IncomingBatch, now_ms: int) -> Failure | None:
        settings = self._state.settings
        limit = settings.pending_max
        if limit and self._pending() + batch.count > limit:
            return limit_reached("pending_max", limit, PENDING_WAIT_MS)
        limits = parse_quotas(settings.topic_pending_max) or {}
        if limits:
            staged = self._staged.by_topic(now_ms)
            for name, count in _by_topic(batch):
                limit = limits.get(name) or limits.get(QUOTA_OTHERS, 0)
                there = self._topic_pending.of(self._state.topic_id(name)) + self._by_topic.get(name, 0)
                there += staged.get(name, 0)
                if count > limit > 0:
                    # The request alone exceeds the limit: a retry can never succeed.
                    return invalid("topic_pending_max", f"{count} messages for {name}", f"at most {limit}").failure
                if limit and there + count > limit:
                    failure = limit_reached("topic_pending_max", limit, PENDING_WAIT_MS)
                    failure.metadata["value"] = name
                    return failure
        return None

    def _quotas(self, batch: IncomingBatch) -> UserQuotas:
        return self._user_quotas(batch.actor) if batch.actor else NO_QUOTAS

    def _user_quotas(self, actor: str) -> UserQuotas:
        user = self._state.access.user(actor)
        return NO_QUOTAS if user is None else user.quotas

    def _user_pending_refusal(self, batch: IncomingBatch, now_ms: int) -> Failure | None:
        """The refusal by the user's quota of messages pending in all topics that it may schedule to; None: it fits. The
        sum is taken once in USER_SUM_MS; requests admitted meanwhile are added."""
        limit = self._quotas(batch).pending_max
        user = self._state.access.user(batch.actor)
        if not limit or user is None:
            return None
        rights, known = self._state.access.rights_of(user), self._user_pending.get(user.name)
        if known is None or known.rights is not rights:
            known = self._user_pending[user.name] = _UserPending(rights)
        if now_ms >= known.until_ms:
            known.messages, known.until_ms = self._pending_of(known, now_ms), now_ms + USER_SUM_MS
        if batch.count > limit:
            # The request alone exceeds the quota: a retry can never succeed.
            return invalid("quotas.pending_max", f"{batch.count} messages", f"at most {limit}").failure
        if known.messages + batch.count <= limit:
            known.messages += batch.count
            return None
        failure = limit_reached("quotas.pending_max", limit, PENDING_WAIT_MS)
        failure.metadata["value"] = batch.actor
        return failure

    def _pending_of(self, known: _UserPending, now_ms: int) -> int:
        """Messages pending in a user's topics, with those admitted and not yet applied, and rows staged. Only topics
        that are new to `known` are compared with the rights."""
        rights, topics = known.rights, self._state.topics
        if rights.all_topics(RIGHT_SCHEDULE):
            return self._pending()
        kept = [topic_id for topic_id in known.topic_ids if topics.get(topic_id) is not None]
        new = (topic for topic in topics.after(known.last_id) if rights.topic(RIGHT_SCHEDULE, topic.name))
        known.topic_ids, known.last_id = kept + [topic.topic_id for topic in new], topics.last_id
        admitted = (
            count
            for name, count in chain(self._by_topic.items(), self._staged.by_topic(now_ms).items())
            if topics.named(name) is not None and rights.topic(RIGHT_SCHEDULE, name)
        )
        return sum(map(self._topic_pending.of, known.topic_ids)) + sum(admitted)

    # -- rates

    def _rates(self, batch: IncomingBatch) -> list[tuple[Buckets, str, str, int, int]]:
        """Buckets that the batch must pass: (buckets, name, setting, rate a second, messages)."""
        settings = self._state.settings
        found: list[tuple[Buckets, str, str, int, int]] = []
        topics = parse_quotas(settings.topic_quotas) or {}
        if topics:
            for name, count in _by_topic(batch):
                rate = topics.get(name) or topics.get(QUOTA_OTHERS)
                if rate:
                    found.append((self._topics, name, "topic_quotas", rate, count))
        clients = parse_quotas(settings.client_quotas) or {}
        rate = clients.get(batch.client) or clients.get(QUOTA_OTHERS)
        if rate:
            found.append((self._clients, batch.client, "client_quotas", rate, batch.count))
        quotas = self._quotas(batch)
        if quotas.messages_per_s:
            user_rate = quotas.messages_per_s
            found.append((self._user_messages, batch.actor, "quotas.messages_per_s", user_rate, batch.count))
        if quotas.bytes_per_s:
            size = len(batch.records)
            found.append((self._user_bytes, batch.actor, "quotas.bytes_per_s", quotas.bytes_per_s, size))
        return found

    # -- ticks

    def _tick_refusal(self, due_ms: NDArray[np.int64], limit: int) -> Failure | None:
        """Judge by the fullest tick that the request touches. An admitted request is counted."""
        slot_ms = self._state.settings.slot_ms
        ticks, counts = np.unique(np.maximum(due_ms, self._wheel.cursor.due_ms) // slot_ms, return_counts=True)
        most = int(counts.max())
        if most > 2 * limit:
            # The request alone exceeds the limit: a retry can never succeed.
            allowed = f"at most {2 * limit} messages of a batch for one tick (twice tick_messages_max)"
            return invalid("due_ms", f"{most} for tick {int(ticks[counts.argmax()])}", allowed).failure
        own = self._ticks
        after = {tick: own.get(tick, 0) + count for tick, count in zip(ticks.tolist(), counts.tolist(), strict=True)}
        fullest = max(after.values())
        if fullest > limit and float(fractions(1, self._random_bits)[0]) >= (2 * limit - fullest) / limit:
            tick = next(tick for tick, count in after.items() if count == fullest)
            failure = limit_reached("tick_messages_max", limit, TICK_WAIT_MS)
            failure.metadata["value"] = str(tick * slot_ms)
            return failure
        own.update(after)
        self._ask(tick for tick, count in after.items() if 4 * count >= limit and tick not in self._asked)
        while len(own) > TICKS_MAX:
            del own[next(iter(own))]
        return None

    def _ask(self, ticks: Iterable[int]) -> None:
        """Ask the wheel how many messages these ticks held before this mastership, one tick after the other."""
        for tick in ticks:
            self._asked.add(tick)
            self._to_ask.append(tick)
        if len(self._asked) > TICKS_MAX:
            self._asked.clear()
        if self._to_ask and not self._asking:
            self._serving.start(self._ask_all(), lambda _: None)

    async def _ask_all(self) -> None:
        mastership, slot_ms = self._mastership, self._state.settings.slot_ms
        self._asking = True
        while self._to_ask:
            tick = self._to_ask.popleft()
            held = 0
            with suppress(UnreadableError):
                job = await self._background.count(tick * slot_ms, (tick + 1) * slot_ms, slot_ms, Wanted())
                held = sum(count for _, count in job.buckets)
            if mastership != self._mastership:
                return
            if tick in self._ticks:
                self._ticks[tick] = max(self._ticks[tick], held)
        self._asking = False

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"refused_messages": {(limit,): float(count) for limit, count in self.refused.items()}}

    def upkeep(self, now: Now) -> None:
        """Forget counts of ticks that have passed, and of staged jobs that are over."""
        self._staged.upkeep()
        first = self._wheel.cursor.due_ms // self._state.settings.slot_ms
        for tick in [tick for tick in self._ticks if tick < first]:
            del self._ticks[tick]
        self._asked = {tick for tick in self._asked if tick >= first}


def _by_topic(batch: IncomingBatch) -> Iterable[tuple[str, int]]:
    """(topic, messages) of a batch."""
    counts = [batch.count] if batch.topic_of is None else np.bincount(batch.topic_of).tolist()
    return zip(batch.topics, counts, strict=False)
