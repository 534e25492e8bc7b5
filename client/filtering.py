"""The exact check of a group's filter: nodes go by hashes of tags, which collide; here the tags themselves are read.

Pure. A batch almost always passes as it came; what does not belong to the group is to be settled as skipped.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tickwheel.client.delivery import Columns
from tickwheel.client.messages import read_meta

NONE: NDArray[np.int64] = np.zeros(0, np.int64)


@lru_cache(maxsize=256)
def tags_of(filter: str) -> frozenset[str]:
    """The tags of a normalized expression; a message needs any one of them."""
    return frozenset(filter.split(" || "))


def mismatches(filter: str, columns: Columns) -> NDArray[np.int64]:
    """The rows of a batch whose messages have none of the filter's tags. Empty filter: there are none. If nobody can
    read the tags of a message, the nodes' hashes decide alone."""
    if not filter:
        return NONE
    wanted, rows, start = tags_of(filter), [], 0
    for row, (size, meta_size) in enumerate(zip(columns.sizes.tolist(), columns.meta_sizes.tolist(), strict=True)):
        meta = read_meta(columns.records[start : start + meta_size])
        if meta is not None and wanted.isdisjoint(meta.tags):
            rows.append(row)
        start += size
    return np.array(rows, np.int64)
