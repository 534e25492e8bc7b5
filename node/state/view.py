"""Read access to the replicated state. Nothing here changes anything.

The state machine is a StateView; node/core reads it through these members alone. A question about one topic or group
has a method here where it has an answer for one that does not exist; other questions go to `topics`, `groups` and the
like, which node/core may read and never changes.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.administration import Administration
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.digest import digest, digest_in_turns
from tickwheel.node.state.filtering import check_stated
from tickwheel.node.state.groups import WAITING_ROWS_MAX, RetryPolicy
from tickwheel.node.state.membership import Members, after
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.ready import ReadyLog
from tickwheel.node.state.results import NO_IDS
from tickwheel.node.state.settings import DELAY_LEVEL_MS_MAX, Settings
from tickwheel.node.state.subscription import Subscription
from tickwheel.proto import admin_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.replication.log import Member
from tickwheel.wheel.units import Ids


class StateView:
    def __init__(self, state: ClusterState, wheel: WheelPort, admin: Administration) -> None:
        self._state = state
        self.wheel = wheel
        self._admin = admin
        # For reading; only apply changes them.
        self.topics, self.groups, self.backlog = state.topics, state.groups, state.backlog
        self.sweeps, self.schedules, self.unique_keys = state.sweeps, state.schedules, state.unique_keys
        self.access, self.staging, self.cold = state.access, state.staging, state.cold
        self.producers, self.loads = state.producers, state.loads
        self._levels: tuple[str, NDArray[np.int64]] = ("", np.zeros(0, np.int64))

    @property
    def applied_index(self) -> int:
        """Index of the last entry applied."""
        return self._state.applied_index

    @property
    def applied_term(self) -> int:
        """Raft term of that entry."""
        return self._state.applied_term

    @property
    def lead_term(self) -> int:
        """Highest term of a lead command."""
        return self._state.lead_term

    @property
    def created(self) -> bool:
        """Whether the cluster has been created."""
        return bool(self._state.cluster_id)

    @property
    def cluster_id(self) -> str:
        """Id of the cluster; empty until it has been created."""
        return self._state.cluster_id

    @property
    def settings(self) -> Settings:
        """The replicated settings."""
        return self._state.settings

    def last_accepted(self, producer_id: str) -> int | None:
        """A producer's last sequence; 0: it has none; None: it may have been forgotten."""
        span = self.producers.span(producer_id)
        if span is not None:
            return span.last
        return None if self.producers.may_have_forgotten(self._state.settings) else 0

    def owner_of(self, producer_id: str) -> str:
        """Owner of a producer id; empty: nobody yet."""
        span = self.producers.span(producer_id)
        return "" if span is None else span.owner

    @property
    def marks_replays(self) -> bool:
        """Whether the log already marks replayed dead letters."""
        return self._state.marks_replays

    @property
    def delay_levels_ms(self) -> NDArray[np.int64]:
        """Delays of level 1, 2, ..."""
        text = self._state.settings.delay_levels
        if self._levels[0] != text:
            levels_ms = np.array(self._state.settings.levels_ms, np.int64)
            self._levels = (text, np.minimum(levels_ms, DELAY_LEVEL_MS_MAX))
        return self._levels[1]

    def members(self) -> list[Member]:
        """Members of the cluster, in the order they came."""
        return list(self._state.members.values())

    @property
    def removed_ids(self) -> AbstractSet[str]:
        """Ids of removed members; such an id never comes back."""
        return self._state.removed_ids

    def members_after(self, command: AdminCommand) -> Members:
        """The members after this command about members. Raises RequestError: apply would refuse it."""
        return after(command, self._state.members, self._state.removed_ids)

    def topic_id(self, name: str) -> int | None:
        """Id of a topic."""
        topic = self._state.topics.named(name)
        return None if topic is None else topic.topic_id

    def topic_name(self, topic_id: int) -> str:
        """Name of a topic; empty if it was deleted."""
        topic = self._state.topics.get(topic_id)
        return "" if topic is None else topic.name

    def topic_fifo(self, topic_id: int) -> bool:
        """Whether messages of one message group are delivered one after the other."""
        topic = self._state.topics.get(topic_id)
        return topic is not None and topic.fifo

    def topic_paused(self, topic_id: int) -> bool:
        """Whether its delivery is paused."""
        topic = self._state.topics.get(topic_id)
        return topic is not None and topic.paused

    def topic_undelivered(self, topic_id: int) -> int:
        """Messages of a topic that were dispatched and are not settled, once per group."""
        return sum(subscription.backlog for subscription in self._state.groups.of_topic(topic_id))

    def group_owed(self, group_id: int) -> dict[str, int]:
        """Counts of a group's unsettled messages ("undelivered") and dead letters ("dead"); {} if there is no group.
        Retries waiting in the wheel do not count."""
        group = self._state.groups.get(group_id)
        if group is None:
            return {}
        return {"undelivered": sum(s.backlog for s in group.subscriptions.values()), "dead": group.dead.count}

    def ready_count(self, topic_id: int) -> int:
        """Messages that ever entered the topic's ready queue."""
        topic = self._state.topics.get(topic_id)
        return 0 if topic is None else topic.ready.count

    def ready_log(self, topic_id: int) -> ReadyLog | None:
        """Ready queue of a topic, for reading."""
        topic = self._state.topics.get(topic_id)
        return None if topic is None else topic.ready

    def group_id(self, name: str) -> int | None:
        """Id of a group."""
        group = self._state.groups.named(name)
        return None if group is None else group.group_id

    def group_name(self, group_id: int) -> str:
        """Name of a group; empty if it was deleted."""
        group = self._state.groups.get(group_id)
        return "" if group is None else group.name

    def groups_of_topic(self, topic_id: int) -> list[int]:
        """Ids of the groups that have the topic."""
        return [subscription.group_id for subscription in self._state.groups.of_topic(topic_id)]

    def group_broadcasting(self, group_id: int) -> bool:
        """Whether every consumer of the group gets every message."""
        group = self._state.groups.get(group_id)
        return group is not None and group.broadcasting

    def group_paused(self, group_id: int) -> bool:
        """Whether its delivery is paused."""
        group = self._state.groups.get(group_id)
        return group is not None and group.paused

    def check_filter(self, group_id: int, stated: str) -> None:
        """Raise RequestError if the filter that a consumer states (empty: none) differs from its group's."""
        group = self._state.groups.get(group_id)
        if group is not None:
            check_stated(group, stated)

    def group_filter(self, group_id: int) -> str:
        """The group's filter, normalised; empty: everything."""
        group = self._state.groups.get(group_id)
        return "" if group is None else group.filter

    def unchecked(self) -> list[tuple[int, int]]:
        """Subscriptions (group id, topic id) of groups with a filter."""
        filtered = (group for group in self._state.groups if group.filter)
        return [(s.group_id, s.topic_id) for group in filtered for s in group.subscriptions.values()]

    def group_topics(self, group_id: int) -> list[int]:
        """Ids of the group's topics."""
        group = self._state.groups.get(group_id)
        return [] if group is None else list(group.subscriptions)

    def oldest_unsettled(self, looks_max: int) -> dict[int, int]:
        """Group id -> due time of its oldest unsettled message, rounded down to its tick; for groups that have one. Of
        at most `looks_max` subscriptions to topics with unsettled messages."""
        oldest: dict[int, int] = {}
        topics = self._state.backlog.by_topic
        for subscription in islice((s for t in topics for s in self._state.groups.of_topic(t)), looks_max):
            due_ms = subscription.oldest_unsettled_ms
            if due_ms is not None:
                oldest[subscription.group_id] = min(due_ms, oldest.get(subscription.group_id, due_ms))
        return oldest

    def oldest_of_group(self, group_id: int, looks_max: int) -> tuple[int | None, int]:
        """(due time of a group's oldest unsettled message, rounded down to its tick; topics looked at). None: there is
        no such message, or more than `looks_max` topics have some, and none was looked at."""
        group = self._state.groups.get(group_id) if group_id in self._state.backlog.by_group else None
        behind = [] if group is None else [s for s in group.subscriptions.values() if s.backlog]
        if len(behind) > looks_max:
            return None, 0
        found = (subscription.oldest_unsettled_ms for subscription in behind)
        return min((due_ms for due_ms in found if due_ms is not None), default=None), len(behind)

    def group_message(self, name: str) -> admin_pb2.Group | None:
        """One group."""
        group = self._state.groups.named(name)
        return None if group is None else self._admin.describe(group)

    def subscription(self, group_id: int, topic_id: int) -> Subscription | None:
        """A group's progress in a topic; None: it does not have the topic."""
        group = self._state.groups.get(group_id)
        return None if group is None else group.subscriptions.get(topic_id)

    def floor(self, channel: tuple[int, int]) -> int:
        """First unsettled position of (group id, topic id); 0: the group does not have the topic (any more)."""
        subscription = self.subscription(*channel)
        return 0 if subscription is None else subscription.floor

    def epoch(self, channel: tuple[int, int]) -> int | None:
        """How often a group was reset in a topic; None: it does not have the topic (any more)."""
        subscription = self.subscription(*channel)
        return None if subscription is None else subscription.epoch

    def waiting_retries(self, id: int) -> list[tuple[str, int, int, int]]:
        """A message's retries that wait in the wheel: (group, id of the retry's unit, due_ms, deliveries so far)."""
        cursor = self.wheel.cursor
        found = ((group.name, group.waiting.of(id, cursor)) for group in self._state.groups)
        return [(name, *retry) for name, retry in found if retry is not None]

    def waiting_origins(self, group_id: int) -> Ids:
        """First ids of a group's messages whose retry waits in the wheel."""
        group = self._state.groups.get(group_id)
        return NO_IDS if group is None else group.waiting.newest(WAITING_ROWS_MAX, self.wheel.cursor)

    def dead_letters_kept(self) -> int:
        """Number of dead letters of all groups."""
        return sum(group.dead.count for group in self._state.groups)

    def oldest_death_ms(self) -> int | None:
        """When the oldest dead letter of all groups died; None: there is none."""
        times = (group.dead.oldest_died_ms for group in self._state.groups)
        return min((died_ms for died_ms in times if died_ms is not None), default=None)

    def dead_letters(self, group_id: int) -> DeadLetters | None:
        """Dead letters of a group, for reading."""
        group = self._state.groups.get(group_id)
        return None if group is None else group.dead

    def retry_policy(self, group_id: int) -> RetryPolicy:
        """Retry policy of a group."""
        group = self._state.groups.get(group_id)
        return RetryPolicy() if group is None else group.retry

    @property
    def removed_unsettled(self) -> int:
        """Messages removed by retention that a group had not settled (once per group), or that never had a group."""
        return self._state.unsettled_removed

    @property
    def hour_min_kept(self) -> int:
        """Hours below were removed."""
        return self._state.hour_min_kept

    def removable_hours(self) -> int:
        """Hours below this one hold no message that a group still needs: propose RemoveHours with it.

        A topic without groups keeps its messages.
        """
        return self._admin.removable_hours()

    def retention_over(self, hour: int) -> int:
        """Hours below this one are over for a retention that reaches back to the start of `hour`."""
        return self._admin.retention_over(hour)

    def digest(self) -> admin_pb2.StateDigest:
        """Digest of the logical state at the applied index, by parts."""
        return digest(self._state, self.wheel)

    def digest_in_turns(self) -> Generator[None, None, admin_pb2.StateDigest]:
        """As `digest`, in turns of a few milliseconds; nothing may be applied in between."""
        index = self._state.applied_index
        made = yield from digest_in_turns(self._state, self.wheel)
        assert self._state.applied_index == index, "an entry was applied while a digest was made"
        return made
