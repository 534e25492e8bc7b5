"""What a worker does with a delivery: its handler, and what follows if that does not return. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from tickwheel.client.delivery import Delivery
from tickwheel.client.errors import PayloadError, refused
from tickwheel.client.moments import span_ms_of


class Action(Exception):
    """What follows an error of a handler: Retry, Dead or Drop. Raise one in a handler, or name one in a rule."""

    def __init__(self, reason: str = "") -> None:
        """`reason` is logged, and kept with a dead letter; empty: the error."""
        super().__init__(reason or type(self).__name__.lower())
        self.reason = reason


class Retry(Action):
    """Deliver the message again: by the group's policy, `after` a pause, or at a delay level."""

    def __init__(self, after: timedelta | None = None, *, level: int = 0, reason: str = "") -> None:
        if after is not None and span_ms_of("after", after) < 0:
            raise refused("after", after, "not negative")
        super().__init__(reason)
        self.after = after
        self.level = level


class Dead(Action):
    """Make the message a dead letter, without further attempts."""


class Drop(Action):
    """Acknowledge the message although its handler failed: it does not come again."""


Rule = Action | type[Action] | Callable[[Delivery, Exception], Action]
"""An action, or a function that chooses one by the delivery and the error."""
Rules = Mapping[type[Exception], Rule]
"""What follows which error. The rule of the nearest class of an error counts."""

DEFAULT_RULES: Rules = {Exception: Retry(), PayloadError: Dead()}
"""A payload that cannot be decoded now cannot be decoded later. An error of any other kind may pass."""

H = TypeVar("H", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler with settings of its own."""

    call: Callable[..., object]
    """Gets the delivery. A coroutine function runs on the loop, any other in a thread."""
    timeout: timedelta | None = None
    """The longest that a call may take; None: the worker's."""
    on_error: Rules = field(default_factory=dict)
    """Rules that go before the worker's."""


def action_of(error: BaseException, delivery: Delivery, rules: Rules) -> tuple[Action, bool]:
    """What follows an error, and whether a rule other than that of Exception chose it.

    Raises what a function of a rule raises.
    """
    if isinstance(error, Action):
        return error, True
    if not isinstance(error, Exception):
        return Retry(), False
    for kind in type(error).__mro__:
        rule = rules.get(kind)
        if rule is None:
            continue
        if isinstance(rule, type):
            return rule(), kind is not Exception
        return (rule if isinstance(rule, Action) else rule(delivery, error)), kind is not Exception
    return Retry(), False
