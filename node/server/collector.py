"""When Python's collector of reference cycles runs: it stops every thread of the process while it does.

It finds almost nothing: what a message leaves behind is freed by reference counts. What a collection takes goes with
the objects that it walks over, and a master that is held up for its lease of 300 ms must give up. So collections are
frequent and small, and those of all objects, a tenth of a second with 10,000 topics, are left to nodes that do not
lead.
"""

from __future__ import annotations

import gc

YOUNG_ALLOCATIONS = 5_000
"""Container objects allocated between two collections of the youngest generation: a few milliseconds;"""
YOUNG_COLLECTIONS = 5
"""so many of these between two collections of the middle one: ten milliseconds."""
MIDDLE_COLLECTIONS = 800
"""So many of those before a node that does not lead collects all: 20 million objects, some minutes at 5,000 messages a
second."""
MIDDLE_COLLECTIONS_MAX = 20 * MIDDLE_COLLECTIONS
"""Before a master does: it may lead for months."""


def set_up() -> None:
    """Call once, when all modules are loaded: they stay for good, and need not be walked over while messages wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_ALLOCATIONS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS_MAX)


def look() -> bool:
    """Collect all, if it is time; for a node that follows a master. Returns whether it did."""
    due = gc.get_count()[2] >= MIDDLE_COLLECTIONS
    if due:
        gc.collect()
    return due
