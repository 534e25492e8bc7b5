"""Records of the history (history.py): requests of operators and their answers, and what becomes of schedules."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_messages import Label


class PauseAsked(Record):
    """A client first asks to pause or resume a topic or group."""

    kind: str  # topic, group
    name: str
    paused: bool


class PauseAnswered(Record):
    """It is so."""

    kind: str
    name: str
    paused: bool


class FilterAsked(Record):
    """A client first asks that a group, which has one topic, takes messages with one of these tags; none: all."""

    group: str
    tags: tuple[str, ...]
    topic: str


class FilterAnswered(Record):
    """It is so."""

    group: str
    tags: tuple[str, ...]


class ResetAsked(Record):
    """A client first asks to reset a group in one topic, to the messages due from `from_ms` on; -1: to those that come
    next."""

    group: str
    from_ms: int
    topic: str


class ResetAnswered(Record):
    """The reset was confirmed: it was carried out at least once since it was asked for."""

    group: str
    from_ms: int
    topic: str


# -- bulk cancels and moves


@dataclass(slots=True, frozen=True)
class Selected:
    """The messages a sweep selects and their fate: cancelled, or moved to `due_ms` or by `shift_ms`."""

    topic: str = ""
    tag: str = ""
    key: str = ""
    key_prefix: str = ""
    due_ms_min: int = 0
    due_ms_max: int = 0
    cancel: bool = False
    due_ms: int | None = None
    shift_ms: int | None = None

    def by_text(self, topic: str, label: Label) -> bool:
        """Whether the selection matches a message, apart from its due time."""
        return (
            self.topic in ("", topic)
            and (not self.tag or self.tag in label.tags)
            and self.key in ("", label.key)
            and label.key.startswith(self.key_prefix)
        )

    def by_time(self, due_ms: int) -> bool:
        """Whether the selection matches this due time."""
        return self.due_ms_min <= due_ms and (not self.due_ms_max or due_ms < self.due_ms_max)

    def target_ms(self, due_ms: int) -> int:
        """The new due time of a message due at `due_ms`."""
        return self.due_ms if self.due_ms is not None else due_ms + (self.shift_ms or 0)


class SweepAsked(Record):
    """A client first asks for a sweep."""

    job: str
    selected: Selected


class SweepBegan(Record):
    """The sweep has certainly begun."""

    job: str


class SweepEnded(Record):
    """The cluster's report of a sweep that is over."""

    job: str
    finished: bool
    """False: the sweep was stopped."""
    done: int
    too_late: int
    gone: int
    too_far: int


class SweptSeen(Record):
    """The cluster's report of a message after all sweeps. `state` is a name of MessageState."""

    uid: int
    id: int
    """Its id now."""
    state: str
    due_ms: int


class Administered(Record):
    """A change of settings, topics or groups was confirmed to its client, or refused for good."""

    what: str
    done: bool


class PassingAccepted(Record):
    """A node answers that it has scheduled these messages of a topic that is to be deleted."""

    topic: str
    ids: tuple[int, ...]
    due_ms: tuple[int, ...]


class PassingDelivered(Record):
    """A node answers a pull with messages of such a topic."""

    node: str
    topic: str
    ids: tuple[int, ...]


class DeletionAsked(Record):
    """A client first asks to delete a topic or group, with what it holds."""

    kind: str  # topic, group
    name: str


class DeletionAnswered(Record):
    """By the answer of a node, the topic or group is gone."""

    kind: str
    name: str
    cancelled: int
    """Messages that the deletion cancelled."""
    clock_error_ms: float
    """How far that node says its time may be off."""


# -- recurring schedules: what nodes did when they applied a command


class ScheduleChanged(Record):
    """A node applied a change of a schedule: it was put, paused, resumed or deleted."""

    node: str
    index: int
    number: int
    """Place of the command within the entry."""
    name: str
    change: str
    """put, pause, resume or delete."""
    from_ms: int
    revision: int
    """Afterwards; of a deleted one its last."""
    interval_ms: int
    next_ms: int


class RunSeen(Record):
    """A node applied what became of a planned time, or of several passed over at once."""

    node: str
    index: int
    number: int
    """Place within the entry."""
    name: str
    revision: int
    outcome: str
    """A name of RunOutcome."""
    planned_ms: int
    at_ms: int
    id: int
    times: int
    request_id: str = ""
    """Of a trigger or backfill."""
