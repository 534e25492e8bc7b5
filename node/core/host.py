"""Keeps one node's core: builds it from the disk, and builds it again from a peer's checkpoint.

The server process and the simulation own a NodeHost. It opens the journal, restores the newest checkpoint and composes
NodeCore with the replicated log. If the log reports that this slave is too far behind, the host fetches a peer's
checkpoint, installs it and starts over from it, in the same process. It replaces the files only when nothing of the
stopped core writes to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH, Restored, cluster_of
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.founding import check_founding, has_founded
from tickwheel.node.core.install import STAGING, CheckpointCopy, discard, install_if_complete
from tickwheel.node.core.world import NodeIdentity, Ports, Reported
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.proto import admin_pb2
from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.peer_pb2 import CheckpointChunk, PeerFrame
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.guards import Guards
from tickwheel.replication.journal import HARD_STATE_FILE, Journal, check_owner
from tickwheel.replication.journal_files import read_newest, segment_sequences
from tickwheel.replication.log import LogListener, Member, ReplicatedLog
from tickwheel.replication.raft import RaftLog
from tickwheel.storage.disk import DiskError, DiskFullError
from tickwheel.storage.errors import ADVICE
from tickwheel.storage.manifest import read_manifest
from tickwheel.storage.owner import ForeignFileError
from tickwheel.storage.partial_copy import CopyError

HARD_STATE_PATH = f"{JOURNAL_DIRECTORY}/{HARD_STATE_FILE}"
COPY_PAUSE_NS_MIN, COPY_PAUSE_NS_MAX = 2_000_000_000, 60_000_000_000
"""After a copy that this node could not keep, mostly because its disk has no room for it, comes a pause as long as the
copy took, within these bounds."""


class CheckpointSource(Protocol):
    """Copies the newest checkpoint of a peer; the network implements it."""

    def fetch(
        self,
        peer_id: str,
        held: Sequence[HeldFile],
        chunk: Callable[[CheckpointChunk], bool | None],
        done: Callable[[str | None], None],
    ) -> None:
        """Call `chunk` for every chunk in order, then `done(None)`; or `done(reason)` after a failure, or if `chunk`
        returned False: it wants no more.

        `held`: what this node has of the files, the most bytes first. A file that begins with that is given from there
        on.
        """
        ...


def raft_config(config: CoreConfig) -> RaftConfig:
    """The log's timings as they follow from the node's configuration."""
    return RaftConfig(
        election_timeout_ms_min=config.election_timeout_min_ms,
        election_timeout_ms_max=config.election_timeout_max_ms,
        append_period_ms=config.sync_period_ms,
        lease_ms=config.lease_ms,
        fallback_ms=(config.lease_ms + config.election_timeout_min_ms) // 2,
        apply_slice_ms=config.apply_slice_ms,
    )


class NodeHost:
    """Same thread and calling rules as NodeCore."""

    def __init__(
        self,
        config: CoreConfig,
        raft: RaftConfig,
        identity: NodeIdentity,
        ports: Ports,
        *,
        seed: admin_pb2.Settings | None,
        members: Sequence[Member],
        joining: bool = False,
        on_fatal: Callable[[str], None],
        source: CheckpointSource | None = None,
        guards: Guards | None = None,
        report: Callable[[Reported], None] = lambda line: None,
        faults: Callable[[str, BaseException], None] | None = None,
        on_no_room: Callable[[DiskFullError], None] | None = None,
    ) -> None:
        """`report` gets lines for operators. `faults` gets the errors that fail a request, with their ids; None: such
        an error raises. `on_no_room` ends the process instead of `on_fatal` if a start will succeed once the disk has
        room."""
        self._config = config
        self._raft = raft
        self._identity = identity
        self._ports = ports
        self._seed = seed
        self._members = list(members)
        self._joining = joining
        self._on_fatal, self._on_no_room = on_fatal, on_no_room
        self._source = source
        self._guards = guards or Guards()
        self._report = report
        self._faults = faults
        self._connected: set[str] = set()
        self._fetching = False
        self._copy: CheckpointCopy | None = None
        """The pieces of a checkpoint that this process has received, in one try or several."""
        self._copy_begun_ns = self._no_copy_until_ns = self._refused_at = 0
        """When the last copy was begun. After one that this node could not keep: when it may ask again, and the last
        entry of its journal then."""
        self._received = False
        """A complete checkpoint of a peer waits to be installed."""
        self._started = False
        self._stopped = False
        self.installs = 0
        self._journal: Journal | None = None
        self._check_owner()
        install_if_complete(ports.disk)
        self._check_journal()
        self.core = self._build()
        self._left_at = self._last_index() if ports.disk.exists(STAGING) else None
        """Last entry of the journal when a copy broke, of which files are left."""

    def _check_owner(self) -> None:
        """Raise ForeignFileError if what this node has promised was promised by another, before anything is changed."""
        disk, owner = self._ports.disk, self._identity.owner
        try:
            check_owner(disk, JOURNAL_DIRECTORY, owner)
            check_founding(disk, owner)
        except ForeignFileError:
            self._check_cluster(cluster_of(disk))  # an interrupted `tickwheel recover` leaves a new journal, too
            raise

    def _check_journal(self) -> None:
        """Raise ImpossibleStateError if the journal was removed: its first segment is durable before all other data."""
        disk = self._ports.disk
        if segment_sequences(disk.list(JOURNAL_DIRECTORY)):
            return
        self._check_cluster(cluster_of(disk))
        if read_newest(disk, JOURNAL_DIRECTORY) or read_manifest(disk) is not None or has_founded(disk):
            raise ImpossibleStateError(_removed(JOURNAL_DIRECTORY))

    def _build(self) -> NodeCore:
        core = NodeCore(
            self._config,
            self._identity,
            self._ports,
            self._seed,
            self._members,
            self._make_log,
            self._fatal,
            self._checkpoint_needed,
            self._report,
        )
        if self._faults is not None:
            core.serving.contain(self._faults)
        return core

    def _check_cluster(self, of: str) -> None:
        """Raise ImpossibleStateError if the state has been made that of another cluster, and the identity has not
        yet."""
        identity = self._identity
        if of not in ("", identity.cluster_id):
            raise ImpossibleStateError(
                f"the state is of cluster {of}, and the identity of cluster {identity.cluster_id}. If tickwheel "
                "recover was interrupted, run it again, or put the copy of the directory back. If not, files of "
                "another cluster were put here: put this node's own back"
            )

    def _check_disk(self, members: Sequence[Member]) -> None:
        """Raise ForeignFileError if the checkpoint is of a cluster in which this node has another disk.

        A checkpoint of another member of this cluster is accepted, like a copied one: the journal begins anew after it.
        """
        own = next((member for member in members if member.node_id == self._identity.node_id), None)
        if own is not None and own.disk_uuid and self._identity.disk_uuid not in ("", own.disk_uuid):
            whose = f"a cluster in which node {own.node_id} has another disk"
            raise self._identity.owner.foreign(MANIFEST_PATH, whose)

    def _make_log(self, listener: LogListener, restored: Restored) -> ReplicatedLog:
        self._check_cluster(restored.state.cluster_id)
        self._check_disk(restored.members)
        ports = self._ports
        journal = Journal.open(
            ports.disk, JOURNAL_DIRECTORY, segment_bytes=self._config.segment_bytes, owner=self._identity.owner
        )
        if journal.last_term and not journal.term:
            journal.close()
            raise ImpossibleStateError(_removed(HARD_STATE_PATH))
        if (
            restored.applied_index > journal.last_index
            or restored.applied_index < journal.base_index
            or journal.term_at(restored.applied_index) != restored.applied_term
        ):
            if restored.applied_index < journal.base_index:
                journal.close()
                raise ImpossibleStateError(
                    f"the checkpoint covers the log up to entry {restored.applied_index}, the journal begins behind "
                    f"entry {journal.base_index}: what is between them is lost. {ADVICE}"
                )
            journal.reset_to(restored.applied_index, restored.applied_term)
        self._journal = journal
        members = list(restored.members) or self._members
        return RaftLog(
            self._raft,
            self._identity.node_id,
            self._identity.cluster_id,
            ports.clock,
            ports.sync_executor,
            ports.network,
            ports.random,
            listener,
            journal,
            members,
            (restored.applied_index, restored.applied_term),
            wheel_group=self._identity.wheel_group,
            disk_uuid=self._identity.disk_uuid,
            joining=self._joining and not restored.members,
            guards=self._guards,
        )

    def _fatal(self, reason: str) -> None:
        if not self._stopped:
            self._stopped = True
            self._on_fatal(reason)

    @property
    def journal_path(self) -> str:
        """Path of the journal's file that is written to; empty if the node has stopped."""
        return "" if self._journal is None else self._journal.newest_path

    # -- life

    def start(self) -> None:
        """Replay the journal and join the cluster."""
        self._started = True
        self.core.start()

    def stop(self) -> None:
        """Idempotent. A process stops its workers first."""
        self._stopped = True
        self.core.stop()
        self.core.parts.events.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def tick(self, *, woken: bool = True) -> int:
        """As `NodeCore.tick`; also carries on the copy of a checkpoint."""
        self._install()
        self._tidy()
        if self.core.lacks_checkpoint and self._last_index() > self._refused_at:
            self.core.lacks_checkpoint = ""  # the entries came after all
        return self.core.serving.attempt("a tick", 0, self.core.tick, woken=woken)

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        """As `NodeCore.receive`."""
        core = self.core
        return core.serving.attempt("a peer's frame", True, core.receive, peer_id, frame)

    def peer_connected(self, peer_id: str) -> None:
        """As `NodeCore.peer_connected`."""
        core = self.core
        self._connected.add(peer_id)
        core.serving.attempt("a peer's connection", None, core.peer_connected, peer_id)

    def peer_disconnected(self, peer_id: str) -> None:
        """As `NodeCore.peer_disconnected`."""
        core = self.core
        self._connected.discard(peer_id)
        core.serving.attempt("the end of a peer's connection", None, core.peer_disconnected, peer_id)

    # -- a checkpoint from a peer

    def _checkpoint_needed(self, peer_id: str) -> None:
        if self._fetching or self._stopped or self._source is None:
            return
        now_ns = self._ports.clock.monotonic_ns()
        if now_ns < self._no_copy_until_ns:
            return
        self._fetching = True
        self._copy_begun_ns = now_ns
        if self._copy is not None:
            self._fetch(peer_id, self._copy)
            return

        def opened(copy: CheckpointCopy | None, error: BaseException | None) -> None:
            if self._stopped:
                return
            if copy is None:
                self._fetching = False
                if not isinstance(error, DiskFullError):
                    self._fatal(f"what is left of a copied checkpoint could not be read: {error}")
                self._refused(peer_id, error)
                return
            self._copy = copy
            self._fetch(peer_id, copy)

        self._ports.executor.submit(lambda: CheckpointCopy(self._ports.disk), opened)

    def _fetch(self, peer_id: str, copy: CheckpointCopy) -> None:
        assert self._source is not None
        held = copy.begin()
        problem: list[Exception] = []

        def chunk(received: CheckpointChunk) -> bool:
            if not problem:
                try:
                    copy.take(received)
                except (CopyError, DiskError) as error:
                    problem.append(error)
            return not problem

        def done(reason: str | None) -> None:
            if self._stopped:
                return
            if problem:
                self._give_up(copy)
                self._refused(peer_id, problem[0])
                return
            if reason is not None:
                # If the copy is still needed, the log asks again.
                copy.pause()
                self._left_at = self._last_index()
                self._fetching = False
                return
            self._ports.executor.submit(copy.finish, finished)

        def finished(_: object, error: BaseException | None) -> None:
            if self._stopped:
                return
            if error is not None:
                self._give_up(copy)
                if not isinstance(error, CopyError | DiskFullError):
                    self._fatal(f"a checkpoint could not be stored: {error}")
                self._refused(peer_id, error)
                return
            if copy.index < self.core.applied.index:
                # The missing entries came after all, from a master with a longer log: the copy would set the node back.
                self._give_up(copy)
                return
            self._received = True
            self._copy = self._left_at = None
            self.core.lacks_checkpoint = ""
            self.core.stop()
            self._install()

        self._source.fetch(peer_id, held, chunk, done)

    def _give_up(self, copy: CheckpointCopy) -> None:
        self._fetching = False
        self._copy = self._left_at = None
        copy.abandon()

    def _refused(self, peer_id: str, error: BaseException | None) -> None:
        """Say why this node cannot keep the checkpoint that it needs, and wait before it asks for it again."""
        now_ns = self._ports.clock.monotonic_ns()
        took_ns = now_ns - self._copy_begun_ns
        self._no_copy_until_ns = now_ns + min(max(took_ns, COPY_PAUSE_NS_MIN), COPY_PAUSE_NS_MAX)
        self._refused_at = self._last_index()
        advice = "; free space in the data directory" if isinstance(error, DiskFullError) else ""
        reason = f"the checkpoint of {peer_id}, which it needs, could not be stored: {error}{advice}"
        if not self._stopped:
            self.core.lacks_checkpoint = reason
            self._report(Reported("warning", "a checkpoint could not be copied", {"peer": peer_id, "reason": reason}))

    def _last_index(self) -> int:
        return 0 if self._journal is None else self._journal.last_index

    def _tidy(self) -> None:
        """Remove what is left of a broken copy once the log has grown without it: nobody needs it any more."""
        if self._left_at is None or self._fetching or self._last_index() <= self._left_at:
            return
        self._copy = self._left_at = None
        self._fetching = True  # none begins meanwhile

        def removed(_: object, error: BaseException | None) -> None:
            self._fetching = False
            if error is not None and not isinstance(error, DiskFullError):
                self._fatal(f"what is left of a copied checkpoint could not be removed: {error}")

        self._ports.executor.submit(lambda: discard(self._ports.disk), removed)

    def _install(self) -> None:
        """Install a received checkpoint once the stopped core no longer writes.

        A checkpoint still under way would rename an older manifest over the new one, or remove files that the new one
        names. A sync of the journal would truncate the file that it reserves, which may belong to the new journal by
        then.
        """
        if self._received and not self._stopped and not self.core.writing:
            self._received = self._fetching = False
            try:
                self._rebuild()
            except Exception as error:  # half replaced: the process must not stay up doing nothing
                if isinstance(error, DiskFullError) and self._on_no_room is not None:
                    self._stopped = True
                    self._on_no_room(error)
                    return
                self._fatal(f"a checkpoint could not be put in place: {error!r}")

    def _rebuild(self) -> None:
        """Replace the stopped core's files by the checkpoint and build a new core from it."""
        if self._journal is not None:
            self._journal.close()
        install_if_complete(self._ports.disk)
        self.installs += 1
        earlier = self.core
        self.core = self._build()
        self.core.parts.sync.take_over(earlier.parts.sync)
        self.core.log.introduce(earlier.log.introduced())
        if self._started:
            self.core.start()
            for peer_id in sorted(self._connected):
                self.core.peer_connected(peer_id)


def _removed(path: str) -> str:
    return f"{path} was removed, and with it votes or entries that this node has given or acknowledged. {ADVICE}"
