"""Python clients of a tickwheel cluster: `AsyncClient`, and `Client` for code without a loop. See docs/CLIENT.md."""

from tickwheel.client.async_client import (
    AsyncClient,
    Bucket,
    CancelResult,
    Message,
    PendingCount,
    PendingPage,
    RescheduleResult,
)
from tickwheel.client.cluster import TlsFiles
from tickwheel.client.consumer import Consumer
from tickwheel.client.dead import DeadLetter
from tickwheel.client.delivery import DeliveredBatch, Delivery, SettleReceipt
from tickwheel.client.errors import (
    ClientClosed,
    ClusterUnavailable,
    FilterDiffers,
    LimitReached,
    NotFound,
    OutcomeUnknown,
    PayloadError,
    PermissionRefused,
    RequestRefused,
    SequenceError,
    SequenceTaken,
    TickwheelError,
)
from tickwheel.client.handling import Action, Dead, Drop, Handler, Retry
from tickwheel.client.messages import BatchReceipt, Receipt
from tickwheel.client.producer import Producer
from tickwheel.client.retrying import ExponentialBackoff, RetryPolicy
from tickwheel.client.schedules import (
    Missed,
    Overlap,
    PutResult,
    RunCounts,
    RunOutcome,
    Schedule,
    ScheduleRun,
    ScheduleState,
)
from tickwheel.client.states import (
    CancelOutcome,
    DeadCause,
    MessageState,
    RescheduleOutcome,
    StartFrom,
    SweepState,
)
from tickwheel.client.sweeps import Selection, Sweep
from tickwheel.client.sync_client import Client, SyncBatch, SyncConsumer, SyncDelivery
from tickwheel.client.sync_worker import SyncWorker
from tickwheel.client.unique_keys import KeyConflict, KeyOutcome, KeyTaken
from tickwheel.client.worker import HandlerTimeout, Worker
from tickwheel.client.worker_metrics import WorkerMetrics

__all__ = [
    "Action",
    "AsyncClient",
    "BatchReceipt",
    "Bucket",
    "CancelOutcome",
    "CancelResult",
    "Client",
    "ClientClosed",
    "ClusterUnavailable",
    "Consumer",
    "Dead",
    "DeadCause",
    "DeadLetter",
    "DeliveredBatch",
    "Delivery",
    "Drop",
    "ExponentialBackoff",
    "FilterDiffers",
    "Handler",
    "HandlerTimeout",
    "KeyConflict",
    "KeyOutcome",
    "KeyTaken",
    "LimitReached",
    "Message",
    "MessageState",
    "Missed",
    "NotFound",
    "OutcomeUnknown",
    "Overlap",
    "PayloadError",
    "PendingCount",
    "PendingPage",
    "PermissionRefused",
    "Producer",
    "PutResult",
    "Receipt",
    "RequestRefused",
    "RescheduleOutcome",
    "RescheduleResult",
    "Retry",
    "RetryPolicy",
    "RunCounts",
    "RunOutcome",
    "Schedule",
    "ScheduleRun",
    "ScheduleState",
    "Selection",
    "SequenceError",
    "SequenceTaken",
    "SettleReceipt",
    "StartFrom",
    "Sweep",
    "SweepState",
    "SyncBatch",
    "SyncConsumer",
    "SyncDelivery",
    "SyncWorker",
    "TickwheelError",
    "TlsFiles",
    "Worker",
    "WorkerMetrics",
]
