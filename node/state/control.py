"""Changes of a running group by operators: its filter.

Called by administration; a command is checked whole before it changes anything. A filter belongs to the group:
consumers may state it but never change it.
"""

from __future__ import annotations

from tickwheel.node.failure import Failure, invalid
from tickwheel.node.state import filtering
from tickwheel.node.state.groups import Group
from tickwheel.proto import common_pb2 as pb
from tickwheel.wheel.filters import FILTER_RULE, normalised, shown


def checked_filter(expression: str) -> str | Failure:
    """The normalised expression, or the refusal of an invalid one."""
    found = normalised(expression)
    return invalid("filter", expression, FILTER_RULE).failure if found is None else found


def filter_differs(name: str, asked: str, kept: str) -> Failure:
    """The refusal of a consumer, or of a repeated creation, that states another filter than the group's. Both are
    normalised."""
    text = f"group {name} has the filter {shown(kept)}, not {shown(asked)}"
    return Failure(pb.FILTER_DIFFERS, text, {"field": "filter", "value": shown(asked), "limit": shown(kept)})


def filter_refusal(group: Group, asked: str) -> Failure | None:
    """The refusal if a stated filter differs from the group's; None: it agrees, or is empty (none was stated)."""
    if not asked:
        return None
    expression = checked_filter(asked)
    if isinstance(expression, Failure):
        return expression
    return None if expression == group.filter else filter_differs(group.name, expression, group.filter)


def set_filter(group: Group, asked: str) -> Failure | None:
    """Set the filter. All unsettled messages from the floors on meet the new filter; messages skipped before stay
    skipped."""
    expression = checked_filter(asked)
    if isinstance(expression, Failure):
        return expression
    if expression != group.filter:
        group.filter = expression
        for subscription in group.subscriptions.values():
            subscription.forget_how()
            filtering.begin(group, subscription)
    return None
