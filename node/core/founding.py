"""How a cluster is founded: once, by all of its founders, each with an empty disk.

A node with a new disk cannot tell a first start from a lost disk. If it voted, it could elect, or be elected by, a
founder that has been away since the first moments. The two would found the cluster a second time, without the entries
that the others have acknowledged. So a node with a new disk neither votes nor stands for election (`may_vote`) until
its disk has one of two things:

- The founding. A founder that has heard from every other founder that its disk is new too records all founders with
  their disks. Once all have recorded the same list, the cluster is founded.
- Its own entry in the cluster's log: the applied members include it with this very disk. Then it has every earlier
  entry, and so every entry that it could have acknowledged with an earlier disk.

Invariants:
- A node never replaces its record, and tells nobody of it before it is durable.
- A node that has voted never again says that its disk is new.
- A data directory of a version without such records votes as before; it says that its cluster exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from tickwheel.node.core.world import NodeIdentity, Now, SteadyMs
from tickwheel.proto.parsing import parsed
from tickwheel.proto.peer_pb2 import Founder, Founding, PeerFrame
from tickwheel.replication.log import Member
from tickwheel.storage.disk import Disk, DiskError, DiskFullError
from tickwheel.storage.errors import CorruptFileError
from tickwheel.storage.owner import Owner
from tickwheel.storage.whole_file import read_whole, write_whole

PATH = "founding"
EARLIER_NAMES = ("manifest", "journal")
"""Files that exist if a node has run. One of them without a founding record means a directory of an earlier version."""
FOUNDERS_LOG_LEVEL = 1
"""Every founder on record reads a log of this level (senders.LOG_LEVEL): the record is younger than the level."""
ASK_PERIOD_MS = 200
"""Pause between two questions to the other founders. Changes are told at once; asking covers lost messages."""
FOUNDERS_MAX = 64
"""Founders in a peer's message; a message with more is ignored."""
ADVICE = "This node may have forgotten that it voted: remove the member and add it anew under a new id"

Send = Callable[[str, PeerFrame], bool]


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last report of a founder."""

    disk_uuid: str
    founders: Mapping[str, str]
    founded: bool


class ClusterFounding:
    """Used on the core's thread."""

    def __init__(
        self,
        disk: Disk,
        identity: NodeIdentity,
        founder_ids: Iterable[str],
        fatal: Callable[[str, BaseException | None], None],
    ) -> None:
        """`founder_ids`: members in the configuration; empty: this node waits to be added. Raises DiskError."""
        self._disk = disk
        self._identity = identity
        self._others = sorted(set(founder_ids) - {identity.node_id})
        self._is_founder = identity.node_id in founder_ids
        self._fatal = fatal
        self._heard: dict[str, _Heard] = {}
        self._next_ask_ms = SteadyMs(0)
        record = _read(disk)
        if record is None and any(name in EARLIER_NAMES for name in disk.list("")):
            record = Founding(founded=True)
        elif record is None:
            record = Founding()
            self._write(record)
        self._record = record

    @property
    def may_vote(self) -> bool:
        """Whether this node may vote and stand for election."""
        return self._record.founded

    def disk_of(self, node_id: str) -> str:
        """The disk that a founder had at the founding; empty: unknown."""
        return next((founder.disk_uuid for founder in self._record.founders if founder.node_id == node_id), "")

    @property
    def reason(self) -> str:
        """Why this node may not vote yet, and what to do about it. Empty: it may, or it waits to be added."""
        if self.may_vote or not self._is_founder:
            return ""
        exists = [peer_id for peer_id, heard in self._heard.items() if heard.founded]
        if exists:
            return (
                f"its disk is new, and {exists[0]} belongs to the cluster already, so this node founds none: it counts "
                "once a master has recorded its disk. If its disk was lost, remove the member and add it anew under a "
                "new id (docs/DEPLOY.md, a node is dead)"
            )
        silent = [peer_id for peer_id in self._others if peer_id not in self._heard]
        if silent:
            return (
                "the cluster is founded once all of its founders have heard from each other, and this node has not "
                f"heard from {', '.join(silent)}: start what is not running, with the same cluster.members everywhere"
            )
        differing = [peer_id for peer_id in self._others if self._differs(self._heard[peer_id])]
        if differing:
            return (
                f"the cluster was not founded: {', '.join(differing)} recorded other founders, or other disks of them, "
                "than this node. Nobody was served yet: stop all founders, empty their data directories, see that "
                "cluster.members is the same everywhere, and start them again"
            )
        return "the founders of the cluster are agreeing on its founding"

    # -- input

    def connected(self, peer_id: str, send: Send) -> None:
        """The connection to a peer is open."""
        if not self.may_vote and peer_id in self._others:
            send(peer_id, self._said(asks=True))

    def receive(self, peer_id: str, frame: PeerFrame, send: Send) -> PeerFrame | None:
        """Take a peer's report about the founding; returns the answer if the peer asks for one."""
        heard = frame.founding
        if not self.may_vote and peer_id in self._others and len(heard.founders) <= FOUNDERS_MAX:
            founders = {founder.node_id: founder.disk_uuid for founder in heard.founders}
            self._heard[peer_id] = _Heard(frame.disk_uuid, founders, heard.founded)
            self._advance(send)
        return self._said() if heard.asks else None

    def tick(self, steady_ms: SteadyMs, members: Callable[[], Sequence[Member]], send: Send) -> None:
        """Record this node's membership once its log names it, and ask the other founders. `members` returns the
        members as applied here."""
        if self.may_vote or steady_ms < self._next_ask_ms:
            return
        self._next_ask_ms = SteadyMs(steady_ms + ASK_PERIOD_MS)
        own = next((m for m in members() if m.node_id == self._identity.node_id), None)
        if own is not None and own.disk_uuid == self._identity.disk_uuid:
            self._store(Founding(founders=self._record.founders, founded=True))
            return
        self._advance(send)
        if not self.may_vote:
            self._tell(send)

    def look_again(self) -> None:
        """The members have changed. The next tick checks whether they name this node's disk, before any peer hears that
        this node has applied the change."""
        self._next_ask_ms = SteadyMs(0)

    def wait_ms(self, now: Now) -> int | None:
        """Until the next `tick` is needed; None: never again."""
        return None if self.may_vote else self._next_ask_ms - now.steady_ms

    # -- how it goes on

    def _advance(self, send: Send) -> None:
        """Record the founders, or that all have recorded the same list; tell the others."""
        if not self._is_founder:
            return
        before = self._record
        if not self._record.founders:
            disks = {self._identity.node_id: self._identity.disk_uuid}
            for peer_id in self._others:
                heard = self._heard.get(peer_id)
                if heard is None or heard.founded:
                    return
                disks[peer_id] = heard.disk_uuid
            if any(heard.founders and heard.founders != disks for heard in self._heard.values()):
                return
            founders = [Founder(node_id=node_id, disk_uuid=disk) for node_id, disk in sorted(disks.items())]
            self._store(Founding(founders=founders))
        recorded = self._recorded()
        alike = [peer_id for peer_id, heard in self._heard.items() if recorded and heard.founders == recorded]
        if recorded and (len(alike) == len(self._others) or any(self._heard[peer_id].founded for peer_id in alike)):
            self._store(Founding(founders=self._record.founders, founded=True))
        if self._record is not before:
            self._tell(send)

    def _differs(self, heard: _Heard) -> bool:
        recorded = self._recorded()
        if recorded and heard.founders:
            return recorded != heard.founders
        return bool(heard.founders) and heard.founders.get(self._identity.node_id) != self._identity.disk_uuid

    def _recorded(self) -> dict[str, str]:
        return {founder.node_id: founder.disk_uuid for founder in self._record.founders}

    def _tell(self, send: Send) -> None:
        for peer_id in self._others:
            send(peer_id, self._said(asks=not self.may_vote))

    def _said(self, *, asks: bool = False) -> PeerFrame:
        return PeerFrame(founding=Founding(founders=self._record.founders, founded=self._record.founded, asks=asks))

    def _store(self, record: Founding) -> None:
        """Store a record; it takes effect once durable. On a full disk the next tick tries again."""
        try:
            self._write(record)
        except DiskFullError:
            return
        except DiskError as error:
            self._fatal(f"{PATH} could not be written: {error}", error)
            return
        self._record = record

    def _write(self, record: Founding) -> None:
        """Durable on return. Raises DiskError."""
        owned = Founding(founders=record.founders, founded=record.founded, disk_uuid=self._identity.disk_uuid)
        write_whole(self._disk, PATH, owned.SerializeToString())


def check_founding(disk: Disk, owner: Owner) -> None:
    """Raise ForeignFileError if the record was written on another disk, or lists another one for this node. Raises
    DiskError."""
    record = _read(disk)
    if record is None:
        return
    disks = {founder.node_id: founder.disk_uuid for founder in record.founders}
    written_on = record.disk_uuid or disks.get(owner.node_id, "")
    if (written_on or disks) and owner.disk_uuid not in ("", written_on):
        raise owner.foreign(PATH, "another node, or of an earlier data directory of this one")


def has_founded(disk: Disk) -> bool:
    """Whether this directory's node has recorded that it may vote, so it may have done so. Raises DiskError."""
    record = _read(disk)
    return record is not None and record.founded


def _read(disk: Disk) -> Founding | None:
    content = read_whole(disk, PATH, advice=ADVICE)
    if content is None:
        return None
    try:
        return parsed(Founding, content)
    except DecodeError:
        raise CorruptFileError(PATH, 0, "it is no record of a founding", ADVICE) from None
