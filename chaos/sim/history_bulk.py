"""Records of bulk writers for the history (history.py): staged rows, bundles, and the answers to them."""

from __future__ import annotations

from tickwheel.chaos.sim.history import Record

# -- staged publication


class BlockStaged(Record):
    """A task first asks to stage a block of rows under its attempt."""

    job: str
    batch: int
    run: str
    attempt: int
    uids: tuple[int, ...]


class CommitAsked(Record):
    """A driver first asks to commit these attempts of its run."""

    job: str
    batch: int
    run: str
    attempts: tuple[int, ...]


class CommitAnswered(Record):
    """The answer to a commit. `state` is a name of StagedState, or `REFUSED`: it will never be carried out."""

    job: str
    batch: int
    run: str
    state: str


class AbortAnswered(Record):
    """The answer to a driver that asked from `asked_ns` on to abort its run: the state of the batch."""

    job: str
    batch: int
    run: str
    state: str
    asked_ns: int


class WriteSeen(Record):
    """The progress of a committed batch, as the cluster reports it."""

    job: str
    batch: int
    state: str
    rows: int
    published: int
    discarded: int


# -- bundles


class TakeOverAsked(Record):
    """A loader first asks to take over a bundle, the `sequence`th of `bundles` of its load."""

    job: str
    sequence: int
    bundles: int
    uids: tuple[int, ...]


class ColdParked(Record):
    """A freezer learns that its part is registered: the cluster has the messages now, to be loaded in time."""

    group: str
    """The group that they are for."""
    part: int
    uids: tuple[int, ...]
    due_ms: tuple[int, ...]


class ColdLoaded(Record):
    """A freezer is told that a part was taken over."""

    part: int


class ColdListed(Record):
    """A master's answer to a question of `asked_ns`: the parts it knows, and those of them that wait."""

    asked_ns: int
    known: tuple[int, ...]
    waiting: tuple[int, ...]


class ColdLooked(Record):
    """A node's report of a message by its cold id. `state` is a name of MessageState, or NOT_FOUND."""

    uid: int
    state: str


class LoadAnswered(Record):
    """The answer to a loader that asked for the `sequence`th bundle: `taken` bundles of its load have been taken over,
    with `units` messages."""

    job: str
    sequence: int
    taken: int
    units: int
