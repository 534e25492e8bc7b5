"""Keys, tags and headers, which lie in front of a payload, decoded for requests about a message.

Metas of schedule requests are checked on arrival. But bundles are built outside, and logs hold metas that earlier
versions accepted. So a record may have a meta that cannot be decoded, or one nested so deep that no client could decode
an answer with it. Such a message counts as one without a meta. Unknown fields of a meta are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from tickwheel.proto.common_pb2 import MessageMeta

ANSWER_BYTES_MAX = 3 << 20
"""Bytes of records in one answer, unless a single one is larger: below the 4 MiB that gRPC libraries accept by default.
A record of the largest payload is still below 5 MiB, the least value of `limits.request_bytes_max`."""

DECODED_BYTES_MAX = 256 << 10
"""Bytes of messages and metas that the core's thread decodes for one answer, unless a single one is larger: some 10 ms
if they are nothing but headers. The rest comes with the next page."""

HEADERS_OF_REQUEST_MAX = 200_000
"""Headers of one request: to decode as many takes a fifth of a second."""

FIELD_BYTES = 8
"""Upper bound of what a message in a repeated field takes beside its own bytes."""


LIST_BYTES_MAX = 1 << 20
"""Bytes of a list in an answer that also has other things in it. What does not fit is counted or asked for later."""

M = TypeVar("M")


def fitting(items: Sequence[M], size: Callable[[M], int], bytes_max: int = LIST_BYTES_MAX) -> Sequence[M]:
    """The first items whose sizes together are at most `bytes_max`; the first one in any case."""
    left = bytes_max
    for number, item in enumerate(items):
        left -= size(item) + FIELD_BYTES
        if left < 0 and number:
            return items[:number]
    return items


def meta_of(data: bytes) -> MessageMeta:
    """The meta of a record; an empty one if it cannot be decoded."""
    try:
        meta = MessageMeta.FromString(data)
    except DecodeError:
        return MessageMeta()
    meta.DiscardUnknownFields()
    return meta


def headers_at_most(metas: Iterable[bytes]) -> int:
    """At most how many headers serialized metas have: each begins with one of two bytes, which texts hardly have."""
    return sum(meta.count(b"\x1a") + meta.count(b"\x9a") for meta in metas)
