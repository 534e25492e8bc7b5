"""What bulk writers did and were told, staged rows and bundles: more records of the history (history.py)."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record

# -- staged publication


@dataclass(slots=True)
class BlockStaged(Record):
    """A task begins to ask that a block of rows is kept under its attempt."""

    job: str
    batch: int
    run: str
    attempt: int
    uids: tuple[int, ...]


@dataclass(slots=True)
class CommitAsked(Record):
    """A driver begins to ask that these attempts of its run count."""

    job: str
    batch: int
    run: str
    attempts: tuple[int, ...]


@dataclass(slots=True)
class CommitAnswered(Record):
    """What it was told, by the names of StagedState; `REFUSED`: that it will never be."""

    job: str
    batch: int
    run: str
    state: str


@dataclass(slots=True)
class AbortAnswered(Record):
    """A driver has asked that its run is dropped, since `asked_ns`, and was told what the batch is since."""

    job: str
    batch: int
    run: str
    state: str
    asked_ns: int


@dataclass(slots=True)
class WriteSeen(Record):
    """How far the cluster says that a committed batch is."""

    job: str
    batch: int
    state: str
    rows: int
    published: int
    discarded: int


# -- bundles


@dataclass(slots=True)
class TakeOverAsked(Record):
    """A loader begins to ask for the taking over of a bundle, which is the `sequence`th of `bundles` of its load."""

    job: str
    sequence: int
    bundles: int
    uids: tuple[int, ...]


@dataclass(slots=True)
class ColdParked(Record):
    """A freezer knows that a part was registered: its messages are the cluster's now, and it brings them in time."""

    group: str
    """Whom they are for."""
    part: int
    uids: tuple[int, ...]
    due_ms: tuple[int, ...]


@dataclass(slots=True)
class ColdLoaded(Record):
    """A freezer is told that a part was taken over."""

    part: int


@dataclass(slots=True)
class ColdListed(Record):
    """Parts that are known, and those of them that wait, as a master tells who asked at `asked_ns`."""

    asked_ns: int
    known: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(slots=True)
class ColdLooked(Record):
    """State of a message by its cold id, as a node tells, by the names of MessageState, or NOT_FOUND."""

    uid: int
    state: str


@dataclass(slots=True)
class LoadAnswered(Record):
    """What a loader that asked for the `sequence`th bundle is told of its load: that so many bundles of it were taken
    over, with so many messages."""

    job: str
    sequence: int
    taken: int
    units: int
