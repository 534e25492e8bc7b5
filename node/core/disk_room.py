"""Whether there is room for more schedules: on this node's disk, and on those of a majority.

Above the high-water mark (a share of the disk), or with less free than the reserve, settlements, dispatch, retries and
the removal of hours shall have the rest; a full disk would stop the node altogether. So a master in that state hands
over to a member with room, and until then takes what a majority of the members still has room for; with no such member
it lets no schedule in. It takes schedules again once the share is HYSTERESIS_PERCENT lower. Slaves tell theirs with the
sync: the master also refuses when fewer disks than a majority have room, for then the cluster would soon stop with two
nodes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tickwheel.node.core.failure import Failure, limit_reached
from tickwheel.storage.disk import Disk, DiskError

HYSTERESIS_PERCENT = 5
RETRY_AFTER_MS = 5_000


class DiskRoom:
    """One per node. `look` once a second or so."""

    def __init__(
        self,
        disk: Disk,
        high_percent: int,
        members: Callable[[], Sequence[str]],
        full_peers: Callable[[], set[str]],
        roomy_peers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`high_percent` 0: no mark. `full_peers`: members that said last that they are above theirs; `roomy_peers`:
        those that said just now that they are not."""
        self._disk = disk
        self._members = members
        self._full_peers = full_peers
        self._roomy_peers = roomy_peers
        self.high_percent = high_percent
        self.above = False
        """This node's disk is above its mark, or was and is not far enough below."""
        self.total_bytes = 0
        self.free_bytes = 0

    @property
    def used_ratio(self) -> float:
        """Share of the disk that is used, 0 to 1; 0 before the first look."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0

    def look(self) -> None:
        """Ask the disk."""
        try:
            self.total_bytes, self.free_bytes = self._disk.space_total(), self._disk.space_left()
        except DiskError:
            return  # what is wrong with it shows where it is written to; until then the last answer holds
        used_percent = 100 * self.used_ratio
        mark = self.high_percent - (HYSTERESIS_PERCENT if self.above else 0)
        # The disk leaves the reserve out of what it says is free.
        self.above = (bool(self.high_percent) and used_percent >= mark) or not self.free_bytes

    def own_refusal(self) -> Failure | None:
        """Why nothing new is to come to this node's disk; None if there is room."""
        if not self.above:
            return None
        if not self.free_bytes:
            return limit_reached("storage.space_reserve_bytes", "less than that is free", RETRY_AFTER_MS)
        return limit_reached("storage.high_water_percent", f"{self.high_percent} %", RETRY_AFTER_MS)

    def refusal(self) -> Failure | None:
        """Why a master lets no schedule in now; None if there is room."""
        own = self.own_refusal()
        if own is not None:
            return None if 2 * len(self._roomy_peers()) > len(self._members()) else own
        full = self._full_peers()
        if full:
            members = self._members()
            roomy = sum(member not in full for member in members)
            if 2 * roomy <= len(members):
                failure = limit_reached("storage.high_water_percent", f"{self.high_percent} %", RETRY_AFTER_MS)
                failure.metadata["value"] = ",".join(sorted(full))
                return failure
        return None
