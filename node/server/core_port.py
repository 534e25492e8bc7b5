"""The part of NodeCore that the services use.

Everything runs on the node's loop. A `done` is called exactly once, at once or later, with the answer or a
`Failure`. Except on hot paths the answers are protobuf messages, ready to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tickwheel.node.core.bundle_store import Held
from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.failure import Failure, Permitted
from tickwheel.node.core.intake import IncomingBatch
from tickwheel.node.core.publisher import BatchOutcome
from tickwheel.node.core.serving import Serving
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.settings import Settings
from tickwheel.node.state.view import StateView
from tickwheel.proto import (
    admin_pb2,
    bulk_pb2,
    cold_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    snapshot_pb2,
    staging_pb2,
)
from tickwheel.proto.log_pb2 import AdminCommand


class ConsumerSession(Protocol):
    """One open consumer of a group."""

    def opened(self) -> consumer_pb2.Opened:
        """The term and the lease of the session, as the first response of a stream."""
        ...

    def credit(self, credits: int) -> Failure | None:
        """The consumer takes `credits` more messages. Returns a Failure if that exceeds its bound."""
        ...

    def settle(
        self, batch: consumer_pb2.SettleBatch, done: Callable[[consumer_pb2.SettleReceipt | Failure], None]
    ) -> None: ...

    def extend(
        self, batch: consumer_pb2.ExtendBatch, done: Callable[[consumer_pb2.ExtendReceipt | Failure], None]
    ) -> None: ...

    def close(self) -> None:
        """The consumer is gone: its open deliveries go to others. Idempotent."""
        ...


class BulkPort(Protocol):
    """Bulk load; BulkDesk implements it."""

    def offer(self, name: str, total_bytes: int) -> Held | Failure: ...

    def take(
        self, name: str, total_bytes: int, offset: int, data: bytes, crc32c: int, done: Callable[[Held | Failure], None]
    ) -> None: ...

    def take_over(
        self, request: bulk_pb2.TakeOverRequest, done: Callable[[bulk_pb2.LoadState | Failure], None]
    ) -> None: ...

    def load(self, job_id: str) -> bulk_pb2.LoadState: ...


class ColdPort(Protocol):
    """Parts of the cold tier; node/core/cold.py implements it."""

    def register(
        self, request: cold_pb2.RegisterColdRequest, done: Callable[[cold_pb2.ColdJob | Failure], None]
    ) -> None: ...

    def parts(
        self, request: cold_pb2.ListColdPartsRequest, done: Callable[[cold_pb2.ColdParts | Failure], None]
    ) -> None: ...

    def moved(
        self, request: cold_pb2.ListColdMovedRequest, done: Callable[[cold_pb2.ColdMoved | Failure], None]
    ) -> None: ...


class CorePort(Protocol):
    """The client face of NodeCore."""

    @property
    def serving(self) -> Serving:
        """Assigns the core's errors to the request that it is serving."""
        ...

    @property
    def settings(self) -> Settings:
        """Replicated settings, for checks of what clients send."""
        ...

    @property
    def state(self) -> StateView:
        """The replicated state, for reading."""
        ...

    def now_ms(self) -> int:
        """Cluster time in milliseconds since the Unix epoch."""
        ...

    @property
    def cold(self) -> ColdPort:
        """The cold tier."""
        ...

    @property
    def bulk(self) -> BulkPort:
        """Bulk load."""
        ...

    def schedule(self, batch: IncomingBatch, done: Callable[[BatchOutcome | Failure], None]) -> None: ...

    def cancel(
        self, id64: int, done: Callable[[scheduler_pb2.CancelResponse | Failure], None], permitted: Permitted
    ) -> None:
        """Cancel a message. `permitted` is called with the topic of the message found; the same holds below."""
        ...

    def reschedule(
        self,
        request: scheduler_pb2.RescheduleRequest,
        done: Callable[[scheduler_pb2.RescheduleResponse | Failure], None],
        permitted: Permitted,
        owner: str = "",
    ) -> None: ...

    def refused(self, producer_id: str, sequence: int, failure: Failure) -> Failure: ...

    def get(
        self,
        id64: int,
        content: bool,
        done: Callable[[scheduler_pb2.GetResponse | Failure], None],
        permitted: Permitted,
    ) -> None: ...

    def list_pending(
        self,
        request: scheduler_pb2.ListPendingRequest,
        done: Callable[[scheduler_pb2.ListPendingResponse | Failure], None],
    ) -> None: ...

    def count_pending(
        self,
        request: scheduler_pb2.CountPendingRequest,
        done: Callable[[scheduler_pb2.CountPendingResponse | Failure], None],
    ) -> None: ...

    def stage(
        self,
        request: staging_pb2.StageRequest,
        batch: IncomingBatch,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None: ...

    def commit_staged(
        self,
        request: staging_pb2.CommitStagedRequest,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None: ...

    def abort_staged(
        self,
        request: staging_pb2.AbortStagedRequest,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None: ...

    def staged_job(
        self,
        request: staging_pb2.GetStagedJobRequest,
        done: Callable[[staging_pb2.StagedJob | Failure], None],
        owner: str = "",
    ) -> None: ...
    def delete_topic(
        self, request: admin_pb2.DeleteTopicRequest, done: Callable[[scheduler_pb2.Sweep | Failure], None]
    ) -> None: ...

    def delete_group(
        self, request: admin_pb2.DeleteGroupRequest, done: Callable[[scheduler_pb2.Sweep | Failure], None]
    ) -> None: ...

    def begin_sweep(
        self, request: scheduler_pb2.BeginSweepRequest, done: Callable[[scheduler_pb2.Sweep | Failure], None]
    ) -> None: ...

    def get_sweep(self, job_id: str, done: Callable[[scheduler_pb2.Sweep | Failure], None]) -> None: ...

    def list_sweeps(self, done: Callable[[scheduler_pb2.ListSweepsResponse | Failure], None]) -> None: ...

    def stop_sweep(self, job_id: str, done: Callable[[scheduler_pb2.Sweep | Failure], None]) -> None: ...

    def pin(
        self, request: snapshot_pb2.PinRequest, done: Callable[[snapshot_pb2.PinResponse | Failure], None]
    ) -> None: ...

    def read_pinned(
        self, request: snapshot_pb2.ReadPinnedRequest, done: Callable[[snapshot_pb2.PinnedPage | Failure], None]
    ) -> None: ...

    def agree_pin(
        self,
        request: snapshot_pb2.AgreePinRequest,
        done: Callable[[snapshot_pb2.AgreePinResponse | Failure], None],
    ) -> None: ...

    def unpin(self, pin_id: int) -> None: ...

    def pin_settled(
        self,
        request: snapshot_pb2.PinSettledRequest,
        done: Callable[[snapshot_pb2.PinSettledResponse | Failure], None],
    ) -> None: ...

    def read_settled(
        self, request: snapshot_pb2.ReadSettledRequest, done: Callable[[snapshot_pb2.SettledPage | Failure], None]
    ) -> None: ...

    def open_consumer(
        self,
        request: consumer_pb2.OpenConsumer,
        deliver: Callable[[consumer_pb2.DeliverBatch], None],
        closed: Callable[[Failure], None],
        opened: Callable[[ConsumerSession | Failure], None],
        actor: str,
    ) -> None:
        """Open a session. `opened` is called before the first `deliver`; `closed` when the core ends the session.

        `actor`: the user whose quotas count for a group or topics that the call creates; the same holds below.
        """
        ...

    def pull(
        self,
        request: consumer_pb2.PullRequest,
        done: Callable[[consumer_pb2.DeliverBatch | Failure], None],
        actor: str,
    ) -> None:
        """Deliver one batch; an empty one if nothing is due within `wait_ms`."""
        ...

    def settle(
        self, batch: consumer_pb2.SettleBatch, done: Callable[[consumer_pb2.SettleReceipt | Failure], None]
    ) -> None: ...

    def extend(
        self, batch: consumer_pb2.ExtendBatch, done: Callable[[consumer_pb2.ExtendReceipt | Failure], None]
    ) -> None: ...

    def list_dead(
        self, request: dead_pb2.ListDeadRequest, done: Callable[[dead_pb2.ListDeadResponse | Failure], None]
    ) -> None: ...

    def get_dead(
        self, request: dead_pb2.GetDeadRequest, done: Callable[[dead_pb2.DeadLetter | Failure], None]
    ) -> None: ...

    def replay_dead(
        self, request: dead_pb2.ReplayDeadRequest, done: Callable[[dead_pb2.ChangeDeadResponse | Failure], None]
    ) -> None: ...

    def purge_dead(
        self, request: dead_pb2.PurgeDeadRequest, done: Callable[[dead_pb2.ChangeDeadResponse | Failure], None]
    ) -> None: ...

    def admin(self, command: AdminCommand, done: Callable[[AdminResult | Failure], None]) -> None: ...

    def transfer(self, target_id: str, done: Callable[[admin_pb2.TransferMasterResponse | Failure], None]) -> None: ...

    def members(self) -> admin_pb2.MemberList: ...

    def topics(self, after_id: int = 0) -> Iterator[admin_pb2.Topic]: ...

    def topic(self, name: str) -> admin_pb2.Topic | None: ...

    def groups(self, after_id: int = 0) -> Iterator[admin_pb2.Group]: ...

    def group(self, name: str) -> admin_pb2.Group | None: ...

    def settings_message(self) -> admin_pb2.Settings: ...

    def status(self) -> admin_pb2.NodeStatus: ...

    def trace(
        self, request: admin_pb2.TraceRequest, done: Callable[[admin_pb2.TraceResponse | Failure], None]
    ) -> None: ...

    def digest(self) -> admin_pb2.StateDigest: ...

    def disk_use(
        self, request: admin_pb2.GetDiskUseRequest, done: Callable[[admin_pb2.DiskUse | Failure], None]
    ) -> None: ...

    def backup_files(self, done: Callable[[list[BackupFile] | Failure], None]) -> None:
        """Write a checkpoint and list the files of a copy. They are kept unchanged until `backup_copied`."""
        ...

    def backup_origin(self) -> admin_pb2.BackupOrigin:
        """The origin of the files being copied. Before `backup_files`: only the stale_reason that a copy would have."""
        ...

    def backup_progressed(self, files: object) -> bool:
        """The copy of these files makes progress. False: they are no longer kept for it."""
        ...

    def backup_copied(self, files: object) -> None:
        """The copy has ended or was given up. Once the last one has, checkpoints may replace the files again."""
        ...

    def metrics(self) -> Mapping[str, MetricValue]: ...
