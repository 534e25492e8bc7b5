"""When a member may begin a merge or a checkpoint, so that the members of a cluster do not all begin at once.

All members apply the same log, so all of them would write their hour files and checkpoints in the same moment. Then no
disk of a majority is quick, and every commit waits. So the cluster's time is cut into shares, and the voters take
turns: fewer than half of them have the same share, if there are at least three. The others are a majority.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.node.core.world import ClusterMs, Now

SHARE_MS = 200
WAIT_MS_MAX = 1_000
"""Longest wait for the own share. It comes sooner unless the cluster's time is stepped."""


class Stagger:
    """Of one kind of work."""

    def __init__(self, node_id: str, voters: Callable[[], list[str]]) -> None:
        self._node_id = node_id
        self._voters = voters
        self._held_since_ms: int | None = None

    def holds(self, now: Now, *, waits: bool) -> bool:
        """Whether work has to wait now. `waits`: there is some, and nobody wants it at once.

        To be asked with every look until the work begins or is wanted no more.
        """
        if not waits or self.wait_ms(now.cluster_ms) == 0:
            self._held_since_ms = None
        elif self._held_since_ms is None:
            self._held_since_ms = now.steady_ms
        elif now.steady_ms - self._held_since_ms >= WAIT_MS_MAX:
            self._held_since_ms = None
        return self._held_since_ms is not None

    def wait_ms(self, cluster_ms: ClusterMs) -> int:
        """Until the next share of this member; 0: it is now, or the member needs none."""
        voters = sorted(self._voters())
        if len(voters) == 1 or self._node_id not in voters:
            return 0
        minority = max(1, (len(voters) - 1) // 2)
        shares = -(-len(voters) // minority)
        own, share = voters.index(self._node_id) % shares, cluster_ms // SHARE_MS
        away = (own - share) % shares
        return (share + away) * SHARE_MS - cluster_ms if away else 0
