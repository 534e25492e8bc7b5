"""How fast topics and groups come into being, and how many subscriptions there may be: asked by the master before it
proposes.

A name costs every node memory for ever and a slice of its loop when it is applied, while a message costs next to
nothing; one batch that named 9,000 new topics kept a master from its heartbeats for longer than its lease. So creation
has an allowance that grows with time. One request may overdraw it, if there is any left: then nothing is created until
it is made good. Soft state of the master.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.node.core.failure import Failure, invalid, limit_reached
from tickwheel.node.state.machine import StateMachine
from tickwheel.proto.log_pb2 import AdminCommand

TOPIC_COST = 3
GROUP_COST = 3
SUBSCRIPTION_COST = 1
"""In allowance; one is about 20 microseconds of the loop of each node."""
ALLOWANCE_A_SECOND = 1_500
"""500 topics a second: 3 % of a loop."""
ALLOWANCE_MAX = 600
"""200 topics at once: about 12 ms in one entry."""
TOPICS_PER_GROUP_MAX = 1_024
"""Of one request; a group may be given more by another one."""
SUBSCRIPTIONS_MAX = 200_000
"""Topics of all groups together: half a kilobyte each while they are quiet, so 100 MB."""


class Creations:
    """One per node."""

    def __init__(self, state: StateMachine, steady_ms: Callable[[], int]) -> None:
        self._state = state
        self._steady_ms = steady_ms
        self._left = float(ALLOWANCE_MAX)
        self._at_ms = 0

    def topics(self, wanted: int) -> int:
        """How many of so many new topics may be created now; they are taken off the allowance."""
        self._renew()
        allowed = min(wanted, max(0, int(self._left) // TOPIC_COST))
        self._left -= allowed * TOPIC_COST
        return allowed

    def topics_refused(self, missing: int) -> Failure:
        """So many topics more were wanted than may be created now."""
        return self._refused(missing * TOPIC_COST)

    def refusal(self, command: AdminCommand) -> Failure | None:
        """Why a command must not create now what it would; if it may, that is taken off the allowance."""
        kind = command.WhichOneof("body")
        state = self._state
        if kind == "create_topic":
            cost = 0 if state.topic_id(command.create_topic.name) is not None else TOPIC_COST
        elif kind == "create_group":
            group = command.create_group
            if len(group.topics) > TOPICS_PER_GROUP_MAX:
                return invalid("topics", len(group.topics), f"at most {TOPICS_PER_GROUP_MAX} in one request").failure
            group_id = state.group_id(group.name)
            ids = [state.topic_id(name) for name in dict.fromkeys(group.topics)]
            known = [i for i in ids if i is not None and group_id is not None and state.subscription(group_id, i)]
            added = len(ids) - len(known)
            if added and state.subscription_count + added > SUBSCRIPTIONS_MAX:
                return limit_reached("subscriptions", SUBSCRIPTIONS_MAX, 60_000)
            cost = added * SUBSCRIPTION_COST + ids.count(None) * TOPIC_COST + (GROUP_COST if group_id is None else 0)
        else:
            return None
        self._renew()
        if cost and self._left <= 0:
            return self._refused(0)
        self._left -= cost
        return None

    def _renew(self) -> None:
        now_ms = self._steady_ms()
        self._left = min(ALLOWANCE_MAX, self._left + (now_ms - self._at_ms) * ALLOWANCE_A_SECOND / 1_000)
        self._at_ms = now_ms

    def _refused(self, missing: int) -> Failure:
        """Retry once half of the allowance is there again, or all that is missing if that is less."""
        wait = (min(missing, ALLOWANCE_MAX / 2) + max(0.0, -self._left)) * 1_000 / ALLOWANCE_A_SECOND
        limit = f"{ALLOWANCE_A_SECOND // TOPIC_COST} new topics a second, subscriptions a third of that each"
        return limit_reached("names_created", limit, max(10, int(wait) + 1))
