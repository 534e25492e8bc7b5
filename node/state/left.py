"""Late settlements: an acknowledgement of a delivery that was nacked before or whose lease expired.

Such a delivery is settled at its position, but not by acknowledgement: its message comes again, has come again, or is
dead. A late acknowledgement must be answered as stale, and not as done.

The delivery shows it: a retry of the message waits in the wheel or was dispatched behind the delivery, or there is a
dead letter. The newest LOOK_BACK_ROWS of each kind are searched; an acknowledgement that is later than that is answered
as a repeat. Only the answer depends on this.
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
    """How many rows of a batch name deliveries that have left; each of them is settled already.

    `found`: result of the subscription's `find` for the batch. `dying`: the batch declares messages dead, so for
    messages that are dead it is right.
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
