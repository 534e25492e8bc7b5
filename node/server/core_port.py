"""What the services ask of NodeCore: its client face, as they see it.

Everything runs on the node's loop. A `done` is called exactly once, at once or later, with the answer or a
`Failure`. Answers of calls that are not hot are the messages of the wire, ready to be sent.
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
        """Term and lease that hold."""
        ...

    def credit(self, credits: int) -> Failure | None:
        """The consumer takes so many messages more; a Failure if that is beyond its bound."""
        ...

    def settle(
        self, batch: consumer_pb2.SettleBatch, done: Callable[[consumer_pb2.SettleReceipt | Failure], None]
    ) -> None: ...

    def extend(
        self, batch: consumer_pb2.ExtendBatch, done: Callable[[consumer_pb2.ExtendReceipt | Failure], None]
    ) -> None: ...

    def close(self) -> None:
        """The consumer is gone; what it holds goes to others. Idempotent."""
        ...


class BulkPort(Protocol):
    """Bulk load, as BulkDesk offers it."""

    def offer(self, name: str, total_bytes: int) -> Held | Failure: ...

    def take(
        self, name: str, total_bytes: int, offset: int, data: bytes, crc32c: int, done: Callable[[Held | Failure], None]
    ) -> None: ...

    def take_over(
        self, request: bulk_pb2.TakeOverRequest, done: Callable[[bulk_pb2.LoadState | Failure], None]
    ) -> None: ...

    def load(self, job_id: str) -> bulk_pb2.LoadState: ...


class ColdPort(Protocol):
    """Parts of the cold tier; see node/core/cold.py."""

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
        """Whose request is being served."""
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
        """Cluster time."""
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
        """`permitted` is asked with the topic that the id turns out to be of; likewise below."""
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
        """`opened` comes before anything is delivered; `closed` ends a session from inside. `actor`: the user whose
        group and topics they are if they have to be made; likewise below."""
        ...

    def pull(
        self,
        request: consumer_pb2.PullRequest,
        done: Callable[[consumer_pb2.DeliverBatch | Failure], None],
        actor: str,
    ) -> None:
        """One batch, or an empty one after wait_ms."""
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
        """Write a checkpoint and name what a copy consists of; it stays until `backup_copied`."""
        ...

    def backup_origin(self) -> admin_pb2.BackupOrigin:
        """Where the files come from that are being copied; before that: its stale_reason as it would be."""
        ...

    def backup_progressed(self, files: object) -> bool:
        """A copy of these files gets on; tells whether they are held still."""
        ...

    def backup_copied(self, files: object) -> None:
        """A copy is made or given up: checkpoints go on after the last one."""
        ...

    def metrics(self) -> Mapping[str, MetricValue]: ...
