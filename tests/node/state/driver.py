"""Drives a state machine over the model wheel and a simulated disk: builds entries, checkpoints, restarts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from tests.node.state.model_wheel import ModelWheel
from tickwheel.node.state.machine import StateMachine
from tickwheel.proto import admin_pb2
from tickwheel.proto.consumer_pb2 import EARLIEST, StartFrom
from tickwheel.proto.log_pb2 import (
    AdminCommand,
    Command,
    CreateCluster,
    Dispatch,
    Lead,
    LogEntry,
    Manifest,
    Publish,
    PublishRequest,
    Settle,
    SettleColumns,
)
from tickwheel.storage.simulated import SimulatedDisk

HOUR_0 = 490_000 * 3_600_000
"""An hour's first millisecond to schedule around."""


def publish_command(
    requests: Sequence[tuple[str, int, Sequence[int]]], topics: Sequence[int] | int = 1, payload: bytes = b"x"
) -> Command:
    """Requests of (producer, sequence, due times in row order) as the master merges and sorts them."""
    due = np.array([d for _, _, dues in requests for d in dues], np.int64)
    order = np.argsort(due, kind="stable")
    column = np.array([topics] if isinstance(topics, int) else topics, "<u4")
    return Command(
        publish=Publish(
            requests=[PublishRequest(producer_id=p, sequence=s, count=len(d)) for p, s, d in requests],
            due_ms=due[order].tobytes(),
            rows=order.astype("<u4").tobytes(),
            topic_ids=(column if isinstance(topics, int) else column[order]).tobytes(),
            sizes=np.full(len(due), len(payload), "<u4").tobytes(),
            records=payload * len(due),
        )
    )


def dispatch_command(due_ms: int, index: int = 0) -> Command:
    """Move the cursor."""
    return Command(dispatch=Dispatch(due_ms=due_ms, index=index))


def settle_command(
    kind: int,
    ids: Sequence[int],
    attempts: Sequence[int],
    positions: Sequence[int] | None,
    *,
    group_id: int = 1,
    topic_id: int = 1,
    due_ms: Sequence[int] | None = None,
    reason: str = "",
    cause: int = 0,
) -> Command:
    """One batch. `due_ms`: of retries."""
    columns = SettleColumns(
        group_id=group_id,
        topic_id=topic_id,
        kind=kind,  # type: ignore[arg-type]
        ids=np.array(ids, "<u8").tobytes(),
        attempts=np.array(attempts, "<u4").tobytes(),
        positions=b"" if positions is None else np.array(positions, "<u8").tobytes(),
        due_ms=b"" if due_ms is None else np.array(due_ms, "<i8").tobytes(),
        reason=reason,
        cause=cause,  # type: ignore[arg-type]
    )
    return Command(settle=Settle(batches=[columns]))


def admin(**body: Any) -> Command:
    """An admin command by the name of its field."""
    return Command(admin=AdminCommand(**body))


class Driver:
    """One node's state; `log` is what it was given."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk(Random(1))
        self.wheel = ModelWheel()
        self.state = StateMachine(self.disk, "state", self.wheel)
        self.log: list[LogEntry] = []
        self.manifest: Manifest | None = None
        self.term = 1

    def apply(self, *commands: Command, term: int | None = None) -> list[Any]:
        """One entry."""
        entry = LogEntry(format_version=1, term=self.term if term is None else term, stamped_ms=7, commands=commands)
        entry = LogEntry.FromString(entry.SerializeToString())
        self.log.append(entry)
        return self.state.apply(len(self.log), entry.term, entry)

    def create(self, topics: Sequence[str] = ("orders",), **settings: Any) -> None:
        """Cluster, lead and topics."""
        members = [admin_pb2.Member(node_id="a", peer_address="a:1", client_address="a:2")]
        cluster = CreateCluster(cluster_id="c", settings=admin_pb2.Settings(**settings), members=members)
        self.apply(Command(lead=Lead(term=self.term, node_id="a")), admin(create_cluster=cluster))
        for name in topics:
            self.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name=name)))

    def group(
        self,
        name: str = "g",
        topics: Sequence[str] = ("orders",),
        start_from: StartFrom.ValueType = EARLIEST,
        start_ms: int = 0,
    ) -> Any:
        """Create a group."""
        request = admin_pb2.CreateGroupRequest(name=name, topics=topics, start_from=start_from, start_ms=start_ms)
        return self.apply(admin(create_group=request))[0]

    def ready(self, due_ms: Sequence[int], topic_id: int = 1) -> list[int]:
        """Publish messages without producer and dispatch all up to the latest; returns their ids by due time."""
        outcome = self.apply(publish_command([("", 0, sorted(due_ms))], topic_id))[0].requests[0]
        assert outcome.failure is None
        self.apply(dispatch_command(max(due_ms) + 1))
        return [int(n) for n in outcome.ids]

    def checkpoint(self) -> None:
        """Begin, run, finish."""
        job = self.state.begin_checkpoint()
        job.run()
        self.manifest = job.manifest
        self.state.checkpoint_durable(job)
        job.remove_old()

    def restart(self, crash: Random | None = None) -> None:
        """From the newest checkpoint, then the log after it."""
        if crash is not None:
            self.disk.crash(crash)
        manifest = self.manifest
        self.wheel = ModelWheel(manifest.wheel if manifest else b"")
        self.state = StateMachine(self.disk, "state", self.wheel, restored=manifest.state if manifest else b"")
        for number in range(manifest.applied_index if manifest else 0, len(self.log)):
            self.state.apply(number + 1, self.log[number].term, self.log[number])
