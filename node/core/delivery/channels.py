"""The channels of a mastership, by group and topic, and the recent units that they read from.

A channel is made when somebody looks at it, and goes once everything is settled and nothing has come for a while: a new
one would begin where it stands.
Channels of broadcasting groups are made here and kept by broadcast.py. Soft state of one mastership.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.agenda import Pace
from tickwheel.node.core.delivery.channel import Channel, Fetch
from tickwheel.node.core.delivery.fifo import FifoChannel
from tickwheel.node.core.delivery.leases import TURN_CHANNELS, ChannelKey
from tickwheel.node.core.delivery.recent_units import Recent
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.subscription import Positions


class Channels:
    def __init__(
        self,
        config: CoreConfig,
        state: StateMachine,
        fetch: Fetch,
        pace: Callable[[int], Pace],
        held: Callable[[ChannelKey, int], Iterable[Positions]],
    ) -> None:
        """`pace` returns that of a group. `held`: what a new channel of this key and epoch must not hand out, since it
        is out or on its way back."""
        self._config = config
        self._state = state
        self._fetch = fetch
        self._pace = pace
        self._held = held
        self._by_key: dict[ChannelKey, Channel] = {}
        self.recent = Recent()
        """Units that were dispatched in this mastership."""
        self._hold_until_ms = 0

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._by_key.values())

    def begin(self, hold_until_ms: int) -> None:
        """A mastership begins. No channel hands anything out before `hold_until_ms`."""
        self._hold_until_ms = hold_until_ms

    def clear(self) -> None:
        """The mastership is over."""
        self._by_key.clear()
        self.recent.clear()

    def made(self, key: ChannelKey) -> Channel | None:
        """The channel if there is one by now."""
        return self._by_key.get(key)

    def of(self, key: ChannelKey) -> Channel | None:
        """The channel; None: there is no such group and topic (any more)."""
        channel = self._by_key.get(key)
        if channel is None:
            channel = self.make(key)
            if channel is None:
                return None
            for positions in self._held(key, channel.epoch):
                channel.hold(positions)
            self._by_key[key] = channel
        return channel

    def in_topics(self, group_id: int, topic_ids: Iterable[int]) -> list[Channel]:
        """The channels of a group in these topics."""
        return [channel for topic_id in topic_ids if (channel := self.of((group_id, topic_id))) is not None]

    def make(self, key: ChannelKey) -> Channel | None:
        """A channel that is not kept here; None as in `of`."""
        group, topic = self._state.groups.get(key[0]), self._state.topics.get(key[1])
        subscription = None if group is None else group.subscriptions.get(key[1])
        if group is None or topic is None or subscription is None:
            return None
        kind = FifoChannel if topic.fifo and not group.broadcasting else Channel
        return kind(
            key=key,
            group=group.name,
            topic=topic.name,
            subscription=subscription,
            recent=self.recent.of(key[1]),
            config=self._config,
            fetch=self._fetch,
            pace=self._pace(key[0]),
            next_position=subscription.floor,
            hold_until_ms=self._hold_until_ms,
            epoch=subscription.epoch,
        )

    def drop(self, key: ChannelKey) -> None:
        """Let the next look make a new channel."""
        self._by_key.pop(key, None)

    def drop_group(self, group_id: int) -> None:
        """As `drop`, for all channels of a group."""
        for key in [key for key in self._by_key if key[0] == group_id]:
            del self._by_key[key]

    def void(self) -> set[ChannelKey]:
        """Channels whose group was reset, or whose group or topic was deleted."""
        return {
            key
            for key, channel in self._by_key.items()
            if self._state.subscription(*key) is not channel.subscription or channel.subscription.epoch != channel.epoch
        }

    # -- what may be in them

    def candidates(self, group_id: int) -> list[int]:
        """The group's topics that may be open. It may have ten thousand, and all groups are looked at together after an
        election: what some group has not settled is asked before what this one has not."""
        unsettled, by_key = self._state.backlog.by_topic, self._by_key
        return [t for t in self._state.group_topics(group_id) if t in unsettled or (group_id, t) in by_key]

    def is_open(self, group_id: int, topic_id: int) -> bool:
        """Whether the group has unsettled messages in the topic, or its channel is busy or ahead of a dispatch."""
        subscription = self._state.subscription(group_id, topic_id)
        if subscription is not None and subscription.backlog:
            return True
        channel = self._by_key.get((group_id, topic_id))
        return channel is not None and not channel.idle_at(self._state.ready_count(topic_id))

    def unpush(self) -> None:
        """A dispatch was not applied: forget what came ahead of it."""
        self.recent.clear()
        for channel in self:
            channel.recent = self.recent.of(channel.key[1])
            channel.unpush(self._state.ready_count(channel.key[1]))

    # -- upkeep

    def upkeep(self) -> Iterator[None]:
        """Forget settled messages, and channels that were idle since the last upkeep. In turns of TURN_CHANNELS."""
        for number, key in enumerate(list(self._by_key), 1):
            if not number % TURN_CHANNELS:
                yield
            channel = self._by_key.get(key)
            if channel is None:
                continue
            channel.forget_settled()
            if channel.subscription.backlog or not channel.idle_at(self._state.ready_count(key[1])):
                continue
            if channel.seen_position == channel.next_position:
                del self._by_key[key]
            channel.seen_position = channel.next_position
