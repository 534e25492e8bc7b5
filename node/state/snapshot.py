"""Checkpoints of the replicated state: their capture, their writing by a worker, and their restore.

`capture` (on the core's thread, in turns) copies everything that may change, as plain values; nothing is applied before
it is complete. `StateCheckpoint.run` (any thread) turns the values into messages a piece at a time, so that no second
copy of the state is ever in memory. It writes and syncs append-only files up to their captured length, then the windows
in a file that is written once and named after the applied index. Afterwards the caller writes the manifest, which names
all these files. Only when it is durable may `remove_old` (any thread) remove files of earlier manifests. `restore`
removes files that a crash left in between.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tickwheel.node.failure import RequestError
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.cold import ColdCapture
from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.groups import Group, WaitingRetries, policy_of
from tickwheel.node.state.membership import member_of, message_of
from tickwheel.node.state.ports import WheelCheckpoint
from tickwheel.node.state.producers import Batch, Span, make_batch
from tickwheel.node.state.ready import IDS, TICKS, ReadyLog, ids_path, targets_path, ticks_path
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.state.schedules import Schedule, snapshot_values
from tickwheel.node.state.schema import STATE_SCHEMA, state_problem
from tickwheel.node.state.sequence import Flush, Sequence
from tickwheel.node.state.settings import BOUNDS, Settings, changed
from tickwheel.node.state.staging import StagedFile, StagedSync
from tickwheel.node.state.subscription import NOT_JUDGED, Subscription
from tickwheel.node.state.targets import TARGET, Targets
from tickwheel.node.state.topics import Topic
from tickwheel.node.state.unique_keys import Rows, contents
from tickwheel.proto import access_pb2, state_pb2
from tickwheel.proto.log_pb2 import Manifest, ManifestFile
from tickwheel.proto.parsing import parsed
from tickwheel.proto.scheduler_pb2 import SWEEP_RUNNING
from tickwheel.proto.staging_pb2 import StagingSnapshot
from tickwheel.storage.disk import Disk
from tickwheel.storage.manifest import FORMAT_VERSION as MANIFEST_VERSION
from tickwheel.storage.whole_file import file_crc, read_whole, write_pieces

FORMAT_VERSION = 3
"""Version of the state in the manifest, and of the files that it names."""

TURN_TOPICS = 100
TURN_SUBSCRIPTIONS = 2_000
TURN_BATCHES = 20_000
TURN_FLUSHES = 5_000
WINDOW_BYTES_A_SUBSCRIPTION = 10_000
"""These bounds limit one turn of a capture, or of a checkpoint's end, to a few milliseconds each. A window counts as
one more subscription for each such number of bytes."""
PIECE_BYTES = 1 << 20
"""Size of the pieces in which the file of windows is written."""
ROW_BYTES = 32
"""Bytes counted for a window or batch, beside its columns."""


def windows_path(directory: str, applied_index: int) -> str:
    """Path of a checkpoint's file of windows."""
    return f"{directory}/windows/{applied_index}"


@dataclass(slots=True, eq=False)
class StateCheckpoint:
    """One checkpoint of state and wheel. After `run`, `manifest` is what must become durable."""

    disk: Disk
    directory: str
    snapshot: state_pb2.StateSnapshot
    """The state; `run` adds the subscriptions of the groups."""
    wheel: WheelCheckpoint
    subscriptions: list[list[_Subscribed]]
    """Subscriptions of each group in `snapshot`."""
    windows: list[tuple[int, int, bytes]]
    """(group id, topic id, values) of windows that cover something."""
    spans: list[tuple[str, Span]]
    batches: list[tuple[str, int, Batch]]
    shares: state_pb2.ProducerShares | None
    flushes: list[tuple[Sequence, Flush]]
    sequences: list[ManifestFile]
    dropped: list[tuple[Sequence, list[str]]]
    doomed: list[str]
    staging: StagingSnapshot
    staged: list[ManifestFile]
    staged_syncs: list[tuple[StagedFile, StagedSync]]
    cold: ColdCapture
    access: access_pb2.AccessSnapshot
    schedules: list[Schedule]
    schedule_revision: int
    unique_keys: list[tuple[int, Rows]]
    next_key_shard: int
    ran: bool = False
    _files: list[ManifestFile] = field(default_factory=list)

    @property
    def applied_index(self) -> int:
        """Index of the newest entry that the checkpoint covers."""
        return self.snapshot.applied_index

    @property
    def applied_term(self) -> int:
        """Term of that entry."""
        return self.snapshot.applied_term

    @property
    def lead_term(self) -> int:
        """Highest term of an applied lead command."""
        return self.snapshot.lead_term

    @property
    def state(self) -> bytes:
        """Content of `Manifest.state`."""
        return self.snapshot.SerializeToString()

    @property
    def wheel_state(self) -> bytes:
        """Content of `Manifest.wheel`."""
        return self.wheel.state

    @property
    def files(self) -> list[ManifestFile]:
        """After `run`: every file that the checkpoint needs, including those of the wheel."""
        if not self.ran:
            raise ImpossibleStateError("the files of a checkpoint were asked for before it was written")
        return [*self.sequences, *self.staged, *self._files, *self.wheel.files]

    def run(self) -> None:
        """Write and sync everything. Any thread may call it. Raises DiskError."""
        for _, flush in self.flushes:
            flush.run()
        for name in ("ready", "dead"):
            if any(sequence.path.startswith(f"{self.directory}/{name}/") for sequence, _ in self.flushes):
                self.disk.fsync_dir(f"{self.directory}/{name}")
        for _, sync in self.staged_syncs:
            sync.run()
        if self.staged_syncs:
            self.disk.fsync_dir(f"{self.directory}/staging")
        if not self._files:
            for group, subscribed in zip(self.snapshot.groups, self.subscriptions, strict=True):
                for facts in subscribed:
                    group.subscriptions.add(**facts._asdict())
        path = self.snapshot.windows_path
        write_pieces(self.disk, path, self._windows_file())
        self._files = [ManifestFile(path=path, bytes=self.disk.size(path), crc32c=file_crc(self.disk, path))]
        self.wheel.run()
        self.ran = True

    def _windows_file(self) -> Iterator[bytes]:
        """A StateWindows message in pieces: protobuf reads consecutive messages as one."""
        first_part = state_pb2.StateWindows(
            staging=self.staging,
            cold=self.cold.message(),
            access=self.access,
            schedule_revision=self.schedule_revision,
            next_key_shard=self.next_key_shard,
            producer_shares=self.shares,
        )
        yield first_part.SerializeToString()
        part, size = state_pb2.StateWindows(), 0
        for name, values, row_bytes in self._window_rows():
            getattr(part, name).add(**values)
            size += row_bytes + ROW_BYTES
            if size >= PIECE_BYTES:
                yield part.SerializeToString()
                part, size = state_pb2.StateWindows(), 0
        yield part.SerializeToString()

    def _window_rows(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Field of StateWindows, values and bytes of each of its rows."""
        for group_id, topic_id, window in self.windows:
            yield "subscriptions", {"group_id": group_id, "topic_id": topic_id, "values": window}, len(window)
        for producer_id, span in self.spans:
            span_values = {"producer_id": producer_id, "first": span.first, "last": span.last, "owner": span.owner}
            yield "producers", span_values, 0
        for producer_id, sequence, batch in self.batches:
            columns = {
                "ids": batch.ids.tobytes(),
                "due_ms": batch.due_ms.tobytes(),
                "key_outcomes": b"" if batch.keys is None else batch.keys.tobytes(),
            }
            values = {"producer_id": producer_id, "sequence": sequence, "checksum": batch.checksum, **columns}
            yield "batches", values, sum(map(len, columns.values()))
        for number, rows in contents(self.unique_keys):
            yield "unique_keys", {"number": number, "rows": rows}, len(rows)
        for schedule in self.schedules:
            yield "schedules", snapshot_values(schedule), schedule.size + len(schedule.runs)

    def remove_old(self) -> None:
        """Remove files that only earlier manifests named; call it once this one is durable. Any thread. Raises
        DiskError."""
        for path in self.doomed:
            self.disk.remove(path)
        for _, paths in self.dropped:
            for path in paths:
                self.disk.remove(path)
        directory, _, kept = self.snapshot.windows_path.rpartition("/")
        for name in self.disk.list(directory):
            if name != kept:
                self.disk.remove(f"{directory}/{name}")
        self.wheel.remove_old()

    @property
    def manifest(self) -> Manifest:
        """After `run`: the manifest of this checkpoint."""
        return Manifest(
            format_version=MANIFEST_VERSION,
            applied_index=self.applied_index,
            applied_term=self.applied_term,
            lead_term=self.lead_term,
            wheel=self.wheel_state,
            state=self.state,
            members=self.snapshot.members,
            files=self.files,
        )


def _topic_message(topic: Topic) -> state_pb2.TopicSnapshot:
    ready = topic.ready
    return state_pb2.TopicSnapshot(
        topic_id=topic.topic_id,
        name=topic.name,
        fifo=topic.fifo,
        paused=topic.paused,
        ids=ready.ids.snapshot(),
        ticks=ready.ticks.snapshot(),
        last_tick=ready.last_tick,
        first_retained=ready.first_retained,
        hours=ready.hours_bytes(),
        hours_dispatched=ready.dispatched_bytes(),
        targets=ready.targets.rows.snapshot(),
        owner=topic.owner,
    )


class _Subscribed(NamedTuple):
    """The values of a SubscriptionSnapshot: for a hundred thousand subscriptions these cost less of the core's
    thread."""

    topic_id: int
    floor: int
    start_ms: int
    checked: int | None
    epoch: int
    pauses: bytes
    began: int
    judged_from: int


def _subscribed(s: Subscription) -> _Subscribed:
    pauses = s.pauses_bytes() if s.pauses else b""
    return _Subscribed(s.topic_id, s.floor, s.start_ms, s.checked, s.epoch, pauses, s.began, s.judged_from)


def _group_message(group: Group) -> state_pb2.GroupSnapshot:
    waiting, waiting_limit = group.waiting.content()
    message = state_pb2.GroupSnapshot(
        group_id=group.group_id,
        name=group.name,
        filter=group.filter,
        broadcasting=group.broadcasting,
        paused=group.paused,
        retry=group.retry.message(),
        waiting=waiting,
        waiting_limit=waiting_limit,
        owner=group.owner,
    )
    group.dead.snapshot_into(message)
    return message


def capture(state: ClusterState, wheel: WheelCheckpoint) -> Generator[None, None, StateCheckpoint]:
    """Capture the state in turns of a few milliseconds; nothing may be applied in between."""
    path = windows_path(state.directory, state.applied_index)
    snapshot = state_pb2.StateSnapshot(
        format_version=FORMAT_VERSION,
        schema=STATE_SCHEMA,
        applied_index=state.applied_index,
        applied_term=state.applied_term,
        lead_term=state.lead_term,
        cluster_id=state.cluster_id,
        settings=state.settings.message(),
        members=[message_of(member) for member in state.members.values()],
        removed_ids=sorted(state.removed_ids),
        last_topic_id=state.topics.last_id,
        last_group_id=state.groups.last_id,
        hour_min_kept=state.hour_min_kept,
        unsettled_removed=state.unsettled_removed,
        sweeps=state.sweeps.dump(),
        windows_path=path,
        loads=state.loads,
        marks_replays=state.marks_replays,
    )
    held = _Sequences()
    for number, topic in enumerate(state.topics, 1):
        snapshot.topics.append(_topic_message(topic))
        held.add(topic.ready.sequences())
        if number % TURN_TOPICS == 0:
            yield
    subscriptions: list[list[_Subscribed]] = []
    windows: list[tuple[int, int, bytes]] = []
    number = 0
    for group in state.groups:
        snapshot.groups.append(_group_message(group))
        held.add(group.dead.sequences())
        subscribed: list[_Subscribed] = []
        subscriptions.append(subscribed)
        number += TURN_SUBSCRIPTIONS // TURN_TOPICS  # a group costs as much as a topic
        for s in group.subscriptions.values():
            subscribed.append(_subscribed(s))
            if values := s.window_bytes():
                windows.append((s.group_id, s.topic_id, values))
                number += len(values) // WINDOW_BYTES_A_SUBSCRIPTION
            number += 1
            if number >= TURN_SUBSCRIPTIONS:
                number = 0
                yield
    batches: list[tuple[str, int, Batch]] = []
    remembered = state.producers.batches()
    while taken := list(itertools.islice(remembered, TURN_BATCHES)):
        batches += taken
        yield
    doomed, state.doomed = state.doomed + state.staging.doomed, []
    state.staging.doomed = []
    return StateCheckpoint(
        disk=state.disk,
        directory=state.directory,
        snapshot=snapshot,
        wheel=wheel,
        subscriptions=subscriptions,
        windows=windows,
        spans=list(state.producers.spans()),
        batches=batches,
        shares=state.producers.shares(),
        flushes=held.flushes,
        sequences=held.files,
        dropped=held.dropped,
        doomed=doomed,
        staging=state.staging.snapshot(),
        staged=[file.manifest_file() for file in state.staging.files()],
        staged_syncs=[(file, file.begin_fsync()) for file in state.staging.files() if file.needs_fsync()],
        cold=state.cold.capture(),
        access=state.access.message(),
        schedules=state.schedules.capture(),
        schedule_revision=state.schedules.last_revision,
        unique_keys=state.unique_keys.capture(),
        next_key_shard=state.unique_keys.next_shard,
    )


@dataclass(slots=True)
class _Sequences:
    """The append-only lists in a checkpoint."""

    flushes: list[tuple[Sequence, Flush]] = field(default_factory=list)
    files: list[ManifestFile] = field(default_factory=list)
    dropped: list[tuple[Sequence, list[str]]] = field(default_factory=list)

    def add(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.needs_flush():
                self.flushes.append((sequence, sequence.begin_flush()))
            self.files += sequence.files()
            paths = sequence.dropped_paths()
            if paths:
                self.dropped.append((sequence, paths))


def finish(checkpoint: StateCheckpoint) -> Generator[None, None, None]:
    """The checkpoint's manifest is durable: note that in turns of a few milliseconds, during which entries may be
    applied. Then run `remove_old`."""
    for number, (sequence, _) in enumerate(checkpoint.flushes, 1):
        sequence.finish_flush(True)
        if number % TURN_FLUSHES == 0:
            yield
    for number, (sequence, paths) in enumerate(checkpoint.dropped, 1):
        sequence.forget_dropped(len(paths))
        if number % TURN_FLUSHES == 0:
            yield
    for file, sync in checkpoint.staged_syncs:
        file.finish_fsync(sync)


def abandon(state: ClusterState, checkpoint: StateCheckpoint) -> None:
    """Give up a failed checkpoint; the one before stays valid."""
    for sequence, _ in checkpoint.flushes:
        sequence.finish_flush(False)
    state.doomed = checkpoint.doomed + state.doomed


def parts(
    disk: Disk, data: bytes, *, below: str = ""
) -> tuple[state_pb2.StateSnapshot, state_pb2.StateWindows, Settings]:
    """Content of `Manifest.state` and of the file that it names (`below` a directory), if this version may start from
    it.

    Raises ImpossibleStateError, CorruptFileError.
    """
    snapshot = parsed(state_pb2.StateSnapshot, data)
    if snapshot.format_version != FORMAT_VERSION:
        # Versions 1 and 2 were never in a release.
        raise ImpossibleStateError(
            f"the checkpoint has state format {snapshot.format_version}, this version knows {FORMAT_VERSION}: "
            "start the version that wrote it"
        )
    try:
        settings = changed(Settings(), snapshot.settings, creating=True)
    except RequestError as error:
        raise ImpossibleStateError(f"checkpoint at {snapshot.applied_index}: settings: {error}") from error
    content = read_whole(disk, below + snapshot.windows_path)
    if content is None:
        raise ImpossibleStateError(f"checkpoint at {snapshot.applied_index}: {snapshot.windows_path} missing")
    windows = parsed(state_pb2.StateWindows, content)
    unknown = state_problem(snapshot, windows)
    if unknown:
        raise ImpossibleStateError(
            f"checkpoint at {snapshot.applied_index} was written by a newer version: this one does not know {unknown}: "
            "start the version that wrote it"
        )
    return snapshot, windows, settings


def restore(state: ClusterState, data: bytes) -> None:
    """Fill a fresh state from `Manifest.state`. Raises ImpossibleStateError, CorruptFileError."""
    snapshot, windows, settings = parts(state.disk, data)
    state.applied_index, state.applied_term = snapshot.applied_index, snapshot.applied_term
    state.lead_term = snapshot.lead_term
    state.cluster_id = snapshot.cluster_id
    state.settings = settings
    state.members = {message.node_id: member_of(message) for message in snapshot.members}
    state.removed_ids = set(snapshot.removed_ids)
    state.hour_min_kept = snapshot.hour_min_kept
    state.sweeps.load(snapshot.sweeps)
    state.unsettled_removed = snapshot.unsettled_removed
    state.marks_replays = snapshot.marks_replays
    state.loads.restore(snapshot.loads)
    for message in snapshot.topics:
        state.topics.add(_restore_topic(state, message))
    state.topics.last_id = snapshot.last_topic_id
    values = {(w.group_id, w.topic_id): w.values for w in windows.subscriptions}
    for group in snapshot.groups:
        state.groups.add(_restore_group(state, group, values))
    state.groups.last_id = snapshot.last_group_id
    for job in state.sweeps:
        target = state.deletion_target(job)
        if target is not None:
            target.closing = job.state == SWEEP_RUNNING
    state.staging.restore(windows.staging)
    state.cold.restore(windows.cold)
    state.access.restore(windows.access)
    state.schedules.restore(windows.schedules, windows.schedule_revision)
    state.unique_keys.restore(((shard.number, shard.rows) for shard in windows.unique_keys), windows.next_key_shard)
    _remove_leavings(state, snapshot.windows_path)
    state.producers.restore(
        ((span.producer_id, Span(span.first, span.last, sys.intern(span.owner))) for span in windows.producers),
        (
            (
                b.producer_id,
                b.sequence,
                make_batch(
                    np.frombuffer(b.ids, "<u8"),
                    np.frombuffer(b.due_ms, "<i8"),
                    b.checksum if b.HasField("checksum") else None,
                    np.frombuffer(b.key_outcomes, np.uint8) if b.key_outcomes else None,
                ),
            )
            for b in windows.batches
        ),
        windows.producer_shares if windows.HasField("producer_shares") else None,
    )


def _remove_leavings(state: ClusterState, windows: str) -> None:
    """Remove files that this checkpoint does not name: written after it, or left by a crash before their removal."""
    named = {file.path for sequence in state.sequences() for file in sequence.files()} | {windows}
    named |= {file.path for file in state.staging.files()}
    for name in ("ready", "dead", "windows", "staging"):
        directory = f"{state.directory}/{name}"
        for left in state.disk.list(directory):
            if f"{directory}/{left}" not in named:
                state.disk.remove(f"{directory}/{left}")


def _restore_topic(state: ClusterState, message: state_pb2.TopicSnapshot) -> Topic:
    disk, directory, topic_id = state.disk, state.directory, message.topic_id
    ready = ReadyLog(
        Sequence(disk, ids_path(directory, topic_id), IDS, message.ids),
        Sequence(disk, ticks_path(directory, topic_id), TICKS, message.ticks),
        Targets(Sequence(disk, targets_path(directory, topic_id), TARGET, message.targets)),
        state.settings.slot_ms,
    )
    ready.last_tick = message.last_tick
    ready.first_retained = message.first_retained
    ready.restore_hours(message.hours, message.hours_dispatched)
    return Topic(topic_id, message.name, message.fifo, ready, message.paused, message.owner)


def _restore_group(
    state: ClusterState, message: state_pb2.GroupSnapshot, values: dict[tuple[int, int], bytes]
) -> Group:
    try:
        retry = policy_of(message.retry, BOUNDS["delay_ms_max"][1])
    except RequestError as error:
        raise ImpossibleStateError(f"group {message.name}: {error}") from error
    group = Group(
        message.group_id,
        message.name,
        message.filter,
        message.broadcasting,
        DeadLetters(state.disk, state.directory, message.group_id, message),
        message.paused,
        retry,
        WaitingRetries(message.waiting, message.waiting_limit),
        owner=message.owner,
    )
    window_max = state.settings.window_messages_max
    for item in message.subscriptions:
        topic = state.topics.get(item.topic_id)
        if topic is None:
            raise ImpossibleStateError(f"group {message.name} has topic {item.topic_id}, which does not exist")
        subscription = Subscription(message.group_id, item.topic_id, topic.ready, window_max, state.backlog)
        subscription.restore(item.floor, item.start_ms, values.get((message.group_id, item.topic_id), b""))
        subscription.checked = item.checked if item.HasField("checked") else None
        subscription.epoch = item.epoch
        subscription.began = item.began
        subscription.judged_from = item.judged_from if item.HasField("judged_from") else NOT_JUDGED
        subscription.pauses = dict(np.frombuffer(item.pauses, "<i8").reshape(-1, 2).tolist())
        group.subscriptions[item.topic_id] = subscription
    return group
