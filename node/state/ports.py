"""The wheel as the state machine uses it. `tickwheel.wheel.engine.Wheel` offers it, and so does the model of the
tests."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.storage.bundle import Layout
from tickwheel.wheel.bundles import Ingested
from tickwheel.wheel.sweep import Standing
from tickwheel.wheel.units import CursorKey, Ids, Units


class Outcome(Protocol):
    """A member of the wheel's CancelOutcome; its name says what happened."""

    @property
    def name(self) -> str: ...


class Dispatched(Protocol):
    """The result of a dispatch."""

    @property
    def units(self) -> Units: ...


class WheelCheckpoint(Protocol):
    """The wheel's part of a checkpoint. Call `run` in a worker; `files` is complete after it.

    `remove_old`, called in a worker once the checkpoint is durable, removes files that only earlier ones named.
    """

    state: bytes
    files: list[ManifestFile]

    def run(self) -> None: ...

    def remove_old(self) -> None: ...


class WheelPort(Protocol):
    """wheel/engine.py explains each method. A `job` is the result of the wheel's own `begin_checkpoint`."""

    @property
    def pending(self) -> int: ...

    @property
    def cursor(self) -> CursorKey: ...

    def append(self, units: Units, records: bytes | memoryview) -> Ids: ...

    def fetch(self, ids: Ids, bytes_max: int) -> tuple[Units, list[bytes]]: ...
    def ingest(self, name: str, layout: Layout, topic_ids: tuple[int, ...], stamped_ms: int) -> Ingested: ...

    def withhold(self, ids: Ids) -> Ids: ...

    @property
    def bundle_chunks(self) -> int: ...

    def covers(self, hour_max: int) -> bool: ...

    def dispatch(self, to: CursorKey) -> Dispatched: ...

    def cancel(self, id: int, due_ms: int) -> Outcome: ...

    def standing(self, id: int, due_ms: int) -> tuple[int, int, Outcome | None]: ...

    def standing_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> Standing: ...

    def move(self, id: int, due_ms: int, units: Units, record: bytes) -> tuple[Outcome, int]: ...

    def cancel_many(self, ids: Ids, due_ms: NDArray[np.int64]) -> NDArray[np.uint8]: ...

    def move_many(
        self, ids: Ids, due_ms: NDArray[np.int64], units: Units, records: bytes
    ) -> tuple[NDArray[np.uint8], Ids, NDArray[np.int64]]: ...

    def remove_hours(self, below: int) -> None: ...

    def begin_checkpoint(self) -> WheelCheckpoint: ...

    def checkpoint_durable(self, job: Any) -> None: ...

    def abandon(self, job: Any) -> None: ...

    def digest_in_turns(self) -> Generator[None, None, dict[str, bytes]]: ...
