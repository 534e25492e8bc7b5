"""What the replicated log tells a core, and asks of it: entries to apply, its role, the sync, frames beside the log.

Implements LogListener for NodeCore and owns what follows on an applied command outside of the state: counts, notes,
members, and who has to look again. The state itself is changed by the state machine alone. Only the log calls it, on
the thread that drives the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.schema import command_problem, read_entry
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.log import ApplyLaterError, LogStatus

if TYPE_CHECKING:
    from tickwheel.node.core.core import NodeCore

BUFFERS_APPLIED_MAX = 3
"""Arrival buffers full of what is not merged, from which on a node applies no more of its log until the disk has caught
up; more than what a master stops accepting at (BUFFERS_ACCEPTED_MAX in core.py)."""


class CoreListener:
    """One per core."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core

    def apply(self, index: int, term: int, command: bytes) -> object:
        """See LogListener. What does not even begin like an entry is of another format: stop."""
        core = self._core
        if not command:
            core.applied_index, core.applied_term = index, term
            core.state.note_applied(index, term)
            return []
        try:
            entry = read_entry(command)
        except DecodeError as error:
            core.fatal(f"log entry {index} cannot be read ({error}): was it written by a newer version?")
            return []
        if entry is None:
            core.passed_over.append(index)
            core.applied_index, core.applied_term = index, term
            core.state.note_applied(index, term)
            return []
        if not core.mending.ready(entry):
            raise ApplyLaterError(f"entry {index} waits for rows of an index that are lost here")
        core.applied_index, core.applied_term = index, term
        core.stamped_ms = max(core.stamped_ms, entry.stamped_ms)
        noted = core.events.enabled and index > core.events.noted_to
        now_ms = core.clock.now_ms() if noted else 0
        results = core.state.apply(index, term, entry)
        for command_, result in zip(entry.commands, results, strict=True):
            kind = command_.WhichOneof("body")
            core.totals.note(result)
            core.topic_rates.applied(command_, result)
            core.topic_pending.applied(command_, result)
            if noted:
                core.events.applied(index, now_ms, entry, command_, kind or "", result)
            if kind == "dispatch":
                core.clock.judge_cursor(command_.dispatch.due_ms)
            elif kind == "lead":
                core.reign.lead_was_applied(command_.lead)
            elif kind == "admin" and isinstance(result, AdminResult):
                self._administered(command_.admin.WhichOneof("body") or "", result)
        return results

    def _administered(self, kind: str, result: AdminResult) -> None:
        core = self._core
        if result.members is not None:
            core.log.set_members(result.members)
        if not core.leading or kind == "create_topic" or (result.group is None and result.topic is None):
            return
        if kind == "create_group" and result.group is not None:
            # The most frequent one, since consumers create: it changes nothing of the others.
            core.filter_sweep.subscribed(result.group.group_id)
            core.delivery.subscribed(result.group.group_id)
        else:
            core.filter_sweep.refresh()
            core.delivery.administered()

    def problem_of(self, entry: bytes, start: int) -> str:
        """See LogListener: what a newer version wrote must not be half understood."""
        return command_problem(entry, start)

    def role_changed(self, status: LogStatus) -> None:
        """See LogListener."""
        if not self._core.stopped:
            self._core.reign.role_changed(status)

    def sync_out(self, peer_id: str) -> PeerFrame | None:
        """See LogListener."""
        return self._core.sync.outgoing(peer_id)

    def sync_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """See LogListener."""
        self._core.clock.heard_master(frame.sync.clock_ms)
        return self._core.sync.incoming(frame)

    def beside_in(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """See LogListener: about this machine's clock, bundles, or records."""
        core = self._core
        kind = frame.WhichOneof("body")
        if kind == "bundle_ask":
            return core.bulk.ask_in(peer_id, frame.bundle_ask)
        if kind == "bundle_piece":
            core.bulk.piece_in(peer_id, frame.bundle_piece)
            return None
        if kind == "record_ask":
            core.record_answers.ask_in(peer_id, frame.record_ask)
            return None
        if kind == "record_answer":
            if not frame.record_answer.units_only:
                core.salvage.answer_in(peer_id, frame.record_answer)
            core.mending.answer_in(peer_id, frame.record_answer)
            return None
        return core.clock.receive(peer_id, frame)

    def sync_reply_in(self, peer_id: str, frame: PeerFrame) -> None:
        """See LogListener."""
        self._core.sync.reply(peer_id, frame)
        self._core.clock.sync_answered(peer_id, frame.sync_reply.echo_sent_ns, frame.sync_reply.clock_ms)

    def may_apply(self) -> bool:
        """See LogListener: arrivals that the disk is too slow to take in wait in the journal, not in memory; and what
        follows a bundle waits until it is here and read as far as it is due."""
        core = self._core
        if core.mending.holds_log or core.wheel.absorbing or core.checkpointer.capturing:
            return False
        return core.wheel.buffer_bytes < BUFFERS_APPLIED_MAX * core.config.buffer_bytes_max

    def handover_ready(self, peer_id: str) -> bool:
        """See LogListener: the next master must know what is out with consumers, or it would deliver it again; and must
        have applied what this one had when it was asked, or it would lead and not serve."""
        core = self._core
        # A master without an agreed time has handed out nothing.
        if not core.sync.enabled or not core.delivery.reigning:
            return True
        applied = core.sync.applied_of(peer_id) >= core.reign.handed_over_index
        return applied and core.delivery.feed.all_heard(peer_id)

    def checkpoint_needed(self, peer_id: str, applied_index: int) -> None:
        """See LogListener."""
        self._core.checkpoint_needed(peer_id)

    def fatal(self, reason: str) -> None:
        """See LogListener."""
        self._core.fatal(reason)
