"""Records of bulk writers for the history (history.py): staged rows, bundles, and the answers to them."""

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
    """The answer to a commit. `state` is a name of StagedState, or `REFUSED`: it will never be carried out."""

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
    """The answer to a loader that asked for the `sequence`th bundle: `taken` bundles of its load have been taken over,
    with `units` messages."""

    job: str
    sequence: int
    taken: int
    units: int
