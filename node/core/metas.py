"""Keys, tags and headers, which lie in front of a payload, decoded for requests about a message.

Metas of schedule requests are checked on arrival. But bundles are built outside, and logs hold metas that earlier
versions accepted. So a record may have a meta that cannot be decoded, or one nested so deep that no client could decode
an answer with it. Such a message counts as one without a meta. Unknown fields of a meta are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.proto.parsing import parsed

ANSWER_BYTES_MAX = 3 << 20
"""Bytes of records in one answer, unless a single one is larger: below the 4 MiB that gRPC libraries accept by default.
A record of the largest payload is still below 5 MiB, the least value of `limits.request_bytes_max`."""

DECODED_BYTES_MAX = 256 << 10
"""Bytes of messages and metas that the core's thread decodes for one answer, unless a single one is larger: some 10 ms
if they are nothing but headers. The rest comes with the next page."""

HEADERS_OF_REQUEST_MAX = 200_000
"""Headers of one request: decoding them takes a fifth of a second."""

COUNTED_MAX = 5 * HEADERS_OF_REQUEST_MAX
"""Possible headers are counted exactly up to here, which takes 30 ms. A header of two texts of 26 characters looks like
four."""

FIELD_BYTES = 8
"""Most bytes that a message in a repeated field takes beside its own."""


LIST_BYTES_MAX = 1 << 20
"""Bytes of a list in an answer with other fields. Elements that do not fit are counted, or asked for later."""

M = TypeVar("M")


def fitting(items: Sequence[M], size: Callable[[M], int], bytes_max: int = LIST_BYTES_MAX) -> Sequence[M]:
    """The first items whose sizes together are at most `bytes_max`; the first one in any case."""
    left = bytes_max
    for number, item in enumerate(items):
        left -= size(item) + FIELD_BYTES
        if left < 0 and number:
            return items[:number]
    return items


def count_fitting(sizes: NDArray[Any], bytes_max: int) -> int:
    """How many of the first items, of these sizes, together are at most `bytes_max`; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), bytes_max, side="right")))


def meta_of(data: bytes) -> MessageMeta:
    """The meta of a record; an empty one if it cannot be decoded."""
    try:
        meta = parsed(MessageMeta, data)
    except DecodeError:
        return MessageMeta()
    meta.DiscardUnknownFields()
    return meta


def headers_at_most(data: bytes) -> int:
    """At most how many headers there are in serialized metas, or in what holds them: each begins with one of two bytes.
    Lengths and texts have these bytes too."""
    return data.count(b"\x1a") + data.count(b"\x9a")


def surplus_headers(metas: bytes) -> int:
    """How many headers there are in serialized metas, one behind the other, if that is more than
    HEADERS_OF_REQUEST_MAX; else 0. Decodes none of them. Beyond COUNTED_MAX, and if the metas cannot be decoded, it may
    be fewer than it says."""
    count = headers_at_most(metas)
    if HEADERS_OF_REQUEST_MAX < count <= COUNTED_MAX:
        try:
            count = len(parsed(_OUTLINE, metas).headers)
        except DecodeError:
            return count
    return count if count > HEADERS_OF_REQUEST_MAX else 0


def _outline() -> Any:
    """A message type whose headers are those of a meta on the wire, as bytes."""
    file = FileDescriptorProto(name="tickwheel/outline_of_meta.proto", package="tickwheel.outline", syntax="proto3")
    field = MessageMeta.DESCRIPTOR.fields_by_name["headers"]
    file.message_type.add(name="Meta").field.add(
        name=field.name,
        number=field.number,
        label=FieldDescriptor.LABEL_REPEATED,
        type=FieldDescriptor.TYPE_BYTES,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tickwheel.outline.Meta"))


_OUTLINE = _outline()
