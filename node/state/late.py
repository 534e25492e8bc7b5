"""Finds late settlements: acknowledgements of a delivery that was nacked before or whose lease expired.

Such a delivery is settled at its position, but not by acknowledgement: its message comes again, has come again, or is
dead. The late acknowledgement must be answered as stale, and not as done. The delivery shows it: a retry of the message
waits in the wheel or was dispatched behind the delivery, or there is a dead letter. Only the answer depends on this.

A settlement may name thousands of topics, so what a search costs must not grow with their number: what waits and what
is dead is read once for a command, and the positions of retries, which are a topic's own, up to a limit. What lies
beyond is answered as a repeat.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.groups import Group
from tickwheel.node.state.id_search import find_ids
from tickwheel.node.state.subscription import Found, Subscription
from tickwheel.node.state.window import Places
from tickwheel.wheel.units import CursorKey, Ids

LOOK_BACK_ROWS = 16_384
"""Rows of each kind, the newest, that are searched."""
TARGETS_MAX = 8 * LOOK_BACK_ROWS
"""Positions of retries that are searched for one command: about 2 ms."""
GROUPS_KEPT = 8
"""Groups whose newest dead letters are kept in memory: 256 KB each."""


class _Column:
    """Ids to search in. A single id is compared with all of them; for more they are sorted, once."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._sorted: Ids | None = None

    def has(self, wanted: Ids) -> NDArray[np.bool_]:
        """Which of `wanted`, in any order, are among the ids."""
        if self._sorted is None:
            if len(wanted) == 1:
                return np.array([bool((self._ids == wanted[0]).any())])
            self._sorted = np.sort(self._ids)
        if not len(self._sorted):
            return np.zeros(len(wanted), np.bool_)
        at = np.minimum(self._sorted.searchsorted(wanted), len(self._sorted) - 1)
        found: NDArray[np.bool_] = self._sorted[at] == wanted
        return found


class LateSettlements:
    """What a node keeps between commands: the newest dead letters of the groups that were searched last."""

    def __init__(self) -> None:
        self._dead: OrderedDict[int, tuple[tuple[int, int, int], _Column]] = OrderedDict()

    def dead(self, group: Group) -> _Column:
        """Ids of the messages of a group's newest dead letters."""
        version = group.dead.version
        kept = self._dead.get(group.group_id)
        if kept is None or kept[0] != version:
            kept = (version, _Column(group.dead.newest_origins(LOOK_BACK_ROWS)))
            self._dead[group.group_id] = kept
            if len(self._dead) > GROUPS_KEPT:
                self._dead.popitem(last=False)
        self._dead.move_to_end(group.group_id)
        return kept[1]


class LateSearch:
    """The search for one command."""

    def __init__(self, kept: LateSettlements, cursor: CursorKey) -> None:
        self._kept = kept
        self._cursor = cursor
        self._waiting: dict[int, _Column] = {}
        self._targets_left = TARGETS_MAX

    def forget(self, group: Group) -> None:
        """Messages of the group began to wait."""
        self._waiting.pop(group.group_id, None)

    def count(
        self,
        group: Group,
        subscription: Subscription,
        ids: Ids,
        found: Found,
        *,
        dying: bool = False,
    ) -> int:
        """How many rows of a batch name deliveries whose messages come again or are dead; each of them is settled
        already.

        `found`: result of the subscription's `find` for the batch. `dying`: the batch declares messages dead, so for
        messages that are dead it is right.
        """
        if not (subscription.has_targets or group.waiting.used or group.dead.count):
            return 0
        places, names = subscription.settled_before(ids, found)
        if not len(places):
            return 0
        late = self._comes_again(subscription, names, places)
        if group.waiting.used:
            late |= self._waiting_of(group).has(names)
        if group.dead.count and not dying:
            late |= self._kept.dead(group).has(names)
        return int(np.count_nonzero(late))

    def _waiting_of(self, group: Group) -> _Column:
        column = self._waiting.get(group.group_id)
        if column is None:
            column = _Column(group.waiting.newest(LOOK_BACK_ROWS, self._cursor))
            self._waiting[group.group_id] = column
        return column

    def _comes_again(self, subscription: Subscription, names: Ids, places: Places) -> NDArray[np.bool_]:
        """Which messages were dispatched once more behind the place of their delivery."""
        rows = subscription.newest_targets(min(LOOK_BACK_ROWS, self._targets_left))
        self._targets_left -= len(rows)
        if not len(rows):
            return np.zeros(len(names), np.bool_)
        wanted, of_name = np.unique(names, return_inverse=True)
        at, of = find_ids(rows["origin"], wanted)
        own = rows["group"][at] == subscription.group_id
        at, of = at[own], of[own]
        last = np.full(len(wanted), -1, np.int64)
        np.maximum.at(last, of, rows["position"][at].astype(np.int64))
        behind: NDArray[np.bool_] = last[of_name] > places
        return behind
