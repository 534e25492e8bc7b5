"""Applies a publish: which of its requests count, and the units of those.

Of one producer's requests exactly the one with sequence `last + 1` counts. A repeat that is remembered gets the first
answer; its rows are taken out of the columns before anything is appended. Without repeats and refusals (nearly always)
nothing is masked or copied.

Repeats are judged by the batches remembered before the command, and by the command's own requests. Batches that these
push out of a window are forgotten only after the command.

Columns that do not fit each other cannot come from a sound master: each request is refused, on every node alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.state.key_holders import KeyHolders
from tickwheel.node.state.keyed_append import KeyedAppend, Keys
from tickwheel.node.state.names import check_producer_id
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.producers import (
    Batch,
    Producers,
    Sender,
    content_differs,
    make_batch,
    other_count,
    owner_differs,
)
from tickwheel.node.state.results import KeyOutcomes, PublishResult, RequestOutcome, is_scheduled
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.topics import Topics
from tickwheel.node.state.unique_keys import DIGEST, DIGEST_BYTES
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import Publish, PublishRequest
from tickwheel.wheel.sweep import cut_records
from tickwheel.wheel.units import ONE_TAG, UNIT, Units, picked

META_BYTES_MAX = 65_535
"""A unit keeps the size of its meta in 16 bits."""
DUE_MS_MAX = (1 << 32) * 3_600_000 - 1
"""An id has 32 bits for the hour."""


@dataclass(slots=True)
class _Columns:
    """Columns of n units, in the order of their due times."""

    units: Units
    rows: NDArray[np.uint32] | None
    records: bytes
    keys: Keys | None = None


def _column(data: bytes, name: str, dtype: str, count: int) -> NDArray[np.int64]:
    width = np.dtype(dtype).itemsize
    if len(data) != width * count:
        raise invalid(name, f"{len(data)} bytes", f"{count} elements of {width} bytes")
    return np.frombuffer(data, dtype)


def _read_columns(publish: Publish, stamped_ms: int) -> _Columns:
    count = sum(request.count for request in publish.requests)
    due = _column(publish.due_ms, "due_ms", "<i8", count)
    sizes = _column(publish.sizes, "sizes", "<u4", count)
    records = publish.records  # each look at the field copies it
    units = np.zeros(count, UNIT)
    one_topic = len(publish.topic_ids) == 4
    topics = _column(publish.topic_ids, "topic_ids", "<u4", 1 if one_topic else count)
    rows = _column(publish.rows, "rows", "<u4", count).view(np.uint32) if publish.rows else None
    if count:
        if not (due[1:] >= due[:-1]).all() or int(due[-1]) > DUE_MS_MAX:
            raise invalid("due_ms", int(due[-1]), f"rising, at most {DUE_MS_MAX}")
        if int(sizes.sum(dtype=np.int64)) != len(records):
            raise invalid("records", f"{len(records)} bytes", "the sum of sizes")
        units["due_requested_ms"] = due
        units["scheduled_ms"] = stamped_ms
        units["size"] = sizes
        units["topic_id"] = topics
        if publish.meta_sizes:
            meta_sizes = _column(publish.meta_sizes, "meta_sizes", "<u4", count)
            if int(meta_sizes.max()) > META_BYTES_MAX or (meta_sizes > sizes).any():
                raise invalid("meta_sizes", int(meta_sizes.max()), f"at most {META_BYTES_MAX} and the size")
            units["meta_size"] = meta_sizes
        if publish.tag_hashes:
            units["tag_hash"] = _column(publish.tag_hashes, "tag_hashes", "<u4", count)
            if publish.one_tag_hashes:
                units["flags"] = np.where(units["tag_hash"] != 0, ONE_TAG, 0)
        if publish.tag_masks:
            units["tag_mask"] = _column(publish.tag_masks, "tag_masks", "<u8", count)
        if publish.key_hashes:
            units["key_hash"] = _column(publish.key_hashes, "key_hashes", "<u8", count)
        if rows is not None:
            seen = np.zeros(count, np.bool_)
            seen[rows[rows < count]] = True
            if not seen.all():
                raise invalid("rows", "", "each row once")
    return _Columns(units, rows, records, _read_keys(publish, count))


def _read_keys(publish: Publish, count: int) -> Keys | None:
    if not publish.unique_keys:
        return None
    if len(publish.unique_keys) != DIGEST_BYTES * count or len(publish.key_rules) != count:
        sizes = f"{len(publish.unique_keys)} bytes and {len(publish.key_rules)} rules"
        raise invalid("unique_keys", sizes, f"{count} elements of {DIGEST_BYTES} bytes, and a rule of each")
    return Keys(np.frombuffer(publish.unique_keys, DIGEST), np.frombuffer(publish.key_rules, np.uint8))


def read_units(publish: Publish, stamped_ms: int) -> tuple[Units, bytes]:
    """Units and records of a publish that is part of another command. Raises RequestError: its columns do not fit."""
    columns = _read_columns(publish, stamped_ms)
    return columns.units, columns.records


class Publishing:
    def __init__(self, wheel: WheelPort, topics: Topics, producers: Producers, holders: KeyHolders) -> None:
        self._wheel = wheel
        self._topics = topics
        self._producers = producers
        self._holders = holders

    def apply(self, publish: Publish, stamped_ms: int, settings: Settings) -> PublishResult:
        """Append the requests that count; one outcome per request."""
        requests = publish.requests
        try:
            columns = _read_columns(publish, stamped_ms)
        except RequestError as error:
            return PublishResult([RequestOutcome(failure=error.failure) for _ in requests])
        # Each look at a field of a request makes an object.
        parts = [(sender_of(request), request.count) for request in requests]
        outcomes = self._decide(parts, self._unknown_topics(columns, requests))
        counts = [outcome is None for outcome in outcomes]
        if all(counts):
            return self._append(parts, columns, settings, stamped_ms)
        result = PublishResult([])
        if any(counts):
            taken_rows = np.repeat(counts, [count for _, count in parts])
            taken = [part for part, counted in zip(parts, counts, strict=True) if counted]
            result = self._append(taken, _masked(columns, taken_rows), settings, stamped_ms)
        appended = iter(result.requests)
        answers: list[RequestOutcome] = []
        for (sender, _), outcome in zip(parts, outcomes, strict=True):
            if outcome is None:
                outcome = next(appended)
            elif isinstance(outcome, int | Batch):
                first = answers[outcome] if isinstance(outcome, int) else outcome
                outcome = RequestOutcome(first.ids, first.due_ms, repeated=True, keys=first.keys)
                self._producers.touch(sender.producer_id, stamped_ms)
            answers.append(outcome)
        return replace(result, requests=answers)

    def _unknown_topics(self, columns: _Columns, requests: Sequence[PublishRequest]) -> dict[int, int]:
        """Number of each request with an unknown topic -> that topic."""
        used = columns.units["topic_id"]
        if not len(used):
            return {}
        same = bool((used == used[0]).all())
        numbers = set((used[:1] if same else used).tolist())
        unknown = sorted(number for number in numbers if not self._topics.takes(number))
        if not unknown:
            return {}
        ends = np.cumsum([request.count for request in requests])
        found: dict[int, int] = {}
        for topic_id in unknown:
            places = np.flatnonzero(used == topic_id)
            rows = places if columns.rows is None else columns.rows[places]
            for number in np.unique(np.searchsorted(ends, rows, "right")).tolist():
                found.setdefault(number, topic_id)
        return found

    def _decide(
        self, parts: Sequence[tuple[Sender, int]], unknown: dict[int, int]
    ) -> list[RequestOutcome | Batch | int | None]:
        """For each request (sender, number of messages): None (append it), a refusal, the remembered batch, or the
        request it repeats."""
        outcomes: list[RequestOutcome | Batch | int | None] = []
        taken: dict[tuple[str, int], int] = {}
        last: dict[str, Sender] = {}
        for number, (sender, count) in enumerate(parts):
            producer_id = sender.producer_id
            outcome: RequestOutcome | Batch | int | None = None
            if producer_id:
                here = last.get(producer_id)
                outcome = taken.get((producer_id, sender.sequence))
                if here is not None and sender.owner and here.owner and sender.owner != here.owner:
                    outcome = _refused(owner_differs(sender))
                elif outcome is None:
                    outcome = self._sequence(sender, count, here)
                else:
                    problem = _differs(sender, count, *parts[outcome])
                    outcome = outcome if problem is None else _refused(problem)
            if outcome is None and number in unknown:
                topic_id = unknown[number]
                closing = self._topics.get(topic_id)
                text = (
                    f"no topic has the id {topic_id}" if closing is None else f"topic {closing.name} is being deleted"
                )
                facts = {"field": "topic_id", "value": str(topic_id)}
                outcome = _refused(Failure(pb.UNKNOWN_NAME, text, facts))
            if outcome is None and producer_id:
                taken[producer_id, sender.sequence] = number
                last[producer_id] = sender
            outcomes.append(outcome)
        return outcomes

    def _sequence(self, sender: Sender, count: int, here: Sender | None) -> RequestOutcome | Batch | None:
        """The refusal or the remembered batch of a request; None: it counts. `here`: the last request of the same
        producer in this command."""
        try:
            return judge(self._producers, sender, count, here)
        except RequestError as error:
            return _refused(error.failure)

    def _append(
        self,
        parts: Sequence[tuple[Sender, int]],
        columns: _Columns,
        settings: Settings,
        stamped_ms: int,
    ) -> PublishResult:
        """Append the columns of requests (sender, number of messages) that count."""
        units = columns.units
        scheduled = len(units)
        keys: KeyOutcomes | None = None
        replaced: list[int] = []
        if columns.keys is None:
            ids = self._wheel.append(units, columns.records)
            due = units["due_ms"]
        else:
            keyed = KeyedAppend(self._wheel, self._holders, units, columns.records, columns.keys)
            keyed.append(columns.rows)
            ids, due, keys, replaced = keyed.ids, keyed.due_ms, keyed.outcomes, keyed.replaced
            scheduled = int(np.count_nonzero(is_scheduled(keys)))
        if columns.rows is not None:
            by_row, due_by_row = np.empty_like(ids), np.empty(len(ids), np.int64)
            by_row[columns.rows], due_by_row[columns.rows] = ids, due
            ids, due = by_row, due_by_row
            if keys is not None:
                keys_by_row = np.empty_like(keys)
                keys_by_row[columns.rows] = keys
                keys = keys_by_row
        else:
            due = due.astype(np.int64)
        outcomes: list[RequestOutcome] = []
        accept = self._producers.accept
        at = 0
        for sender, count in parts:
            end = at + count
            own_ids, own_due = ids[at:end], due[at:end]
            of_keys = keys[at:end] if keys is not None and keys[at:end].any() else None
            at = end
            outcomes.append(RequestOutcome(own_ids, own_due, keys=of_keys))
            if sender.producer_id:
                accept(sender, make_batch(own_ids, own_due, sender.checksum, of_keys), settings, stamped_ms)
        return PublishResult(outcomes, tuple(replaced), scheduled)


def _refused(failure: Failure) -> RequestOutcome:
    return RequestOutcome(failure=failure)


def sender_of(request: PublishRequest) -> Sender:
    """The producer's part of a request."""
    checksum = request.checksum if request.HasField("checksum") else None
    return Sender(request.producer_id, request.sequence, checksum, request.owner, request.by_owner)


def judge(producers: Producers, sender: Sender, count: int, here: Sender | None = None) -> Batch | None:
    """The remembered batch that a request repeats; None: its sequence is the producer's next. Raises RequestError: it
    is refused.

    `here`: an earlier request of the same producer that counts as accepted already."""
    problem = check_producer_id(sender.producer_id)
    if problem or sender.sequence < 1:
        name, value = ("producer_id", sender.producer_id) if problem else ("sequence", str(sender.sequence))
        raise invalid(name, value, problem or "1 or more")
    found = producers.repeated(sender, count)
    if found is not None:
        return found
    span = producers.span(sender.producer_id)
    if span is None and here is None:
        return None
    last = here.sequence if here is not None else span.last if span is not None else 0
    if sender.sequence == last + 1:
        return None
    facts = {"field": "sequence", "value": str(sender.sequence), "expected": str(last + 1)}
    if sender.sequence > last + 1:
        text = f"sequence {sender.sequence} of producer {sender.producer_id}: expected {last + 1}"
        raise RequestError(Failure(pb.SEQUENCE_GAP, text, facts))
    # The sequence lies below the first one that this command brings of a producer that was unknown.
    text = f"sequence {sender.sequence} of producer {sender.producer_id} was accepted, its ids are no longer kept"
    raise RequestError(Failure(pb.SEQUENCE_FORGOTTEN, text, facts))


def _differs(sender: Sender, count: int, first: Sender, first_count: int) -> Failure | None:
    """Why a request cannot be a repeat of an earlier one in the same command; None: it can."""
    if None not in (sender.checksum, first.checksum) and sender.checksum != first.checksum:
        return content_differs(sender)
    return None if count == first_count else other_count(sender, count, first_count)


def _masked(columns: _Columns, taken_rows: NDArray[np.bool_]) -> _Columns:
    """The columns of taken rows only, with rows renumbered."""
    rows = columns.rows
    taken = taken_rows if rows is None else taken_rows[rows]
    renumbered = None
    if rows is not None:
        renumbered = (np.cumsum(taken_rows) - 1)[rows[taken]].astype(np.uint32)
    keys = None if columns.keys is None else Keys(columns.keys.digests[taken], columns.keys.rules[taken])
    records = cut_records(columns.records, columns.units["size"], taken)
    return _Columns(picked(columns.units, taken), renumbered, records, keys)
