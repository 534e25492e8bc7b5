"""Checkpoints of a node: when one is written, in which order, and how a node starts from it.

Order on disk, so that a crash between any two steps leaves something to start from:
files of wheel and state fsynced, then the manifest renamed into place (and its directory fsynced), then
the journal cut below it, then files that only an earlier checkpoint needed removed (by a worker; what a crash leaves of
them, a start removes).

While files of a checkpoint are being copied to a peer or into a backup, no later checkpoint is begun: whoever asks
meanwhile gets the same one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.stagger import Stagger
from tickwheel.node.core.world import Now, SteadyMs
from tickwheel.node.failure import Failure
from tickwheel.node.state.machine import StateConfig, StateMachine
from tickwheel.node.state.membership import member_of
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.state.schema import unknown_in
from tickwheel.node.state.snapshot import StateCheckpoint
from tickwheel.proto import common_pb2
from tickwheel.proto.parsing import parsed
from tickwheel.proto.state_pb2 import StateSnapshot
from tickwheel.replication.journal_files import entries_cut
from tickwheel.replication.log import Member
from tickwheel.storage.bundle import DIRECTORY, SUFFIX
from tickwheel.storage.disk import Disk, DiskFullError
from tickwheel.storage.errors import ADVICE
from tickwheel.storage.manifest import FILE_NAME, read_manifest, restore_files, write_manifest
from tickwheel.wheel.engine import Wheel, WheelConfig

JOURNAL_DIRECTORY = "journal"
WHEEL_DIRECTORY = "wheel"
STATE_DIRECTORY = "state"
MANIFEST_PATH = FILE_NAME
RETRY_MS = 5_000
REST = 9
"""After a checkpoint comes a pause this many times as long, so that they take a tenth of the time at most;"""
REST_MS_MAX = 30_000
"""but at most this one. A checkpoint that somebody requests does not wait for it."""
COPY_STALL_MS = 60_000
"""A checkpoint is held for its copies as long as one of them gets on in this time, however large it is; then it is
given up, and copies of it fail. Longer than a receiver waits for the sender (COPY_SILENCE_S)."""


@dataclass(frozen=True, slots=True)
class BackupFile:
    """One file of a copy: its path below the data directory and how many bytes of it count."""

    path: str
    bytes: int


def in_checkpoint(path: str) -> bool:
    """Whether a checkpoint may hold a file of this path; for paths that come from other machines."""
    directory, _, name = path.partition("/")
    return path == MANIFEST_PATH or (
        directory in (WHEEL_DIRECTORY, STATE_DIRECTORY, DIRECTORY)
        and all(part not in ("", ".", "..") and part.isprintable() for part in name.split("/"))
    )


@dataclass(slots=True)
class Restored:
    """The state that a node starts with, before it replays its journal."""

    wheel: Wheel
    state: StateMachine
    applied_index: int
    applied_term: int
    members: Sequence[Member]
    bundle_names: set[str]
    """Bundles that the checkpoint needs."""


def cluster_of(disk: Disk) -> str:
    """Id of the cluster whose state the newest checkpoint holds; empty if there is none. Raises DiskError."""
    manifest = read_manifest(disk)
    return "" if manifest is None else parsed(StateSnapshot, manifest.state).cluster_id


def bundles_in(paths: Iterable[str]) -> set[str]:
    """Names of the bundles among some files."""
    return {path.removeprefix(f"{DIRECTORY}/").removesuffix(SUFFIX) for path in paths if path.startswith(DIRECTORY)}


def restore(disk: Disk, config: CoreConfig, slot_ms: int, wheel_group: int) -> Restored:
    """Read the manifest and what it names; an empty disk gives an empty node. Raises DiskError kinds for damaged files:
    their message says which file and what to do."""
    manifest = read_manifest(disk)
    wheel_config = WheelConfig(slot_ms=slot_ms, buffer_bytes_max=config.buffer_bytes_max, preload_ms=config.preload_ms)
    state_config = StateConfig(wheel_group=wheel_group, slot_ms=slot_ms)
    if manifest is None:
        cut = entries_cut(disk, JOURNAL_DIRECTORY)
        if cut:
            raise ImpossibleStateError(
                f"there is no {MANIFEST_PATH}, and the journal begins behind entry {cut}: a checkpoint that held what "
                f"was before is lost. Nothing was changed. {ADVICE}"
            )
        # Files without a manifest are the leavings of a first start that never reached a checkpoint, or given up
        # (node/rebuild.py): the journal holds everything.
        disk.remove(WHEEL_DIRECTORY)
        disk.remove(STATE_DIRECTORY)
        wheel = Wheel(disk, WHEEL_DIRECTORY, wheel_config)
        state = StateMachine(disk, STATE_DIRECTORY, wheel, config=state_config)
        return Restored(wheel, state, 0, 0, (), set())
    unknown = unknown_in(manifest)
    if unknown:
        raise ImpossibleStateError(
            f"the manifest was written by a newer version: this one does not know {unknown}: "
            "start the version that wrote it"
        )
    restore_files(disk, manifest)
    wheel = Wheel(disk, WHEEL_DIRECTORY, wheel_config, manifest.wheel)
    state = StateMachine(disk, STATE_DIRECTORY, wheel, manifest.state, state_config)
    names = bundles_in(f.path for f in manifest.files)
    members = [member_of(message) for message in manifest.members]
    return Restored(wheel, state, manifest.applied_index, manifest.applied_term, members, names)


def _stopped() -> Failure:
    text = "this node stops, or starts again from a peer's checkpoint: ask again, or another node"
    return Failure(common_pb2.RECOVERING, text, {"retry_after_ms": "1000"})


class _Written(NamedTuple):
    """A worker's report of a durable checkpoint: the files that its manifest names, and the bundles among them."""

    files: list[BackupFile]
    bundle_names: set[str]


class Checkpointer:
    """Writes the node's checkpoints. `tick` begins one when it pays; the work runs in the executor."""

    def __init__(self, core: Kernel, restored: Restored, stagger: Stagger) -> None:
        self._core = core
        self._config = core.config
        self._state = core.state
        self._stagger = stagger
        self._held = False
        """A checkpoint is wanted and waits for this member's turn."""
        self._running = False
        self._capture: tuple[Generator[None, None, StateCheckpoint], int, int] | None = None
        """Under way, with the index and term that it is of."""
        self._end: Generator[None, None, None] | None = None
        """Of the checkpoint that became durable last."""
        self._stopped = False
        self._next_ms = 0
        self._not_before_ms = 0
        """After one that failed."""
        self._rest_until_ms = 0
        """After one that took long."""
        self._waiting: list[Reply[list[BackupFile]]] = []
        self._copies = 0
        self._copies_until_ms = 0
        self._copied_files: list[BackupFile] = []
        """Of the checkpoint that is being copied."""
        self._steady_ms = SteadyMs(0)
        """At the last tick."""
        self.covered_index = restored.applied_index
        """Index up to which the newest durable checkpoint covers the log;"""
        self._covered_ms = 0
        """When that checkpoint was begun, if this process wrote it."""
        self.written = 0
        self.bundle_names = restored.bundle_names
        """Bundles that the newest durable checkpoint needs."""

    @property
    def running(self) -> bool:
        """A checkpoint is being written, or what it made superfluous removed."""
        return self._running

    @property
    def capturing(self) -> bool:
        """The state is being copied, in turns: nothing may be applied, and the next turn wants to come soon."""
        return self._capture is not None

    @property
    def covered_age_ms(self) -> int:
        """How long ago the newest checkpoint that this process wrote was begun."""
        return self._steady_ms - self._covered_ms

    def wait_ms(self, now: Now) -> int | None:
        """0 while a capture or an end has turns to come; until this member's turn to begin one; else None."""
        if self.capturing or (self._end is not None and not self._core.wheel.ingestion.absorbing):
            return 0
        return self._stagger.wait_ms(now.cluster_ms) or None if self._held else None

    def tick(self, now: Now) -> None:
        """Begin a checkpoint if somebody asked, or at this member's turn if the log has grown enough or the period is
        over."""
        steady_ms = now.steady_ms
        self._steady_ms = steady_ms
        self._held = False
        if self._capture is not None:
            self._go_on(steady_ms)
            return
        if self._end is not None:
            next(self._end, None)
            return
        if self._next_ms == 0:
            self._next_ms = steady_ms + self._config.checkpoint_period_ms
        if self._running or steady_ms < self._not_before_ms:
            return
        if self._copies and steady_ms < self._copies_until_ms:
            self._answer(self._copied_files)
            return
        self._copies = 0
        if not self._waiting and not self._due(steady_ms):
            return
        self._held = self._stagger.holds(now, waits=not self._waiting)
        if not self._held:
            self._begin(steady_ms)

    def _due(self, steady_ms: int) -> bool:
        if steady_ms < self._rest_until_ms:
            return False
        entries = self._core.applied.index - self.covered_index
        if entries >= self._config.checkpoint_entries or (steady_ms >= self._next_ms and entries > 0):
            return True
        return self._core.log.entries_after(self.covered_index) >= self._config.checkpoint_log_bytes

    def request(self, reply: Reply[list[BackupFile]]) -> None:
        """Write a checkpoint soon, or take the one that others copy now; `reply` gets its files.

        They stay until all have said `copied` of them, or COPY_STALL_MS after the last has said `progressed`.
        """
        if self._stopped:
            reply.fail(_stopped())
        else:
            self._waiting.append(reply)

    def stop(self) -> None:
        """Begin nothing any more and tell those that wait. A write under way may still end."""
        self._stopped = True
        if self._capture is not None or self._end is not None:
            self._capture, self._end, self._running = None, None, False
        self._refuse(_stopped())

    def progressed(self, files: object) -> bool:
        """A copy of these files gets on; are they held still? If not, a later checkpoint replaces them."""
        if not self._holds(files):
            return False
        self._copies_until_ms = self._steady_ms + COPY_STALL_MS
        return True

    def copied(self, files: object) -> None:
        """A copy of these files is made (or given up); after the last one checkpoints go on."""
        if self._holds(files):
            self._copies -= 1

    def _holds(self, files: object) -> bool:
        # Of a copy that was given up one may hear late: it has no part in the hold of a later one.
        return self._copies > 0 and files is self._copied_files

    def _answer(self, files: list[BackupFile]) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._copies += len(waiting)
            self._copies_until_ms = self._steady_ms + COPY_STALL_MS
            self._copied_files = files
        for reply in waiting:
            reply.done(files)

    def _refuse(self, failure: Failure) -> None:
        waiting, self._waiting = self._waiting, []
        for reply in waiting:
            reply.fail(failure)

    def _begin(self, steady_ms: SteadyMs) -> None:
        index, term = self._core.applied.index, self._core.applied.term
        if index == 0:
            self._refuse(Failure(common_pb2.WRONG_STATE, "nothing has been applied yet", {"retry_after_ms": "1000"}))
            return
        self._running = True
        self._next_ms = steady_ms + self._config.checkpoint_period_ms
        self._capture = (self._state.capture_checkpoint(), index, term)
        self._go_on(steady_ms)

    def _go_on(self, steady_ms: SteadyMs) -> None:
        """One more turn of capturing the state; the rest is written by a worker."""
        assert self._capture is not None
        turns, index, term = self._capture
        try:
            next(turns)
        except StopIteration as complete:
            self._capture = None
            self._write(complete.value, index, term, steady_ms)

    def _write(self, checkpoint: StateCheckpoint, index: int, term: int, steady_ms: SteadyMs) -> None:
        disk = self._core.disk

        def write() -> _Written:
            checkpoint.run()
            manifest = checkpoint.manifest
            write_manifest(disk, manifest)
            files = [BackupFile(f.path, f.bytes) for f in manifest.files]
            return _Written(files, bundles_in(f.path for f in files))

        self._core.executor.submit(
            write, lambda written, error: self._ended(checkpoint, index, term, steady_ms, written, error)
        )

    def _ended(
        self,
        checkpoint: StateCheckpoint,
        index: int,
        term: int,
        begun_ms: SteadyMs,
        written: _Written | None,
        error: BaseException | None,
    ) -> None:
        if error is not None or written is None:
            self._running = False
            if not isinstance(error, DiskFullError):
                self._core.fatal(f"the checkpoint failed: {error}", error)
            self._state.abandon_checkpoint(checkpoint)
            self._not_before_ms = self._steady_ms + RETRY_MS
            text = f"the checkpoint failed: {error}"
            self._refuse(Failure(common_pb2.DISK_FULL, text, {"retry_after_ms": str(RETRY_MS)}))
            return
        self.written += 1
        self._rest_until_ms = self._steady_ms + min(REST * (self._steady_ms - begun_ms), REST_MS_MAX)
        self.covered_index, self._covered_ms = index, begun_ms
        self.bundle_names = written.bundle_names
        self._core.log.checkpointed(index, term)
        self._end = self._finish(checkpoint, written.files)
        next(self._end, None)

    def _finish(self, checkpoint: StateCheckpoint, files: list[BackupFile]) -> Generator[None, None, None]:
        """The work that is left once a checkpoint is durable, in turns of a few milliseconds."""
        yield from self._state.finish_in_turns(checkpoint)
        self._end = None
        files.append(BackupFile(MANIFEST_PATH, self._core.disk.size(MANIFEST_PATH)))

        def removed(_: object, problem: BaseException | None) -> None:
            self._running = False
            # Without a free descriptor files stay; the next start removes them.
            if problem is not None and not isinstance(problem, DiskFullError):
                self._core.fatal(f"files that no checkpoint needs any more could not be removed: {problem}", problem)

        self._answer(files)
        self._core.executor.submit(checkpoint.remove_old, removed)
