"""Messages to schedule and their receipts: checks the arguments and builds the columns of a batch.

Owns the ways to state the due time, and the layout of a batch. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tickwheel.client.errors import check_names, refused
from tickwheel.client.ids import id_text
from tickwheel.client.moments import moment_of, ms_of, span_ms_of, span_of
from tickwheel.client.payloads import Payload, encoded, with_content_type
from tickwheel.client.requests import checked_text, request_of
from tickwheel.client.unique_keys import (
    NO_RULE,
    KeyConflict,
    KeyOutcome,
    KeyRule,
    KeyTaken,
    check_no_rule,
    checked_key,
    key_taken,
    outcome_of,
    rule_of,
)
from tickwheel.proto import common_pb2, scheduler_pb2

KIND_DUE, KIND_DELAY, KIND_LEVEL = 0, 1, 2
JITTER_MS_MAX = 86_400_000
PAYLOAD_BYTES_MAX = 4 << 20
"""The most that the setting `payload_bytes_max` can be."""
KEY_LENGTH_MAX = 4_096
TAGS_MAX = 64
TAG_LENGTH_MAX = 128
TAG_RULE = f"1 to {TAG_LENGTH_MAX} printable characters without |, no blank at either end, not *"
META_BYTES_MAX = 32_768
HEADERS_MAX = META_BYTES_MAX // 4
TOPIC = re.compile(r"(?!%DLQ%)[A-Za-z0-9_\-%][A-Za-z0-9_\-.%]{0,126}")
TOPIC_RULE = "1 to 127 characters of [A-Za-z0-9_-.%], not starting with a dot or %DLQ%"
"""The nodes have the same bounds: a message checked here never gets its whole batch refused."""


class Content(TypedDict, total=False):
    """The fields of a message beside its payload."""

    key: str
    tags: Sequence[str]
    headers: Mapping[str, str] | None
    message_group: str


class KeyOptions(TypedDict, total=False):
    """What goes with a unique key."""

    on_key_conflict: KeyConflict | str | None
    """What to do if another message holds the key; None: refuse."""
    key_until_settled: bool
    """Hold the key until every group has settled the message; otherwise until its time has come."""


class _Rest(Content, KeyOptions, total=False):
    pass


class When(TypedDict, total=False):
    """When a message is due, by exactly one of these."""

    at: datetime | None
    """With a time zone."""
    delay: timedelta | None
    due_ms: int | None
    """Milliseconds since the Unix epoch."""
    delay_ms: int | None
    level: int | None
    """A delay level of the cluster; 0 is no delay."""


class MessageOptions(When, Content, KeyOptions, total=False):
    """When a message is due, what it carries, and how it holds its unique key."""

    jitter: timedelta | None
    """The master adds a random part of this; the receipt has the resulting time."""
    unique_key: str | None
    """At most one pending message of the topic has it."""


def when_of(
    at: datetime | None = None,
    delay: timedelta | None = None,
    due_ms: int | None = None,
    delay_ms: int | None = None,
    level: int | None = None,
) -> tuple[int, int]:
    """(kind, value) of the one argument that is not None. Raises RequestRefused unless exactly one is given."""
    if due_ms is not None and at is None and delay is None and delay_ms is None and level is None:
        return KIND_DUE, _number("due_ms", due_ms, -(1 << 50), 1 << 50)  # the commonest way costs least
    given = (at is not None) + (delay is not None) + (due_ms is not None) + (delay_ms is not None) + (level is not None)
    if given != 1:
        raise refused("when", "none or several", "exactly one of at, delay, due_ms, delay_ms and level")
    if delay_ms is not None:
        return KIND_DELAY, _number("delay_ms", delay_ms, 0, 1 << 50)
    if delay is not None:
        return KIND_DELAY, _span("delay", delay, 1 << 50, "0 or longer")
    if at is not None:
        return KIND_DUE, ms_of("at", at)
    return KIND_LEVEL, _number("level", level, 0, (1 << 32) - 1)


def _number(field: str, value: object, least: int, most: int) -> int:
    if type(value) is int and least <= value <= most:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise refused(field, value, f"a whole number from {least} to {most}")
    return int(value)


def _span(field: str, span: timedelta, ms_max: int, limit: str) -> int:
    """In milliseconds. `limit` says what is allowed; the caller gave no milliseconds."""
    ms = span_ms_of(field, span)
    if not 0 <= ms <= ms_max:
        raise refused(field, span, limit)
    return ms


def meta_of(
    key: str = "",
    tags: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    message_group: str = "",
    unique_key: str = "",
) -> common_pb2.MessageMeta | None:
    """The meta of a message; None if it is empty. Raises RequestRefused for what no node takes: one message must not
    have the batch refused in which it travels."""
    if not (key or tags or headers or message_group or unique_key):
        return None
    if isinstance(tags, str):
        raise refused("tags", tags, "a list of texts")
    made = request_of(
        common_pb2.MessageMeta,
        key=key,
        tags=tags,
        headers=headers or {},
        message_group=message_group,
        unique_key=unique_key,
    )
    if len(made.key) > KEY_LENGTH_MAX:
        raise refused("key", f"{len(made.key)} characters", f"at most {KEY_LENGTH_MAX} characters")
    if len(made.tags) > TAGS_MAX:
        raise refused("tags", len(made.tags), f"at most {TAGS_MAX} tags of a message")
    for tag in made.tags:
        if not is_tag(tag):
            raise refused("tags", repr(tag), TAG_RULE)
    if len(made.headers) > HEADERS_MAX:
        raise refused("headers", len(made.headers), f"at most {HEADERS_MAX} headers")
    size = made.ByteSize()
    if size > META_BYTES_MAX:
        raise refused("headers", f"{size} bytes", f"at most {META_BYTES_MAX} bytes of key, tags and headers together")
    return made


def read_meta(data: bytes) -> common_pb2.MessageMeta | None:
    """The meta of a record; None if it cannot be decoded. Nodes check what is scheduled, but bundles are built outside:
    such a message counts as one without a meta, here as on the nodes."""
    try:
        return common_pb2.MessageMeta.FromString(data)
    except DecodeError:
        return None


@lru_cache(maxsize=4_096)
def _is_topic(name: str) -> bool:
    return TOPIC.fullmatch(name) is not None


def is_tag(tag: str) -> bool:
    """Whether a tag is allowed by TAG_RULE."""
    return 0 < len(tag) <= TAG_LENGTH_MAX and tag.isprintable() and "|" not in tag and tag != "*" and tag == tag.strip()


class Row(NamedTuple):
    """A checked message to schedule."""

    topic: str
    payload: bytes
    kind: int
    when: int
    meta: bytes
    jitter_ms: int = 0
    unique_key: str = ""
    """Also in the meta; empty: it has none."""
    key_rule: KeyRule = NO_RULE

    def fill(self, message: common_pb2.Message) -> common_pb2.Message:
        """Set the fields of an empty protobuf message; returns it."""
        message.topic, message.payload = self.topic, self.payload
        if self.kind == KIND_DUE:
            message.due_ms = self.when
        elif self.kind == KIND_DELAY:
            message.delay_ms = self.when
        else:
            message.delay_level = self.when
        if self.meta:
            message.meta.ParseFromString(self.meta)
        if self.jitter_ms:
            message.jitter_ms = self.jitter_ms
        if self.unique_key:
            message.on_key_conflict, message.key_until_settled = self.key_rule
        return message


def row_of(
    topic: str,
    payload: Payload,
    *,
    at: datetime | None = None,
    delay: timedelta | None = None,
    due_ms: int | None = None,
    delay_ms: int | None = None,
    level: int | None = None,
    jitter: timedelta | None = None,
    unique_key: str | None = None,
    **rest: Unpack[_Rest],
) -> Row:
    """A message of MessageOptions. Raises RequestRefused for a wrong argument, TypeError for one that is none."""
    kind, when = when_of(at, delay, due_ms, delay_ms, level)
    name, rule = "", NO_RULE
    if rest or unique_key is not None:
        check_names(rest, _Rest)
        on_key_conflict, key_until_settled = rest.get("on_key_conflict"), rest.get("key_until_settled", False)
        if unique_key is not None:
            name, rule = checked_key(unique_key), rule_of(on_key_conflict, key_until_settled)
        else:
            check_no_rule(on_key_conflict, key_until_settled, "unique_key")
    if not (type(topic) is str and _is_topic(topic)):
        topic = checked_text("topic", topic)
        if not _is_topic(topic):
            raise refused("topic", topic, TOPIC_RULE)
    headers = None
    if rest or type(payload) is not bytes:
        payload, headers = content_of(payload, rest.get("headers"))
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise refused("payload", f"{len(payload)} bytes", f"1 to {PAYLOAD_BYTES_MAX} bytes")
    serialized = b""
    if rest or headers or name:
        meta = meta_of(rest.get("key", ""), rest.get("tags", ()), headers, rest.get("message_group", ""), name)
        serialized = meta.SerializeToString() if meta is not None else b""
    return Row(topic, payload, kind, when, serialized, 0 if jitter is None else jitter_ms_of(jitter), name, rule)


def content_of(payload: Payload, headers: Mapping[str, str] | None) -> tuple[bytes, Mapping[str, str] | None]:
    """The bytes of a payload, and the headers with its content type. Raises RequestRefused."""
    if isinstance(payload, bytes):
        return payload, headers
    if isinstance(payload, str):
        return checked_text("payload", payload).encode(), headers
    payload, content_type = encoded(payload)
    return payload, with_content_type(headers, content_type) if content_type else headers


def jitter_ms_of(jitter: timedelta | None) -> int:
    """The jitter window in milliseconds; 0 for none. Raises RequestRefused out of bounds."""
    if jitter is None:
        return 0
    return _span("jitter", jitter, JITTER_MS_MAX, f"0 to {JITTER_MS_MAX // 3_600_000} hours")


def batch_of(rows: Sequence[Row]) -> scheduler_pb2.ScheduleBatch:
    """A batch as columns if all messages have the same topic, kind of time and jitter, and all unique keys the same
    rule; otherwise as rows."""
    topics, payloads, kinds, whens, metas, jitters_ms, unique_keys, given = zip(*rows, strict=True)
    rules: set[KeyRule] = set()
    if any(unique_keys):
        rules = {rule for rule, unique_key in zip(given, unique_keys, strict=True) if unique_key}
    if max(len(rules), *map(len, map(set, (topics, kinds, jitters_ms)))) > 1:
        batch = scheduler_pb2.ScheduleBatch()
        add = batch.rows.messages.add
        for row in rows:
            row.fill(add())
        return batch
    count = len(rows)
    rule = rules.pop() if rules else NO_RULE
    columns = scheduler_pb2.ColumnBatch(
        topic=topics[0],
        jitter_ms=jitters_ms[0],
        payload_sizes=np.fromiter(map(len, payloads), "<u4", count).tobytes(),
        payloads=b"".join(payloads),
        on_key_conflict=rule.conflict,
        key_until_settled=rule.until_settled,
    )
    when = np.fromiter(whens, "<u4" if kinds[0] == KIND_LEVEL else "<i8", count).tobytes()
    if kinds[0] == KIND_DUE:
        columns.due_ms = when
    elif kinds[0] == KIND_DELAY:
        columns.delay_ms = when
    else:
        columns.delay_levels = when
    if any(metas):
        columns.meta_sizes = np.fromiter(map(len, metas), "<u4", count).tobytes()
        columns.metas = b"".join(metas)
    return scheduler_pb2.ScheduleBatch(columns=columns)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One message is on stable storage of a majority: the one scheduled, or the one that holds its unique key."""

    id: str
    due_ms: int
    """The due time that applies, jitter included."""
    level: int = 0
    """The delay level applied, at most the highest that exists; 0 if none was requested, or for a repeat."""
    delay_ms: int = 0
    """The delay of that level."""
    key_outcome: KeyOutcome = KeyOutcome.FREE
    """FREE, USED_EXISTING or REPLACED."""

    @property
    def due(self) -> datetime:
        """The due time that applies, in UTC."""
        return moment_of(self.due_ms)

    @property
    def delay(self) -> timedelta:
        """The delay of the level applied; zero if none was requested."""
        return span_of(self.delay_ms)


_set_id, _set_due_ms, _set_level, _set_delay_ms, _set_key_outcome = (
    vars(Receipt)[name].__set__ for name in ("id", "due_ms", "level", "delay_ms", "key_outcome")
)


def _plain_receipt(id_: str, due_ms: int) -> Receipt:
    """As `Receipt(id_, due_ms)`. The constructor of a frozen dataclass takes twice as long, for each message."""
    receipt = object.__new__(Receipt)
    _set_id(receipt, id_)
    _set_due_ms(receipt, due_ms)
    _set_level(receipt, 0)
    _set_delay_ms(receipt, 0)
    _set_key_outcome(receipt, KeyOutcome.FREE)
    return receipt


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """A batch is on stable storage of a majority."""

    ids: NDArray[np.uint64]
    """The ids, in the order of the batch."""
    due_ms: NDArray[np.int64] | None
    """The due times that apply; None: all as requested."""
    repeated: bool
    """Whether this answers a repeat of a batch that was accepted before."""
    levels: NDArray[np.uint32] | None = None
    """The delay levels applied, 0 for none. None if no message requested one, or for a repeat."""
    delay_ms: NDArray[np.int64] | None = None
    """The delays of those levels."""
    key_outcomes: NDArray[np.uint8] | None = None
    """Of each message the number of its KeyOutcome in the protobuf enum; None: all are FREE."""

    def __len__(self) -> int:
        return len(self.ids)

    def outcomes(self) -> list[KeyOutcome]:
        """What became of each message, by its unique key. A refused one leaves its neighbours alone."""
        if self.key_outcomes is None:
            return [KeyOutcome.FREE] * len(self.ids)
        return [outcome_of(number) for number in self.key_outcomes.tolist()]

    def texts(self) -> list[str]:
        """The ids as text."""
        return [id_text(value) for value in self.ids.tolist()]


def receipts_of(receipt: BatchReceipt, rows: Sequence[Row]) -> list[Receipt | KeyTaken]:
    """What each message of a batch has got, in their order."""
    due = receipt.due_ms.tolist() if receipt.due_ms is not None else [row.when for row in rows]
    nothing = [0] * len(rows)
    levels = receipt.levels.tolist() if receipt.levels is not None else nothing
    delays = receipt.delay_ms.tolist() if receipt.delay_ms is not None else nothing
    columns = zip(receipt.ids.tolist(), due, levels, delays, strict=True)
    if receipt.key_outcomes is None and receipt.levels is None and receipt.delay_ms is None:
        return [_plain_receipt(id_text(id64), due_ms) for id64, due_ms in zip(receipt.ids.tolist(), due, strict=True)]
    if receipt.key_outcomes is None:
        return [Receipt(id_text(id64), due_ms, level, delay_ms) for id64, due_ms, level, delay_ms in columns]
    return [
        key_taken(row.topic, row.unique_key, id_text(id64), due_ms)
        if outcome is KeyOutcome.REFUSED
        else Receipt(id_text(id64), due_ms, level, delay_ms, outcome)
        for (id64, due_ms, level, delay_ms), row, outcome in zip(columns, rows, receipt.outcomes(), strict=True)
    ]


def receipt_of(receipt: scheduler_pb2.BatchReceipt) -> BatchReceipt:
    """A receipt from its protobuf message, without copying columns."""
    due_ms = np.frombuffer(receipt.due_ms, "<i8") if receipt.due_ms else None
    levels = np.frombuffer(receipt.delay_levels, "<u4") if receipt.delay_levels else None
    delay_ms = np.frombuffer(receipt.delay_ms, "<i8") if receipt.delay_ms else None
    outcomes = np.frombuffer(receipt.key_outcomes, np.uint8) if receipt.key_outcomes else None
    return BatchReceipt(np.frombuffer(receipt.ids, "<u8"), due_ms, receipt.repeated, levels, delay_ms, outcomes)
