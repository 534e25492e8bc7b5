"""The calls of the replicated log to a core: entries to apply, its role, the sync, frames beside the log.

Implements LogListener for a core, and owns the effects of an applied command outside the state: counts, notes,
members, and the parts that have to look again. Only the state machine changes the state itself. Only the log calls
this, on the thread that drives the core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from google.protobuf.message import DecodeError

from tickwheel.node.core.checkpoint import Checkpointer
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.parts import Parts
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import AdminResult, DispatchResult
from tickwheel.node.state.schema import command_problem, read_entry
from tickwheel.proto.log_pb2 import Command, LogEntry
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.log import ApplyLaterError, LogStatus
from tickwheel.storage.disk import DiskError

_P = ParamSpec("_P")
_T = TypeVar("_T")

BUFFERS_APPLIED_MAX = 3
"""Arrival buffers full of what is not merged, from which on a node applies no more of its log until the disk has caught
up; more than what a master stops accepting at (publisher.BUFFERS_ACCEPTED_MAX)."""


PASSED_OVER_MAX = 1_000


@dataclass(slots=True)
class Applied:
    """How far this process has applied the log. Only the listener changes it; the kernel shows it."""

    index: int
    term: int
    stamped_ms: int = 0
    """Latest stamp of an entry; cluster time."""
    passed_over: deque[int] = field(default_factory=lambda: deque(maxlen=PASSED_OVER_MAX))
    """Indexes of entries that nobody can decode, which this process passed over like every node: for the server."""


def _attempted(
    call: Callable[Concatenate[CoreListener, _P], _T | None],
) -> Callable[Concatenate[CoreListener, _P], _T | None]:
    """The call as the node's own work: damage makes the node stuck, and None is returned. The log would end the node at
    once for what it cannot tell from damage of its own."""

    @wraps(call)
    def attempted(self: CoreListener, /, *args: _P.args, **named: _P.kwargs) -> _T | None:
        return self.serving.attempt("a call of the log", None, call, self, *args, **named)

    return attempted


class CoreListener:
    """The core's side of its log: applies entries, and passes the log's other events to the parts they concern."""

    def __init__(
        self,
        core: Kernel,
        applied: Applied,
        parts: Parts,
        checkpointer: Callable[[], Checkpointer],
        checkpoint_needed: Callable[[str], None],
    ) -> None:
        """`checkpoint_needed`: this node must start again from the checkpoint of this peer."""
        self._core = core
        self.serving = core.serving
        self._applied = applied
        self._parts = parts
        self._checkpointer = checkpointer
        self._checkpoint_needed = checkpoint_needed

    def apply(self, index: int, term: int, command: bytes) -> object:
        """Apply an entry and note its effects. One that does not even begin like an entry stops the node."""
        core = self._core
        if not command:
            self._nothing(index, term)
            return []
        try:
            entry = read_entry(command)
        except DecodeError as error:
            core.fatal(f"log entry {index} cannot be read ({error}): was it written by a newer version?")
            return []
        if entry is None:
            self._applied.passed_over.append(index)
            self._nothing(index, term)
            return []
        applied, parts = self._applied, self._parts
        before = applied.index, applied.term
        try:
            if not parts.index_repair.ready(entry):
                raise ApplyLaterError(f"entry {index} waits for rows of an index that are lost here")
            applied.index, applied.term = index, term
            applied.stamped_ms = max(applied.stamped_ms, entry.stamped_ms)
            results = core.state.apply(index, term, entry)
            for each, result in zip(entry.commands, results, strict=True):
                # Nothing replicated depends on counts and events. Without `side`, every node would end at this entry by
                # a mistake in them, and again at each start.
                core.serving.side(parts.topic_pending.spoil, self._count, index, entry, each, result)
                self._follow(each, result)
        except DiskError as error:
            applied.index, applied.term = before
            core.serving.stick(f"log entry {index} could not be applied: {error}", error)
            raise ApplyLaterError(core.serving.stuck) from error
        return results

    def _count(self, index: int, entry: LogEntry, command: Command, result: AnyResult) -> None:
        """Count an applied command, and record its events unless they are recorded already."""
        parts = self._parts
        parts.counts.applied(command, result)
        parts.topic_pending.applied(command, result)
        if parts.events.enabled and index > parts.events.noted_to:
            parts.events.applied(index, self._core.clock.now_ms(), entry, command, result)

    def _follow(self, command: Command, result: AnyResult) -> None:
        """The effects of an applied command on the parts."""
        kind = command.WhichOneof("body")
        if kind == "dispatch":
            if isinstance(result, DispatchResult):
                self._parts.delivery.dispatched(result)
            self._core.clock.judge_cursor(command.dispatch.due_ms)
        elif kind == "lead":
            self._parts.mastership.lead_was_applied(command.lead)
        elif kind == "admin" and isinstance(result, AdminResult):
            self._administered(command.admin.WhichOneof("body") or "", result)

    def _nothing(self, index: int, term: int) -> None:
        """An entry without an effect."""
        self._applied.index, self._applied.term = index, term
        self._core.state.note_applied(index, term)

    def _administered(self, kind: str, result: AdminResult) -> None:
        core = self._core
        if result.members is not None:
            core.log.set_members(result.members)
            self._parts.founding.look_again()
        if not core.leading or kind == "create_topic" or (result.group is None and result.topic is None):
            return
        if kind == "create_group" and result.group is not None:
            # The most frequent one, since consumers create: it changes nothing of the others.
            self._parts.filter_skips.subscribed(result.group.group_id)
            self._parts.delivery.subscribed(result.group.group_id)
        else:
            self._parts.filter_skips.refresh()
            self._parts.delivery.administered()

    problem_of = staticmethod(command_problem)
    """Why this node cannot apply a command. No command of a newer version is half understood."""

    @_attempted
    def role_changed(self, status: LogStatus) -> None:
        """Lead, follow or step down. Ignored once the core has stopped."""
        if not self._core.stopped:
            self._parts.mastership.role_changed(status)

    @_attempted
    def sync_out(self, peer_id: str) -> PeerFrame | None:
        """The sync of this master for one slave; None: nothing to send now."""
        return self._parts.sync.outgoing(peer_id)

    @_attempted
    def sync_unsent(self, peer_id: str) -> None:
        """The sync did not leave: what it told of leases is told again."""
        self._parts.delivery.feed.unsent(peer_id)

    @_attempted
    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Take in a sync, and the master's clock with it. Returns the answer."""
        self._core.clock.heard_master(frame.sync.clock_ms)
        return self._parts.sync.incoming(peer_id, frame)

    @_attempted
    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Take a frame about bundles, records, the founding, or the clock of a machine. Returns the answer, if any."""
        core = self._core
        if core.serving.stuck:
            return None
        kind = frame.WhichOneof("body")
        if kind == "bundle_ask":
            return self._parts.bulk.ask_in(peer_id, frame.bundle_ask)
        if kind == "bundle_piece":
            self._parts.bulk.piece_in(peer_id, frame.bundle_piece)
            return None
        if kind == "record_ask":
            self._parts.record_answers.ask_in(peer_id, frame.record_ask)
            return None
        if kind == "record_answer":
            if not frame.record_answer.units_only:
                self._parts.record_repair.answer_in(peer_id, frame.record_answer)
            self._parts.index_repair.answer_in(peer_id, frame.record_answer)
            return None
        if kind == "founding":
            return self._parts.founding.receive(peer_id, frame, core.log.send_beside)
        return core.clock.receive(peer_id, frame)

    @_attempted
    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """Take in a slave's answer: its sync, the identity of its disk, and a sample of its clock."""
        self._parts.sync.reply(peer_id, frame)
        self._parts.members.came_with(peer_id, frame.disk_uuid)
        self._core.clock.sync_answered(peer_id, frame.sync_reply.echo_sent_ns, frame.sync_reply.clock_ms)

    def may_apply(self) -> bool:
        """Arrivals that the disk is too slow to take in wait in the journal, not in memory. Entries after a bundle wait
        until the bundle is here and read as far as it is due. While a checkpoint is captured or a digest made, in turns
        of a few milliseconds, the state must stay as it is."""
        core = self._core
        parts = self._parts
        waits = parts.index_repair.holds_log or core.wheel.ingestion.absorbing
        looks = self._checkpointer().capturing or parts.digests.making
        if core.serving.stuck or waits or looks:
            return False
        return core.wheel.holdings.buffer_bytes < BUFFERS_APPLIED_MAX * core.config.buffer_bytes_max

    def may_vote(self) -> bool:
        """False with a new disk until it is known that no member lost an old one."""
        return self._parts.founding.may_vote

    def handover_ready(self, peer_id: str) -> bool:
        """The next master must know all deliveries in flight, or it would repeat them. It must also have applied what
        this master had applied when it was asked to hand over, or it would lead and not serve."""
        # A master without an agreed time has handed out nothing.
        if not self._parts.sync.enabled or not self._parts.delivery.active:
            return True
        applied = self._parts.sync.applied_of(peer_id) >= self._parts.mastership.handed_over_index
        return applied and self._parts.delivery.feed.all_heard(peer_id)

    @_attempted
    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """Fetch the checkpoint of `peer_id`: the log no longer reaches back far enough."""
        self._checkpoint_needed(peer_id)

    def damaged(self, error: DiskError) -> None:
        """The log cannot read or write its own journal: another node leads, then this one stops."""
        self.serving.stick(f"the journal met damage: {error}", error)

    def fatal(self, reason: str) -> None:
        """Stop the node, with this reason."""
        self._core.fatal(reason)
