"""Counts exactly how many messages of a group are out with its consumers, and how many more may be.

The count comes from the channels (handed out) and the replicated state (unsettled); a returned message that waits for
its next attempt is not out. Called only where a limit is set.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tickwheel.node.core.delivery.channel import Channel


def out(channel: Channel) -> int:
    """Messages of one channel that are out with consumers or under an earlier master's lease."""
    subscription = channel.subscription
    below = subscription.unsettled_below(channel.next_position)
    if subscription.returned_count:
        positions, _, attempts = subscription.returned(subscription.returned_count)
        here = np.searchsorted(positions, np.uint64(channel.next_position))
        waiting = sum(
            not channel.claims(position, attempt)
            for position, attempt in zip(positions[:here].tolist(), attempts[:here].tolist(), strict=True)
        )
        below -= waiting
    return max(0, below - channel.not_out)


def room(channels: Iterable[Channel], limit: int) -> int:
    """How many more messages a group with these channels may be given."""
    return max(0, limit - sum(map(out, channels)))
