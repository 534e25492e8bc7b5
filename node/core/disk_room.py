"""Whether there is room for more schedules, on the disks of this node and of a majority.

Above the high-water mark (a share of the disk), or with less free than the reserve, the remaining room is for
settlements, dispatch, retries and the removal of hours: a full disk would stop the node altogether. A master in that
state hands over to a member with room. Until then it accepts schedules only while a majority of the members has room.
The state ends once the share is HYSTERESIS_PERCENT lower. Slaves report their state with the sync. A master with room
also refuses schedules when no majority has room: otherwise the cluster would soon stop, with two nodes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tickwheel.node.failure import Failure, limit_reached
from tickwheel.storage.disk import Disk, DiskError

HYSTERESIS_PERCENT = 5
RETRY_AFTER_MS = 5_000


class DiskRoom:
    """Call `look` about once a second."""

    def __init__(
        self,
        disk: Disk,
        high_percent: int,
        members: Callable[[], Sequence[str]],
        roomy_peers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`high_percent` 0: no mark. `roomy_peers`: members that have just reported to be below their mark."""
        self._disk = disk
        self._members = members
        self._roomy_peers = roomy_peers
        self.high_percent = high_percent
        self.above = False
        """This node's disk is above its mark, or has been and is not yet far enough below."""
        self.full_peers: set[str] = set()
        """Nodes whose last report was above their mark."""
        self._free_of_peers: dict[str, int] = {}
        """Bytes that each slave's last report had free, its reserve left out."""
        self.total_bytes = 0
        self.free_bytes = 0

    @property
    def used_ratio(self) -> float:
        """Used share of the disk, 0 to 1; 0 before the first look."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0

    def look(self) -> None:
        """Read the disk's figures."""
        try:
            self.total_bytes, self.free_bytes = self._disk.space_total(), self._disk.space_left()
        except DiskError:
            return  # the next write will show what is wrong with the disk; until then the last figures hold
        used_percent = 100 * self.used_ratio
        mark = self.high_percent - (HYSTERESIS_PERCENT if self.above else 0)
        # The disk's free bytes do not include the reserve.
        self.above = (bool(self.high_percent) and used_percent >= mark) or not self.free_bytes

    def hear(self, peer_id: str, free_bytes: int, *, above: bool) -> None:
        """A slave's report. `free_bytes` 0 below the mark: it is of an earlier version, which does not say."""
        if above:
            self.full_peers.add(peer_id)
        else:
            self.full_peers.discard(peer_id)
        if free_bytes or above:
            self._free_of_peers[peer_id] = free_bytes
        else:
            self._free_of_peers.pop(peer_id, None)

    def own_refusal(self) -> Failure | None:
        """Why this node's disk should take nothing new; None if it has room."""
        if not self.above:
            return None
        if not self.free_bytes:
            failure = limit_reached("storage.space_reserve_bytes", "that much stays free", RETRY_AFTER_MS)
            text = f"storage.space_reserve_bytes: the disk has no more than that left; retry after {RETRY_AFTER_MS} ms"
            return replace(failure, message=text)
        return limit_reached("storage.high_water_percent", f"{self.high_percent} %", RETRY_AFTER_MS)

    def bulk_refusal(self, wanted_bytes: int) -> Failure | None:
        """Why rows must not be staged now: the disk of this node, or those of so many members that the others are no
        majority, have not as much room beyond their reserve as they, and those that are staged already, take in all.
        None if they have, as far as is known. Whoever schedules them later does not ask again."""
        if self.total_bytes and wanted_bytes > self.free_bytes:
            return _no_bulk("", self.free_bytes, wanted_bytes)
        members = self._members()
        free = {peer: free for peer, free in self._free_of_peers.items() if free < wanted_bytes and peer in members}
        if free and 2 * len(free) >= len(members):
            return _no_bulk(" of " + ", ".join(sorted(free)), min(free.values()), wanted_bytes)
        return None

    def refusal(self) -> Failure | None:
        """Why a master accepts no schedule now; None if there is room."""
        if self.above:
            return None if 2 * len(self._roomy_peers()) > len(self._members()) else self.own_refusal()
        if self.full_peers:
            members = self._members()
            full = self.full_peers.intersection(members)
            if full and 2 * len(full) >= len(members):
                failure = limit_reached("storage.high_water_percent", f"{self.high_percent} %", RETRY_AFTER_MS)
                failure.metadata["value"] = ",".join(sorted(full))
                return failure
        return None


def _no_bulk(whose: str, free_bytes: int, wanted_bytes: int) -> Failure:
    failure = limit_reached("storage.space_reserve_bytes", "that much stays free", RETRY_AFTER_MS)
    text = f"{free_bytes} bytes are free beyond it, and to schedule what is staged takes {wanted_bytes}"
    return replace(failure, message=f"storage.space_reserve_bytes{whose}: {text}; retry after {RETRY_AFTER_MS} ms")
