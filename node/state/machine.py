"""The replicated state machine: applies the log's entries to wheel, topics, groups, producers, settings.

Pure: what it does follows from the entries alone. It has no clock, no chance, and touches files only
through the disk port. It belongs to one thread, that of the node's core, which is its only caller.

Invariants:
- `apply` is called with rising indexes. It raises for no content of a known version: each command of an
  entry gets one typed result. `ImpossibleStateError` means that this process must stop.
- Every entry carries the term of its master. An entry of a lower term than the newest applied lead command
  has no effect.
- Two machines that applied the same entries have the same digest, whatever they read, wrote to disk,
  checkpointed or restored in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tickwheel.node.failure import Failure, RequestError, invalid, refused
from tickwheel.node.state import filtering, snapshot
from tickwheel.node.state.administration import Administration
from tickwheel.node.state.burial import Burial
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.cold import ColdResult
from tickwheel.node.state.key_holders import Holder, KeyHolders
from tickwheel.node.state.loads import Ingesting, IngestResult
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.producers import Batch, make_batch
from tickwheel.node.state.publishing import DUE_MS_MAX, META_BYTES_MAX, Publishing, judge, sender_of
from tickwheel.node.state.ready import Arrival, by_topic
from tickwheel.node.state.recurring import Recurring
from tickwheel.node.state.results import (
    ONE_SETTLED,
    AdminResult,
    CancelResult,
    DeadResult,
    DispatchResult,
    FilteredResult,
    Ignored,
    ImpossibleStateError,
    LeadResult,
    MadeReady,
    PublishResult,
    Refused,
    RescheduleResult,
    ScheduleResult,
    SettleResult,
    SweepResult,
)
from tickwheel.node.state.retrying import Budget, LateSearch, LateSettlements, Retrying
from tickwheel.node.state.schema import entry_problem
from tickwheel.node.state.snapshot import StateCheckpoint
from tickwheel.node.state.staging import StagingResult
from tickwheel.node.state.subscription import RETURNING, SETTLING
from tickwheel.node.state.sweeps import DELETIONS
from tickwheel.node.state.unique_keys import DIGEST_BYTES, digest_of, key_of
from tickwheel.node.state.view import StateView
from tickwheel.proto import cold_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto import scheduler_pb2 as scheduler
from tickwheel.proto.log_pb2 import (
    SETTLE_ACK,
    SETTLE_DEAD,
    SETTLE_RETRY,
    SETTLE_SKIP,
    Cancel,
    Command,
    Dispatch,
    Filtered,
    Ingest,
    Lead,
    LogEntry,
    PublishRequest,
    Reschedule,
    Settle,
    SettleColumns,
    SweepCommand,
)
from tickwheel.replication.log import Member
from tickwheel.storage.disk import Disk
from tickwheel.wheel.units import ONE_TAG, UNIT, CursorKey

__all__ = ["FORMAT_VERSION", "AnyResult", "CommandResult", "StateCheckpoint", "StateConfig", "StateMachine"]

FORMAT_VERSION = 1
"""Version of log entries, as masters write them. A newer one stops the node: guessing would make it differ from the
others."""

CommandResult = (
    AdminResult
    | CancelResult
    | cold_pb2.ColdJob
    | ColdResult
    | DeadResult
    | DispatchResult
    | FilteredResult
    | IngestResult
    | LeadResult
    | PublishResult
    | RescheduleResult
    | ScheduleResult
    | SettleResult
    | StagingResult
    | SweepResult
)
"""The result of `apply` for one command. With a `failure` the command was refused."""

AnyResult = CommandResult | Ignored | Refused

_CANCEL_OUTCOMES = {
    "CANCELLED": scheduler.CANCELLED,
    "ALREADY_DISPATCHED": scheduler.ALREADY_DISPATCHED,
    "NOT_FOUND": scheduler.NOT_FOUND,
}


@dataclass(frozen=True, slots=True)
class StateConfig:
    """`slot_ms`: slot width of the wheel; a cluster of another width stops the node. None: not compared."""

    wheel_group: int = 0
    slot_ms: int | None = None


class StateMachine(StateView):
    def __init__(
        self,
        disk: Disk,
        directory: str,
        wheel: WheelPort,
        restored: bytes = b"",
        config: StateConfig | None = None,
    ) -> None:
        """`restored`: `Manifest.state`; the wheel must be restored from the same manifest."""
        self._config = config or StateConfig()
        state = ClusterState(disk, directory)
        if restored:
            snapshot.restore(state, restored)
        else:
            disk.make_dir(directory)
        super().__init__(state, wheel, Administration(state, wheel, self._config.slot_ms))
        self.holders = KeyHolders(state.unique_keys, state.groups, wheel)
        self._ingesting = Ingesting(wheel, self._state.topics, self._state.loads, self._state.cold)
        self._publishing = Publishing(wheel, self._state.topics, self._state.producers, self.holders)
        self.retrying = Retrying(self._state, wheel)
        self._late = LateSettlements()
        self.burial = Burial(self._state, self.retrying)
        self._recurring = Recurring(self._state, wheel)
        self._checkpoint: StateCheckpoint | None = None
        self._apply_by_kind: dict[str, Callable[[Any, LogEntry], AnyResult]] = {
            "publish": lambda body, entry: self._publishing.apply(body, entry.stamped_ms, state.settings),
            "dispatch": lambda body, entry: self._dispatch(body, entry.stamped_ms),
            "ingest": self._ingest,
            "settle": lambda body, entry: self._settle(body, entry.stamped_ms),
            "replay_dead": lambda body, entry: self.burial.replay(body),
            "purge_dead": lambda body, entry: self.burial.purge(body),
            "cancel": lambda body, entry: self._cancel_once(body, entry.stamped_ms),
            "reschedule": lambda body, entry: self._reschedule_once(body, entry.stamped_ms),
            "filtered": lambda body, entry: self._filter(body),
            "staging": lambda body, entry: state.staging.apply(
                body, entry.stamped_ms, state.settings, self._publishing
            ),
            "admin": lambda body, entry: self._admin.apply(body, entry.stamped_ms),
            "lead": lambda body, entry: self._lead(body),
            "cold": lambda body, entry: state.cold.apply(body),
            "sweep": lambda body, entry: self._sweep(body, entry.stamped_ms),
            "schedule": lambda body, entry: self._recurring.apply(body, entry.stamped_ms),
        }
        """By kind of command. A RequestError makes the result Refused."""
        self.filtered = 0
        """Messages that filters left out since this process started, replays included. No part of the state."""

    # -- the log

    def apply(self, index: int, term: int, entry: LogEntry) -> list[AnyResult]:
        """Apply one entry; one result per command, in order."""
        state = self._state
        if entry.format_version > FORMAT_VERSION:
            raise ImpossibleStateError(
                f"log entry {index} has format {entry.format_version}, this version knows up to {FORMAT_VERSION}: "
                "start the version that the other nodes run"
            )
        unknown = entry_problem(entry)
        if unknown:
            raise ImpossibleStateError(
                f"log entry {index} was written by a newer version: this one does not know {unknown}: "
                "start the version that the other nodes run"
            )
        if index <= state.applied_index:
            raise ImpossibleStateError(f"log entry {index} was given to apply after {state.applied_index}")
        if entry.wheel_group != self._config.wheel_group:
            raise ImpossibleStateError(
                f"log entry {index} is of wheel group {entry.wheel_group}, this is {self._config.wheel_group}"
            )
        state.applied_index, state.applied_term = index, term
        return [self._apply_command(command, entry) for command in entry.commands]

    def note_applied(self, index: int, term: int) -> None:
        """Note the index of an entry without a command."""
        self._state.applied_index, self._state.applied_term = index, term

    def _apply_command(self, command: Command, entry: LogEntry) -> AnyResult:
        state = self._state
        if entry.term < state.lead_term:
            return Ignored(entry.term, state.lead_term)
        kind = command.WhichOneof("body") or "without a body"
        try:
            if kind not in self._apply_by_kind:
                raise refused(pb.WRONG_STATE, f"command {kind} is not known to this version")
            return self._apply_by_kind[kind](getattr(command, kind), entry)
        except RequestError as error:
            return Refused(error.failure)

    def _lead(self, lead: Lead) -> LeadResult:
        state = self._state
        accepted = lead.term >= state.lead_term
        state.lead_term = max(lead.term, state.lead_term)
        return LeadResult(accepted, lead.term)

    def _dispatch(self, dispatch: Dispatch, stamped_ms: int) -> DispatchResult:
        if not 0 <= dispatch.due_ms <= DUE_MS_MAX:
            failure = invalid("due_ms", dispatch.due_ms, f"0 to {DUE_MS_MAX}").failure
            return DispatchResult(self.wheel.cursor, 0, failure=failure)
        units = self.wheel.dispatch(CursorKey(dispatch.due_ms, dispatch.index)).units
        ready: list[MadeReady] = []
        if len(units):
            targeted = bool(units["target_group"].any())
            for arrival in by_topic(units):
                self._make_ready(arrival, stamped_ms, ready, targeted=targeted)
        self.holders.prune()
        dispatched = sum([len(part.units) for part in ready])
        return DispatchResult(self.wheel.cursor, dispatched, len(units) - dispatched, ready)

    def _make_ready(self, arrival: Arrival, stamped_ms: int, ready: list[MadeReady], *, targeted: bool) -> None:
        """Put units of one topic into its ready queue and note that in `ready`; discard them if the topic is gone.
        `targeted`: some may be for one group only."""
        topic_id, units = arrival.topic_id, arrival.units
        topic = self._state.topics.get(topic_id)
        if topic is None:
            return
        first, targeted = topic.ready.append(arrival, stamped_ms, targeted=targeted)
        ready.append(MadeReady(topic_id, topic.name, first, units))
        subscriptions = self._state.groups.of_topic(topic_id)
        self._state.backlog.arrived(topic_id, subscriptions, len(units))
        for subscription in subscriptions:
            if subscription.start_ms:
                subscription.skip_before_start(first, units["due_ms"])
            if targeted:
                subscription.skip_foreign()
            if subscription.checked is not None:
                group = self._state.groups.get(subscription.group_id)
                assert group is not None, "a subscription belongs to a group"
                self.filtered += filtering.arrived(group, subscription, first, units)

    def _ingest(self, ingest: Ingest, entry: LogEntry) -> IngestResult:
        alone = len(entry.commands) == 1
        return self._ingesting.apply(ingest, entry.stamped_ms, self._state.settings.slot_ms, alone=alone)

    def _settle(self, settle: Settle, stamped_ms: int) -> SettleResult:
        budget, late = Budget(), LateSearch(self._late, self.wheel.cursor)
        return SettleResult.of(tuple([self._settle_batch(batch, stamped_ms, budget, late) for batch in settle.batches]))

    def _settle_batch(self, batch: SettleColumns, stamped_ms: int, budget: Budget, late: LateSearch) -> SettleResult:
        ids_bytes, attempts_bytes, positions_bytes, kind = batch.ids, batch.attempts, batch.positions, batch.kind
        count = len(ids_bytes) // 8
        wrong = None
        if len(ids_bytes) != 8 * count:
            wrong = "ids", "elements of 8 bytes"
        elif len(attempts_bytes) != 4 * count:
            wrong = "attempts", f"{count} elements of 4 bytes"
        elif positions_bytes and len(positions_bytes) != 8 * count:
            wrong = "positions", f"{count} elements of 8 bytes"
        elif kind not in SETTLING and kind not in RETURNING:
            wrong = "kind", "a known kind"
        if wrong is not None:
            name, allowed = wrong
            failure = invalid(name, f"{len(ids_bytes)} bytes of ids, kind {kind}", allowed).failure
            return SettleResult(unknown=count, failure=failure, taken=count)
        group = self._state.groups.get(batch.group_id)
        subscription = None if group is None else group.subscriptions.get(batch.topic_id)
        if group is None or subscription is None:
            facts = {"field": "group", "value": str(batch.group_id)}
            text = f"group {batch.group_id} does not consume topic {batch.topic_id}"
            return SettleResult(unknown=count, failure=Failure(pb.UNKNOWN_NAME, text, facts), taken=count)
        if not count:
            return SettleResult()
        if batch.HasField("epoch") and batch.epoch != subscription.epoch:
            return SettleResult(stale=count, taken=count)
        if kind in (SETTLE_ACK, SETTLE_SKIP) and subscription.settle_in_order(
            ids_bytes, attempts_bytes, positions_bytes
        ):
            return ONE_SETTLED if count == 1 else SettleResult(settled=count, taken=count)
        ids = np.frombuffer(ids_bytes, "<u8")
        attempts = np.frombuffer(attempts_bytes, "<u4")
        positions = np.frombuffer(positions_bytes, "<u8") if positions_bytes else None
        if kind == SETTLE_DEAD or (kind == SETTLE_RETRY and batch.due_ms):
            columns = (ids, attempts, positions)
            in_place = self.topic_fifo(batch.topic_id)
            return self.retrying.settle(
                batch, group, subscription, columns, stamped_ms, budget, late, in_place=in_place
            )
        found = subscription.find(ids, positions)
        too_late = late.count(group, subscription, ids, found) if kind in SETTLING else 0
        result, _ = subscription.settle(kind, attempts, found)
        return SettleResult(result.settled - too_late, result.stale + too_late, result.unknown, taken=count)

    def _filter(self, command: Filtered) -> FilteredResult:
        group = self._state.groups.get(command.group_id)
        result = filtering.apply(group, self.subscription(command.group_id, command.topic_id), command)
        self.filtered += result.skipped
        return result

    def _cancel_once(self, cancel: Cancel, stamped_ms: int) -> CancelResult:
        """Cancel a message unless the request repeats its sender's sequence; then give the first answer again. A new
        cancel is remembered with that sequence."""
        if not cancel.HasField("request"):
            return self._cancel(cancel)
        try:
            found = self._repeated(cancel.request, stamped_ms)
        except RequestError as error:
            return CancelResult(scheduler.CANCEL_OUTCOME_UNSPECIFIED, failure=error.failure)
        if found is not None:
            return CancelResult(scheduler.CANCELLED, int(found.ids[0]), None, True, True)
        result = self._cancel(cancel)
        if result.outcome != scheduler.CANCELLED:
            return result
        self._remember(cancel.request, result.id, 0, stamped_ms)
        return replace(result, remembered=True)

    def _repeated(self, request: PublishRequest, stamped_ms: int) -> Batch | None:
        """The first answer, if a request about one message repeats its sender's sequence. Raises RequestError."""
        sender = sender_of(request)
        found = judge(self._state.producers, sender, 1)
        if found is not None:
            self._state.producers.touch(sender.producer_id, stamped_ms)
        return found

    def _remember(self, request: PublishRequest, id: int, due_ms: int, stamped_ms: int) -> None:
        """Remember the answer to such a request."""
        sender = sender_of(request)
        batch = make_batch(np.array([id], np.uint64), np.array([due_ms], np.int64), sender.checksum)
        self._state.producers.accept(sender, batch, self._state.settings, stamped_ms)

    def _cancel(self, cancel: Cancel) -> CancelResult:
        if not cancel.unique_key:
            outcome = self.wheel.cancel(cancel.id, cancel.due_ms)
            return CancelResult(_CANCEL_OUTCOMES[outcome.name], cancel.id)
        if len(cancel.unique_key) != DIGEST_BYTES:
            failure = invalid("unique_key", f"{len(cancel.unique_key)} bytes", f"{DIGEST_BYTES} bytes").failure
            return CancelResult(scheduler.CANCEL_OUTCOME_UNSPECIFIED, failure=failure)
        holder = self.holders.holder(key_of(cancel.topic_id, cancel.unique_key))
        if holder is None:
            return CancelResult(scheduler.NOT_FOUND)
        if holder.dispatched:
            return CancelResult(scheduler.ALREADY_DISPATCHED, holder.id)
        outcome = self.wheel.cancel(holder.id, holder.due_ms)
        return CancelResult(_CANCEL_OUTCOMES[outcome.name], holder.id)

    def _reschedule_once(self, command: Reschedule, stamped_ms: int) -> RescheduleResult:
        """Move a message unless the request repeats its sender's sequence; then give the first answer again. A new move
        is remembered with that sequence."""
        if not command.HasField("request"):
            return self._reschedule(command, stamped_ms)
        try:
            found = self._repeated(command.request, stamped_ms)
        except RequestError as error:
            return RescheduleResult(scheduler.RESCHEDULE_OUTCOME_UNSPECIFIED, failure=error.failure)
        if found is not None:
            return RescheduleResult(scheduler.RESCHEDULED, int(found.ids[0]), int(found.due_ms[0]), None, True, True)
        result = self._reschedule(command, stamped_ms)
        if result.outcome != scheduler.RESCHEDULED:
            return result
        self._remember(command.request, result.new_id, result.due_ms, stamped_ms)
        return replace(result, remembered=True)

    def _reschedule(self, command: Reschedule, stamped_ms: int) -> RescheduleResult:
        not_found = scheduler.RESCHEDULE_NOT_FOUND
        if command.new_due_ms > DUE_MS_MAX:
            failure = invalid("new_due_ms", command.new_due_ms, f"at most {DUE_MS_MAX}").failure
            return RescheduleResult(not_found, failure=failure)
        if command.meta_size > min(len(command.record), META_BYTES_MAX):
            failure = invalid("meta_size", command.meta_size, f"at most {META_BYTES_MAX} and the record's size").failure
            return RescheduleResult(not_found, failure=failure)
        if command.unique_key:
            if len(command.unique_key) != DIGEST_BYTES:
                failure = invalid("unique_key", f"{len(command.unique_key)} bytes", f"{DIGEST_BYTES} bytes").failure
                return RescheduleResult(not_found, failure=failure)
            holder = self.holders.holder(key_of(command.topic_id, command.unique_key))
            if holder is None or holder.id != command.id:
                return RescheduleResult(not_found, stale=True)
        units = np.zeros(1, UNIT)
        units["due_requested_ms"] = command.new_due_ms
        units["scheduled_ms"] = stamped_ms
        units["size"] = len(command.record)
        units["meta_size"] = command.meta_size
        units["topic_id"] = command.topic_id
        units["tag_hash"] = command.tag_hash
        units["tag_mask"] = command.tag_mask
        units["key_hash"] = command.key_hash
        units["flags"] = command.flags & ONE_TAG
        outcome, new_id = self.wheel.move(command.id, command.due_ms, units, command.record)
        return RescheduleResult(_RESCHEDULE_OUTCOMES[outcome.name], new_id, int(units["due_ms"][0]) if new_id else 0)

    def _sweep(self, command: SweepCommand, stamped_ms: int) -> SweepResult:
        if command.WhichOneof("body") == "begin":
            try:
                self._admin.check_deletion(command.begin)
            except RequestError as error:
                return SweepResult(failure=error.failure)
        result = self._state.sweeps.apply(command, self.wheel, self.wheel.pending, stamped_ms)
        if result.sweep is None:
            return result
        action = result.sweep.WhichOneof("action")
        if action in DELETIONS and result.failure is None:
            looked = () if result.stale else command.step.dead
            return replace(result, sweep=self._admin.deletion_went_on(result.sweep, looked))
        return result

    def key_holder(self, topic: str, unique_key: str) -> Holder | None:
        """The message that holds a unique key now."""
        topic_id = self.topic_id(topic)
        return None if topic_id is None else self.holders.holder(key_of(topic_id, digest_of(unique_key)))

    def refound(self, cluster_id: str, member: Member) -> None:
        """Make the same content a cluster of one under another id. Only on a stopped node (node/refound.py)."""
        self._state.cluster_id = cluster_id
        self._state.members = {member.node_id: member}
        self._state.removed_ids = set()

    # -- checkpoints

    def begin_checkpoint(self) -> StateCheckpoint:
        """Capture state and wheel. Run the checkpoint in a worker, make its manifest durable, then call
        `checkpoint_durable`.

        One at a time: this call abandons an earlier checkpoint whose `run` raised; one that still runs must not exist.
        """
        turns = self.capture_checkpoint()
        while True:
            try:
                next(turns)
            except StopIteration as complete:
                checkpoint: StateCheckpoint = complete.value
                return checkpoint

    def capture_checkpoint(self) -> Generator[None, None, StateCheckpoint]:
        """`begin_checkpoint` in turns of a few milliseconds. Apply nothing before it has returned."""
        if self._checkpoint is not None:
            self.abandon_checkpoint(self._checkpoint)
        index = self._state.applied_index
        checkpoint = yield from snapshot.capture(self._state, self.wheel.begin_checkpoint())
        assert self._state.applied_index == index, "an entry was applied while the state was captured"
        self._checkpoint = checkpoint
        return checkpoint

    def checkpoint_durable(self, checkpoint: StateCheckpoint) -> None:
        """As `finish_in_turns`, in one piece."""
        for _ in self.finish_in_turns(checkpoint):
            pass

    def finish_in_turns(self, checkpoint: StateCheckpoint) -> Generator[None, None, None]:
        """The checkpoint's manifest is durable: note that, in turns of a few milliseconds. Run its `remove_old` in a
        worker afterwards, before the next one begins."""
        self._checkpoint = None
        self.wheel.checkpoint_durable(checkpoint.wheel)
        yield from snapshot.finish(checkpoint)

    def abandon_checkpoint(self, checkpoint: StateCheckpoint) -> None:
        """Give up a checkpoint that failed before its manifest was durable: the one before stays valid."""
        self._checkpoint = None
        snapshot.abandon(self._state, checkpoint)
        self.wheel.abandon(checkpoint.wheel)


_RESCHEDULE_OUTCOMES = {
    "MOVED": scheduler.RESCHEDULED,
    "RESCHEDULED": scheduler.RESCHEDULED,
    "CANCELLED": scheduler.RESCHEDULE_CANCELLED,
    "ALREADY_DISPATCHED": scheduler.RESCHEDULE_ALREADY_DISPATCHED,
    "NOT_FOUND": scheduler.RESCHEDULE_NOT_FOUND,
}
