"""A typed channel by which parts of a core inform each other and the server.

`announce` calls every subscriber at once, on the core's thread, in the order of subscription. `Parts` subscribes the
parts; the host subscribes to what operators read. A part knows neither its subscribers nor their results. Subscribers
must not raise. A question that needs an answer is not an announcement: a part is given its sources of answers when it
is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.wheel.units import Units


@dataclass(frozen=True, slots=True)
class PushedAhead:
    """A proposed dispatch will put these units at these positions (push-first)."""

    topic_id: int
    first_position: int
    units: Units


@dataclass(frozen=True, slots=True)
class DispatchFailed:
    """A dispatch was not applied, so messages delivered ahead of it are not dispatched."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The disk cannot read this message; its channel withholds it. `unit` is None if it could not be read either."""

    channel: Channel
    position: int
    id: int
    unit: Units | None
    error: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A line for the operator; `level` is the name of a logger's method."""

    level: str
    event: str
    fields: dict[str, object]


Announcement = PushedAhead | DispatchFailed | Unreadable | Reported

A = TypeVar("A", PushedAhead, DispatchFailed, Unreadable, Reported)


class Announcements:
    """The channel of one core."""

    def __init__(self) -> None:
        self._hearers: dict[type[Announcement], list[Callable[..., None]]] = {}

    def subscribe(self, kind: type[A], hear: Callable[[A], None]) -> None:
        """Call `hear` with each announcement of a kind, after all earlier subscribers."""
        self._hearers.setdefault(kind, []).append(hear)

    def announce(self, what: Announcement) -> None:
        """Call every subscriber of this kind."""
        for hear in self._hearers.get(type(what), ()):
            hear(what)
