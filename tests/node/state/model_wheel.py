"""A wheel of dicts and lists with the API of wheel/engine.py: slow and plainly right."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.storage.bundle import Layout
from tickwheel.wheel.bundles import Ingested
from tickwheel.wheel.sweep import DISPATCHED, DONE, MARKED, UNKNOWN, Standing
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, Ids, Units, ids_of


class CancelOutcome(enum.Enum):
    """As the wheel's."""

    CANCELLED = 1
    ALREADY_DISPATCHED = 2
    NOT_FOUND = 3
    MOVED = 4


OUTCOMES = {
    None: DONE,
    CancelOutcome.CANCELLED: MARKED,
    CancelOutcome.ALREADY_DISPATCHED: DISPATCHED,
    CancelOutcome.NOT_FOUND: UNKNOWN,
}


@dataclass(frozen=True)
class Dispatched:
    """Live units in order."""

    units: Units
    passed_count: int


@dataclass
class ModelCheckpoint:
    """All of the model is in `state`."""

    state: bytes
    files: list[ManifestFile] = field(default_factory=list)

    def run(self) -> None:
        """Nothing to write."""

    def remove_old(self) -> None:
        """Nothing to remove."""


class ModelWheel:
    def __init__(self, state: bytes = b"") -> None:
        self.cursor = CursorKey(0, 0)
        self.units: dict[int, bytes] = {}
        self.records: dict[int, bytes] = {}
        self.next_index: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.moved: dict[int, int] = {}
        if state:
            found = json.loads(state)
            self.cursor = CursorKey(*found["cursor"])
            self.units = {int(k): bytes.fromhex(v) for k, v in found["units"].items()}
            self.records = {int(k): bytes.fromhex(v) for k, v in found["records"].items()}
            self.next_index = {int(k): v for k, v in found["next"].items()}
            self.cancelled = found["cancelled"]
            self.moved = {int(k): v for k, v in found["moved"].items()}

    def append(self, units: Units, records: bytes | memoryview) -> Ids:
        """Clamp, number and keep."""
        assert int(units["size"].sum()) == len(records)
        units["due_ms"] = np.maximum(units["due_requested_ms"], self.cursor.due_ms)
        at = 0
        for unit in units:
            hour = int(unit["due_ms"]) // HOUR_MS
            unit["index"] = self.next_index.get(hour, 0)
            self.next_index[hour] = int(unit["index"]) + 1
            self.units[hour << 32 | int(unit["index"])] = unit.tobytes()
            self.records[hour << 32 | int(unit["index"])] = bytes(records[at : at + int(unit["size"])])
            at += int(unit["size"])
        return ids_of(units)

    def fetch(self, ids: Ids, bytes_max: int) -> tuple[Units, list[bytes]]:
        """The first ones up to so many bytes, one at least."""
        numbers: list[int] = ids.tolist()
        records: list[bytes] = []
        for number in numbers:
            if records and sum(map(len, records)) + len(self.records[number]) > bytes_max:
                break
            records.append(self.records[number])
        live = b"".join(self.units[number] for number in numbers[: len(records)])
        return np.frombuffer(live, UNIT).copy(), records

    def _key(self, number: int) -> CursorKey:
        unit = np.frombuffer(self.units[number], UNIT)[0]
        return CursorKey(int(unit["due_ms"]), int(unit["index"]))

    bundle_chunks = 0

    def ingest(self, name: str, layout: Layout, topic_ids: tuple[int, ...], stamped_ms: int) -> Ingested:
        """Not modelled: it reads no files."""
        raise NotImplementedError

    def withhold(self, ids: Ids) -> Ids:
        """Nothing was taken over."""
        raise NotImplementedError

    def covers(self, hour_max: int) -> bool:
        """Any hour."""
        return True

    def dispatch(self, to: CursorKey) -> Dispatched:
        """Move the cursor."""
        to = CursorKey(to.due_ms, min(to.index, self.next_index.get(to.due_ms // HOUR_MS, 0)))
        if to <= self.cursor:
            return Dispatched(np.zeros(0, UNIT), 0)
        keys = sorted((self._key(n), n) for n in self.units)
        passed = [n for key, n in keys if self.cursor <= key < to]
        self.cursor = to
        live = b"".join(self.units[n] for n in passed if n not in self.cancelled and n not in self.moved)
        return Dispatched(np.frombuffer(live, UNIT), len(passed))

    def _state_of(self, number: int) -> tuple[int, CancelOutcome | None]:
        while number in self.moved:
            number = self.moved[number]
        if number not in self.units:
            return number, CancelOutcome.NOT_FOUND
        if number in self.cancelled:
            return number, CancelOutcome.CANCELLED
        return number, CancelOutcome.ALREADY_DISPATCHED if self._key(number) < self.cursor else None

    def cancel(self, id: int, due_ms: int) -> CancelOutcome:
        """By first or present id."""
        number, outcome = self._state_of(id)
        if outcome is None:
            self.cancelled.append(number)
        return outcome or CancelOutcome.CANCELLED

    def standing(self, id: int, due_ms: int) -> tuple[int, int, CancelOutcome | None]:
        """Present id, its due time, and why it cannot be cancelled."""
        number, outcome = self._state_of(id)
        return number, self._key(number).due_ms if number in self.units else due_ms, outcome

    def standing_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> Standing:
        """One after the other."""
        found = [self.standing(id, due) for id, due in zip(ids.tolist(), due_ms.tolist(), strict=True)]
        return Standing(
            np.array([id for id, _, _ in found], np.uint64),
            np.array([due for _, due, _ in found], np.int64),
            np.array([OUTCOMES[outcome] for _, _, outcome in found], np.uint8),
        )

    def move(self, id: int, due_ms: int, units: Units, record: bytes) -> tuple[CancelOutcome, int]:
        """Append anew; the old id goes on naming it."""
        number, outcome = self._state_of(id)
        if outcome is not None:
            return outcome, 0
        self.moved[number] = int(self.append(units, record)[0])
        return CancelOutcome.MOVED, self.moved[number]

    @property
    def pending(self) -> int:
        """Live units behind the cursor."""
        return sum(self._state_of(number) == (number, None) for number in self.units)

    def cancel_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> NDArray[np.uint8]:
        """One after the other."""
        outcomes = []
        for number, due in zip(ids.tolist(), due_ms.tolist(), strict=True):
            _, before = self._state_of(number)
            outcomes.append(OUTCOMES[before])
            self.cancel(number, due)
        return np.array(outcomes, np.uint8)

    def move_many(
        self, ids: Ids, due_ms: NDArray[np.int64], units: Units, records: bytes
    ) -> tuple[NDArray[np.uint8], Ids, NDArray[np.int64]]:
        """One after the other."""
        outcomes, new_ids = [], []
        at = 0
        for row, number in enumerate(ids.tolist()):
            _, before = self._state_of(number)
            outcomes.append(OUTCOMES[before])
            size = int(units["size"][row])
            _, new_id = self.move(number, int(due_ms[row]), units[row : row + 1], records[at : at + size])
            at += size
            if before is None:
                new_ids.append(new_id)
        due = [self._key(new_id).due_ms for new_id in new_ids]
        return np.array(outcomes, np.uint8), np.array(new_ids, np.uint64), np.array(due, np.int64)

    def remove_hours(self, below: int) -> None:
        """Forget units of hours below."""
        self.units = {n: unit for n, unit in self.units.items() if n >> 32 >= below}
        self.records = {n: record for n, record in self.records.items() if n in self.units}

    def encode(self) -> bytes:
        """All of it."""
        units = {n: unit.hex() for n, unit in sorted(self.units.items())}
        records = {n: record.hex() for n, record in sorted(self.records.items())}
        state = {"cursor": self.cursor, "units": units, "records": records, "next": self.next_index}
        return json.dumps(state | {"cancelled": self.cancelled, "moved": self.moved}).encode()

    def begin_checkpoint(self) -> ModelCheckpoint:
        """The present state."""
        return ModelCheckpoint(self.encode())

    def checkpoint_durable(self, job: object) -> None:
        """Nothing to remove."""

    def abandon(self, job: object) -> None:
        """Nothing to undo."""

    def digest_in_turns(self) -> Generator[None, None, dict[str, bytes]]:
        """Of everything, in one turn."""
        yield
        return {"all": hashlib.sha256(self.encode()).digest()}
