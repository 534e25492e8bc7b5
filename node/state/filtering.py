"""Applies a group's filter to its topics' ready queues: messages that do not match are settled as skipped.

Invariants: nothing from `Subscription.checked` on is handed out; all positions below it have met the group's filter,
and those that did not match are settled.

Units that enter the ready queue are checked by the dispatch that brings them, on every node alike and without a
command, unless the group is behind: it starts in the past, its window is full, its filter was changed, or it was reset.
Then the master reads units and proposes the positions to skip (`Filtered`), in order and for the filter that the
command names; any other command has no effect.

A filter belongs to its group: consumers may state it, and only operators change it.

Called by the state machine and by administration; the master's sweep reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.state.groups import Group
from tickwheel.node.state.results import FilteredResult
from tickwheel.node.state.subscription import Subscription
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import Filtered
from tickwheel.wheel.filters import FILTER_RULE, filter_of, normalised, shown
from tickwheel.wheel.units import Units

RUNS = "<u4"


def checked_filter(expression: str) -> str:
    """The normalised expression. Raises RequestError for an invalid one."""
    found = normalised(expression)
    if found is None:
        raise invalid("filter", expression, FILTER_RULE)
    return found


def filter_differs(name: str, asked: str, kept: str) -> Failure:
    """The refusal of a consumer, or of a repeated creation, that states another filter than the group's. Both are
    normalised."""
    text = f"group {name} has the filter {shown(kept)}, not {shown(asked)}"
    return Failure(pb.FILTER_DIFFERS, text, {"field": "filter", "value": shown(asked), "limit": shown(kept)})


def check_stated(group: Group, asked: str) -> None:
    """Raise RequestError if a stated filter differs from the group's. Empty: none was stated."""
    if asked and (expression := checked_filter(asked)) != group.filter:
        raise RequestError(filter_differs(group.name, expression, group.filter))


def set_filter(group: Group, asked: str) -> None:
    """Set the filter. All unsettled messages from the floors on meet the new filter; messages skipped before stay
    skipped. Raises RequestError for an invalid one."""
    expression = checked_filter(asked)
    if expression != group.filter:
        group.filter = expression
        for subscription in group.subscriptions.values():
            subscription.forget_how()
            begin(group, subscription)


def begin(group: Group, subscription: Subscription) -> None:
    """All messages from the floor on must meet the group's filter (again)."""
    subscription.checked = subscription.floor if filter_of(group.filter) is not None else None


def arrived(group: Group, subscription: Subscription, first: int, units: Units) -> int:
    """Check units that entered the ready queue from `first` on; returns how many are skipped."""
    wanted_by = filter_of(group.filter)
    at = subscription.unchecked
    if wanted_by is None or not first <= at < first + len(units):
        return 0
    end = min(first + len(units), subscription.stop)
    if end <= at:
        return 0
    return subscription.check(at, wanted_by.wanted(units[at - first : end - first]))


def runs_of(wanted: NDArray[np.bool_]) -> bytes:
    """The decisions as uint32 lengths of runs: skipped, wanted, skipped, ...; the first may be 0."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False)).tolist()
    lengths = np.diff([0, *edges, len(wanted)])
    return lengths.astype(RUNS).tobytes()


def apply(group: Group | None, subscription: Subscription | None, command: Filtered) -> FilteredResult:
    """Skip the positions that a master found, if group, filter and place are still those that it examined."""
    if group is None or subscription is None or len(command.runs) % 4:
        return FilteredResult()
    lengths = np.frombuffer(command.runs, RUNS).astype(np.int64)
    total = int(lengths.sum())
    if (
        command.filter != group.filter
        or subscription.checked is None
        or command.first != subscription.unchecked
        or not total
        or command.first + total > subscription.stop
    ):
        return FilteredResult()
    wanted = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    skipped = subscription.check(command.first, wanted)
    if command.ends_pauses:
        subscription.end_pauses()
    return FilteredResult(total, skipped)
