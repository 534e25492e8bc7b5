"""Hashes of keys and tags for a whole column: what the nodes index, as docs/FORMATS.md and the nodes define it.

FNV-1a of 64 bits over the UTF-8 bytes. A tag's code is the upper half folded into 32 bits, its mask has three bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tickwheel.storage import tags


def hash64(column: pa.Array) -> NDArray[np.uint64]:
    """FNV-1a of each value; null and empty give that of no bytes."""
    column = pc.fill_null(column.cast(pa.binary()), b"")
    count = len(column)
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + count + 1].astype(np.int64)
    data = column.buffers()[2]
    return tags.hash64_many(np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8), offsets)


def key_hashes(column: pa.Array) -> NDArray[np.uint64]:
    """Code of each key; 0 for null and empty."""
    hashes = hash64(column)
    hashes[hashes == 0] = 1
    hashes[pc.fill_null(pc.equal(pc.binary_length(column), 0), True).to_numpy(zero_copy_only=False)] = 0
    return hashes


def tag_hashes(column: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.bool_]]:
    """For each list of tags: (code of the only tag, 0 for none or several; mask of all; whether there is one only)."""
    count = len(column)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    coded = pc.list_flatten(column).dictionary_encode()
    distinct = hash64(coded.dictionary.cast(pa.string()))
    codes: NDArray[Any] = pc.fill_null(coded.indices, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    one = lengths == 1
    hashes = np.zeros(count, np.uint32)
    hashes[one] = tags.tag_hashes(distinct)[codes[(np.cumsum(lengths) - lengths)[one]]]
    masks = tags.tag_masks(distinct[codes], lengths)
    return hashes, masks, one
