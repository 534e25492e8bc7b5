"""How a cluster is founded: once, by all of its founders, each with a disk that was empty.

A node whose disk is new cannot tell a first start from a disk that was lost. If it voted, it and a founder that was
away since the first moments could elect each other and found the cluster anew, without what the others have
acknowledged. So a node with a new disk neither votes nor stands for election (`may_vote`) until one of two things is
on its disk:

- The founding. A founder that has heard from every other founder that its disk is new as well records, for good, all
  founders with their disks. Once all have recorded the same, the cluster is founded.
- Its own entry in the cluster's log: the members that it has applied name it with this very disk. Then it has
  everything that came before, and so everything that it could have acknowledged with an earlier disk.

Invariants:
- What a node records it never replaces, and says nothing of before it is durable.
- One that has voted never again says that its disk is new.
- A data directory from before there was such a record votes as it always did; it says that its cluster exists.

One per node, on the thread of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from tickwheel.node.core.world import NodeIdentity, SteadyMs
from tickwheel.proto.peer_pb2 import Founder, Founding, PeerFrame
from tickwheel.replication.log import Member
from tickwheel.storage.disk import Disk, DiskError, DiskFullError
from tickwheel.storage.errors import CorruptFileError
from tickwheel.storage.whole_file import read_whole, write_whole

PATH = "founding"
EARLIER_NAMES = ("manifest", "journal")
"""What a node leaves that has run: with one of them and without a record its directory is of an earlier version."""
ASK_PERIOD_MS = 200
"""Between two questions to the other founders. What changes is told at once; this is for what was lost on the way."""
FOUNDERS_MAX = 64
"""A peer that says more is not listened to."""
ADVICE = "This node may have forgotten that it voted: remove the member and add it anew under a new id"

Send = Callable[[str, PeerFrame], bool]


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a founder last said."""

    disk_uuid: str
    founders: Mapping[str, str]
    founded: bool


class FoundingDesk:
    """See the module."""

    def __init__(
        self, disk: Disk, identity: NodeIdentity, founder_ids: Iterable[str], fatal: Callable[[str], None]
    ) -> None:
        """`founder_ids`: the members by the configuration; none: this node waits to be added. Raises DiskError."""
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
            write_whole(disk, PATH, record.SerializeToString())
        self._record = record

    @property
    def may_vote(self) -> bool:
        """Whether this node may vote and stand for election."""
        return self._record.founded

    def disk_of(self, node_id: str) -> str:
        """The disk that a founder had when the cluster was founded; empty: not known."""
        return next((founder.disk_uuid for founder in self._record.founders if founder.node_id == node_id), "")

    @property
    def reason(self) -> str:
        """Why this node may not vote yet, and what to do; empty: it may, or waits to be added."""
        if self.may_vote or not self._is_founder:
            return ""
        exists = [peer_id for peer_id, heard in self._heard.items() if heard.founded]
        if exists:
            return (
                f"its disk is new, and {exists[0]} belongs to the cluster already, so this node founds none: it counts "
                "once a master has recorded its disk. If its disk was lost, remove the member and add it anew under a "
                "new id (docs/DEPLOY.md, a host is lost)"
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

    # -- what comes in

    def connected(self, peer_id: str, send: Send) -> None:
        """The way to a peer is open."""
        if not self.may_vote and peer_id in self._others:
            send(peer_id, self._said(asks=True))

    def receive(self, peer_id: str, frame: PeerFrame, send: Send) -> PeerFrame | None:
        """What a peer says of the founding; the answer, if it asks for one."""
        heard = frame.founding
        if not self.may_vote and peer_id in self._others and len(heard.founders) <= FOUNDERS_MAX:
            founders = {founder.node_id: founder.disk_uuid for founder in heard.founders}
            self._heard[peer_id] = _Heard(frame.disk_uuid, founders, heard.founded)
            self._advance(send)
        return self._said() if heard.asks else None

    def tick(self, steady_ms: SteadyMs, members: Callable[[], Sequence[Member]], send: Send) -> None:
        """`members`: by what this node has applied."""
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
        """The members have changed: the next tick looks whether they name this node's disk, before a peer hears that
        this node has applied it."""
        self._next_ask_ms = SteadyMs(0)

    def wanted_ms(self) -> SteadyMs | None:
        """When `tick` has something to do; None: nothing any more."""
        return None if self.may_vote else self._next_ask_ms

    # -- how it goes on

    def _advance(self, send: Send) -> None:
        """Record the founders, or that all have recorded the same; tell them."""
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
        """It counts once it is durable. A full disk is tried again at the next tick."""
        try:
            write_whole(self._disk, PATH, record.SerializeToString())
        except DiskFullError:
            return
        except DiskError as error:
            self._fatal(f"{PATH} could not be written: {error}")
            return
        self._record = record


def _read(disk: Disk) -> Founding | None:
    content = read_whole(disk, PATH, advice=ADVICE)
    if content is None:
        return None
    try:
        return Founding.FromString(content)
    except DecodeError:
        raise CorruptFileError(PATH, 0, "it is no record of a founding", ADVICE) from None
