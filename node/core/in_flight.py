"""How many messages of a group are out with its consumers, exactly, and how many more may be.

Counted from what the channels have handed out and the replicated state has as unsettled: what came back and waits
for its next attempt is not out. Asked only where a limit is set.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tickwheel.node.core.channel import Channel


def out(channel: Channel) -> int:
    """Messages of one channel that consumers hold, or an earlier master's lease does."""
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
    """How many more messages a group with these channels may be handed."""
    return max(0, limit - sum(map(out, channels)))
