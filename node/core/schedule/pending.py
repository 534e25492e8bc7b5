"""Pending messages: pages and counts by topic, tag, key, key prefix and time, on any node.

A worker selects units by their own columns (topic, hashes, masks). If hashes cannot decide, a worker reads the metas
and compares them with the text. Every step is bounded: a job over units (wheel/queries.py), then a job over at most
MATCHES_MAX metas. A call ends after STEPS_MAX steps, or with the first step that is over after CALL_MS, and returns
where the next call continues. Workers decode the metas, unless they are few and small: one of 32 KB with thousands of
headers takes almost a millisecond.

Answers describe the moment of each step. A message that is pending before the first step and after the last appears
exactly once. A message scheduled or dispatched in between may appear or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.message_ids import message_id_of
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, count_fitting, meta_of
from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT, KEY_LENGTH_MAX
from tickwheel.node.core.work import RemovedError
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.storage.tags import key_hash, tag_mask
from tickwheel.wheel.queries import ScanJob, Wanted
from tickwheel.wheel.units import UNIT, CursorKey, Units, ids_of, join_units, picked

PAGE_DEFAULT = 100
PAGE_MAX = 1_000
BUCKETS_MAX = 10_000
BUCKET_WIDTHS_MS = (1_000, 60_000, 3_600_000)
MATCHES_MAX = 1_000
"""Metas compared in one step: mostly some 2 ms of a worker, 600 ms if all are as large as may be."""
STEPS_MAX = 16
"""Steps of one call: about a million units examined, or sixteen thousand metas compared."""
CALL_MS = 25
"""A page or a partial count ends with the first step that is over after this long, so that whoever watches sees it
grow. A page for which everything had to be examined took seconds."""
CALLS_MAX = 32
"""Calls under way at a time; further ones are refused with a retry hint."""
INDEX_MAX = 1 << 32
"""Upper bound of the index in a page token: one beyond the last index of an hour."""
TEXT_LENGTH_MAX = KEY_LENGTH_MAX
"""Characters of a tag, key or prefix in a query: whatever can be scheduled can be selected."""


_FIRST_KEY = CursorKey(0, 0)


@dataclass(frozen=True, slots=True)
class Query:
    """A selection of pending messages: all given conditions must hold. Times in ms since 1970."""

    wanted: Wanted
    due_min: int
    due_max: int
    tag: str = ""
    key: str = ""
    key_prefix: str = ""

    @property
    def by_text(self) -> bool:
        """Whether units alone do not decide: the metas must be read."""
        return bool(self.tag or self.key or self.key_prefix)

    def matches(self, meta: common_pb2.MessageMeta) -> bool:
        """Whether a meta matches the texts exactly; units decide only by hash."""
        return (
            (not self.tag or self.tag in meta.tags)
            and (not self.key or self.key == meta.key)
            and meta.key.startswith(self.key_prefix)
        )

    def matching(self, metas: list[bytes]) -> NDArray[np.int64]:
        """The rows of the metas that match."""
        return np.flatnonzero([self.matches(meta_of(meta)) for meta in metas])


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one step: units in dispatch order, and where the next step begins (None: no more messages)."""

    units: Units
    next_key: CursorKey | None
    passed: int
    """Pending messages from the step's beginning up to `next_key`, selected or not."""
    ranks: NDArray[np.int64]
    """For each unit the number of those messages up to and including it."""


def make_query(
    core: Kernel,
    selection: scheduler_pb2.Selection,
    stamped_ms_max: int | None = None,
    retries: bool = True,
) -> Query:
    """A checked query. Raises RequestError: unknown topic, a text too long, a time out of range."""
    topic_id = None
    if selection.topic:
        topic_id = core.state.topic_id(selection.topic)
        if topic_id is None:
            require_current(core)
            text = f"topic {selection.topic} does not exist"
            raise RequestError(
                Failure(common_pb2.UNKNOWN_NAME, text, {"field": "topic", "value": selection.topic[:127]})
            )
    for name in ("tag", "key", "key_prefix"):
        length = len(getattr(selection, name))
        if length > TEXT_LENGTH_MAX:
            raise invalid(name, f"{length} characters", f"at most {TEXT_LENGTH_MAX} characters")
    for name in ("due_ms_min", "due_ms_max"):
        value = getattr(selection, name)
        if not 0 <= value <= DUE_MS_LIMIT:
            raise invalid(name, value, "a time in milliseconds since 1970, or 0")
    wanted = Wanted(
        topic_id=topic_id,
        tag_mask=tag_mask((selection.tag,)) if selection.tag else 0,
        key_hash=key_hash(selection.key) if selection.key else 0,
        with_key=bool(selection.key_prefix),
        stamped_ms_max=stamped_ms_max,
        retries=retries,
    )
    return Query(
        wanted,
        selection.due_ms_min,
        selection.due_ms_max or DUE_MS_LIMIT,
        selection.tag,
        selection.key,
        selection.key_prefix,
    )


def deletion_query(job: scheduler_pb2.Sweep) -> Query:
    """The query for everything that a deleting sweep cancels: all pending messages of its topic, or for its group."""
    of_topic = job.WhichOneof("action") == "delete_topic"
    wanted = Wanted(topic_id=job.target_id) if of_topic else Wanted(target_group=job.target_id)
    return Query(wanted, 0, DUE_MS_LIMIT)


class Finder:
    """Single steps of a query, for pages, counts by text and sweeps."""

    def __init__(self, core: Kernel, surplus: int = 0) -> None:
        """`surplus`: messages that a step keeps for the ones after it, if it has read them. Only for the steps of one
        query; what became of a message meanwhile is for the caller to find out."""
        self._core = core
        self._surplus = surplus
        self._ahead: ScanJob | None = None
        """The last job, whose later units may not have been taken yet."""
        self._last_start = _FIRST_KEY
        """Start of the last step. A step from there or from before repeats it, or starts over, and reads again."""

    async def step(self, query: Query, start: CursorKey | None, limit: int) -> Found:
        """Find at most `limit` units (and at most MATCHES_MAX) from `start` on. A step's work is bounded, so it may
        find fewer although more follow. Raises UnreadableError."""
        candidates = MATCHES_MAX if query.by_text else min(limit, MATCHES_MAX)
        while True:
            found = await self._candidates(query, start, candidates)
            units, ranks = found.units, found.ranks
            if not query.by_text or not len(units):
                return found
            metas = units.copy()
            metas["size"] = metas["meta_size"]  # the payloads are not read
            try:
                rows = await self._core.background.made_of_records(metas, query.matching)
            except RemovedError:
                # Some messages were settled meanwhile and removed with their hour; the others are found again.
                continue
            if len(rows) <= limit:
                return Found(picked(units, rows), found.next_key, found.passed, ranks[rows])
            rows = rows[:limit]
            return Found(picked(units, rows), _behind(units[rows[-1]]), int(ranks[rows[-1]]), ranks[rows])

    async def _candidates(self, query: Query, start: CursorKey | None, limit: int) -> Found:
        """At most `limit` units from `start` on that the query's units select: of those read ahead, or of a new job."""
        row, job = self._left(start)
        if job is None:
            background = self._core.background
            job = await background.scan(query.due_min, query.due_max, start, limit, query.wanted, self._surplus)
            self._ahead = job if self._surplus else None
        self._last_start = start or _FIRST_KEY
        before = int(job.ranks[row - 1]) if row else 0
        end = row + limit
        if end >= len(job.units):
            return Found(job.units[row:], job.next_key, job.passed - before, job.ranks[row:] - before)
        ranks = job.ranks[row:end] - before
        return Found(job.units[row:end], _behind(job.units[end - 1]), int(ranks[-1]), ranks)

    def _left(self, start: CursorKey | None) -> tuple[int, ScanJob | None]:
        """The first unit from `start` on of what was read ahead, and that job; None: there is no such unit."""
        job = self._ahead
        if job is None or start is None or start <= self._last_start:
            return 0, None
        due_ms = job.units["due_ms"]
        low, high = due_ms.searchsorted((start.due_ms, start.due_ms + 1)).tolist()
        row = low + int(job.units["index"][low:high].searchsorted(start.index))
        return (row, job) if row < len(job.units) else (0, None)


def key_of(unit: np.void) -> CursorKey:
    """This unit's key."""
    return CursorKey(int(unit["due_ms"]), int(unit["index"]))


def _behind(unit: np.void) -> CursorKey:
    """The key that follows this unit's."""
    return CursorKey(int(unit["due_ms"]), int(unit["index"]) + 1)


class PendingRequests:
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._finder = Finder(core)
        self._calls = 0

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Hold one of the CALLS_MAX places."""
        if self._calls >= CALLS_MAX:
            raise RequestError(limit_reached("pending_calls", CALLS_MAX, 500))
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    # -- pages

    async def page(self, request: scheduler_pb2.ListPendingRequest) -> scheduler_pb2.ListPendingResponse:
        """One page of pending messages in dispatch order."""
        query = make_query(self._core, _selection(request))
        size = request.page_size or PAGE_DEFAULT
        if size > PAGE_MAX:
            raise invalid("page_size", size, f"1 to {PAGE_MAX}")
        next_key = key_of_token(request.page_token)
        with self._call():
            parts: list[Units] = []
            count = 0
            until_ms = self._core.steady_ms() + CALL_MS
            for _ in range(STEPS_MAX):
                found = await self._finder.step(query, next_key, size - count)
                next_key = found.next_key
                parts.append(found.units)
                count += len(found.units)
                if next_key is None or count >= size or self._core.steady_ms() >= until_ms:
                    break
            units = join_units([part for part in parts if len(part)]) if count else np.zeros(0, UNIT)
            if request.content or request.meta:
                sizes = units["size" if request.content else "meta_size"]
                units, next_key = within_bytes(units, sizes, next_key)
            page = await self.describe(units, request.content, request.content or request.meta)
            require_current(self._core)  # what is left out does not exist
            page.next_page_token = "" if next_key is None else token_of(next_key)
            return page

    async def describe(self, units: Units, content: bool, meta: bool) -> scheduler_pb2.ListPendingResponse:
        """Units as messages; with their metas and payloads if asked. Messages removed meanwhile are left out."""
        core = self._core
        while True:
            messages = [self._message(unit, number) for unit, number in zip(units, ids_of(units).tolist(), strict=True)]
            page = scheduler_pb2.ListPendingResponse(messages=messages)
            if not meta or not messages:
                return page
            wanted = units
            if not content:
                wanted = units.copy()
                wanted["size"] = wanted["meta_size"]
            try:
                await core.background.made_of_records(wanted, partial(_fill, page, wanted["meta_size"].tolist()))
            except RemovedError:
                # At least one is gone, so this ends.
                units = picked(units, ~core.wheel.holdings.removed(ids_of(units)))
                continue
            return page

    def _message(self, unit: np.void, number: int) -> scheduler_pb2.PendingMessage:
        state, group = self._core.state, self._core.identity.wheel_group
        return scheduler_pb2.PendingMessage(
            id=message_id_of(number, group),
            topic=state.topic_name(int(unit["topic_id"])),
            due_ms=int(unit["due_ms"]),
            due_requested_ms=int(unit["due_requested_ms"]),
            payload_bytes=int(unit["size"]) - int(unit["meta_size"]),
            scheduled_ms=int(unit["scheduled_ms"]),
            attempts=int(unit["attempts"]),
            group=state.group_name(int(unit["target_group"])) if unit["target_group"] else "",
        )

    # -- counts

    async def count(self, request: scheduler_pb2.CountPendingRequest) -> scheduler_pb2.CountPendingResponse:
        """Count pending messages by bucket of due time."""
        query = make_query(self._core, _selection(request))
        bucket_ms = request.bucket_ms or BUCKET_WIDTHS_MS[-1]
        if bucket_ms not in BUCKET_WIDTHS_MS:
            raise invalid("bucket_ms", bucket_ms, "1000, 60000 or 3600000")
        start = key_of_token(request.page_token)
        with self._call():
            return await self._count(query, start, bucket_ms, request.partial)

    async def count_all(self, query: Query) -> int:
        """Count all messages that a query selects."""
        with self._call():
            total, token = 0, None
            while token != "":
                answer = await self._count(query, key_of_token(token or ""), BUCKET_WIDTHS_MS[-1], True)
                total += answer.total
                token = answer.next_page_token
            return total

    async def _count(
        self, query: Query, start: CursorKey | None, bucket_ms: int, partial: bool
    ) -> scheduler_pb2.CountPendingResponse:
        """Count from `start` on. `partial`: the answer may end early, after STEPS_MAX steps, CALL_MS or BUCKETS_MAX
        buckets."""
        counts: dict[int, int] = {}
        until_ms = self._core.steady_ms() + CALL_MS
        next_key = start
        for step in itertools.count(1):
            self._core.require_master()
            buckets, next_key = await self._count_step(query, next_key, bucket_ms)
            for start_ms, count in buckets:
                counts[start_ms] = counts.get(start_ms, 0) + count
            if len(counts) > BUCKETS_MAX:
                if not partial:
                    limit = f"at most {BUCKETS_MAX} buckets an answer; ask for partial ones"
                    raise invalid("bucket_ms", bucket_ms, limit)
                rising = sorted(counts)
                next_key = CursorKey(rising[BUCKETS_MAX], 0)
                counts = {start_ms: counts[start_ms] for start_ms in rising[:BUCKETS_MAX]}
                break
            if next_key is None or (partial and (step >= STEPS_MAX or self._core.steady_ms() >= until_ms)):
                break
        require_current(self._core)
        response = scheduler_pb2.CountPendingResponse(
            total=sum(counts.values()), next_page_token="" if next_key is None else token_of(next_key)
        )
        for start_ms in sorted(counts):
            response.buckets.add(start_ms=start_ms, count=counts[start_ms])
        return response

    async def _count_step(
        self, query: Query, start: CursorKey | None, bucket_ms: int
    ) -> tuple[Iterable[tuple[int, int]], CursorKey | None]:
        """(bucket, messages) of one step, and where the next step begins."""
        if query.by_text:
            found = await self._finder.step(query, start, MATCHES_MAX)
            places, counts = np.unique(found.units["due_ms"] // bucket_ms, return_counts=True)
            return zip((places * bucket_ms).tolist(), counts.tolist(), strict=True), found.next_key
        due_min = max(query.due_min, start.due_ms if start is not None else 0)
        job = await self._core.background.count(due_min, query.due_max, bucket_ms, query.wanted)
        return job.buckets, None if job.next_ms is None else CursorKey(job.next_ms, 0)


def _selection(
    request: scheduler_pb2.ListPendingRequest | scheduler_pb2.CountPendingRequest,
) -> scheduler_pb2.Selection:
    return scheduler_pb2.Selection(
        topic=request.topic,
        due_ms_min=request.due_ms_min,
        due_ms_max=request.due_ms_max,
        tag=request.tag,
        key=request.key,
        key_prefix=request.key_prefix,
    )


def _fill(page: scheduler_pb2.ListPendingResponse, meta_sizes: list[int], records: list[bytes]) -> None:
    """Put metas and payloads into the messages of a page, as far as the records have them."""
    for message, meta_size, record in zip(page.messages, meta_sizes, records, strict=True):
        message.meta.CopyFrom(meta_of(record[:meta_size]))
        message.payload = record[meta_size:]


def within_bytes(units: Units, sizes: np.ndarray, next_key: CursorKey | None) -> tuple[Units, CursorKey | None]:
    """The units that fit into one answer, at least one, and where the next page begins. `sizes`: bytes that the answer
    tells of each unit."""
    fit = count_fitting(sizes, ANSWER_BYTES_MAX)
    if fit >= len(units):
        return units, next_key
    return units[:fit], key_of(units[fit])


def token_of(key: CursorKey) -> str:
    """A page's end as text: the first key of the next page. The key is a place in the order, so later inserts do not
    shift it."""
    return f"{key.due_ms}.{key.index}"


def key_of_token(token: str) -> CursorKey | None:
    """The reverse of `token_of`; None for an empty token. Raises RequestError."""
    if not token:
        return None
    due, _, index = token.partition(".")
    if not (due.isdecimal() and index.isdecimal() and len(due) < 18 and len(index) < 11):
        raise invalid("page_token", token, "the next_page_token of an earlier answer")
    key = CursorKey(int(due), int(index))
    if key.due_ms > DUE_MS_LIMIT or key.index > INDEX_MAX:
        raise invalid("page_token", token, "the next_page_token of an earlier answer")
    return key
