"""What a node knows of leases while it does not lead, and what a new master makes of it.

Ranges are a peer's word: their number, their sizes and their times are bounded here, and malformed ones are left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tickwheel.node.core.delivery.leases import (
    TURN_CHANNELS,
    TURN_LEASES,
    AnyLease,
    ChannelKey,
    FloorOf,
    Lease,
    LeaseCopy,
    copy_of,
    ranges_of,
)
from tickwheel.proto.peer_pb2 import LeaseRange

EpochOf = Callable[[ChannelKey], int | None]
"""Returns how often the group of a channel was reset, as `StateView.epoch`."""

TURN_RANGES = 5_000
"""Ranges looked at in one turn of an upkeep."""
RANGE_MESSAGES_MAX = 1_000_000
"""Messages that one range may name. A range becomes arrays of that length, so its count must be bounded."""
MERGED_MESSAGES_MAX = 1_000_000
"""Messages of several channels that are merged together. All at once could fill the memory."""
ENDS_MAX, ENDS_STEP_MS = 64, 1_000
"""Where a new master knows more leases of a channel than that, they end at the next full second: a lease takes as long
to take over with one message as with thousands."""
POSITION_MAX = 1 << 62
_FIRST = np.ones(1, "<u4").tobytes()
JOIN_MESSAGES_MIN = 1_000
"""What a node has heard of a channel is joined when it names this many messages more than twice the positions from the
lowest to the highest, and than twice what it named when it was joined last. Leases that do not overlap never are."""

RangeKey = tuple[int, int, bytes, bytes, int]
"""A range without its end."""


@dataclass(slots=True)
class _Heard:
    """What was heard of one channel. Of ranges that differ in their end alone, the latest end is kept."""

    ranges: dict[RangeKey, LeaseRange] = field(default_factory=dict)
    messages: int = 0
    """Messages that the ranges name, those named twice counted twice."""
    first: int = POSITION_MAX
    end: int = 0
    joined_messages: int = 0
    """`messages` when the ranges were joined."""

    def add(self, r: LeaseRange) -> None:
        key = (r.first_position, r.count, r.attempts, r.ids, r.epoch)
        known = self.ranges.get(key)
        if known is None:
            self.messages += r.count
            self.first, self.end = min(self.first, r.first_position), max(self.end, r.first_position + r.count)
        elif known.until_ms >= r.until_ms:
            return
        self.ranges[key] = r

    @property
    def overlaps(self) -> bool:
        """Whether many messages are named more than once."""
        return self.messages > 2 * max(self.end - self.first, self.joined_messages) + JOIN_MESSAGES_MIN

    def joined(self) -> _Heard:
        """The same, with each message once; only the newest epoch, since a reset ended the leases from before it.
        Messages known by their ids stay as they are, but of the same ids the latest end counts."""
        epoch = max(r.epoch for r in self.ranges.values())
        by_ids: dict[bytes, LeaseRange] = {}
        placed: list[LeaseRange] = []
        for r in self.ranges.values():
            if r.epoch != epoch:
                continue
            if not r.ids:
                placed.append(r)
            elif r.ids not in by_ids or by_ids[r.ids].until_ms < r.until_ms:
                by_ids[r.ids] = r
        merged = (r for leases in _merged(placed).values() for lease in leases for r in ranges_of(lease))
        heard = _heard_of(itertools.chain(merged, by_ids.values()))
        heard.joined_messages = heard.messages
        return heard


def _heard_of(ranges: Iterable[LeaseRange]) -> _Heard:
    heard = _Heard()
    for r in ranges:
        heard.add(r)
    return heard


class HeardLeases:
    """Leases that this node knows of while it does not lead: told by its masters, left from its own earlier
    masterships, or found on its disk. A new master starts with them.

    A lease of an earlier term stays until it ends, even if later masters have not heard of it. That is safe: the
    replicated state shows which messages were settled or came back meanwhile, so an old lease never holds those.
    """

    def __init__(self) -> None:
        self._channels: dict[ChannelKey, _Heard] = {}
        self._given: dict[ChannelKey, list[Lease]] = {}
        """Leases from this node's own mastership, not yet written as ranges: of many that takes seconds."""

    def keep(self, leases: Iterable[Lease]) -> None:
        """Keep leases of this node's own mastership, which nobody changes any more."""
        for lease in leases:
            self._given.setdefault(lease.channel, []).append(lease)

    def take_in(self, other: HeardLeases) -> None:
        """Move all leases of `other` here."""
        for key in other.channels():
            heard, given = other._channels.pop(key, None), other._given.pop(key, ())
            if heard is not None:
                known = self._channels.setdefault(key, heard)
                if known is not heard:
                    self.hear(heard.ranges.values())
            if given:
                self._given.setdefault(key, []).extend(given)

    def __contains__(self, key: ChannelKey) -> bool:
        """Whether leases of a channel are known."""
        return key in self._channels or key in self._given

    def __len__(self) -> int:
        """Number of channels."""
        return len(self._channels.keys() | self._given.keys()) if self._given else len(self._channels)

    def messages_by_channel(self) -> Counter[ChannelKey]:
        """Messages that the leases of each channel name; those named twice count twice."""
        found = Counter({key: heard.messages for key, heard in self._channels.items()})
        for key, leases in self._given.items():
            found[key] += sum(len(lease.positions) for lease in leases)
        return found

    def take(self, key: ChannelKey) -> HeardLeases | None:
        """Take out the leases of one channel; None: there are none."""
        heard, given = self._channels.pop(key, None), self._given.pop(key, None)
        if heard is None and given is None:
            return None
        taken = HeardLeases()
        if heard is not None:
            taken._channels[key] = heard
        if given is not None:
            taken._given[key] = given
        return taken

    def take_some(self, leases_max: int) -> HeardLeases:
        """Take out the leases of some channels, with about `leases_max` leases or more."""
        taken, count = HeardLeases(), 0
        while count < leases_max and (key := next(iter(self._channels or self._given), None)) is not None:
            if (heard := self._channels.pop(key, None)) is not None:
                taken._channels[key] = heard
                count += len(heard.ranges)
            if (given := self._given.pop(key, None)) is not None:
                taken._given[key] = given
                count += len(given)
        return taken

    def channels(self) -> list[ChannelKey]:
        """Channels of which leases are known."""
        return list(dict.fromkeys([*self._channels, *self._given]))

    def _write(self, key: ChannelKey) -> Iterator[int]:
        """Write the leases of a channel that are not yet ranges. Yields how many were written, TURN_LEASES at most."""
        while given := self._given.get(key):
            some = given[-TURN_LEASES:]
            del given[-TURN_LEASES:]
            for lease in some:
                self.hear(ranges_of(lease))
            if not given:
                del self._given[key]
            yield len(some)

    def hear(self, ranges: Iterable[LeaseRange]) -> None:
        """Learn of leases. Many may be known already: what names the same messages is joined, at once where only the
        end differs, else when it has grown."""
        for r in ranges:
            if _well_formed(r):
                key = (r.group_id, r.topic_id)
                heard = self._channels.get(key)
                if heard is None:
                    heard = self._channels[key] = _Heard()
                heard.add(r)
                if heard.overlaps:
                    self._channels[key] = heard.joined()

    def prune(self, now_ms: int, floor_of: FloorOf, epoch_of: EpochOf) -> Iterator[None]:
        """Forget ranges that have ended or lie below the floor. In turns of TURN_CHANNELS and TURN_RANGES, or of
        TURN_LEASES that this node gave out. Ranges of a later epoch stay: here the reset is not applied yet, and the
        floor is that of before it."""
        done = 0.0
        for key in self.channels():
            for written in self._write(key):
                done += written / TURN_LEASES
                if done >= 1:
                    yield
                    done = 0
            done += 1 / TURN_CHANNELS
            heard = self._channels.get(key)
            if heard is None:
                continue
            done += len(heard.ranges) / TURN_RANGES
            floor, epoch = floor_of(key), epoch_of(key) or 0
            running = [r for r in heard.ranges.values() if r.until_ms > now_ms]
            kept = [r for r in running if r.epoch > epoch or r.first_position + r.count > floor]
            if not kept:
                del self._channels[key]
            elif len(kept) < len(heard.ranges):
                self._channels[key] = _heard_of(kept)
            if done >= 1:
                yield
                done = 0

    def size(self) -> int:
        """Number of ranges kept, and leases not yet written as ranges."""
        return sum(len(heard.ranges) for heard in self._channels.values()) + sum(map(len, self._given.values()))

    def by_group(self) -> dict[int, list[AnyLease]]:
        """All leases by group. None of them changes any more."""
        found: dict[int, list[AnyLease]] = {}
        for (group_id, _), heard in self._channels.items():
            found.setdefault(group_id, []).extend(heard.ranges.values())
        for (group_id, _), given in self._given.items():
            found.setdefault(group_id, []).extend(given)
        return found

    def held(self, now_ms: int, epoch_of: EpochOf) -> list[Lease]:
        """The leases that still run, as leases of an earlier master. Leases from before a reset of the group are void.
        Where leases overlap, the highest attempt wins, then the latest end."""
        running: dict[ChannelKey, list[LeaseRange | LeaseCopy]] = {}
        for key in self.channels():
            epoch, heard = epoch_of(key) or 0, self._channels.get(key)
            known: list[LeaseRange | LeaseCopy] = [*heard.ranges.values()] if heard is not None else []
            known += map(copy_of, self._given.get(key, ()))
            running[key] = [some for some in known if some.until_ms > now_ms and some.epoch == epoch]
        merged = _merged([some for known in running.values() for some in known if not _has_ids(some)], coarse=True)
        leases: list[Lease] = []
        for key, known in running.items():
            leases += merged.get(key, ())
            leases += _by_ids([_lease_by_ids(some) for some in known if _has_ids(some)])
        return leases

    def of_channel(self, key: ChannelKey) -> list[AnyLease]:
        """The leases of one channel as they are now."""
        heard = self._channels.get(key)
        return [*(heard.ranges.values() if heard is not None else ()), *self._given.get(key, ())]


def _well_formed(r: LeaseRange) -> bool:
    """Whether a range from a peer or a file can be used; malformed ranges are ignored."""
    return (
        0 < r.count <= RANGE_MESSAGES_MAX
        and r.first_position < POSITION_MAX
        and len(r.attempts) in (0, 4 * r.count)
        and len(r.ids) in (0, 8 * r.count)
    )


def _has_ids(some: LeaseRange | LeaseCopy) -> bool:
    return bool(some.ids) if isinstance(some, LeaseRange) else some.ids is not None


def _channel_of(some: LeaseRange | LeaseCopy) -> ChannelKey:
    return (some.group_id, some.topic_id) if isinstance(some, LeaseRange) else some.channel


def _messages_of(some: LeaseRange | LeaseCopy) -> int:
    return some.count if isinstance(some, LeaseRange) else len(some.positions)


def _lease_by_ids(some: LeaseRange | LeaseCopy) -> Lease:
    """A lease of messages that are known by their ids, as one of an earlier master."""
    key, until_ms, epoch = _channel_of(some), some.until_ms, some.epoch
    if isinstance(some, LeaseCopy):
        return Lease(key, some.positions, some.attempts, until_ms, 0, ids=some.ids, epoch=epoch)
    positions = np.arange(some.first_position, some.first_position + some.count, dtype=np.uint64)
    attempts = np.ones(some.count, np.uint32)
    return Lease(key, positions, attempts, until_ms, 0, ids=np.frombuffer(some.ids, "<u8"), epoch=epoch)


def _by_ids(leases: list[Lease]) -> list[Lease]:
    """Leases by ids of one channel and epoch: where it has more than ENDS_MAX of them, few whose ends are rounded up to
    ENDS_STEP_MS, with each message once, under the latest end."""
    if len(leases) <= ENDS_MAX:
        return leases
    counts = [len(lease.positions) for lease in leases]
    ends = np.minimum(np.array([lease.until_ms for lease in leases], np.int64), POSITION_MAX)
    until = np.repeat(-(-ends // ENDS_STEP_MS) * ENDS_STEP_MS, counts)
    positions = np.concatenate([lease.positions for lease in leases])
    ids = np.concatenate([lease.ids for lease in leases if lease.ids is not None])
    order = np.lexsort((positions, until, ids))
    order = order[np.append(ids[order][1:] != ids[order][:-1], True)]
    order = order[np.lexsort((positions[order], until[order]))]
    positions, ids, until = positions[order], ids[order], until[order]
    cuts = (np.flatnonzero(np.diff(until)) + 1).tolist()
    return [
        replace(
            leases[0],
            positions=positions[start:end],
            attempts=np.ones(end - start, np.uint32),
            until_ms=int(until[start]),
            ids=ids[start:end],
        )
        for start, end in itertools.pairwise([0, *cuts, len(order)])
    ]


def _merged(known: Iterable[LeaseRange | LeaseCopy], *, coarse: bool = False) -> dict[ChannelKey, list[Lease]]:
    """Leases without ids, channel by channel and those of a channel of one epoch, as leases that do not overlap: for
    each channel, by rising end. Many channels in one pass: a new master would lose its mastership over a thousand.
    `coarse`: where a channel has more than ENDS_MAX of them, their ends are rounded up to ENDS_STEP_MS."""
    merged: dict[ChannelKey, list[Lease]] = {}
    together: list[LeaseRange | LeaseCopy] = []
    messages = 0
    for _, channel in itertools.groupby(known, key=_channel_of):
        some = list(channel)
        count = sum(map(_messages_of, some))
        if together and messages + count > MERGED_MESSAGES_MAX:
            merged |= _merged_together(together, coarse=coarse)
            together, messages = [], 0
        together += some
        messages += count
    return merged | _merged_together(together, coarse=coarse) if together else merged


def _merged_together(known: Sequence[LeaseRange | LeaseCopy], *, coarse: bool) -> dict[ChannelKey, list[Lease]]:
    """As `_merged`, in one pass."""
    ranges = [some for some in known if isinstance(some, LeaseRange)]
    copies = [some for some in known if isinstance(some, LeaseCopy)]
    known = [*ranges, *copies]
    numbers: dict[ChannelKey, int] = {}
    numbers_of = np.array([numbers.setdefault(_channel_of(some), len(numbers)) for some in known])
    keys, epochs = list(numbers), {number: some.epoch for number, some in zip(numbers_of.tolist(), known, strict=True)}
    ends = np.array([some.until_ms for some in known], np.int64)
    if coarse:
        many = np.bincount(numbers_of)[numbers_of] > ENDS_MAX
        # A peer may name any end; the largest would wrap around.
        ends[many] = -(-np.minimum(ends[many], POSITION_MAX) // ENDS_STEP_MS) * ENDS_STEP_MS
    counts = np.array([_messages_of(some) for some in known], np.int64)
    channels, until = np.repeat(numbers_of, counts), np.repeat(ends, counts)
    in_ranges = counts[: len(ranges)]
    inside = np.arange(in_ranges.sum()) - np.repeat(np.cumsum(in_ranges) - in_ranges, in_ranges)
    firsts = np.repeat(np.array([r.first_position for r in ranges], np.uint64), in_ranges)
    positions = np.concatenate([firsts + inside.astype(np.uint64), *(copy.positions for copy in copies)])
    told = np.frombuffer(b"".join(r.attempts or _FIRST * r.count for r in ranges), "<u4")
    attempts = np.concatenate([told, *(copy.attempts for copy in copies)])
    order = np.lexsort((until, attempts, positions, channels))
    here, there = positions[order], channels[order]
    last = np.append((here[1:] != here[:-1]) | (there[1:] != there[:-1]), True)
    order = order[last]
    order = order[np.lexsort((positions[order], until[order], channels[order]))]
    positions, attempts, until, channels = positions[order], attempts[order], until[order], channels[order]
    cuts = (np.flatnonzero((np.diff(until) != 0) | (np.diff(channels) != 0)) + 1).tolist()
    merged: dict[ChannelKey, list[Lease]] = {key: [] for key in keys}
    for start, end in itertools.pairwise([0, *cuts, len(order)]):
        number = int(channels[start])
        lease = Lease(keys[number], positions[start:end], attempts[start:end], int(until[start]), 0)
        lease.epoch = epochs[number]
        merged[lease.channel].append(lease)
    return merged
