"""Keys, tags and headers as they lie in front of a payload, read for whoever asks about a message.

What clients schedule is checked when it comes; but bundles are built outside, and logs hold what earlier versions took.
So a record may have a meta that nobody can decode, or one that nests so deep that no client could decode an answer with
it: such a message is one without a meta, and what is not known of one is left out.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from tickwheel.proto.common_pb2 import MessageMeta

ANSWER_BYTES_MAX = 3 << 20
"""Of records in one answer, unless a single one is larger: below the 4 MiB that gRPC libraries take by default. A
record of the largest payload is still below the 5 MiB that `limits.request_bytes_max` is at the least."""

FIELD_BYTES = 8
"""What a message in a repeated field takes beside its own bytes, at the most."""


def meta_of(data: bytes) -> MessageMeta:
    """The meta of a record; an empty one if it cannot be decoded."""
    try:
        meta = MessageMeta.FromString(data)
    except DecodeError:
        return MessageMeta()
    meta.DiscardUnknownFields()
    return meta
