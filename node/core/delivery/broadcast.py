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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.leases import ChannelKey, Positions
from tickwheel.node.core.delivery.sessions import Session
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure
from tickwheel.node.state.results import SettleResult
from tickwheel.proto.log_pb2 import SETTLE_ACK, SettleColumns

SETTLE_MAX = 10_000
"""Messages that one command settles when it moves a floor."""

Propose = Callable[[Sequence[SettleColumns], Reply[SettleResult]], None]


@dataclass(slots=True, eq=False)
class Reader:
    """One consumer's progress through one topic. `out`: positions it was given and has not answered."""

    session: Session
    channel: Channel
    out: set[int] = field(default_factory=set)

    def place(self) -> int:
        """Lowest position that this consumer is not done with."""
        return min(min(self.out, default=self.channel.first_unsent), self.channel.first_unsent)


class Broadcasts:
    def __init__(self, make: Callable[[ChannelKey], Channel | None], propose: Propose) -> None:
        self._make = make
        self._propose = propose
        self._readers: dict[ChannelKey, dict[int, Reader]] = {}
        self._under_way: set[ChannelKey] = set()
        self._mastership = 0

    def reader(self, key: ChannelKey, session: Session) -> Reader | None:
        """This consumer's reader of a topic, made if needed; None if the group does not have the topic (any more)."""
        readers = self._readers.setdefault(key, {})
        reader = readers.get(session.session_id)
        if reader is None:
            channel = self._make(key)
            if channel is None:
                return None
            reader = readers[session.session_id] = Reader(session, channel)
        return reader

    def channels(self, group_id: int) -> list[Channel]:
        """Channels of all consumers of a group."""
        of_group = (readers.values() for key, readers in self._readers.items() if key[0] == group_id)
        return [reader.channel for readers in of_group for reader in readers]

    def answered(self, key: ChannelKey, session_id: int, positions: Positions) -> int:
        """A consumer answered for messages, or its leases ran out. Returns how many of them it had out."""
        reader = self._readers.get(key, {}).get(session_id)
        if reader is None:
            return 0
        before = len(reader.out)
        reader.out.difference_update(positions.tolist())
        self._advance(key)
        return before - len(reader.out)

    def left(self, session_id: int) -> None:
        """A consumer is gone: the floor no longer waits for it."""
        for key, readers in self._readers.items():
            if readers.pop(session_id, None) is not None:
                self._advance(key)

    def drop(self, key: ChannelKey) -> None:
        """Drop the readers of a channel, whose group was reset or deleted."""
        self._readers.pop(key, None)

    def topics_read(self) -> list[ChannelKey]:
        """Channels that consumers read."""
        return list(self._readers)

    def upkeep(self) -> None:
        """Advance floors that lag because no consumer answered lately. Called about once a second."""
        for key, readers in self._readers.items():
            self._advance(key)
            for reader in readers.values():
                reader.channel.forget_settled()

    def end(self) -> None:
        self._mastership += 1
        self._readers.clear()
        self._under_way.clear()

    def _advance(self, key: ChannelKey) -> None:
        """Settle for the group all messages that all its consumers are done with."""
        readers = self._readers.get(key)
        if not readers or key in self._under_way:
            return
        place = min(reader.place() for reader in readers.values())
        channel = next(iter(readers.values())).channel
        subscription = channel.subscription
        if place <= subscription.floor:
            return
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
