"""Checkpoints of the replicated state: what is captured, what a worker writes, and how it is read back.

`begin` (on the loop) copies what may change; `StateCheckpoint.run` (any thread) writes and syncs:
append-only files up to their captured length, then the windows in a file that is written once and
named after the applied index. The manifest, written by the caller afterwards, names them all; only
when it is durable may `remove_old` (any thread) remove what earlier ones named. What a crash in between leaves behind,
`restore` removes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import google_crc32c
import numpy as np

from tickwheel.node.core.failure import Failure
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.cold import ColdCapture
from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.groups import Group
from tickwheel.node.state.membership import member_of, message_of
from tickwheel.node.state.ports import WheelCheckpoint
from tickwheel.node.state.producers import Batch, Span, make_batch
from tickwheel.node.state.ready import IDS, TICKS, ReadyLog, ids_path, targets_path, ticks_path
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.state.retry_policy import policy_of
from tickwheel.node.state.schema import STATE_SCHEMA, state_problem
from tickwheel.node.state.sequence import Flush, Sequence
from tickwheel.node.state.settings import BOUNDS, Settings, changed
from tickwheel.node.state.staged_file import StagedFile, StagedSync
from tickwheel.node.state.subscription import NOT_JUDGED, Subscription
from tickwheel.node.state.targets import TARGET, Targets
from tickwheel.node.state.topics import Topic
from tickwheel.node.state.waiting import WaitingRetries
from tickwheel.proto import access_pb2, state_pb2
from tickwheel.proto.log_pb2 import Manifest, ManifestFile
from tickwheel.proto.scheduler_pb2 import SWEEP_RUNNING
from tickwheel.proto.staging_pb2 import StagingSnapshot
from tickwheel.storage.disk import Disk
from tickwheel.storage.manifest import FORMAT_VERSION as MANIFEST_VERSION
from tickwheel.storage.whole_file import read_whole, write_whole

FORMAT_VERSION = 3
"""Of the state in the manifest, and of the files that it names."""


def windows_path(directory: str, applied_index: int) -> str:
    """File of the windows of a checkpoint."""
    return f"{directory}/windows/{applied_index}"


@dataclass(slots=True, eq=False)
class StateCheckpoint:
    """One checkpoint of state and wheel. After `run`, `manifest` is what must become durable."""

    disk: Disk
    directory: str
    snapshot: state_pb2.StateSnapshot
    wheel: WheelCheckpoint
    windows: list[state_pb2.SubscriptionWindow]
    spans: list[tuple[str, Span]]
    batches: list[tuple[str, int, Batch]]
    flushes: list[tuple[Sequence, Flush]]
    sequences: list[ManifestFile]
    dropped: list[tuple[Sequence, list[str]]]
    doomed: list[str]
    staging: StagingSnapshot
    staged: list[ManifestFile]
    staged_syncs: list[tuple[StagedFile, StagedSync]]
    cold: ColdCapture
    access: access_pb2.AccessSnapshot
    ran: bool = False
    _files: list[ManifestFile] = field(default_factory=list)

    @property
    def applied_index(self) -> int:
        """What it covers."""
        return self.snapshot.applied_index

    @property
    def applied_term(self) -> int:
        """Term of that entry."""
        return self.snapshot.applied_term

    @property
    def lead_term(self) -> int:
        """Highest term of a lead command."""
        return self.snapshot.lead_term

    @property
    def state(self) -> bytes:
        """For `Manifest.state`."""
        return self.snapshot.SerializeToString()

    @property
    def wheel_state(self) -> bytes:
        """For `Manifest.wheel`."""
        return self.wheel.state

    @property
    def files(self) -> list[ManifestFile]:
        """After `run`: every file that it needs, those of the wheel included."""
        if not self.ran:
            raise ImpossibleStateError("the files of a checkpoint were asked for before it was written")
        return [*self.sequences, *self.staged, *self._files, *self.wheel.files]

    def run(self) -> None:
        """Write and sync everything; any thread. Raises DiskError."""
        for _, flush in self.flushes:
            flush.run()
        for name in ("ready", "dead"):
            if any(sequence.path.startswith(f"{self.directory}/{name}/") for sequence, _ in self.flushes):
                self.disk.sync_dir(f"{self.directory}/{name}")
        for _, sync in self.staged_syncs:
            sync.run()
        if self.staged_syncs:
            self.disk.sync_dir(f"{self.directory}/staging")
        content = state_pb2.StateWindows(
            staging=self.staging,
            cold=self.cold.message(),
            access=self.access,
            subscriptions=self.windows,
            producers=[
                state_pb2.ProducerSpan(producer_id=name, first=span.first, last=span.last, owner=span.owner)
                for name, span in self.spans
            ],
            batches=[
                state_pb2.ProducerBatch(
                    producer_id=n, sequence=s, ids=b.ids.tobytes(), due_ms=b.due_ms.tobytes(), checksum=b.checksum
                )
                for n, s, b in self.batches
            ],
        ).SerializeToString()
        path = self.snapshot.windows_path
        write_whole(self.disk, path, content)
        self._files = [ManifestFile(path=path, bytes=self.disk.size(path), crc32c=_crc(self.disk, path))]
        self.wheel.run()
        self.ran = True

    def remove_old(self) -> None:
        """The manifest is durable: remove what only earlier ones named; any thread. Raises DiskError."""
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


def _crc(disk: Disk, path: str) -> int:
    file = disk.open(path)
    try:
        return int(google_crc32c.value(file.read_at(0, file.size())))
    finally:
        file.close()


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


def _group_message(group: Group) -> state_pb2.GroupSnapshot:
    waiting, waiting_limit = group.waiting.content()
    message = state_pb2.GroupSnapshot(
        group_id=group.group_id,
        name=group.name,
        filter=group.filter,
        broadcasting=group.broadcasting,
        paused=group.paused,
        subscriptions=[
            state_pb2.SubscriptionSnapshot(
                topic_id=s.topic_id,
                floor=s.floor,
                start_ms=s.start_ms,
                checked=s.checked,
                epoch=s.epoch,
                pauses=s.pauses_bytes(),
                began=s.began,
                judged_from=s.judged_from,
            )
            for s in group.subscriptions.values()
        ],
        retry=group.retry.message(),
        waiting=waiting,
        waiting_limit=waiting_limit,
        owner=group.owner,
    )
    group.dead.snapshot_into(message)
    return message


def begin(state: ClusterState, wheel: WheelCheckpoint) -> StateCheckpoint:
    """Capture the state as it is now."""
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
        topics=[_topic_message(topic) for topic in state.topics],
        groups=[_group_message(group) for group in state.groups],
        hour_min_kept=state.hour_min_kept,
        unsettled_removed=state.unsettled_removed,
        sweeps=state.sweeps.dump(),
        windows_path=path,
        loads=state.loads.messages(),
    )
    sequences = state.sequences()
    dropped = [(sequence, paths) for sequence in sequences if (paths := sequence.dropped_paths())]
    doomed, state.doomed = state.doomed + state.staging.doomed, []
    state.staging.doomed = []
    return StateCheckpoint(
        disk=state.disk,
        directory=state.directory,
        snapshot=snapshot,
        wheel=wheel,
        windows=[
            state_pb2.SubscriptionWindow(group_id=s.group_id, topic_id=s.topic_id, values=s.window_bytes())
            for s in state.groups.subscriptions()
        ],
        spans=list(state.producers.spans()),
        batches=state.producers.batches(),
        flushes=[(sequence, sequence.begin_flush()) for sequence in sequences if sequence.needs_flush()],
        sequences=[file for sequence in sequences for file in sequence.files()],
        dropped=dropped,
        doomed=doomed,
        staging=state.staging.snapshot(),
        staged=[file.manifest_file() for file in state.staging.files()],
        staged_syncs=[(file, file.begin_sync()) for file in state.staging.files() if file.needs_sync()],
        cold=state.cold.capture(),
        access=state.access.message(),
    )


def finish(state: ClusterState, checkpoint: StateCheckpoint) -> None:
    """Its manifest is durable; `remove_old` is to run now."""
    for sequence, _ in checkpoint.flushes:
        sequence.finish_flush(True)
    for sequence, paths in checkpoint.dropped:
        sequence.forget_dropped(len(paths))
    for file, sync in checkpoint.staged_syncs:
        file.finish_sync(sync)


def abandon(state: ClusterState, checkpoint: StateCheckpoint) -> None:
    """It failed; the one before still holds."""
    for sequence, _ in checkpoint.flushes:
        sequence.finish_flush(False)
    state.doomed = checkpoint.doomed + state.doomed


def parts(
    disk: Disk, data: bytes, *, below: str = ""
) -> tuple[state_pb2.StateSnapshot, state_pb2.StateWindows, Settings]:
    """What `Manifest.state` and the file that it names (`below` a directory) hold, if this version may start from it.

    Raises ImpossibleStateError, CorruptFileError.
    """
    snapshot = state_pb2.StateSnapshot.FromString(data)
    if snapshot.format_version != FORMAT_VERSION:
        # Versions 1 and 2 were never in a release.
        raise ImpossibleStateError(
            f"the checkpoint has state format {snapshot.format_version}, this version knows {FORMAT_VERSION}: "
            "start the version that wrote it"
        )
    settings = changed(Settings(), snapshot.settings, creating=True)
    content = read_whole(disk, below + snapshot.windows_path)
    if not isinstance(settings, Settings) or content is None:
        raise ImpossibleStateError(
            f"checkpoint at {snapshot.applied_index}: settings or {snapshot.windows_path} missing"
        )
    windows = state_pb2.StateWindows.FromString(content)
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
    state.loads.restore(list(snapshot.loads))
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
                ),
            )
            for b in windows.batches
        ),
    )


def _remove_leavings(state: ClusterState, windows: str) -> None:
    """Files that this checkpoint does not name: written behind it, or left by a crash before they were removed."""
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
    retry = policy_of(message.retry, BOUNDS["delay_ms_max"][1])
    if isinstance(retry, Failure):
        raise ImpossibleStateError(f"group {message.name}: {retry.message}")
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
    for item in message.subscriptions:
        topic = state.topics.get(item.topic_id)
        if topic is None:
            raise ImpossibleStateError(f"group {message.name} has topic {item.topic_id}, which does not exist")
        subscription = Subscription(message.group_id, item.topic_id, topic.ready, state.settings.window_messages_max)
        subscription.restore(item.floor, item.start_ms, values.get((message.group_id, item.topic_id), b""))
        subscription.checked = item.checked if item.HasField("checked") else None
        subscription.epoch = item.epoch
        subscription.began = item.began
        subscription.judged_from = item.judged_from if item.HasField("judged_from") else NOT_JUDGED
        subscription.pauses = dict(np.frombuffer(item.pauses, "<i8").reshape(-1, 2).tolist())
        group.subscriptions[item.topic_id] = subscription
    return group
