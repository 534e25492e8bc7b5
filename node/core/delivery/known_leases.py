"""The leases of deliveries that this node knows: as master its own and those it inherited, else what it has heard.

Owns what becomes of them when a mastership begins and ends, and what others must know of them: the slaves by the sync,
the next start by the file. Facts that must survive (settled, attempts) are in the replicated state. Leases should
survive: they travel in the sync, and stay here for this node's next mastership.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.node.core.delivery.inherited import Inherited
from tickwheel.node.core.delivery.lease_feed import LeaseFeed
from tickwheel.node.core.delivery.leases import AnyLease, ChannelKey, Lease, LeaseTable, copy_of, ranges_of
from tickwheel.node.state.machine import StateMachine
from tickwheel.proto.peer_pb2 import LeaseRange

LEASES_WRITTEN_MAX = 20_000
"""Leases that a master notes for its file, shared evenly by the groups. Each takes half a microsecond of the core's
thread every second, and three of a worker's."""


def _end_of(lease: AnyLease) -> int:
    return lease.until_ms


def shares(groups: Sequence[int]) -> list[int]:
    """How many leases of each group are written, by how many it has: all if they fit LEASES_WRITTEN_MAX, else as evenly
    as they allow."""
    most = [0] * len(groups)
    room = LEASES_WRITTEN_MAX
    order = sorted(range(len(groups)), key=lambda place: groups[place])
    for behind, place in enumerate(order):
        most[place] = min(groups[place], room // (len(groups) - behind))
        room -= most[place]
    return most


class KnownLeases:
    def __init__(
        self,
        state: StateMachine,
        channel: Callable[[ChannelKey], Channel | None],
        now_ms: Callable[[], int],
        *,
        ahead: bool,
    ) -> None:
        """Arguments as of `Inherited`."""
        self._state = state
        self._leading = False
        self.table = LeaseTable()
        """As master: those given out and taken over."""
        self.feed = LeaseFeed(self.all_held, state.floor)
        """As master: what the slaves have been told."""
        self.heard = HeardLeases()
        """What this node knows while it does not lead."""
        self.inherited = Inherited(state, self.table, self.feed, channel, now_ms, ahead=ahead)
        self.table.inherit = self.inherited.take

    def begin(self, latest_ms: int) -> None:
        """This node leads: take over what it has heard. `latest_ms`: no lease is longer than that."""
        self._leading = True
        self.inherited.begin(self.heard, latest_ms)

    def end(self) -> None:
        """This node leads no more: all that the next master must know is kept as what it has heard."""
        self._leading = False
        self.heard.take_in(self.inherited.left)
        self.heard.keep(self.held())
        self.table.clear()
        self.inherited.clear()
        self.feed.clear()

    def void(self) -> set[ChannelKey]:
        """Channels with leases from before a reset of their group, or whose group or topic was deleted."""
        # Leases of an earlier master can exist without a channel: nobody has consumed here yet.
        void = {key for key in self.inherited.left.channels() if self._state.epoch(key) is None}
        return void | {key for key, epoch in self.table.epochs().items() if epoch != self._state.epoch(key)}

    def drop(self, key: ChannelKey) -> None:
        """Forget a channel: its group was reset, or group or topic deleted."""
        self.inherited.drop(key)
        self.table.drop(key)

    # -- what others must know

    def held(self) -> Iterator[Lease]:
        """The leases given out or taken over that the next master must know, as `all_held`."""
        return self._held(itertools.chain(self.table.open_leases(), self.inherited.unplaced()))

    def all_held(self) -> Iterator[AnyLease]:
        """What the next master must know of leases, channel by channel, each as it is when the iteration comes to it.
        Leases from before this mastership, as ranges, until they are taken over."""
        left = self.inherited.left.channels()
        yield from self._held(self.table.open_leases())
        for key in left:
            # Those of a channel that is taken over before its turn are told as events.
            yield from self.inherited.left.of_channel(key)
        # No event tells of these, and taking a channel over can add some: so they come last.
        yield from self._held(self.inherited.unplaced())

    def _held(self, leases: Iterable[Lease]) -> Iterator[Lease]:
        """Those that the next master must know. Left out: leases of broadcasting groups, whose consumers start afresh
        with each master, and leases given back, which nobody holds."""
        for lease in leases:
            if not lease.given_back and not self._state.group_broadcasting(lease.channel[0]):
                yield lease

    def ranges(self) -> Callable[[], list[Iterator[LeaseRange]]] | None:
        """A function that returns the lease ranges known now, of each group those that end last first, about; None if
        there are none. Any thread may call it at any later time. A master's are limited to `LEASES_WRITTEN_MAX`
        leases."""
        known = self.inherited.left if self._leading else self.heard
        held = known.by_group()
        groups = {g: n for g, n in self.table.groups().items() if not self._state.group_broadcasting(g)}
        for group_id, most in zip(groups, shares(list(groups.values())), strict=True):
            copies = [copy_of(lease) for lease in self.table.newest(group_id, most) if not lease.given_back]
            held.setdefault(group_id, []).extend(copies)
        for lease in itertools.islice(self.inherited.unplaced(), LEASES_WRITTEN_MAX):
            held.setdefault(lease.channel[0], []).append(copy_of(lease))
        if not any(held.values()):
            return None
        return lambda: [
            (r for some in sorted(known, key=_end_of, reverse=True) for r in ranges_of(some)) for known in held.values()
        ]

    # -- counts

    @property
    def in_flight(self) -> int:
        """Messages out with consumers, roughly: settled ones count until the floor passes them."""
        return self.table.out() + self.inherited.out.total()

    def in_flight_of_group(self, group_id: int) -> int:
        """`in_flight` of one group."""
        return self.table.out_of_group(group_id) + self.inherited.out[group_id]

    def in_flight_by_group(self) -> Counter[int]:
        """Group id -> `in_flight` of that group."""
        return self.table.out_by_group() + self.inherited.out
