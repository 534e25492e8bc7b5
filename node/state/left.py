"""Settlements of deliveries that have left their positions: an acknowledgement behind a nack or an expired lease.

Such a delivery is settled at its position, but not by acknowledgement: its message comes again, has come again, or is
dead. Who acknowledges it late must hear that it is stale, and not that it is done.

What tells: a retry of the message that waits in the wheel, one that was dispatched behind the delivery, or a dead
letter. Of each the newest LOOK_BACK_ROWS are looked at; an acknowledgement that is later than that many is answered as
if it were a repeat. Nothing is decided by it but the answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.groups import Group
from tickwheel.node.state.subscription import Subscription
from tickwheel.node.state.window import Places
from tickwheel.wheel.units import CursorKey, Ids

LOOK_BACK_ROWS = 16_384


def count_left(
    group: Group,
    subscription: Subscription,
    ids: Ids,
    found: tuple[Places, NDArray[np.bool_]],
    cursor: CursorKey,
    *,
    dying: bool = False,
) -> int:
    """How many rows of a batch that is to be settled name deliveries that have left, each settled already.

    `found`: what the subscription's `find` gave for the batch. `dying`: the batch is of dead letters, so those that are
    dead are as it says.
    """
    if not (subscription.has_targets or group.waiting.used or group.dead.count):
        return 0
    places, names = subscription.settled_before(ids, found)
    if not len(places):
        return 0
    left = np.isin(names, group.waiting.newest(LOOK_BACK_ROWS, cursor))
    if not dying:
        left |= np.isin(names, group.dead.newest_origins(LOOK_BACK_ROWS))
    targets = subscription.newest_targets(LOOK_BACK_ROWS)
    behind = targets[np.isin(targets["origin"], names)]
    # Rising positions: the last one of a message stays.
    last = dict(zip(behind["origin"].tolist(), behind["position"].tolist(), strict=True))
    if last:
        left |= np.array([last.get(name, -1) for name in names.tolist()], np.int64) > places
    return int(np.count_nonzero(left))
