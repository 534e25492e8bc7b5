"""Requests of one plain message, read from their bytes without protobuf.

Most requests of `Schedule`, and most batches of a stream of single messages, hold a topic, a payload, a time, and
perhaps the sender's name and a sequence. As objects of protobuf they cost a node more than all that follows until the
log has them. `plain_request` takes such bytes if they have exactly these fields, each once, in the order of their
numbers, as every known library writes them. Whatever else there may be it leaves to the door and to intake.py, which
read it as before: it refuses nothing. Pure.
"""

from __future__ import annotations

import struct

from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT, KIND_DELAY, KIND_DUE, KIND_LEVEL, WHEN_NAMES, Row
from tickwheel.node.state.names import check_open_topic
from tickwheel.proto import common_pb2, scheduler_pb2

NAMES_KEPT = 1_024
"""Names of topics that were found valid, and names of senders."""
SHORT = 0x7F
"""The most that one byte holds of a number on the wire. Names that are longer are not read here."""
_SHIFTS = range(0, 56, 7)
"""Of the bytes of a number. Longer ones are left to protobuf: they may be negative, have surplus bits, or no end."""

_MESSAGE, _TOPIC, _PAYLOAD, _SEQUENCE, _ROWS = b"\x0a\x0a\x12\x10\x1a"
"""ScheduleRequest.message, and alike RowBatch.messages; Message.topic, .payload; ScheduleBatch.sequence, .rows: each as
its number and kind stand on the wire."""
_CLIENT_NAME = b"\xa2\x01"
"""ScheduleRequest.client_name, and alike of a ScheduleBatch."""
_KINDS = {0x20: KIND_DUE, 0x28: KIND_DELAY, 0x30: KIND_LEVEL}
"""Message.due_ms, .delay_ms, .delay_level."""
_WHEN_MAX = {KIND_DUE: DUE_MS_LIMIT, KIND_DELAY: DUE_MS_LIMIT, KIND_LEVEL: (1 << 31) - 1}
"""Protobuf cuts a level to 32 bits."""
_six_bytes = struct.Struct("6B").unpack_from
_NO_BYTES = (0, 0, 0, 0, 0, 0)
_SIX_GO_ON = sum(0x80 << 7 * place for place in range(5))
"""The bits of six bytes of a number that say that it goes on."""

_topics: dict[bytes, str] = {}
_names: dict[bytes, str] = {}


class _OtherwiseError(Exception):
    """The bytes are not plain."""


def plain_request(data: bytes) -> Row | None:
    """The bytes of a ScheduleRequest, if they are plain and valid for any settings; None: read them with protobuf."""
    try:
        return _request(data, 0, 0)
    except (IndexError, struct.error, _OtherwiseError):
        return None


def plain_batch(data: bytes) -> Row | None:
    """As `plain_request`, of a ScheduleBatch."""
    try:
        at, sequence = 0, 0
        if data[0] == _SEQUENCE:
            sequence, at = _number(data, 1)
        if data[at] != _ROWS:
            return None
        size, at = data[at + 1], at + 2
        if size > SHORT:
            size, at = _longer(size, data, at)
        return _request(data, at, at + size, sequence)
    except (IndexError, struct.error, _OtherwiseError):
        return None


def _request(data: bytes, at: int, rows_end: int, sequence: int = 0) -> Row | None:
    """A request whose message, or row, begins at a place. `rows_end`: where its only row must end; 0: it is no batch.
    Raises IndexError where something ends too early."""
    if data[at] != _MESSAGE:
        return None
    size, at = data[at + 1], at + 2
    if size > SHORT:
        size, at = _longer(size, data, at)
    end = at + size
    if data[at] != _TOPIC or (rows_end and rows_end != end):
        return None
    behind = at + 2 + data[at + 1]  # a name whose size takes two bytes is too long, or runs into its own size
    topic = _topics.get(data[at + 2 : behind]) or _topic(data[at + 2 : behind])
    if data[behind] != _PAYLOAD:
        return None
    size, at = data[behind + 1], behind + 2
    if size > SHORT:
        size, at = _longer(size, data, at)
    behind = at + size
    payload, kind = data[at:behind], _KINDS.get(data[behind])
    a, b, c, d, e, f = _six_bytes(data, behind + 1) if behind + 7 <= end else _NO_BYTES
    if f <= SHORT < a and b > SHORT and c > SHORT and d > SHORT and e > SHORT:  # the times of our days
        when, at = a + (b << 7) + (c << 14) + (d << 21) + (e << 28) + (f << 35) - _SIX_GO_ON, behind + 7
    else:
        when, at = _number(data, behind + 1)
    if at != end or kind is None or not payload or when > _WHEN_MAX[kind]:
        return None
    name = "" if at == len(data) else _client_name(data, at)
    return Row(topic, kind, when, payload, name, sequence)


def _longer(first: int, data: bytes, at: int) -> tuple[int, int]:
    """A size of two bytes or more: the first is known, the second stands at a place. And the place behind it."""
    second = data[at]
    return (first - 0x80 + (second << 7), at + 1) if second <= SHORT else _number(data, at - 1)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number and the place behind it."""
    number = 0
    for shift in _SHIFTS:
        byte = data[at]
        at += 1
        if byte <= SHORT:
            return number | byte << shift, at
        number |= (byte & SHORT) << shift
    raise _OtherwiseError


def _topic(name: bytes) -> str:
    if len(name) > SHORT or not name.isascii():
        raise _OtherwiseError
    topic = name.decode()
    if check_open_topic(topic):
        raise _OtherwiseError
    _keep(_topics, name, topic)
    return topic


def _client_name(data: bytes, at: int) -> str:
    """The name of the sender, if that is all that is left."""
    if data[at : at + 2] != _CLIENT_NAME or not data[at + 2] == len(data) - at - 3 <= SHORT:
        raise _OtherwiseError
    given = data[at + 3 :]
    name = _names.get(given)
    if name is None:
        if not given.isascii():
            raise _OtherwiseError
        name = given.decode()
        _keep(_names, given, name)
    return name


def _keep(names: dict[bytes, str], given: bytes, name: str) -> None:
    if len(names) >= NAMES_KEPT:
        names.clear()
    names[given] = name


def request_of(row: Row) -> scheduler_pb2.ScheduleRequest:
    """The request that `plain_request` has read."""
    return scheduler_pb2.ScheduleRequest(message=_message(row), client_name=row.client_name)


def batch_of(row: Row) -> scheduler_pb2.ScheduleBatch:
    """The batch that `plain_batch` has read."""
    rows = scheduler_pb2.RowBatch(messages=[_message(row)])
    return scheduler_pb2.ScheduleBatch(rows=rows, client_name=row.client_name, sequence=row.sequence)


def _message(row: Row) -> common_pb2.Message:
    message = common_pb2.Message(topic=row.topic, payload=row.payload)
    setattr(message, WHEN_NAMES[row.kind], row.when)
    return message
