"""The pages of the Python API: reStructuredText that names classes to Sphinx's autodoc, by the file of each page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import get_args, get_origin

from tickwheel.client.blocking import (
    Blocking,
    attribute,
    calling,
    each,
    following,
    following_all,
    making,
    reading,
    waiting,
)
from tickwheel.client.payloads import Carrier

PAGES = {
    "Clients": ["client.AsyncClient", "client.TlsFiles", "client.tracing.Tracing"],
    "Schedule": [
        *("client.messages.MessageOptions", "client.messages.Content", "client.Receipt"),
        *("client.CancelOutcome", "client.RescheduleOutcome", "client.RescheduleResult"),
        *("client.Producer", "client.BatchReceipt", "client.messages.KeyOptions"),
        *("client.KeyConflict", "client.KeyOutcome", "client.CancelResult"),
    ],
    "Consume": [
        *("client.Consumer", "client.Delivery", "client.DeliveredBatch", "client.SettleReceipt", "client.StartFrom"),
        *("client.pulling.PullClient", "client.pulling.PulledBatch", "client.Settlement"),
    ],
    "Workers": [
        *("client.Worker", "client.worker.WorkerOptions", "client.Handler", "client.Action", "client.Retry"),
        *("client.Dead", "client.Drop", "client.HandlerTimeout", "client.WorkerMetrics"),
        *("client.worker_metrics.TopicMetrics", "client.worker_metrics.Times"),
    ],
    "What is pending": [
        *("client.async_client.Conditions", "client.Message", "client.MessageState", "client.PendingPage"),
        *("client.PendingCount", "client.Bucket", "client.sweeps.SweepClient", "client.Selection", "client.Sweep"),
        "client.SweepState",
    ],
    "Recurring schedules": [
        *("client.schedules.ScheduleClient", "client.Schedule", "client.ScheduleState", "client.PutResult"),
        *("client.ScheduleRun", "client.RunOutcome", "client.RunCounts", "client.Missed", "client.Overlap"),
    ],
    "Dead letters": [
        "client.dead.DeadClient",
        "client.DeadLetter",
        "client.DeadCause",
        "client.dead.DeadPage",
        "client.dead.Changed",
    ],
    "Administration": [
        *("client.admin.AdminClient", "client.Topic", "client.Group", "client.RetryPolicy"),
        *("client.ExponentialBackoff", "client.Deletion", "client.Settings", "client.settings.SettingChanges"),
        *("client.Trace", "client.TraceEvent", "client.EventKind", "client.Member", "client.Handover"),
        *("client.BackupChunk", "client.BackupOrigin", "client.HeldFile"),
    ],
    "Nodes": [
        *("client.NodeStatus", "client.NodeRole", "client.NodeState", "client.ClockState", "client.PeerStatus"),
        *("client.TopicStatus", "client.ColdStatus", "client.ColdState", "client.BulkStatus", "client.ServerInfo"),
        *("client.StateDigest", "client.DiskUse", "client.DiskPart", "client.DiskHour", "client.DiskTopic"),
    ],
    "Rights": [
        *("client.access.AccessClient", "client.User", "client.Role", "client.Grant", "client.Right"),
        *("client.Quotas", "client.Token", "client.NewToken", "client.Caller", "client.KnownBy", "client.AuditRecord"),
    ],
    "Bulk": [
        *("client.staging.StagingClient", "client.staging.StagedAttemptWriter", "client.staging.Rows"),
        *("client.staging.StagedJob", "client.staging.StagedState", "client.staging.StagedAttempt"),
        *("client.snapshot.SnapshotClient", "client.snapshot.Pin", "client.snapshot.PinnedPage"),
        *("client.snapshot.SettledPin", "client.snapshot.SettledTopic", "client.snapshot.SettledPage"),
        *("client.bulk.BulkClient", "client.bulk.LoadProgress", "client.cold.ColdClient", "client.cold.NewColdPart"),
        *("client.cold.ColdJob", "client.cold.ColdPart", "client.cold.ColdMoved", "client.cold.ColdLoad"),
    ],
    "Without a loop": [
        *("client.Client", "client.sync_client.SyncProducer", "client.SyncConsumer", "client.SyncDelivery"),
        *("client.SyncBatch", "client.SyncWorker", "client.sync_client.SyncAdmin", "client.sync_client.SyncAccess"),
        *("client.sync_client.SyncDead", "client.sync_client.SyncSweeps", "client.sync_client.SyncSchedules"),
        *("client.sync_client.SyncPulling", "client.sync_client.SyncStaging", "client.sync_client.SyncStagedAttempt"),
        *("client.sync_client.SyncSnapshot", "client.sync_client.SyncBulk", "client.sync_client.SyncCold"),
    ],
    "Errors": [
        *("client.TickwheelError", "client.RequestRefused", "client.FilterDiffers", "client.NotFound"),
        *("client.PayloadError", "client.LimitReached", "client.ClusterUnavailable", "client.OutcomeUnknown"),
        *("client.SequenceError", "client.SequenceTaken", "client.ClientClosed", "client.PermissionRefused"),
        *("client.KeyTaken", "client.Fault"),
    ],
    "Testing": [
        *("testing.FakeCluster", "testing.Clock", "testing.SyncFakeCluster", "testing.SyncClock"),
        "testing.clock.Span",
    ],
}
"""Page -> its classes, below `tickwheel`."""

BLOCKING = {
    attribute: "The same",
    reading: "The same",
    calling: "The same",
    waiting: "Without ``await``",
    each: "Iterate without ``async``",
    making: "The blocking kind",
    following: "A ``concurrent.futures.Future``, once there is room",
    following_all: "A list of ``concurrent.futures.Future``, once there is room",
}
"""How a member of a blocking class differs from that of the asynchronous class."""


def python() -> dict[str, str]:
    """The pages of the Python API. Raises ValueError if a public name has no page."""
    listed = {name for names in PAGES.values() for name in names}
    for package in ("client", "testing"):
        public = {f"{package}.{name}" for name in import_module(f"tickwheel.{package}").__all__}
        if public - listed:
            raise ValueError(f"no page of the Python API has {', '.join(sorted(public - listed))}")
    pages = {}
    for title, names in PAGES.items():
        entries = [entry for name in names for entry in _class_entry(f"tickwheel.{name}")]
        pages[f"reference/python/{_slug(title)}.rst"] = "\n".join([title, "=" * len(title), "", *entries])
    contents = [f"   python/{_slug(title)}" for title in PAGES]
    head = [
        *("Python API", "==========", ""),
        "What the packages ``tickwheel.client`` and ``tickwheel.testing`` have, from their docstrings.",
        "The guides are :doc:`/client` and :doc:`/testing`.",
        *("", ".. toctree::", "   :maxdepth: 2", ""),
    ]
    return pages | {"reference/python.rst": "\n".join([*head, *contents, ""])}


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _class_entry(path: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    directive = "autoexception" if issubclass(kind, BaseException) else "autoclass"
    yield from (name, "-" * len(name), "", f".. {directive}:: {path}")
    if issubclass(kind, Blocking):
        yield from _blocking_members(kind)
        return
    yield from ("   :members:", "   :undoc-members:")
    if issubclass(kind, Carrier):
        yield "   :inherited-members:"
    if kind.__bases__ != (object,):
        yield "   :show-inheritance:"
    yield ""


def _blocking_members(kind: type) -> Iterator[str]:
    """Its own methods; of the others, which are those of the asynchronous class, how they differ."""
    own = [key for key, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)]
    own = [key for key in own if not key.startswith("_")]
    yield from ([f"   :members: {', '.join(own)}"] if own else [])
    yield ""
    ways: dict[str, list[str]] = {}
    for key, value in vars(kind).items():
        if key.startswith("_") or type(value) not in BLOCKING:
            continue
        ways.setdefault(BLOCKING[type(value)], []).append(_link(kind, key, value))
    yield from (f"   | {way}: {', '.join(members)}." for way, members in ways.items())
    yield ""


def _link(kind: type, key: str, value: object) -> str:
    if isinstance(value, attribute):
        return f"``{key}``"
    shown = getattr(kind, key)
    method = getattr(shown, "fget", getattr(shown, "func", shown))
    owner, _, name = method.__qualname__.partition(".")
    if owner == Carrier.__name__:
        [owner] = [get_args(base)[0].__name__ for base in vars(kind)["__orig_bases__"] if get_origin(base) is Blocking]
    return f":py:obj:`{key} <{_place_of(owner)}.{name}>`"


def _place_of(name: str) -> str:
    """Where a page has the class of this name."""
    [place] = [path for names in PAGES.values() for path in names if path.rpartition(".")[2] == name]
    return f"tickwheel.{place}"
