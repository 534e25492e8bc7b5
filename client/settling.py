"""A consumer's requests about deliveries: settlements and lease extensions. Pure.

Rows are places in a batch; None means all rows. Ids, attempts and positions are sent as they were received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.client.delivery import DeliveredBatch
from tickwheel.client.requests import request_of
from tickwheel.proto import consumer_pb2

Rows = NDArray[np.int64]

JOINT_TOPICS_MAX = 512
"""Topics in one settlement: as many as a node accepts."""
JOINT_MESSAGES_MAX = 10_000
"""Messages in one settlement of several topics; a node accepts ten times as many."""


class Settling:
    """A settlement of deliveries of one topic and epoch, or an extension of their leases, until its receipt comes."""

    __slots__ = ("attempts", "epoch", "future", "group", "ids", "positions", "sequence", "terms", "topic", "tries")

    def __init__(
        self, parts: Sequence[tuple[DeliveredBatch, Rows | None]], terms: Mapping[str, Any], future: asyncio.Future[Any]
    ) -> None:
        """`parts`: rows of batches of the same topic and epoch. `terms`: of a settlement its outcome and what goes with
        it, of an extension `lease_ms`."""
        first = parts[0][0].columns
        self.group, self.topic, self.epoch = first.group, first.topic, first.epoch
        named = [batch.columns.named(rows) for batch, rows in parts]
        self.ids, self.attempts, self.positions = map(b"".join, zip(*named, strict=True))
        if len(self.positions) < len(self.ids):  # a node did not say some of them
            self.positions = b""
        self.terms = terms
        self.future = future
        self.sequence = 0
        self.tries = 0

    @property
    def acknowledges(self) -> bool:
        """Whether it may be sent with others."""
        return self.terms is ACK

    def message(self) -> consumer_pb2.ConsumeRequest:
        """It alone, as a node is sent it. Raises RequestRefused for terms that no message can hold."""
        fields: dict[str, Any] = {
            "group": self.group,
            "topic": self.topic,
            "epoch": self.epoch,
            "ids": self.ids,
            "attempts": self.attempts,
            "positions": self.positions,
            "sequence": self.sequence,
            **self.terms,
        }
        if "lease_ms" in self.terms:
            return consumer_pb2.ConsumeRequest(extend=request_of(consumer_pb2.ExtendBatch, **fields))
        return consumer_pb2.ConsumeRequest(settle=request_of(consumer_pb2.SettleBatch, **fields))


ACK: Mapping[str, Any] = {"outcome": consumer_pb2.ACK}
"""The terms of an acknowledgement."""


def terms_of(
    outcome: consumer_pb2.Outcome.ValueType, delay_ms: int = 0, delay_level: int = 0, reason: str = ""
) -> Mapping[str, Any]:
    """The terms of a settlement."""
    if outcome == consumer_pb2.ACK:
        return ACK
    # The text of an error may hold a name of a file whose bytes are no UTF-8. That must not keep it from being settled.
    reason = reason.encode(errors="replace").decode()
    return {"outcome": outcome, "delay_ms": delay_ms, "delay_level": delay_level, "reason": reason}


def together(acknowledgements: Sequence[Settling]) -> Iterator[list[Settling]]:
    """Acknowledgements of one group as they may leave together."""
    some: list[Settling] = []
    count = 0
    for one in acknowledgements:
        rows = len(one.ids) // 8
        if some and (len(some) == JOINT_TOPICS_MAX or count + rows > JOINT_MESSAGES_MAX):
            yield some
            some, count = [], 0
        some.append(one)
        count += rows
    if some:
        yield some


def joint(some: Sequence[Settling], sequence: int) -> consumer_pb2.ConsumeRequest:
    """Several acknowledgements as one settlement of several topics."""
    settle = consumer_pb2.SettleBatch(
        group=some[0].group,
        outcome=consumer_pb2.ACK,
        ids=b"".join([one.ids for one in some]),
        attempts=b"".join([one.attempts for one in some]),
        positions=b"".join([one.positions for one in some]),
        topics=[one.topic for one in some],
        topic_counts=np.array([len(one.ids) // 8 for one in some], "<u4").tobytes(),
        epochs=np.array([one.epoch for one in some], "<u4").tobytes(),
        sequence=sequence,
    )
    return consumer_pb2.ConsumeRequest(settle=settle)
