"""Broadcasting groups: every attached consumer gets every message, and nothing is retried.

Each consumer reads the ready queue on its own, starting at the group's floor when it attaches. A consumer is done with
a message once it has answered (with any outcome), has let the lease run out, or is gone. A message is settled for the
group once every attached consumer is done with it: the group's floor is the least of its consumers' places. The master
notes the answers itself; only the group's floor goes into the log. So after a change of master the consumers get again
every message that some of them had not answered. While no consumer is attached, messages wait. A consumer that takes
nothing holds the floor, until retention.

Soft state of one mastership. Called by the delivery, which sends messages and keeps the leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.leases import ChannelKey
from tickwheel.node.core.delivery.sessions import Session
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import Positions
from tickwheel.proto.log_pb2 import SETTLE_ACK, SettleColumns

SETTLE_MAX = 10_000
"""Messages that one command settles when it moves a floor."""

Propose = Callable[[Sequence[SettleColumns], Reply[SettleResult]], None]


TURN_READERS = 512
"""Readers that a turn of the upkeep looks at, in about a millisecond."""
ANSWERED_KEPT = 1_024
"""Answered positions that a reader may keep, beside as many as it has out."""


@dataclass(slots=True, eq=False)
class Reader:
    """One consumer's progress through one topic. `out`: positions it was given and has not answered, perhaps without
    those that were settled in another way (a filter, a removal)."""

    session: Session
    channel: Channel
    out: set[int] = field(default_factory=set)
    _lowest: list[int] = field(default_factory=list)
    """Heap of the positions of `out`, and of some that were answered; the lowest is out."""

    def give(self, positions: Positions) -> None:
        """The consumer was given these positions."""
        given = positions.tolist()
        self.out.update(given)
        for position in given:
            heappush(self._lowest, position)
        if len(self._lowest) > 2 * len(self.out) + ANSWERED_KEPT:
            # One message that is not answered for long keeps those behind it.
            self._lowest = list(self.out)
            heapify(self._lowest)

    def answered(self, positions: Positions) -> int:
        """The consumer is done with these positions. Returns how many of them it had out."""
        before, lowest = len(self.out), self._lowest
        self.out.difference_update(positions.tolist())
        while lowest and lowest[0] not in self.out:
            heappop(lowest)
        return before - len(self.out)

    def place(self) -> int:
        """Lowest position that this consumer is not done with."""
        lowest, floor = self._lowest, self.channel.subscription.floor
        while lowest and (lowest[0] < floor or lowest[0] not in self.out):
            # What lies below the floor may have no lease any more, whose end would tell that nobody answers.
            self.out.discard(heappop(lowest))
        first_unsent = self.channel.first_unsent
        return min(lowest[0], first_unsent) if lowest else first_unsent


@dataclass(slots=True, eq=False)
class _Audience:
    """The readers of a topic, by session."""

    readers: dict[int, Reader] = field(default_factory=dict)
    behind: list[Reader] = field(default_factory=list)
    """Readers that held the group's floor back when all were looked at. While one of them still does, or another
    reader that answers, nobody else need be looked at."""

    def holds(self, floor: int) -> bool:
        """Whether a reader is not done with the message at the floor. Each reader is looked at about once for each
        place of the floor, however often their answers ask."""
        behind = self.behind
        while behind:
            reader = behind[-1]
            if self.readers.get(reader.session.session_id) is reader and reader.place() <= floor:
                return True
            behind.pop()
        self.behind = [reader for reader in self.readers.values() if reader.place() <= floor]
        return bool(self.behind)

    def place(self) -> int:
        """Lowest position that a reader is not done with. There is a reader."""
        return min(reader.place() for reader in self.readers.values())


class Broadcasts:
    def __init__(self, make: Callable[[ChannelKey], Channel | None], propose: Propose) -> None:
        self._make = make
        self._propose = propose
        self._audiences: dict[ChannelKey, _Audience] = {}
        self._under_way: set[ChannelKey] = set()
        self._mastership = 0

    def reader(self, key: ChannelKey, session: Session) -> Reader | None:
        """This consumer's reader of a topic, made if needed; None if the group does not have the topic (any more)."""
        audience = self._audiences.get(key)
        if audience is None:
            audience = self._audiences[key] = _Audience()
        readers = audience.readers
        reader = readers.get(session.session_id)
        if reader is None:
            channel = self._make(key)
            if channel is None:
                return None
            reader = readers[session.session_id] = Reader(session, channel)
        return reader

    def channels(self, group_id: int) -> list[Channel]:
        """Channels of all consumers of a group."""
        of_group = [audience for key, audience in self._audiences.items() if key[0] == group_id]
        return [reader.channel for audience in of_group for reader in audience.readers.values()]

    def channels_of(self, key: ChannelKey) -> list[Channel]:
        """Channels of all consumers that read this topic for this group."""
        audience = self._audiences.get(key)
        return [] if audience is None else [reader.channel for reader in audience.readers.values()]

    def waits_for_floor(self, key: ChannelKey) -> bool:
        """Whether a consumer may get more of this topic now that the group's floor has moved."""
        channels = self.channels_of(key)
        return any(channel.next_position < channel.subscription.ready.count for channel in channels)

    def answered(self, key: ChannelKey, session_id: int, positions: Positions) -> int:
        """A consumer answered for messages, or its leases ran out. Returns how many of them it had out."""
        audience = self._audiences.get(key)
        reader = None if audience is None else audience.readers.get(session_id)
        if reader is None:
            return 0
        count = reader.answered(positions)
        self._advance(key)
        return count

    def left(self, session_id: int) -> None:
        """A consumer is gone: the floor no longer waits for it."""
        for key, audience in self._audiences.items():
            if audience.readers.pop(session_id, None) is not None:
                self._advance(key)

    def drop(self, key: ChannelKey) -> None:
        """Drop the readers of a channel, whose group was reset or deleted."""
        self._audiences.pop(key, None)

    def topics_read(self) -> list[ChannelKey]:
        """Channels that consumers read."""
        return list(self._audiences)

    def upkeep(self) -> Iterator[None]:
        """Advance floors that lag because no consumer answered lately. Called about once a second, in turns."""
        looked = 0
        for key in list(self._audiences):
            self._advance(key)
            channels = self.channels_of(key)
            for channel in channels:
                channel.forget_settled()
            looked += 1 + len(channels)
            if looked >= TURN_READERS:
                yield
                looked = 0

    def end(self) -> None:
        self._mastership += 1
        self._audiences.clear()
        self._under_way.clear()

    def _advance(self, key: ChannelKey) -> None:
        """Settle for the group all messages that all its consumers are done with."""
        audience = self._audiences.get(key)
        if audience is None or not audience.readers or key in self._under_way:
            return
        channel = next(iter(audience.readers.values())).channel
        subscription = channel.subscription
        if audience.holds(subscription.floor):
            return
        place = audience.place()
        positions, ids, attempts = subscription.deliverable(subscription.floor, SETTLE_MAX)
        count = int(np.searchsorted(positions, np.uint64(place)))
        if not count:
            return
        columns = SettleColumns(
            group_id=key[0],
            topic_id=key[1],
            kind=SETTLE_ACK,
            ids=ids[:count].tobytes(),
            attempts=attempts[:count].astype("<u4").tobytes(),
            positions=positions[:count].tobytes(),
            epoch=channel.epoch,
        )
        self._under_way.add(key)
        mastership = self._mastership

        def settled(result: SettleResult) -> None:
            if mastership == self._mastership:
                self._under_way.discard(key)
                if result.settled:
                    self._advance(key)

        def failed(failure: Failure) -> None:
            if mastership == self._mastership:
                self._under_way.discard(key)

        self._propose([columns], Reply(settled, failed))
