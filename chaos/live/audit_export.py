"""The history of a live run as the events that the audit reads: Parquet in the schema of `pipeline/event_export.py`.

Owns the meaning of the records of workload and supervisor to the audit. Shares no code with the verdict, so that the
two are independent. The clients' knowledge decides: a message is SCHEDULED when its acknowledgement came, with the time
that was asked for; SCHEDULED and CANCELLED, as uncertain, also when the answer never came; DELIVERED when a consumer
had it, with the time before which it must not come. LEADS stands for a status of a serving master. Other rows have
no term, so the time without a master is the time between such statuses. A message keeps its first id, also after a
move.
Needs pyarrow (extra `spark`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tickwheel.chaos.live.history import Record, read_history
from tickwheel.pipeline.event_export import SCHEMA

ROWS_A_FILE = 250_000
TOPIC = "chaos"
SETTLED_MS = 5_000
"""Messages due within this time before the end are not judged as lost."""
UNCERTAIN = 1
"""`detail` of a SCHEDULED or a CANCELLED whose answer never came."""
Row = dict[str, Any]


@dataclass(slots=True)
class _Known:
    """One message, as its clients know it in the end."""

    asked_ms: float
    id: int = 0
    acknowledged_ms: float = 0.0
    cancel: tuple[float, bool] | None = None
    """(time, whether the answer confirmed it); None: no cancel."""
    moved: tuple[float, float, bool] | None = None
    """(time, new due time, whether the answer confirmed it); None: not moved."""

    @property
    def earliest_ms(self) -> int:
        """The message must not come before this. A move without a confirmation may or may not have been carried out."""
        if self.moved is None:
            return math.floor(self.asked_ms)
        _, to_ms, surely = self.moved
        return math.floor(to_ms if surely else min(to_ms, self.asked_ms))


@dataclass(frozen=True, slots=True)
class Exported:
    """Number of rows written, and the due time up to which messages must have come."""

    rows: int
    until_ms: int


class _Files:
    """Rows into files of a bounded size."""

    def __init__(self, out: Path, rows_a_file: int) -> None:
        self._out = out
        self._rows_a_file = rows_a_file
        self._held: list[Row] = []
        self._number = 0
        self.rows = 0
        out.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, at_ms: float, **columns: object) -> None:
        """One row; columns that are not named are null."""
        fixed = {"node": "chaos", "stamped_ms": 0, "term": 0, "log_index": 0, "detail": 0, "count": 1}
        self._held.append({**fixed, "kind": kind, "at_ms": math.floor(at_ms), **columns})
        self.rows += 1
        if len(self._held) >= self._rows_a_file:
            self.write()

    def write(self) -> None:
        """Write the held rows as one file. The first file is written even if it is empty."""
        if self._held or not self._number:
            table = pa.Table.from_pylist(self._held, schema=SCHEMA)
            pq.write_table(table, self._out / f"events-{self._number:05}.parquet", compression="zstd")
            self._held, self._number = [], self._number + 1


def _histories(directory: Path) -> Iterator[Record]:
    return read_history([directory / "supervisor.jsonl", directory / "workload.jsonl"])


class _Reader:
    """The first reading: what became of each message."""

    def __init__(self) -> None:
        self.messages: dict[int, _Known] = {}
        self._requests: dict[int, list[int]] = {}
        self.end_ms = 0.0
        self._ended = False

    def read(self, record: Record) -> None:
        at_ms, kind = record["t"], record["k"]
        if kind == "end" or not self._ended:
            self.end_ms = at_ms
            self._ended = self._ended or kind == "end"
        if kind == "send":
            self._requests[record["b"]] = record["uids"]
            for uid, asked_ms in zip(record["uids"], record["asked"], strict=True):
                self.messages[uid] = _Known(asked_ms)
        elif kind == "ack":
            for uid, id64 in zip(self._requests[record["b"]], record["ids"], strict=True):
                known = self.messages[uid]
                known.id, known.acknowledged_ms = known.id or id64, at_ms
        elif kind == "got":
            for uid, id64 in zip(record["uids"], record["ids"], strict=True):
                if uid in self.messages:
                    self.messages[uid].id = self.messages[uid].id or id64
        elif kind == "cancel":
            self.messages[record["uid"]].cancel = (at_ms, False)
        elif kind == "cancelled":
            self.messages[record["uid"]].cancel = (at_ms, True) if record["outcome"] == "CANCELLED" else None
        elif kind in ("move", "moved"):
            self._read_move(record, self.messages[record["uid"]])

    def _read_move(self, record: Record, known: _Known) -> None:
        if record["k"] == "move":
            known.moved = (record["t"], record["asked"], False)
        elif known.moved is not None:
            outcome = record["outcome"]
            possible = outcome in ("RESCHEDULED", "ALREADY_DISPATCHED")
            known.moved = (record["t"], known.moved[1], outcome == "RESCHEDULED") if possible else None


def export_history(directory: Path, out: Path, rows_a_file: int = ROWS_A_FILE) -> Exported:
    """Write the history of the run in `directory` into the folder `out`, which is new. Reads it twice."""
    reader = _Reader()
    for record in _histories(directory):
        reader.read(record)
    files = _Files(out, rows_a_file)
    for order, known in enumerate(reader.messages.values()):
        if known.id:
            _write_message(files, known, order)
    leading: dict[int, tuple[str, float, float]] = {}
    for record in _histories(directory):
        if record["k"] == "got":
            _write_deliveries(files, record, reader.messages)
        elif record["k"] == "status" and (record["role"], record["lease"], record["state"]) == (
            "MASTER",
            True,
            "SERVING",
        ):
            _, first_ms, _ = leading.get(record["term"], ("", record["t"], 0.0))
            if record["term"] >= max(leading, default=0):
                leading[record["term"]] = (record["node"], first_ms, record["t"])
    for term, (node, first_ms, last_ms) in leading.items():
        files.add("LEADS", first_ms, term=term, node=node, group=node)
        files.add("LEADS", last_ms, term=term, node=node, group=node)
    files.write()
    return Exported(files.rows, math.floor(reader.end_ms) - SETTLED_MS - 1)


def _write_message(files: _Files, known: _Known, order: int) -> None:
    surely_moved = known.moved is not None and known.moved[2]
    due_ms = math.floor(known.asked_ms) if surely_moved else known.earliest_ms
    certainty = 0 if known.acknowledged_ms else UNCERTAIN
    at_ms = known.acknowledged_ms or known.asked_ms
    files.add("SCHEDULED", at_ms, id=known.id, due_ms=due_ms, topic=TOPIC, log_index=order, detail=certainty)
    if known.moved is not None and surely_moved:
        files.add("MOVED", known.moved[0], id=known.id, new_id=known.id, due_ms=known.earliest_ms, log_index=order)
    if known.cancel is not None:
        files.add("CANCELLED", known.cancel[0], id=known.id, detail=0 if known.cancel[1] else UNCERTAIN)


def _write_deliveries(files: _Files, record: Record, messages: dict[int, _Known]) -> None:
    for uid, attempt in zip(record["uids"], record["attempts"], strict=True):
        known = messages.get(uid)
        if known is not None:
            files.add(
                "DELIVERED",
                record["t"],
                id=known.id,
                due_ms=known.earliest_ms,
                attempt=attempt,
                topic=TOPIC,
                group=record["group"],
            )
