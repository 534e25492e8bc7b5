"""Mastership of this node: how it begins, how it ends, and planned handover.

An elected node commits lead{term}. Once that entry is applied, all earlier ones are too, and the node serves. A deposed
node stops its wheel at once and drops its delivery state. A planned handover stops proposing first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tickwheel.node.core.delivery.sync import SyncState
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.world import Reported, SteadyMs
from tickwheel.node.failure import Failure, beginning, not_master, refused
from tickwheel.proto import common_pb2
from tickwheel.proto.log_pb2 import Command, Lead
from tickwheel.replication.log import LogStatus, Role

LEAD_RETRY_MS = 50
"""Until a lead command that the log refused is proposed again."""
SEEK_ROOM_MS = 5_000
"""Pause between two tries to hand over to a member whose disk has room."""


class Mastership:
    def __init__(
        self,
        core: Kernel,
        sync: SyncState,
        create_cluster: Callable[[], None],
        begin: Callable[[], None],
        end: Callable[[Failure], None],
    ) -> None:
        """`create_cluster` is called on the first master of a new cluster. `begin`: this node leads, has applied
        everything before its term and knows the time. `end`: it leads no more; waiting callers get the failure."""
        self._core = core
        self._sync = sync
        self._create_cluster = create_cluster
        self._begin = begin
        self._end = end
        self.term = 0
        self.elected = False
        """The log says that this node is master; its lead command may not be applied yet."""
        self.begun = False
        """Master, with its own lead command applied: requests are served."""
        self._lead_refused = False
        self.handing_over = False
        self._next_seek_ms = 0
        self.handed_over_index = 0
        """Applied index at the last request to hand over."""
        self.changes = 0
        """How often this node became master or ceased to be master."""
        self._leaving = False

    def role_changed(self, status: LogStatus) -> None:
        """The log reports a new role or term: begin or end mastership. Repetitions for one term do nothing."""
        if status.role is Role.MASTER:
            if self.elected and self.term == status.term:
                return
            self.step_down()
            self.term = status.term
            self.elected = True
            self.changes += 1
            self._core.proposer.term = status.term
            self._propose_lead()
        else:
            self.term = status.term
            if self.elected:
                self.step_down()
                self.changes += 1

    def tick(self) -> None:
        """Propose the lead command again if the log refused it."""
        if self._lead_refused and self.elected and not self.begun:
            self._propose_lead()

    def wait_ms(self) -> int | None:
        """Until the next `tick` is needed; None: an answer will bring it."""
        return LEAD_RETRY_MS if self._lead_refused and self.elected and not self.begun else None

    def _propose_lead(self) -> None:
        self._lead_refused = False
        lead = Lead(term=self.term, node_id=self._core.identity.node_id)
        self._core.proposer.submit(Command(lead=lead), Reply(lambda _: None, self._lead_failed))

    def _lead_failed(self, failure: Failure) -> None:
        # `tick` tries again. At once, a log that has just found its disk full or lost its role would refuse for ever.
        self._lead_refused = True

    def lead_was_applied(self, lead: Lead) -> None:
        """A lead command was applied. If it is this node's own of this term, the node begins to serve."""
        core = self._core
        if not self.elected or lead.term != self.term or lead.node_id != core.identity.node_id:
            return
        self.begun = True
        if not core.state.created:
            self._create_cluster()
        if core.clock.known:
            self._begin()

    def refusal(self) -> Failure | None:
        """Why this node cannot serve a client's request now; None if it can."""
        core = self._core
        if self.begun and not self.handing_over:
            return None
        if core.recovering:
            return Failure(
                common_pb2.RECOVERING,
                f"replaying the log: at {core.applied.index} of {core.recover_to}; ask another node or retry",
                {"retry_after_ms": "200"},
            )
        status = core.log.status()
        if self.elected and not self.handing_over and not status.halted:
            return beginning()
        master_id = status.master_id if status.master_id != core.identity.node_id else None
        if status.halted and master_id is None:
            return Failure(common_pb2.DISK_FULL, status.halted, {"retry_after_ms": "1000"})
        address = next((m.client_address for m in core.log.members() if m.node_id == master_id), None)
        return not_master(master_id, address, status.term)

    def step_down(self) -> None:
        """Stop the wheel at once and clear the delivery state. Does nothing if this node was not elected."""
        if not self.elected:
            return
        self.elected = False
        self.begun = False
        self._end(self.refusal() or not_master(None, None))

    async def transfer(self, target_id: str | None, *, applying: bool = True) -> None:
        """Hand over by plan: stop proposing, let the target catch up, then tell it to lead. Raises RequestError: this
        node leads still. Without a target the member furthest in applying is chosen: a member that holds the whole log
        may still wait for a bundle and be unable to serve. `applying`: see ReplicatedLog.transfer."""
        core = self._core
        core.require_master()
        if target_id == core.identity.node_id:
            raise refused(common_pb2.WRONG_STATE, f"{target_id} is the master already")
        self.handing_over = True
        self.handed_over_index = core.applied.index
        ended: Promise[str | None] = Promise()

        def hand_over() -> None:
            # A settlement left behind would be delivered again by the next master.
            core.proposer.flush_all()
            core.log.transfer(target_id or self._furthest(), ended.keep, applying=applying)

        core.serving.own(hand_over)
        try:
            problem = await ended
        finally:
            self.handing_over = False
        if problem is not None:
            raise refused(common_pb2.WRONG_STATE, problem, retry_after_ms=1_000)

    def start_transfer(self, target_id: str | None, done: Callable[[Failure | None], None]) -> None:
        """As `transfer`; `done` gets None once another node leads, or why not."""
        self._core.serving.start(self.transfer(target_id), done)

    def leave(self, reason: str, *, applying: bool = True) -> None:
        """Hand over to another member if there is one, then stop the process for this reason. A handover that is under
        way comes first. Call it until the node has stopped."""
        if self._leaving or self.handing_over:
            return
        core = self._core
        voters = [member for member in core.log.members() if not member.learner]
        if not self.begun or len(voters) < 2:
            core.fatal(reason)
            return
        self._leaving = True

        def ended(failure: Failure | None) -> None:
            self._leaving = False
            if failure is None or not applying or not core.serving.stuck:
                core.fatal(reason)
            # Else it got stuck meanwhile, so the log waited in vain until it had applied everything: `leave_stuck`.

        core.serving.start(self.transfer(None, applying=applying), ended)

    def leave_stuck(self) -> bool:
        """Work was cut off halfway: serve nobody, only hand over, then stop. Call it until the node has stopped. True:
        it was the first call."""
        serving = self._core.serving
        reason, first = serving.stuck, serving.closed is None
        if first:
            facts: dict[str, object] = {"reason": reason, "exc_info": serving.stuck_by}
            self._core.report(Reported("error", "damaged files: this node leaves", facts))
        serving.shut(Failure(common_pb2.RECOVERING, f"this node stops: {reason}", {"retry_after_ms": "1000"}))
        self.leave(reason, applying=False)
        return first

    def seek_room(self, steady_ms: SteadyMs) -> None:
        """Hand over to a member whose disk has room, if there is one. Called while this node's disk is nearly full."""
        core = self._core
        if self.handing_over or steady_ms < self._next_seek_ms:
            return
        target = self._furthest(self._sync.roomy_peers([member.node_id for member in core.log.members()]))
        if target is not None:
            self._next_seek_ms = steady_ms + SEEK_ROOM_MS
            # A failure is tried again after SEEK_ROOM_MS.
            core.serving.start(self.transfer(target), lambda _: None)

    def _furthest(self, among: Collection[str] | None = None) -> str | None:
        """The connected voting member that has applied most of the log; None: there is none. Equal members, for example
        before any has reported what it applied, are compared by how much of the log they hold. `among`: only these."""
        core = self._core
        peers = core.log.status().peers
        reached: dict[str, tuple[int, int]] = {}
        for member in core.log.members():
            peer = peers.get(member.node_id)
            wanted = among is None or member.node_id in among
            if wanted and peer is not None and peer.connected and not member.learner:
                applied_index = self._sync.applied_of(member.node_id)
                reached[member.node_id] = (min(peer.match_index, applied_index), peer.match_index)
        return max(reached, key=lambda peer_id: (reached[peer_id], peer_id), default=None)
