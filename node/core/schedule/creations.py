"""How fast topics and groups may be created, and how many subscriptions there may be. The master asks before it
proposes.

A name costs every node memory for ever, and time of the core's thread when it is applied; a message costs next to
nothing. One batch that named 9,000 new topics kept a master from its heartbeats for longer than its lease. So creation
has an allowance that grows with time. One request may overdraw it if any is left; then nothing is created until the
debt is made good. Soft state of the master.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.node.state.machine import StateMachine
from tickwheel.proto.log_pb2 import AdminCommand

TOPIC_COST = 3
GROUP_COST = 3
SUBSCRIPTION_COST = 1
"""Costs are in units of allowance. One unit is about 20 microseconds of each node's core thread."""
ALLOWANCE_A_SECOND = 1_500
"""500 topics a second: 3 % of a core's thread."""
ALLOWANCE_MAX = 600
"""200 topics at once: about 12 ms in one entry."""
TOPICS_PER_GROUP_MAX = 1_024
"""Topics that one request may give a group; further requests may add more."""
SUBSCRIPTIONS_MAX = 200_000
"""Topics of all groups together. A quiet one takes half a kilobyte, so 100 MB."""


class Creations:
    def __init__(self, state: StateMachine, steady_ms: Callable[[], int]) -> None:
        self._state = state
        self._steady_ms = steady_ms
        self._left = float(ALLOWANCE_MAX)
        self._at_ms = 0

    def topics(self, wanted: int) -> int:
        """How many of `wanted` new topics may be created now. They are taken off the allowance."""
        self._renew()
        allowed = min(wanted, max(0, int(self._left) // TOPIC_COST))
        self._left -= allowed * TOPIC_COST
        return allowed

    def topics_refused(self, missing: int) -> Failure:
        """The refusal of `missing` topics beyond the allowance."""
        return self._refused(missing * TOPIC_COST)

    def admit(self, command: AdminCommand) -> None:
        """Take the cost of a command that creates topics or a group off the allowance. Raises RequestError: it must not
        create them now."""
        kind = command.WhichOneof("body")
        state = self._state
        if kind == "create_topic":
            cost = 0 if state.topic_id(command.create_topic.name) is not None else TOPIC_COST
        elif kind == "create_group":
            group = command.create_group
            if len(group.topics) > TOPICS_PER_GROUP_MAX:
                raise invalid("topics", len(group.topics), f"at most {TOPICS_PER_GROUP_MAX} in one request")
            group_id = state.group_id(group.name)
            ids = [state.topic_id(name) for name in dict.fromkeys(group.topics)]
            known = [i for i in ids if i is not None and group_id is not None and state.subscription(group_id, i)]
            added = len(ids) - len(known)
            if added and state.groups.subscription_count + added > SUBSCRIPTIONS_MAX:
                raise RequestError(limit_reached("subscriptions", SUBSCRIPTIONS_MAX, 60_000))
            cost = added * SUBSCRIPTION_COST + ids.count(None) * TOPIC_COST + (GROUP_COST if group_id is None else 0)
        else:
            return
        self._renew()
        if cost and self._left <= 0:
            raise RequestError(self._refused(0))
        self._left -= cost

    def _renew(self) -> None:
        now_ms = self._steady_ms()
        self._left = min(ALLOWANCE_MAX, self._left + (now_ms - self._at_ms) * ALLOWANCE_A_SECOND / 1_000)
        self._at_ms = now_ms

    def _refused(self, missing: int) -> Failure:
        """A refusal whose retry hint is when `missing` units are there again, or half of the allowance if that is
        sooner."""
        wait = (min(missing, ALLOWANCE_MAX / 2) + max(0.0, -self._left)) * 1_000 / ALLOWANCE_A_SECOND
        limit = f"{ALLOWANCE_A_SECOND // TOPIC_COST} new topics a second, subscriptions a third of that each"
        return limit_reached("names_created", limit, max(10, int(wait) + 1))
