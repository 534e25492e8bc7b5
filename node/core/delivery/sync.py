"""The contents of the 50 ms sync, on both sides: tick and local index, leases, clock samples.

The sync is soft: it never moves a cursor and never skips a message. A slave keeps the newest one to show it, and to
start from when it becomes master.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.sync_files import Synced
from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.state.schema import LOG_LEVEL
from tickwheel.proto.peer_pb2 import PeerFrame, Sync, SyncReply

ROOM_MS = 2_000
"""How long a slave's report on its disk counts as current. Each answer to a sync renews it."""


@dataclass(slots=True)
class Heard:
    """The newest sync that a slave received."""

    term: int = 0
    number: int = 0
    tick: int = 0
    local_index: int = 0
    at_ns: int = 0


class SyncState:
    """Fills outgoing syncs and takes in those that arrive."""

    def __init__(
        self,
        core: Kernel,
        delivery: Delivery,
        disk_room: DiskRoom,
        waits_for_bundle: Callable[[], bool],
        members_log_level: Callable[[], int],
    ) -> None:
        """`members_log_level` returns the level that every member is known to understand in the log; 0: none."""
        self._core = core
        self._disk_room = disk_room
        self._waits_for_bundle = waits_for_bundle
        self._members_log_level = members_log_level
        self._clock = core.clock
        self._wheel = core.wheel
        self._delivery = delivery
        self._monotonic_ns = core.monotonic_ns
        self._number = 0
        self.heard = Heard()
        self._replies: dict[str, tuple[int, int]] = {}
        """Peer to (applied index, when it said so)."""
        self._levels: dict[str, int] = {}
        """Peer to what it said it understands in the log."""
        self._told_level = 0
        """What every member understands, as the last master said."""
        self.enabled = True
        """Switched off by tests that show what the sync is for."""

    def remember(self, synced: Synced) -> None:
        """After a start: show where the cluster was, until the next sync says where it is."""
        self.heard = Heard(term=synced.term, tick=synced.tick, local_index=synced.local_index)

    def take_over(self, earlier: SyncState) -> None:
        """From the core that this one replaces in the same process: its master counts on what it acknowledged."""
        self.heard = earlier.heard
        self._delivery.leases.heard = earlier._delivery.leases.heard
        self._levels.update(earlier._levels)
        self._told_level = earlier._told_level

    def newest(self, leading_term: int) -> Synced:
        """The newest pair this node knows: its own as master of `leading_term`, else (0) what it heard."""
        if leading_term:
            return Synced(leading_term, self._wheel.window.tick, self._wheel.window.local_index)
        return Synced(self.heard.term, self.heard.tick, self.heard.local_index)

    def outgoing(self, peer_id: str) -> PeerFrame | None:
        """The sync for one slave; the log fills in envelope and term."""
        if not self.enabled or not self._delivery.active:
            return None
        self._number += 1
        leases = self._delivery.leases
        ranges, complete = leases.feed.for_peer(peer_id, self._number)
        return PeerFrame(
            sync=Sync(
                number=self._number,
                tick=self._wheel.window.tick,
                local_index=self._wheel.window.local_index,
                clock_ms=self._clock.now_ms() if self._clock.known else 0,
                sent_ns=self._monotonic_ns(),
                leases=ranges,
                complete=complete,
                log_level=LOG_LEVEL,
                members_log_level=self._members_log_level(),
            )
        )

    def incoming(self, peer_id: str, frame: PeerFrame) -> PeerFrame:
        """A sync of this term's master (the log has dropped older terms). A repeated or older one tells of leases only:
        each has those that were not in the one before."""
        sync = frame.sync
        heard = self.heard
        if sync.log_level:
            self._levels[peer_id] = sync.log_level
        self._told_level = sync.members_log_level
        if frame.term > heard.term or sync.number > heard.number:
            if frame.term > heard.term:
                heard.tick, heard.local_index = 0, 0
            heard.term, heard.number, heard.at_ns = frame.term, sync.number, self._monotonic_ns()
            heard.tick, heard.local_index = max((heard.tick, heard.local_index), (sync.tick, sync.local_index))
        self._delivery.leases.heard.hear(sync.leases)
        cursor = self._wheel.cursor
        return PeerFrame(
            sync_reply=SyncReply(
                number=sync.number,
                # Not what waits for its bundle: such a node would lead and not serve.
                applied_index=self._core.applied.index - self._waits_for_bundle(),
                cursor_due_ms=cursor.due_ms,
                cursor_index=cursor.index,
                clock_ms=self._clock.wall_ms(),
                echo_sent_ns=sync.sent_ns,
                disk_above_mark=self._disk_room.above,
                disk_free_bytes=self._disk_room.free_bytes,
                log_level=LOG_LEVEL,
            )
        )

    def reply(self, peer_id: str, frame: PeerFrame) -> None:
        """A slave acknowledged a sync."""
        self._delivery.leases.feed.acknowledged(peer_id, frame.sync_reply.number)
        self._replies[peer_id] = (frame.sync_reply.applied_index, self._monotonic_ns())
        self._levels[peer_id] = frame.sync_reply.log_level
        self._disk_room.hear(peer_id, frame.sync_reply.disk_free_bytes, above=frame.sync_reply.disk_above_mark)

    def understands(self, level: int, peer_id: str) -> bool | None:
        """Whether a member reads a log of this level, as it said last, as a slave or as master; else as an earlier
        master said of all members. None: neither has said so."""
        said = self._levels.get(peer_id)
        if said is None:
            return True if level <= self._told_level else None
        return said >= level

    def roomy_peers(self, members: Sequence[str]) -> list[str]:
        """Slaves that said within ROOM_MS that their disk is not above its mark."""
        heard = [member for member in members if member in self._replies and self.reply_age_ms(member) < ROOM_MS]
        return [member for member in heard if member not in self._disk_room.full_peers]

    def applied_of(self, peer_id: str) -> int:
        """What a slave last said it has applied."""
        return self._replies.get(peer_id, (0, 0))[0]

    def reply_age_ms(self, peer_id: str) -> int:
        """Since a slave last answered a sync; 0 if it never did."""
        at_ns = self._replies.get(peer_id, (0, 0))[1]
        return (self._monotonic_ns() - at_ns) // 1_000_000 if at_ns else 0

    def age_ms(self) -> int:
        """Since the newest sync arrived; 0 if none ever did."""
        if not self.heard.at_ns:
            return 0
        return (self._monotonic_ns() - self.heard.at_ns) // 1_000_000
