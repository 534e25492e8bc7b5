"""Python clients of a tickwheel cluster: `AsyncClient`, and `Client` for code without a loop. See docs/CLIENT.md."""

from tickwheel.client.async_client import AsyncClient, Bucket, Message, PendingCount
from tickwheel.client.cluster import TlsFiles
from tickwheel.client.consumer import Consumer
from tickwheel.client.dead import DeadLetter
from tickwheel.client.delivery import DeliveredBatch, Delivery
from tickwheel.client.errors import (
    ClientClosed,
    ClusterUnavailable,
    FilterDiffers,
    LimitReached,
    NotFound,
    OutcomeUnknown,
    PermissionRefused,
    RequestRefused,
    SequenceError,
    SequenceTaken,
    TickwheelError,
)
from tickwheel.client.messages import BatchReceipt, Receipt
from tickwheel.client.producer import Producer
from tickwheel.client.sweeps import Selection, Sweep
from tickwheel.client.sync_client import Client, SyncBatch, SyncConsumer, SyncDelivery

__all__ = [
    "AsyncClient",
    "BatchReceipt",
    "Bucket",
    "Client",
    "ClientClosed",
    "ClusterUnavailable",
    "Consumer",
    "DeadLetter",
    "DeliveredBatch",
    "Delivery",
    "FilterDiffers",
    "LimitReached",
    "Message",
    "NotFound",
    "OutcomeUnknown",
    "PendingCount",
    "PermissionRefused",
    "Producer",
    "Receipt",
    "RequestRefused",
    "Selection",
    "SequenceError",
    "SequenceTaken",
    "Sweep",
    "SyncBatch",
    "SyncConsumer",
    "SyncDelivery",
    "TickwheelError",
    "TlsFiles",
]
