"""Metrics of consumer groups: backlog, age of the oldest unsettled message, what is out, redeliveries, dead letters.

Read from counts that are kept anyway, when a page is asked for, and by the master only. A page names GROUPS_MAX groups
and looks at LOOKS_MAX subscriptions, so its cost does not grow with groups or topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.view import StateView

GROUPS_MAX = 1_000
"""Groups with metrics of their own: those that were created first, so that the same ones are there on each page."""
LOOKS_MAX = 2_000
"""Subscriptions of one page or listing whose oldest message is looked for: some milliseconds of the core's thread."""

Rows = dict[tuple[str, ...], float]


def group_metrics(
    state: StateView, now_ms: int, in_flight: Mapping[int, int], redelivered: Mapping[int, int]
) -> Mapping[str, MetricValue]:
    """Name -> value of a master's metrics by group. `in_flight` and `redelivered`: by group id, without those of 0."""
    oldest_ms = state.oldest_unsettled(LOOKS_MAX)
    backlog, oldest, out, again, dead = (Rows() for _ in range(5))
    for group in islice(state.groups, GROUPS_MAX):
        group_id, key = group.group_id, (group.name,)
        backlog[key] = float(state.backlog.by_group.get(group_id, 0))
        oldest[key] = max(0, now_ms - oldest_ms[group_id]) / 1_000 if group_id in oldest_ms else 0.0
        out[key] = float(in_flight.get(group_id, 0))
        again[key] = float(redelivered.get(group_id, 0))
        dead[key] = float(group.dead.count)
    return {
        "group_backlog_messages": backlog,
        "group_oldest_unsettled_age_seconds": oldest,
        "group_in_flight_messages": out,
        "group_redelivered_messages": again,
        "group_dead_letters": dead,
        "groups_left_out": float(max(0, len(state.groups) - GROUPS_MAX)),
    }
