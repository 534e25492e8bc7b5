"""What an operator changes about a running group: its filter.

Called by administration; a command is checked whole before it changes anything. A group's filter belongs to the
group: consumers may name it, never change it.
"""

from __future__ import annotations

from tickwheel.node.core.failure import Failure, invalid
from tickwheel.node.state import filtering
from tickwheel.node.state.groups import Group
from tickwheel.proto import common_pb2 as pb
from tickwheel.wheel.filters import FILTER_RULE, normalised, shown


def checked_filter(expression: str) -> str | Failure:
    """An expression as it is kept, or why it is none."""
    found = normalised(expression)
    return invalid("filter", expression, FILTER_RULE).failure if found is None else found


def filter_differs(name: str, asked: str, kept: str) -> Failure:
    """A consumer, or a repeated creation, names another filter than the group's. Both normalised."""
    text = f"group {name} has the filter {shown(kept)}, not {shown(asked)}"
    return Failure(pb.FILTER_DIFFERS, text, {"field": "filter", "value": shown(asked), "limit": shown(kept)})


def filter_refusal(group: Group, asked: str) -> Failure | None:
    """Whether a stated filter (empty: none was) is another than the group's."""
    if not asked:
        return None
    expression = checked_filter(asked)
    if isinstance(expression, Failure):
        return expression
    return None if expression == group.filter else filter_differs(group.name, expression, group.filter)


def set_filter(group: Group, asked: str) -> Failure | None:
    """From the floors on everything unsettled meets the new filter; what was skipped before stays skipped."""
    expression = checked_filter(asked)
    if isinstance(expression, Failure):
        return expression
    if expression != group.filter:
        group.filter = expression
        for subscription in group.subscriptions.values():
            subscription.forget_how()
            filtering.begin(group, subscription)
    return None
