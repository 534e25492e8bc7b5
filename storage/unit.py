"""The unit of a delay index: 96 bytes with a message's place, due time and topic.

Owns the layout (docs/FORMATS.md), on disk and in memory, little-endian. A batch of units is a numpy array of `UNIT`.
All writers of chunks use it: the wheel's merges, and builders of bundles outside.
"""

from __future__ import annotations

import numpy as np

HOUR_MS = 3_600_000
NO_INDEX = 0xFFFF_FFFF
"""`previous_index` of the first unit of a tick in its segment."""

UNIT = np.dtype(
    [
        ("offset", "<u8"),  # of the record (meta and payload) in the hour's delay log, given at apply
        ("due_ms", "<i8"),  # that counts: the requested one, or the cursor's at apply if that was later
        ("due_requested_ms", "<i8"),
        ("scheduled_ms", "<i8"),  # stamp of the command that brought it; of a retry: when it was due first
        ("tag_mask", "<u8"),
        ("key_hash", "<u8"),
        ("size", "<u4"),  # of the record
        ("index", "<u4"),  # global index
        ("previous_index", "<u4"),  # previous unit of the same tick, filled at merge; NO_INDEX: none
        ("local_index", "<u4"),  # units of that tick before it, filled at merge
        ("run_index", "<u4"),  # place in its run: contiguous units of one tick, filled at merge
        ("topic_id", "<u4"),
        ("tag_hash", "<u4"),  # of its only tag; 0: none, or several (first version: of the first of several)
        ("target_group", "<u4"),  # 0: all groups; else the one group a retry goes to
        ("origin_hour", "<u4"),  # id it was first scheduled under; 0, 0: its own
        ("origin_index", "<u4"),
        ("crc", "<u4"),  # checksum of the other 92 bytes (segment.row_checksums), filled at merge
        ("meta_size", "<u2"),  # of the MessageMeta in front of the payload
        ("attempts", "u1"),
        ("flags", "u1"),
    ]
)
UNIT_BYTES = 96
ONE_TAG = 1
"""In `flags`: the message has one tag only, and `tag_hash` is its hash."""
LACKING = 2
"""In `flags`: this node copied the message from a record that it could not read, so its own record has the right size
and no content. Not part of the state: other nodes lack other records, or none."""
REPLAYED = 4
"""In `flags`: a replayed dead letter, or a retry of one. It holds no unique key."""
assert UNIT.itemsize == UNIT_BYTES
