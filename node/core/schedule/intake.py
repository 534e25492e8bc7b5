"""Turns schedule requests into checked columns, so that no later step handles a single message.

`from_message` and `from_batch` raise `RequestError` naming field, value and limit. The result is an
`IncomingBatch`: numpy columns and one blob. Relative times stay relative here: the publisher resolves
them by the cluster clock when it proposes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from tickwheel.node.core.metas import HEADERS_OF_REQUEST_MAX, surplus_headers
from tickwheel.node.failure import RequestError, invalid
from tickwheel.node.state.keyed_append import UNTIL_SETTLED
from tickwheel.node.state.names import check_open_topic, check_producer_id
from tickwheel.node.state.producers import Sender
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.unique_keys import DIGEST, DIGEST_BYTES, KEY_BYTES_MAX, digest_of
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.parsing import parsed
from tickwheel.storage.tags import hashes_of, tag_hash, tag_hashes, tag_mask, tag_masks
from tickwheel.wheel.filters import TAG_RULE, TAGS_MAX, are_tags, is_tag

KIND_DUE, KIND_DELAY, KIND_LEVEL = 0, 1, 2
META_BYTES_MAX = 32_768
"""Half of what fits: a unit keeps the size of its meta in 16 bits."""
HEADERS_MAX = META_BYTES_MAX // 4
"""More would take more bytes, and long to serialize before that shows."""
KEY_LENGTH_MAX = 4_096
"""Characters of a message's key, which is hashed byte by byte."""
DUE_MS_LIMIT = 1 << 50
"""Far beyond any allowed time. It keeps sums of times within 64 bits."""
CLIENT_NAME_MAX = 127
JITTER_MS_MAX = 86_400_000
"""A day. A message spread over more time has no real due time."""

KEYED_MAX = 2_000
"""Messages with a unique key in one batch. Each takes some 30 us to apply, fifty times as long as one without, and a
batch is applied in one piece."""
KEYED_BYTES = 512
"""What a unique key counts as, where bytes stand for work."""
SEQUENCE_MAX = (1 << 63) - 1
"""Largest sequence of a producer's batch. The next number still fits an unsigned 64-bit integer."""

JOINED_BYTES_MAX = 16 << 10
"""Payloads that are copied for their checksum: for fewer bytes that costs less than a further call."""

_I8, _U4 = np.dtype("<i8"), np.dtype("<u4")
_HEAD = struct.Struct("<I????")
_MOVE = struct.Struct("<QBq")

WHEN_NAMES = {KIND_DUE: "due_ms", KIND_DELAY: "delay_ms", KIND_LEVEL: "delay_level"}
_WHEN_KINDS = {name: kind for kind, name in WHEN_NAMES.items()}


class UniqueKeyColumns(NamedTuple):
    """Unique keys of a batch, in the order of its messages."""

    digests: NDArray[np.void]
    """DIGEST of unique_keys.py; zeros: none."""
    rules: NDArray[np.uint8]
    """KeyConflict, and UNTIL_SETTLED of keyed_append.py."""
    keyed: int
    """Messages that have one."""
    first: str
    """The first key, for the answer to a single message."""
    replace: bool
    """A rule is KEY_CONFLICT_REPLACE."""


@dataclass(slots=True)
class MetaColumns:
    """What units keep of the metas of messages, in the order of the messages."""

    sizes: NDArray[np.uint32]
    """Bytes of each meta."""
    tag_hashes: NDArray[np.uint32]
    tag_masks: NDArray[np.uint64]
    key_hashes: NDArray[np.uint64]

    @classmethod
    def none(cls, count: int) -> MetaColumns:
        """Of messages without meta."""
        small, large = np.zeros(count, np.uint32), np.zeros(count, np.uint64)
        return cls(small, small.copy(), large, large.copy())


@dataclass(slots=True)
class IncomingBatch:
    """`count` messages to schedule, as columns in the order of the request."""

    producer_id: str
    sequence: int
    count: int
    topics: list[str]
    topic_of: NDArray[np.uint32] | None
    """For each message an index into `topics`; None: all belong to the first."""
    when: NDArray[np.int64]
    """For each message its due time (ms since 1970), delay (ms) or delay level, as `kinds` says."""
    kinds: NDArray[np.uint8] | int
    sizes: NDArray[np.uint32]
    """Bytes of meta and payload together."""
    records: bytes
    metas: MetaColumns | None = None
    """None: no message has a meta."""
    unique_keys: UniqueKeyColumns | None = None
    """None: no message has a unique key, which is in its meta."""
    jitter_ms: NDArray[np.int64] | None = None
    """The master may put each message up to this long after its due time. None: no message."""
    client: str = ""
    """Name that the client gave itself, for quotas."""
    actor: str = ""
    """The authenticated user while rights are on. Topics that the request creates belong to this user."""
    connection: str = ""
    """By which it came: the connections of a node have equal shares of its queue. Empty: by none, as the node's own."""
    checksum: int | None = None
    """`checksum_of` the content. None: the request has no producer id, so no sequence is at stake."""
    owner: str = ""
    """Secret of the producer id's owner; empty: the client gave none."""

    @property
    def sender(self) -> Sender:
        """The producer's part of the request: id, sequence, checksum and owner."""
        return Sender(self.producer_id, self.sequence, self.checksum, self.owner)

    @property
    def bytes(self) -> int:
        """Roughly the memory that the batch takes; with unique keys, what takes as long to apply."""
        keyed = 0 if self.unique_keys is None else KEYED_BYTES * self.unique_keys.keyed
        return len(self.records) + 32 * self.count + keyed

    @property
    def replaces(self) -> bool:
        """Whether a message may take the place of another one."""
        return self.unique_keys is not None and self.unique_keys.replace


def check_sender(producer_id: str, sequence: int, owner: str) -> None:
    """Check a producer's id, sequence and secret; an empty id is allowed. Raises RequestError."""
    if len(owner) > CLIENT_NAME_MAX:
        raise invalid("producer_owner", f"{len(owner)} characters", f"at most {CLIENT_NAME_MAX} characters")
    if producer_id:
        problem = check_producer_id(producer_id)
        if problem:
            raise invalid("producer_id", producer_id, problem)
        if not 1 <= sequence <= SEQUENCE_MAX:
            raise invalid("sequence", sequence, f"1 to {SEQUENCE_MAX} when producer_id is given")


def _client(name: str) -> None:
    if len(name) > CLIENT_NAME_MAX:
        raise invalid("client_name", name, f"at most {CLIENT_NAME_MAX} characters")


def _topic(name: str, field: str) -> str:
    problem = check_open_topic(name)
    if problem:
        raise invalid(field, name, problem)
    return name


def _count(count: int, settings: Settings) -> None:
    if not 1 <= count <= settings.batch_messages_max:
        raise invalid("messages", count, f"1 to {settings.batch_messages_max} messages in a batch")


def _check_sizes(sizes: NDArray[np.uint32], field: str, settings: Settings) -> None:
    if not len(sizes):
        return
    least, most = int(sizes.min()), int(sizes.max())
    if least == 0:
        raise invalid(f"{field}[{int(sizes.argmin())}]", 0, "a payload has at least one byte")
    if most > settings.payload_bytes_max:
        raise invalid(f"{field}[{int(sizes.argmax())}]", most, f"at most {settings.payload_bytes_max} bytes")


def _index_metas(metas: Sequence[common_pb2.MessageMeta], serialized: Sequence[bytes]) -> MetaColumns:
    count = len(metas)
    for row, blob in enumerate(serialized):
        if len(blob) > META_BYTES_MAX:
            raise _too_large(row, len(blob))
    for row, meta in enumerate(metas):
        if len(meta.key) > KEY_LENGTH_MAX:
            raise invalid(f"meta[{row}].key", f"{len(meta.key)} characters", f"at most {KEY_LENGTH_MAX}")
    tags = [tag for meta in metas for tag in meta.tags]
    counts = np.fromiter((len(meta.tags) for meta in metas), np.int64, count)
    if not are_tags(tags) or int(counts.max()) > TAGS_MAX:
        for row, meta in enumerate(metas):
            _check_tags(row, meta.tags)
    columns = MetaColumns.none(count)
    columns.sizes = np.fromiter(map(len, serialized), np.uint32, count)
    if tags and count == 1:  # a tenth of the time
        columns.tag_hashes[0] = tag_hash(tags[0]) if len(tags) == 1 else 0
        columns.tag_masks[0] = tag_mask(tags)
    elif tags:
        hashes, one = hashes_of(tags), counts == 1
        columns.tag_hashes[one] = tag_hashes(hashes)[(np.cumsum(counts) - counts)[one]]
        columns.tag_masks = tag_masks(hashes, counts)
    keyed = [row for row, meta in enumerate(metas) if meta.key]
    if keyed:
        columns.key_hashes[keyed] = np.maximum(hashes_of([metas[row].key for row in keyed]), np.uint64(1))
    return columns


def _too_large(row: int, size: object) -> RequestError:
    return invalid(f"meta[{row}]", size, f"at most {META_BYTES_MAX} bytes of key, tags and headers")


def _check_tags(row: int, tags: Sequence[str]) -> None:
    if len(tags) > TAGS_MAX:
        raise invalid(f"tags[{row}]", len(tags), f"at most {TAGS_MAX} tags of a message")
    if not are_tags(tags):
        wrong = next(tag for tag in tags if not is_tag(tag))
        raise invalid(f"tags[{row}]", wrong, TAG_RULE)


def from_message(request: scheduler_pb2.ScheduleRequest, settings: Settings) -> IncomingBatch:
    """Check the one message of the unary call. Raises RequestError."""
    _client(request.client_name)
    check_sender(request.producer_id, request.sequence, request.producer_owner)
    batch = _plain(request, settings)
    if batch is None:
        batch = _from_messages([request.message], request.producer_id, request.sequence, settings)
    batch.client = request.client_name
    return batch


def _plain(request: scheduler_pb2.ScheduleRequest, settings: Settings) -> IncomingBatch | None:
    """A valid message without meta and jitter. For a single row this takes a tenth of the time that the functions for
    columns need. None: the message has meta or jitter, or is invalid; `_from_messages` then handles or refuses it."""
    row = _row_of(request.message, settings)
    if row is None:
        return None
    batch = batch_of_rows(row.topic, row.kind, [row.when], [row.payload])
    batch.producer_id, batch.sequence = request.producer_id, request.sequence
    if batch.producer_id:
        batch.checksum = checksum_of(batch, batch.sizes, row.payload, [])
    return batch


class Row(NamedTuple):
    """A checked message without meta, jitter and producer id, which may be joined with others (joining.py)."""

    topic: str
    kind: int
    """KIND_DUE or another: what `when` is."""
    when: int
    payload: bytes
    client_name: str = ""
    """As its request states it. `sequence`: and the number of its batch."""
    sequence: int = 0


def _row_of(message: common_pb2.Message, settings: Settings, client_name: str = "", sequence: int = 0) -> Row | None:
    """None: the message has meta or jitter, or is invalid."""
    name, payload, topic = message.WhichOneof("when"), message.payload, message.topic
    if name is None or message.jitter_ms or message.HasField("meta"):
        return None
    if message.on_key_conflict or message.key_until_settled:
        return None
    if not 0 < len(payload) <= settings.payload_bytes_max or check_open_topic(topic):
        return None
    when = getattr(message, name)
    if not 0 <= when <= DUE_MS_LIMIT:
        return None
    return Row(topic, _WHEN_KINDS[name], when, payload, client_name, sequence)


def row_of(request: scheduler_pb2.ScheduleRequest | scheduler_pb2.ScheduleBatch, settings: Settings) -> Row | None:
    """The message of a request that is one `Row`; None: it is not, or it is invalid, and `from_message` or `from_batch`
    reads or refuses it."""
    if request.producer_id or max(len(request.client_name), len(request.producer_owner)) > CLIENT_NAME_MAX:
        return None
    if isinstance(request, scheduler_pb2.ScheduleRequest):
        return _row_of(request.message, settings, request.client_name)
    if request.WhichOneof("content") != "rows":
        return None
    messages = request.rows.messages
    return _row_of(messages[0], settings, request.client_name, request.sequence) if len(messages) == 1 else None


def batch_of_rows(topic: str, kind: int, when: list[int], payloads: list[bytes]) -> IncomingBatch:
    """Rows of one topic and kind as a batch without a producer id."""
    return IncomingBatch(
        producer_id="",
        sequence=0,
        count=len(when),
        topics=[topic],
        topic_of=None,
        when=np.array(when, np.int64),
        kinds=kind,
        sizes=np.array([len(payload) for payload in payloads], np.uint32),
        records=payloads[0] if len(payloads) == 1 else b"".join(payloads),
    )


def from_batch(batch: scheduler_pb2.ScheduleBatch, settings: Settings) -> IncomingBatch:
    """Check the rows or columns of the streaming call. Raises RequestError."""
    _client(batch.client_name)
    check_sender(batch.producer_id, batch.sequence, batch.producer_owner)
    content = batch.WhichOneof("content")
    if content == "rows":
        incoming = _from_messages(batch.rows.messages, batch.producer_id, batch.sequence, settings)
    elif content == "columns":
        incoming = _from_columns(batch, settings)
    else:
        raise invalid("content", "absent", "rows or columns")
    incoming.client = batch.client_name
    return incoming


def _from_messages(
    messages: Sequence[common_pb2.Message], producer_id: str, sequence: int, settings: Settings
) -> IncomingBatch:
    count = len(messages)
    _count(count, settings)
    messages = list(messages)  # protobuf makes an object of each at each look
    topics: dict[str, int] = {}
    topic_numbers = [topics.setdefault(m.topic, len(topics)) for m in messages]
    for name in topics:
        _topic(name, "topic")
    payloads = [m.payload for m in messages]
    payload_sizes = np.fromiter(map(len, payloads), np.uint32, count)
    _check_sizes(payload_sizes, "payload", settings)

    when = np.array([m.due_ms for m in messages], np.int64)
    kinds: NDArray[np.uint8] | int = KIND_DUE
    if not when.all():  # some row has no due_ms, or an explicit 0
        names = [m.WhichOneof("when") or "" for m in messages]
        if "" in names:
            raise invalid(f"when[{names.index('')}]", "absent", "due_ms, delay_ms or delay_level")
        if names.count(names[0]) == count:
            kinds = _WHEN_KINDS[names[0]]
        else:
            kinds = np.fromiter((_WHEN_KINDS[name] for name in names), np.uint8, count)
        when = np.fromiter((getattr(m, name) for m, name in zip(messages, names, strict=True)), np.int64, count)
    _check_when(when, kinds)

    windows = [m.jitter_ms for m in messages]
    jitter = _jitter(np.array(windows, np.int64)) if any(windows) else None
    _check_rules(messages)
    columns: MetaColumns | None = None
    unique_keys: UniqueKeyColumns | None = None
    serialized: list[bytes] = []
    if any(m.HasField("meta") for m in messages):
        metas = [m.meta for m in messages]
        for row, m in enumerate(metas):
            if len(m.headers) > HEADERS_MAX:
                raise _too_large(row, f"{len(m.headers)} headers")
        serialized = [m.SerializeToString(deterministic=True) for m in metas]
        columns = _index_metas(metas, serialized)
        unique_keys = _unique_keys(metas, [_rule(m) for m in messages])
        records = b"".join(part for pair in zip(serialized, payloads, strict=True) for part in pair)
        sizes = payload_sizes + columns.sizes
    else:
        records = b"".join(payloads)
        sizes = payload_sizes
    batch = IncomingBatch(
        producer_id=producer_id,
        sequence=sequence,
        count=count,
        topics=list(topics),
        topic_of=np.array(topic_numbers, np.uint32) if len(topics) > 1 else None,
        when=when,
        kinds=kinds,
        sizes=sizes,
        records=records,
        metas=columns,
        unique_keys=unique_keys,
        jitter_ms=jitter,
    )
    if producer_id:
        plain = b"".join(payloads) if columns else records
        batch.checksum = checksum_of(batch, payload_sizes, plain, serialized)
    return batch


def _rule(given: common_pb2.Message | scheduler_pb2.ColumnBatch) -> int:
    return given.on_key_conflict | (UNTIL_SETTLED if given.key_until_settled else 0)


def _check_rules(messages: Sequence[common_pb2.Message]) -> None:
    for row, message in enumerate(messages):
        if (message.on_key_conflict or message.key_until_settled) and not message.meta.unique_key:
            field = "on_key_conflict" if message.on_key_conflict else "key_until_settled"
            raise invalid(f"{field}[{row}]", getattr(message, field), "unset without meta.unique_key")


def check_unique_key(field: str, key: str) -> None:
    """Check a unique key that is not empty. Raises RequestError."""
    size = len(key.encode())
    if size > KEY_BYTES_MAX:
        raise invalid(field, f"{size} bytes", f"1 to {KEY_BYTES_MAX} bytes")


def _unique_keys(metas: Sequence[common_pb2.MessageMeta], rules: list[int]) -> UniqueKeyColumns | None:
    """The unique keys of messages with these metas and rules; None: there is none. Raises RequestError."""
    keys = [meta.unique_key for meta in metas]
    if not any(keys):
        return None
    for row, key in enumerate(keys):
        check_unique_key(f"meta[{row}].unique_key", key)
    count = sum(map(bool, keys))
    if count > KEYED_MAX:
        raise invalid("unique_keys", count, f"at most {KEYED_MAX} messages with a unique key in a batch")
    digests = np.frombuffer(b"".join(digest_of(key) if key else bytes(DIGEST_BYTES) for key in keys), DIGEST)
    found = np.array([rule if key else 0 for key, rule in zip(keys, rules, strict=True)], np.uint8)
    replace = bool(((found & ~np.uint8(UNTIL_SETTLED)) == common_pb2.KEY_CONFLICT_REPLACE).any())
    return UniqueKeyColumns(digests, found, count, next(filter(None, keys)), replace)


def _jitter(window_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Checked windows. Raises RequestError."""
    most = int(window_ms.max())
    if most > JITTER_MS_MAX:
        raise invalid(f"jitter_ms[{int(window_ms.argmax())}]", most, f"at most {JITTER_MS_MAX}")
    return window_ms


def beyond_longest_delay(place: str, when: int, kind: int, due_ms: int, limit_ms: int, now_ms: int) -> RequestError:
    """The refusal of a due time beyond the longest delay, in the terms of the request: a delay is told as a delay.
    `place`: which row of the request it is."""
    if kind == KIND_DELAY:
        return invalid(f"delay_ms{place}", when, f"at most {limit_ms}")
    return invalid(f"due_ms{place}", due_ms, f"at most {limit_ms} ms ahead of now ({now_ms})")


def _check_when(when: NDArray[np.int64], kinds: NDArray[np.uint8] | int) -> None:
    if int(when.max()) > DUE_MS_LIMIT:
        raise invalid(f"due_ms[{int(when.argmax())}]", int(when.max()), "not a time in milliseconds since 1970")
    least = int(when.min())
    if least >= 0:
        return
    relative = (when < 0) & (np.asarray(kinds) != KIND_DUE)
    if relative.any():
        row = int(np.flatnonzero(relative)[0])
        raise invalid(f"delay_ms[{row}]", int(when[row]), "0 or more")
    if least < -DUE_MS_LIMIT:
        raise invalid(f"due_ms[{int(when.argmin())}]", least, "not a time in milliseconds since 1970")


def _column(data: bytes, name: str, dtype: str, count: int | None) -> NDArray[np.int64]:
    width = np.dtype(dtype).itemsize
    if len(data) % width or (count is not None and len(data) != width * count):
        wanted = f"{count} elements of {width} bytes" if count is not None else f"a multiple of {width} bytes"
        raise invalid(name, f"{len(data)} bytes", wanted)
    return np.frombuffer(data, dtype)


def _from_columns(batch: scheduler_pb2.ScheduleBatch, settings: Settings) -> IncomingBatch:
    columns = batch.columns
    _topic(columns.topic, "topic")
    given = [(KIND_DUE, "due_ms", columns.due_ms), (KIND_DELAY, "delay_ms", columns.delay_ms)]
    given.append((KIND_LEVEL, "delay_levels", columns.delay_levels))
    filled = [item for item in given if item[2]]
    if len(filled) != 1:
        raise invalid("due_ms", f"{len(columns.due_ms)} bytes", "exactly one of due_ms, delay_ms and delay_levels")
    kind, name, data = filled[0]
    when = _column(data, name, "<u4" if kind == KIND_LEVEL else "<i8", None).astype(np.int64, copy=False)
    count = len(when)
    _count(count, settings)
    _check_when(when, kind)
    payload_sizes = _column(columns.payload_sizes, "payload_sizes", "<u4", count).view(np.uint32)
    _check_sizes(payload_sizes, "payload_sizes", settings)
    payloads = columns.payloads
    total = int(payload_sizes.sum(dtype=np.int64))
    if total != len(payloads):
        raise invalid("payloads", f"{len(payloads)} bytes", f"{total} bytes, the sum of payload_sizes")
    incoming = IncomingBatch(
        producer_id=batch.producer_id,
        sequence=batch.sequence,
        count=count,
        topics=[columns.topic],
        topic_of=None,
        when=when,
        kinds=kind,
        sizes=payload_sizes,
        records=payloads,
        jitter_ms=_jitter(np.full(count, columns.jitter_ms, np.int64)) if columns.jitter_ms else None,
    )
    metas: Sequence[common_pb2.MessageMeta] = ()
    if columns.meta_sizes:
        metas = _add_metas(incoming, columns, count)
        incoming.unique_keys = _unique_keys(metas, [_rule(columns)] * count)
    elif columns.metas:
        raise invalid("metas", f"{len(columns.metas)} bytes", "empty when meta_sizes is empty")
    if batch.producer_id:
        canonical = [meta.SerializeToString(deterministic=True) for meta in metas]
        incoming.checksum = checksum_of(incoming, payload_sizes, payloads, canonical)
    return incoming


def checksum_of(batch: IncomingBatch, payload_sizes: NDArray[np.uint32], payloads: bytes, metas: list[bytes]) -> int:
    """CRC32C of a request's content as the client sent it: topics, times (a delay as a delay), jitter, metas, payloads,
    rules of unique keys.

    The same messages have the same checksum as rows, as columns or in a unary call, at any node and time. `metas`: each
    message's meta, serialized deterministically, or an empty list."""
    one_kind = isinstance(batch.kinds, int)
    with_metas, with_jitter = any(metas), batch.jitter_ms is not None
    head = _HEAD.pack(batch.count, one_kind, with_metas, with_jitter, batch.topic_of is not None)
    parts = [
        head + "\0".join(batch.topics).encode() + b"\0",
        bytes((batch.kinds,)) if isinstance(batch.kinds, int) else batch.kinds.astype(np.uint8).tobytes(),
        batch.when.astype(_I8, copy=False).tobytes(),
        payload_sizes.astype(_U4, copy=False).tobytes(),
        payloads,
    ]
    if batch.topic_of is not None:
        parts.append(batch.topic_of.astype(_U4, copy=False).tobytes())
    if batch.jitter_ms is not None:
        parts.append(batch.jitter_ms.astype(_I8, copy=False).tobytes())
    if with_metas:
        parts += [np.fromiter(map(len, metas), "<u4", len(metas)).tobytes(), *metas]
    if batch.unique_keys is not None:
        parts.append(batch.unique_keys.rules.tobytes())
    if len(payloads) <= JOINED_BYTES_MAX:
        return int(google_crc32c.value(b"".join(parts)))
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return crc


def reschedule_checksum(number: int, kind: int, when: int, key: tuple[str, str] | None = None) -> int:
    """CRC32C of a reschedule. Its input has count 0, so it is never the input of a batch. `key`: topic and unique key
    instead of the number, which is 0."""
    content = _HEAD.pack(0, True, False, False, False) + _MOVE.pack(number, kind, when)
    return int(google_crc32c.value(content + _named(key)))


def cancel_checksum(key: tuple[str, str]) -> int:
    """CRC32C of a cancel by topic and unique key. No other request has the same input."""
    return int(google_crc32c.value(_HEAD.pack(0, False, False, False, False) + _named(key)))


def _named(key: tuple[str, str] | None) -> bytes:
    return b"" if key is None else "\0".join(key).encode()


def _add_metas(incoming: IncomingBatch, columns: scheduler_pb2.ColumnBatch, count: int) -> list[common_pb2.MessageMeta]:
    """Put each meta before its payload in the batch's records; returns the parsed metas. Raises RequestError."""
    meta_sizes = _column(columns.meta_sizes, "meta_sizes", "<u4", count).view(np.uint32)
    ends = np.cumsum(meta_sizes, dtype=np.int64).tolist()
    if int(meta_sizes.max()) > META_BYTES_MAX:
        row = int(meta_sizes.argmax())
        raise _too_large(row, int(meta_sizes[row]))
    content = columns.metas  # each look at the field copies it
    if ends[-1] != len(content):
        raise invalid("metas", f"{len(content)} bytes", f"{ends[-1]} bytes, the sum of meta_sizes")
    headers = surplus_headers(content) if len(content) > 2 * HEADERS_OF_REQUEST_MAX else 0
    if headers:
        raise invalid("headers", headers, f"at most {HEADERS_OF_REQUEST_MAX} in all metas")
    starts = [0, *ends[:-1]]
    serialized = [content[a:b] for a, b in zip(starts, ends, strict=True)]
    metas: list[common_pb2.MessageMeta] = []
    for row, blob in enumerate(serialized):
        try:
            meta = parsed(common_pb2.MessageMeta, blob)
        except DecodeError as error:
            raise invalid(f"metas[{row}]", blob[:16].hex(), "a serialized MessageMeta") from error
        if len(UnknownFieldSet(meta)):
            raise invalid(f"metas[{row}]", blob[:16].hex(), "a MessageMeta without fields of another version")
        metas.append(meta)
    incoming.metas = _index_metas(metas, serialized)
    payload_ends = np.cumsum(incoming.sizes, dtype=np.int64).tolist()
    payload_starts = [0, *payload_ends[:-1]]
    view = memoryview(incoming.records)
    parts: list[bytes | memoryview] = []
    for blob, a, b in zip(serialized, payload_starts, payload_ends, strict=True):
        parts += (blob, view[a:b])
    incoming.records = b"".join(parts)
    incoming.sizes = incoming.sizes + incoming.metas.sizes
    return metas
