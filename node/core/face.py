"""A node's operations as messages of the wire: services and other drivers call them.

A thin layer over NodeCore that turns answers into the messages of proto/. It always serves from the current core, so
services need not know when a peer's checkpoint has replaced the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tickwheel.node.core.bulk import BulkDesk
from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.cold import ColdDesk
from tickwheel.node.core.consumers import ConsumerHandle
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.disk_use import disk_use
from tickwheel.node.core.failure import Failure, Permitted, RequestError
from tickwheel.node.core.intake import KIND_DELAY, KIND_DUE, KIND_LEVEL, IncomingBatch, check_sender
from tickwheel.node.core.listings import groups_after, topics_after
from tickwheel.node.core.publisher import BatchOutcome
from tickwheel.node.core.requests import everybody, id_of, message_id_of
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.status import backup_origin, node_metrics, node_status, node_vitals
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.producers import Sender
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.view import StateView
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, dead_pb2, scheduler_pb2, snapshot_pb2, staging_pb2
from tickwheel.proto.log_pb2 import AdminCommand

WHEN_KINDS = {"due_ms": KIND_DUE, "delay_ms": KIND_DELAY, "delay_level": KIND_LEVEL}


class CoreFace:
    """The operations of a node, for the simulation and tests."""

    def __init__(self, current: Callable[[], NodeCore]) -> None:
        self._current = current

    @property
    def core(self) -> NodeCore:
        """The current core."""
        return self._current()

    @property
    def serving(self) -> Serving:
        """The guard that fails a request instead of the node."""
        return self.core.serving

    @property
    def settings(self) -> Settings:
        """Replicated settings."""
        return self.core.state.settings

    @property
    def state(self) -> StateView:
        """The replicated state, for reading."""
        return self.core.state

    def now_ms(self) -> int:
        """Cluster time."""
        return self.core.clock.now_ms()

    @property
    def bulk(self) -> BulkDesk:
        """Bulk load."""
        return self.core.bulk

    @property
    def cold(self) -> ColdDesk:
        """The cold tier."""
        return self.core.cold

    def schedule(self, batch: IncomingBatch, done: Callable[[BatchOutcome | Failure], None]) -> None:
        """Schedule a checked batch."""
        self.core.requests.schedule(batch, done)

    def cancel(
        self,
        id64: int,
        done: Callable[[scheduler_pb2.CancelResponse | Failure], None],
        permitted: Permitted = everybody,
    ) -> None:
        """Cancel by id."""

        async def cancelled() -> scheduler_pb2.CancelResponse:
            return scheduler_pb2.CancelResponse(outcome=await self.core.requests.cancel(id64, permitted))

        self.serving.start(cancelled(), done)

    def refused(self, producer_id: str, sequence: int, failure: Failure) -> Failure:
        """A refusal of a request that never reached the core, completed with what is certain of the producer's
        sequence."""
        return self.core.senders.told(Sender(producer_id, sequence), failure)

    def reschedule(
        self,
        request: scheduler_pb2.RescheduleRequest,
        done: Callable[[scheduler_pb2.RescheduleResponse | Failure], None],
        permitted: Permitted = everybody,
        owner: str = "",
    ) -> None:
        """Move a pending message to another time. `owner`: the producer id's owner, if known."""
        name = request.WhichOneof("when")
        if name is None:
            failure = Failure(
                common_pb2.INVALID_FIELD,
                "when: absent: due_ms, delay_ms or delay_level",
                {"field": "when", "value": "absent", "limit": "due_ms, delay_ms or delay_level"},
            )
            done(failure)
            return
        try:
            check_sender(request.producer_id, request.sequence, request.producer_owner)
        except RequestError as error:
            done(error.failure)
            return
        group = self.core.identity.wheel_group
        sender = Sender(request.producer_id, request.sequence, owner=owner)

        async def rescheduled() -> scheduler_pb2.RescheduleResponse:
            result = await self.core.requests.reschedule(
                id_of(request.id), getattr(request, name), WHEN_KINDS[name], permitted, sender
            )
            response = scheduler_pb2.RescheduleResponse(
                outcome=result.outcome, due_ms=result.due_ms, remembered=result.remembered
            )
            if result.outcome == scheduler_pb2.RESCHEDULED:
                response.id.CopyFrom(message_id_of(result.id, group))
            return response

        self.serving.start(rescheduled(), done)

    def get(
        self,
        id64: int,
        content: bool,
        done: Callable[[scheduler_pb2.GetResponse | Failure], None],
        permitted: Permitted = everybody,
    ) -> None:
        """State and content of one message."""
        self.serving.start(self.core.requests.get(id64, content, permitted), done)

    def list_pending(
        self,
        request: scheduler_pb2.ListPendingRequest,
        done: Callable[[scheduler_pb2.ListPendingResponse | Failure], None],
    ) -> None:
        """One page of pending messages."""
        self.serving.start(self.core.pending.page(request), done)

    def count_pending(
        self,
        request: scheduler_pb2.CountPendingRequest,
        done: Callable[[scheduler_pb2.CountPendingResponse | Failure], None],
    ) -> None:
        """Pending messages by bucket of time."""
        self.serving.start(self.core.pending.count(request), done)

    def stage(
        self,
        request: staging_pb2.StageRequest,
        batch: IncomingBatch,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None:
        """Keep a checked block of rows until the commit of its job."""
        self.serving.start(self.core.staging.stage(request, batch, owner), done)

    def commit_staged(
        self,
        request: staging_pb2.CommitStagedRequest,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None:
        """Decide which attempts of a job count."""
        self.serving.start(self.core.staging.commit(request, owner), done)

    def abort_staged(
        self,
        request: staging_pb2.AbortStagedRequest,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None:
        """Drop the rows that a run has staged."""
        self.serving.start(self.core.staging.abort(request, owner), done)

    def staged_job(
        self,
        request: staging_pb2.GetStagedJobRequest,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None:
        """How far a job is."""
        self.serving.start(self.core.staging.job(request, owner), done)

    def delete_topic(
        self, request: admin_pb2.DeleteTopicRequest, done: Callable[[scheduler_pb2.Sweep | Failure], None]
    ) -> None:
        """Delete a topic. The answer is the deleting sweep, once it has ended or takes long."""
        self.serving.start(self.core.deleter.topic(request), done)

    def delete_group(
        self, request: admin_pb2.DeleteGroupRequest, done: Callable[[scheduler_pb2.Sweep | Failure], None]
    ) -> None:
        """Delete a group, with the same answer."""
        self.serving.start(self.core.deleter.group(request), done)

    def begin_sweep(
        self, request: scheduler_pb2.BeginSweepRequest, done: Callable[[scheduler_pb2.Sweep | Failure], None]
    ) -> None:
        """Begin to cancel or move the messages of a selection."""
        self.serving.start(self.core.sweeper.begin_sweep(request), done)

    def get_sweep(self, job_id: str, done: Callable[[scheduler_pb2.Sweep | Failure], None]) -> None:
        """The state of a sweep."""
        self.serving.start(self.core.sweeper.get(job_id), done)

    def list_sweeps(self, done: Callable[[scheduler_pb2.ListSweepsResponse | Failure], None]) -> None:
        """All sweeps that are remembered."""
        self.serving.start(self.core.sweeper.list(), done)

    def stop_sweep(self, job_id: str, done: Callable[[scheduler_pb2.Sweep | Failure], None]) -> None:
        """Stop a sweep; its changes so far stay."""
        self.serving.start(self.core.sweeper.stop(job_id), done)

    def pin(self, request: snapshot_pb2.PinRequest, done: Callable[[snapshot_pb2.PinResponse | Failure], None]) -> None:
        """Pin the pending messages of this moment, for a slow reader."""
        self.serving.start(self.core.pins.pin(request), done)

    def read_pinned(
        self, request: snapshot_pb2.ReadPinnedRequest, done: Callable[[snapshot_pb2.PinnedPage | Failure], None]
    ) -> None:
        """A page of a pin's messages."""
        self.serving.start(self.core.pins.read(request), done)

    def agree_pin(
        self,
        request: snapshot_pb2.AgreePinRequest,
        done: Callable[[snapshot_pb2.AgreePinResponse | Failure], None],
    ) -> None:
        """Agree on the pin that is read under a name."""
        self.serving.start(self.core.pins.agree(request), done)

    def unpin(self, pin_id: int) -> None:
        """Drop a pin. Idempotent."""
        self.core.pins.unpin(pin_id)

    def pin_settled(
        self,
        request: snapshot_pb2.PinSettledRequest,
        done: Callable[[snapshot_pb2.PinSettledResponse | Failure], None],
    ) -> None:
        """Pin the messages that a group has settled by now."""
        self.serving.start(self.core.settled.pin(request), done)

    def read_settled(
        self, request: snapshot_pb2.ReadSettledRequest, done: Callable[[snapshot_pb2.SettledPage | Failure], None]
    ) -> None:
        """A page of such a pin's messages."""
        self.serving.start(self.core.settled.read(request), done)

    def open_consumer(
        self,
        request: consumer_pb2.OpenConsumer,
        deliver: Callable[[consumer_pb2.DeliverBatch], None],
        closed: Callable[[Failure], None],
        opened: Callable[[ConsumerHandle | Failure], None],
        actor: str = "",
    ) -> None:
        """Open a consumer; `opened` is called before any delivery."""
        self.serving.start(self.core.consumers.open(request, deliver, closed, actor), opened)

    def pull(
        self,
        request: consumer_pb2.PullRequest,
        done: Callable[[consumer_pb2.DeliverBatch | Failure], None],
        actor: str = "",
    ) -> None:
        """Get one batch, or an empty one after `wait_ms`."""
        self.serving.start(self.core.consumers.pull(request, actor), done)

    def settle(
        self, batch: consumer_pb2.SettleBatch, done: Callable[[consumer_pb2.SettleReceipt | Failure], None]
    ) -> None:
        """Settle without a stream."""
        self.core.consumers.settle(batch, done)

    def extend(
        self, batch: consumer_pb2.ExtendBatch, done: Callable[[consumer_pb2.ExtendReceipt | Failure], None]
    ) -> None:
        """Extend leases without a stream."""
        self.core.consumers.extend(batch, done)

    def list_dead(
        self, request: dead_pb2.ListDeadRequest, done: Callable[[dead_pb2.ListDeadResponse | Failure], None]
    ) -> None:
        """A page of dead letters."""
        self.serving.start(self.core.dead.list(request), done)

    def get_dead(self, request: dead_pb2.GetDeadRequest, done: Callable[[dead_pb2.DeadLetter | Failure], None]) -> None:
        """One dead letter."""
        self.serving.start(self.core.dead.get(request), done)

    def replay_dead(
        self, request: dead_pb2.ReplayDeadRequest, done: Callable[[dead_pb2.ChangeDeadResponse | Failure], None]
    ) -> None:
        """Deliver dead letters again."""
        self.serving.start(self.core.dead.replay(request), done)

    def purge_dead(
        self, request: dead_pb2.PurgeDeadRequest, done: Callable[[dead_pb2.ChangeDeadResponse | Failure], None]
    ) -> None:
        """Remove dead letters for good."""
        self.serving.start(self.core.dead.purge(request), done)

    def admin(self, command: AdminCommand, done: Callable[[AdminResult | Failure], None]) -> None:
        """Put an administrative command into the log."""
        self.serving.start(self.core.requests.admin(command), done)

    def transfer(self, target_id: str, done: Callable[[admin_pb2.TransferMasterResponse | Failure], None]) -> None:
        """Hand over by plan; answered once another node leads."""
        core = self.core
        began_ns = core.monotonic_ns()

        async def transferred() -> admin_pb2.TransferMasterResponse:
            await core.reign.transfer(target_id or None)
            status = core.log.status()
            pause_ms = (core.monotonic_ns() - began_ns) // 1_000_000
            return admin_pb2.TransferMasterResponse(
                master_id=status.master_id or "", term=status.term, pause_ms=pause_ms
            )

        self.serving.start(transferred(), done)

    def topics(self, after_id: int = 0) -> Iterator[admin_pb2.Topic]:
        """As `topics_after`."""
        return topics_after(self.core, after_id)

    def groups(self, after_id: int = 0) -> Iterator[admin_pb2.Group]:
        """As `groups_after`."""
        return groups_after(self.core, after_id)

    def settings_message(self) -> admin_pb2.Settings:
        """Replicated settings."""
        return self.core.state.settings.message()

    def status(self) -> admin_pb2.NodeStatus:
        """This node's status."""
        return node_status(self.core)

    def vitals(self) -> admin_pb2.NodeStatus:
        """The status without topics, cheap enough for the node's own checks several times a second."""
        return node_vitals(self.core)

    def trace(self, request: admin_pb2.TraceRequest, done: Callable[[admin_pb2.TraceResponse | Failure], None]) -> None:
        """Events that this node recorded about single messages."""
        self.serving.start(self.core.tracer.trace(request), done)

    def digest(self) -> admin_pb2.StateDigest:
        """Digest of the logical state."""
        return self.core.state.digest()

    def disk_use(
        self, request: admin_pb2.GetDiskUseRequest, done: Callable[[admin_pb2.DiskUse | Failure], None]
    ) -> None:
        """Bytes of this node's data directory by part, hour and topic."""
        self.serving.start(disk_use(self.core, self.core.disk_room, request), done)

    def backup_files(self, done: Callable[[list[BackupFile] | Failure], None]) -> None:
        """Write a checkpoint and list the files of a copy. The checkpoint stays until `backup_copied`."""
        self.core.checkpointer.request(done)

    def backup_origin(self) -> admin_pb2.BackupOrigin:
        """Origin of the files being copied; before a copy, with the `stale_reason` that it would have."""
        return backup_origin(self.core)

    def backup_progressed(self, files: object) -> bool:
        """A copy of these files makes progress. Returns whether they are still kept for it."""
        return self.core.checkpointer.progressed(files)

    def backup_copied(self, files: object) -> None:
        """A copy has ended or was given up: checkpoints resume after the last one."""
        self.core.checkpointer.copied(files)

    def metrics(self) -> Mapping[str, MetricValue]:
        """Values of the metrics the core owns."""
        return node_metrics(self.core)
