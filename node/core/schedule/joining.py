"""Messages of different callers that wait together: each comes alone, they go into the log as one request.

Only rows without a producer id are joined: nothing is remembered of them, so the log need not know them one by one.
Rows of one `JoinedRows` have topic, kind, client and user in common. So what apply refuses, it refuses to all of them
alike. Whatever may differ from row to row (how far ahead it is due, a quota, a mistake) is judged before, by the
publisher. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tickwheel.node.core.schedule.intake import IncomingBatch, Row, batch_of_rows
from tickwheel.node.failure import Failure

ROWS_JOINED_MAX = 256
"""Rows in one `JoinedRows`: telling all of them something takes about a millisecond."""
BYTES_JOINED_MAX = 256 << 10
"""Payloads of one `JoinedRows`: a quarter of an entry. A larger row is alone."""
ROW_BYTES = 32
"""Bytes that a row counts beside its payload, as in `IncomingBatch.bytes`."""


class RowCaller(NamedTuple):
    """The caller of a row. Exactly one callback is called, unless `fail` also tells of a later mistake."""

    placed: Callable[[int, int, int, int], None]
    """Gets id, due time (ms), delay level and that level's delay (ms); 0 and 0: no level was asked for."""
    fail: Callable[[Failure], None]
    connection: str = ""
    """As in `IncomingBatch`."""


class JoinedRows:
    """Rows that wait, in order of arrival."""

    __slots__ = ("_payloads", "_when", "actor", "bytes", "callers", "client", "kind", "topic")

    def __init__(self, topic: str, kind: int, client: str, actor: str) -> None:
        self.topic = topic
        self.kind = kind
        self.client = client
        self.actor = actor
        self.callers: list[RowCaller] = []
        self.bytes = 0
        """Roughly the memory that the rows take."""
        self._when: list[int] = []
        self._payloads: list[bytes] = []

    def __len__(self) -> int:
        return len(self.callers)

    @property
    def topics(self) -> Sequence[str]:
        return (self.topic,)

    def takes(self, row: Row, client: str, actor: str) -> bool:
        """Whether a row may go with these."""
        return (
            row.kind == self.kind
            and client == self.client
            and actor == self.actor
            and len(self.callers) < ROWS_JOINED_MAX
            and self.bytes + len(row.payload) <= BYTES_JOINED_MAX
        )

    def add(self, when: int, payload: bytes, caller: RowCaller) -> None:
        self._when.append(when)
        self._payloads.append(payload)
        self.callers.append(caller)
        self.bytes += len(payload) + ROW_BYTES

    def batch(self) -> IncomingBatch:
        """All rows as one batch."""
        batch = batch_of_rows(self.topic, self.kind, self._when, self._payloads)
        batch.client, batch.actor = self.client, self.actor
        return batch

    def only(self, rows: Sequence[int]) -> JoinedRows:
        """The rows with these numbers."""
        part = JoinedRows(self.topic, self.kind, self.client, self.actor)
        for number in rows:
            part.add(self._when[number], self._payloads[number], self.callers[number])
        return part

    def each(self) -> Iterator[JoinedRows]:
        """Each row alone."""
        return (self.only((number,)) for number in range(len(self)))
