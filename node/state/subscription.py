"""A group's progress in a topic's ready queue: its settled messages, and the attempt of each other one that counts.

Invariants:
- Everything below `floor` is settled; the message at `floor` is not (or has not been dispatched yet). The window
  (`Window`) keeps the settled positions above it, and the attempts that count there.
- Only commands of the log change it, reading never does. So it is equal on all nodes.
- Nothing from `floor + window_messages_max` on is handed out or settled.

A settlement is never trusted: a position counts only if the ready queue has the id there. Without
positions the ids are searched in the window, and a little below it among settled messages.

Called by the state machine (`settle`, `skip_foreign`, `raise_floor`, ...), and by the master's
delivery, which only reads. Positions are uint64 columns outside, int64 inside.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.ready import ReadyLog
from tickwheel.node.state.results import SettleResult
from tickwheel.proto.log_pb2 import SETTLE_ACK, SETTLE_DEAD, SETTLE_RETRY, SETTLE_RETURN, SETTLE_SKIP
from tickwheel.wheel.units import Ids, find_ids

Places = NDArray[np.int64]
Values = NDArray[np.uint16]

ATTEMPT_MAX = 65_535
CHUNK = 65_536
"""Positions examined together."""
CAPACITY_LEAST = 1_024
_NOTHING: Values = np.zeros(0, np.uint16)
_OPEN: Values = np.ones(1, np.uint16)
_CLOSED: Values = np.zeros(1, np.uint16)

Positions = NDArray[np.uint64]
Attempts = NDArray[np.uint32]


class Found(NamedTuple):
    """The position of each row of a batch, and whether it was found there."""

    places: Places
    known: NDArray[np.bool_]

    def take(self, rows: Places | slice) -> Found:
        """The entries of these rows."""
        return Found(self.places[rows], self.known[rows])


SETTLING = frozenset({SETTLE_ACK, SETTLE_SKIP, SETTLE_DEAD})
RETURNING = frozenset({SETTLE_RETURN, SETTLE_RETRY})
LOOK_BACK = 65_536
"""How far before the floor an id without a position is searched: among recently settled messages."""
HOLDS_ROWS = 16_384
"""Retries of a topic, the newest, among which `retries_open` searches."""
_FIRST_ATTEMPT = (1).to_bytes(4, "little")
_FIRST_ATTEMPTS = np.ones(CHUNK, np.uint32)
MARKS_FROM = 1 << 16
NOT_JUDGED = 1 << 62
"""Value of `judged_from` after a checkpoint of an earlier version, which does not have it."""


def _joined(parts: list[NDArray[Any]], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def mark_of(group_id: int, epoch: int) -> int:
    """What deliveries name as their epoch, and settlements and extensions hand back: 32 bits that differ between a
    group and one that is made again under its name."""
    return ((group_id % (MARKS_FROM - 1) + 1) * MARKS_FROM + epoch) % (1 << 32)


class Subscription:
    __slots__ = (
        "_ready",
        "_window",
        "began",
        "checked",
        "epoch",
        "group_id",
        "judged_from",
        "pauses",
        "start_ms",
        "topic_id",
        "window_messages_max",
    )

    def __init__(
        self, group_id: int, topic_id: int, ready: ReadyLog, window_messages_max: int, backlog: Backlog
    ) -> None:
        self.group_id = group_id
        self.topic_id = topic_id
        self._ready = ready
        self.window_messages_max = window_messages_max
        self._window = Window(group_id, topic_id, ready, backlog)
        self.start_ms = 0
        """Messages due before this count as settled; 0 once it no longer matters."""
        self.checked: int | None = None
        """Messages from this position on have not met the group's filter and are not handed out; None: the group has no
        filter. See filtering.py."""
        self.epoch = 0
        """How often the subscription was reset: deliveries from before the last reset are void."""
        self.began = 0
        """Messages below this position are older than the group, which never got them."""
        self.judged_from = 0
        """Messages settled from this position on were acknowledged, skipped by the group's current filter, or died."""
        self.pauses: dict[int, int] = {}
        """In FIFO topics: unsettled position -> until when it waits for its retry in place."""

    def begin(self, position: int) -> None:
        """Start a new subscription at this position."""
        self.began = position
        self.begin_at(position)

    def begin_at(self, position: int) -> None:
        """Nothing from this position on is settled; everything below is, however it came to be."""
        self.judged_from = position if position > self.floor else min(self.judged_from, position)
        self._window.begin_at(position)
        self._forget_pauses()

    def reset(self, position: int, start_ms: int) -> None:
        """Start again at another position: nothing from there on is settled, and all leases are void."""
        self.epoch += 1
        self.start_ms = start_ms
        self.began = min(self.began, position)
        self.begin_at(position)

    def epoch_of(self, told: int | None) -> int | None:
        """The epoch of a delivery with this mark (`mark_of`): one that this subscription never has, if the delivery was
        of another group. A mark below MARKS_FROM is the epoch itself, as the version before told it."""
        if told is None or told < MARKS_FROM:
            return told
        return (told - mark_of(self.group_id, 0)) % (1 << 32)

    # -- for the delivery

    @property
    def floor(self) -> int:
        """All positions below are settled; this one is not."""
        return self._window.floor

    @property
    def oldest_unsettled_ms(self) -> int | None:
        """Due time of the first unsettled message, rounded down to its tick; None: all are settled."""
        return self._ready.due_tick_ms(self.floor)

    @property
    def returned_count(self) -> int:
        """Unsettled messages that were delivered before and came back."""
        return self._window.returned_count

    @property
    def stop(self) -> int:
        """First position that may not be handed out, or meet the filter, now."""
        return min(self._ready.count, self._window.floor + self.window_messages_max)

    @property
    def unchecked(self) -> int:
        """First position that has yet to meet the filter."""
        return self._ready.count if self.checked is None else max(self.checked, self.floor)

    def unchecked_ids(self, limit: int) -> tuple[int, Ids]:
        """The first position that has yet to meet the filter, and up to `limit` ids from there on that may meet it
        now."""
        first = self.unchecked
        return first, self._ready.read(first, max(0, min(limit, self.stop - first)))

    @property
    def _hand_out_stop(self) -> int:
        return self.stop if self.checked is None else min(self.stop, self.unchecked)

    def unsettled_below(self, position: int) -> int:
        """Unsettled messages from the floor to below a position, including those not yet dispatched."""
        return int(np.count_nonzero(self._window.span(self.floor, position))) if position > self.floor else 0

    @property
    def backlog(self) -> int:
        """Messages dispatched and not settled; may include some for another group."""
        return self._ready.count - self._window.settled

    def forget(self) -> None:
        """The group or the topic was deleted: drop the counts."""
        self._window.forget()

    def deliverable(self, first: int, limit: int) -> tuple[Positions, Ids, Attempts]:
        """Up to `limit` unsettled positions from `first` on, rising, with ids and attempts; within the window."""
        window, stop = self._window, self._hand_out_stop
        at = max(int(first), window.floor)
        if limit <= CHUNK and self.is_untouched_from(at):
            count = max(0, min(stop - at, limit))
            return np.arange(at, at + count, dtype=np.uint64), self._ready.read(at, count), _FIRST_ATTEMPTS[:count]
        parts: list[Places] = []
        values: list[NDArray[np.uint16]] = []
        missing = limit
        while at < stop and missing > 0:
            end = min(stop, at + max(CHUNK, missing))
            span = window.span(at, end)
            rows = np.flatnonzero(span)[:missing]
            parts.append(rows + at)
            values.append(span[rows])
            missing -= len(rows)
            at = end
        places = _joined(parts, np.int64)
        return places.astype(np.uint64), self._ready.gather(places), _joined(values, np.uint16).astype(np.uint32)

    def is_untouched_from(self, position: int) -> bool:
        """Whether from this position on nothing was settled, came back or is for another group."""
        return position >= self._window.end and self._ready.targets.last_position < position

    def scanned_to(self, first: int) -> int:
        """Where a reader goes on that found nothing from `first` on."""
        return max(int(first), self._hand_out_stop)

    def returned(self, limit: int, first: int = 0) -> tuple[Positions, Ids, Attempts]:
        """Up to `limit` unsettled positions from `first` on that came back, rising, with ids and attempts."""
        places = self._window.returned(limit, first)
        return places.astype(np.uint64), self._ready.gather(places), self._window.at(places).astype(np.uint32)

    def is_settled(self, positions: Positions) -> NDArray[np.bool_]:
        """True for each settled position."""
        settled: NDArray[np.bool_] = self._window.at(positions.astype(np.int64)) == 0
        return settled

    def attempts_of(self, positions: Positions) -> Attempts:
        """The attempt that counts for each position (1: the first); 0 for settled ones."""
        return self._window.at(positions.astype(np.int64)).astype(np.uint32)

    def ids_of(self, positions: Positions) -> Ids:
        """Ids at dispatched positions."""
        return self._ready.gather(positions.astype(np.int64))

    def locate(self, ids: Ids, positions: Positions | None) -> tuple[Positions, NDArray[np.bool_]]:
        """Position of each id, and whether it was found; given positions are checked."""
        places, known = self.find(ids, positions)
        return places.astype(np.uint64), known

    # -- ids as consumers know them

    def as_logged(
        self, ids: Ids, attempts: Attempts, positions: Positions | None
    ) -> tuple[Ids, Attempts, Positions | None]:
        """Translate a consumer's columns into those of the log.

        A consumer knows a retry by the id under which the message was first scheduled, and its attempts add up over
        retries. The log names the unit at the position and counts only that unit's deliveries. Without positions the
        newest retry of a message is meant.
        """
        targets = self._ready.targets
        if not self.has_names:
            return ids, attempts, positions
        if positions is not None:
            inside = np.flatnonzero((positions >= self._searched_from) & (positions < self.stop))
            hits, rows = targets.of(positions[inside].astype(np.int64))
            hits = inside[hits]
            own = (rows["group"] == self.group_id) & (rows["origin"] == ids[hits])
            hits, rows = hits[own], rows[own]
        else:
            near = targets.between(self._searched_from, self.stop)
            near = near[find_ids(near["origin"], np.unique(ids))[0]]
            near = near[near["group"] == self.group_id]
            newest = {origin: place for place, origin in enumerate(near["origin"].tolist())}
            found = [(row, newest[id]) for row, id in enumerate(ids.tolist()) if id in newest]
            hits = np.array([row for row, _ in found], np.int64)
            rows = near[np.array([place for _, place in found], np.int64)]
        if not len(hits):
            return ids, attempts, positions
        ids, attempts = ids.copy(), attempts.copy()
        ids[hits] = self._ready.gather(rows["position"].astype(np.int64))
        # An earlier attempt than this retry's first is stale: 0 is never out.
        attempts[hits] = np.where(attempts[hits] > rows["attempts"], attempts[hits] - rows["attempts"], 0)
        return ids, attempts, positions

    @property
    def has_names(self) -> bool:
        """Whether consumers may know messages that can still be settled by other columns than the log."""
        return self._ready.targets.last_position >= self._searched_from

    def deliveries(self, positions: Positions, attempts: Attempts) -> Attempts:
        """Deliveries of the messages over all retries, from the attempts of the units at these dispatched positions."""
        hits, rows = self._ready.targets.of(positions.astype(np.int64))
        if not len(hits):
            return attempts
        attempts = attempts.copy()
        attempts[hits] += rows["attempts"]
        return attempts

    def names_of(self, places: Places) -> Ids:
        """The ids by which consumers know the messages at dispatched positions."""
        names = self._ready.gather(places)
        hits, rows = self._ready.targets.of(places)
        names[hits] = rows["origin"]
        return names

    @property
    def has_targets(self) -> bool:
        """Whether the topic has positions for a single group."""
        return self._ready.targets.last_position >= 0

    def newest_targets(self, limit: int) -> NDArray[Any]:
        """The last `limit` rows of the topic's targets, those for other groups too (see targets.py)."""
        return self._ready.targets.newest(limit)

    def settled_before(self, ids: Ids, found: Found) -> tuple[Places, Ids]:
        """Settled positions among a batch's rows (as `find` returned them), and the ids by which consumers know their
        messages."""
        places, known = found
        places, names = places[known], ids[known]
        settled = self._window.at(places) == 0
        if not settled.any():
            return places[:0], names[:0]
        places, names = places[settled], names[settled]
        near = np.flatnonzero(places >= self._searched_from)
        hits, rows = self._ready.targets.of(places[near])
        names[near[hits]] = rows["origin"]
        return places, names

    @property
    def _searched_from(self) -> int:
        """First position whose id is compared with one that a settlement names."""
        return max(self._ready.first_retained, self.floor - LOOK_BACK)

    @property
    def ready(self) -> ReadyLog:
        """The ready queue of its topic."""
        return self._ready

    @property
    def first_open(self) -> int:
        """First position that is retained and may be unsettled."""
        return max(self._ready.first_retained, self.floor)

    def retries_open(self, ids: Ids) -> NDArray[np.bool_]:
        """Of which messages a dispatched retry is unsettled, as far as it is among the topic's last HOLDS_ROWS.
        Replayed dead letters do not count. `ids`: those under which they were first scheduled, rising, each once."""
        found = np.zeros(len(ids), np.bool_)
        if self._ready.targets.last_position >= self.first_open:
            retries = self.newest_targets(HOLDS_ROWS)
            own = (retries["group"] == self.group_id) & (retries["position"] >= np.uint64(self.first_open))
            retries = retries[own & (retries["replayed"] == 0)]
            places, rows = find_ids(retries["origin"], ids)
            found[rows[self._window.at(retries["position"][places].astype(np.int64)) > 0]] = True
        return found

    # -- commands of the log

    def acting(self, attempts: Attempts, found: Found) -> tuple[Places, Places]:
        """Rows of a batch that a settlement would change, each position once and rising; and their positions. `found`:
        the result of `find` for the batch."""
        places, known = found
        current = np.zeros(len(places), np.uint16)
        current[known] = self._window.at(places[known])
        acts = np.flatnonzero(known & (current > 0) & (current == attempts))
        _, first = np.unique(places[acts], return_index=True)
        rows = acts[np.sort(first)]
        return rows, places[rows]

    def growth(self, last: int) -> int:
        """By how many two-byte values the window would grow if this position were settled."""
        return self._window.growth(last)

    def settle_in_order(self, ids: bytes, attempts: bytes, positions: bytes) -> bool:
        """Settle a batch if it names just the messages from the floor on, all in their first attempt, and nothing
        behind them was settled or came back: nearly every batch of a consumer that keeps up, at a tenth of the cost of
        `find` and `settle`. False: it is another batch, and nothing was done. Columns as in the log."""
        window, ready, first, count = self._window, self._ready, self._window.floor, len(ids) // 8
        last, told = first + count, ready.ids
        if window.end != first or last > told.count or count > self.window_messages_max:
            return False
        if self.pauses or ready.targets.last_position >= first or first < ready.first_retained:
            return False
        in_order = first.to_bytes(8, "little") if count == 1 else np.arange(first, last, dtype="<u8").tobytes()
        if positions != in_order or attempts != _FIRST_ATTEMPT * count or ids != told.read(first, count).tobytes():
            return False
        window.settle_to(last)
        return True

    def settle(
        self,
        kind: int,
        attempts: Attempts,
        found: Found,
        *,
        leaves: bool = False,
    ) -> tuple[SettleResult, Places]:
        """Apply one batch; returns the counts and the changed positions (rising, each once).

        `found`: the result of `find` for the batch. `leaves`: a retried message does not come back at its position but
        continues in another unit.
        """
        places, known = found
        unknown = len(places) - int(np.count_nonzero(known))
        if unknown:
            places, attempts = places[known], attempts[known]
        current = self._window.at(places)
        is_open = current > 0
        acts = is_open & (current == attempts)
        count_open, count_acts = int(np.count_nonzero(is_open)), int(np.count_nonzero(acts))
        before = len(places) - count_open
        stale = count_open - count_acts
        if kind in SETTLING:
            result = SettleResult(settled=count_acts + before, stale=stale, unknown=unknown)
        else:
            result = SettleResult(settled=count_acts, stale=stale + before, unknown=unknown)
        changed = places if count_acts == len(places) else places[acts]
        if not len(changed):
            return result, changed
        if len(changed) > 1 and not (changed[1:] > changed[:-1]).all():
            changed = np.unique(changed)
        if self.pauses:
            for place in changed.tolist():
                self.pauses.pop(place, None)
        if kind in SETTLING or leaves:
            self._window.settle(changed)
        else:
            self._window.give_back(changed)
        return result, changed

    def check(self, first: int, wanted: NDArray[np.bool_]) -> int:
        """Note that positions from `first` on, all below `stop`, met the filter; returns how many are thereby
        skipped."""
        self.checked = first + len(wanted)
        return 0 if wanted.all() else self._window.settle_unwanted(first, wanted)

    def end_pauses(self) -> None:
        """Forget the pauses of settled positions, which a filter leaves behind."""
        if self.pauses:
            places = np.fromiter(self.pauses, np.int64, len(self.pauses))
            for place in places[self._window.at(places) == 0].tolist():
                del self.pauses[place]

    def skip_foreign(self) -> None:
        """Step the floor over positions for other groups, which may have been added."""
        self._window.skip_foreign()

    def skip_before_start(self, first: int, due_ms: NDArray[np.int64]) -> None:
        """Settle the messages dispatched from position `first` on that were due before the group's start."""
        early = int(np.searchsorted(due_ms, self.start_ms))
        if early and self.floor == first:
            if self.began == first:
                self.began += early
            self.begin_at(first + early)
        if early < len(due_ms):
            self.start_ms = 0

    def raise_floor(self, position: int) -> int:
        """Settle all messages below, which are removed; returns how many were unsettled."""
        if self.judged_from == NOT_JUDGED:
            self.judged_from = self._ready.count
        if position <= self.floor:
            return 0
        if position >= self._window.end:
            self.judged_from = position
        unsettled = self._window.raise_floor(position)
        self._forget_pauses()
        return unsettled

    def forget_how(self) -> None:
        """Forget how the messages dispatched so far were settled or will be: nobody is to be told any more."""
        self.judged_from = max(self.judged_from, self._ready.count)

    def pauses_bytes(self) -> bytes:
        """int64[n, 2]: waiting positions, rising, and until when each waits."""
        return np.array(sorted(self.pauses.items()), "<i8").tobytes()

    def window_bytes(self) -> bytes:
        """uint16 for each position from the floor on."""
        return self._window.as_bytes()

    def restore(self, floor: int, start_ms: int, window: bytes) -> None:
        """Restore the content of a checkpoint."""
        self._window.restore(floor, window)
        self.start_ms = start_ms

    def digest_into(self, sha: hashlib._Hash) -> int:
        """Add the logical content to a digest. Returns the bytes of the window, on which the time depends."""
        window = self.window_bytes()
        checked = -1 if self.checked is None else self.unchecked
        facts = (self.group_id, self.topic_id, self.floor, self.start_ms, len(window), checked, self.epoch)
        sha.update(struct.pack("<IIQqQqIQQ", *facts, self.began, self.judged_from))
        sha.update(window)
        if self.pauses:
            sha.update(self.pauses_bytes())
        return len(window)

    # -- inside

    def _forget_pauses(self) -> None:
        """Forget pauses below the floor, and those of positions that a reset brings back."""
        if self.pauses:
            floor, end = self._window.floor, self._window.end
            self.pauses = {place: until_ms for place, until_ms in self.pauses.items() if floor <= place < end}

    def find(self, ids: Ids, positions: Positions | None) -> Found:
        """Position of each row of a batch."""
        if positions is None:
            return self._search(ids)
        stop = self.stop
        known = positions < stop
        places = positions.astype(np.int64)
        checked = known & (places >= self._searched_from)
        if checked.all():
            known = self._ready.gather(places) == ids
        else:
            # A position settled long ago: its id can change nothing and is not worth a read.
            known[checked] = self._ready.gather(places[checked]) == ids[checked]
        return Found(places, known)

    def _search(self, ids: Ids) -> Found:
        wanted, of_id = np.unique(ids, return_inverse=True)
        place_of = np.full(len(wanted), -1, np.int64)
        missing = len(wanted)
        # Open positions first: nearly every id is there.
        for first, stop in ((self.first_open, self.stop), (self._searched_from, self.first_open)):
            at = first
            while at < stop and missing:
                end = min(stop, at + CHUNK)
                here = self._ready.read(at, end - at)
                near = np.flatnonzero((here >= wanted[0]) & (here <= wanted[-1]))
                candidates = here[near]
                left = wanted.searchsorted(candidates)
                hits = wanted[left] == candidates
                place_of[left[hits]] = at + near[hits]
                missing -= int(np.count_nonzero(hits))
                at = end
        places = place_of[of_id]
        known = places >= 0
        places[~known] = 0
        return Found(places, known)


class Window:
    """The attempts in flight: of each message of a ready queue from the first unsettled one on, which attempt counts.

    Invariants:
    - Everything below `floor` is settled; the message at `floor` is not (or has not been dispatched yet).
    - `_values[p - _base]` of a position in [floor, end): 0 settled, else the number of its attempt.
      From `end` on the attempt is 1 and nothing is settled but positions meant for another group.
    - `returned_count` is how many values are above 1, `settled` how many positions are settled, those below the floor
      included.

    Memory goes with [floor, end), not with the queue: a window that covers nothing holds no array. Every change of
    `settled` is told to the backlog at once. The subscription says what may be settled; this says only what is.
    """

    __slots__ = (
        "_backlog",
        "_base",
        "_group_id",
        "_ready",
        "_returned_from",
        "_topic_id",
        "_values",
        "end",
        "floor",
        "returned_count",
        "settled",
    )

    def __init__(self, group_id: int, topic_id: int, ready: ReadyLog, backlog: Backlog) -> None:
        self._group_id = group_id
        self._topic_id = topic_id
        self._ready = ready
        self._backlog = backlog
        self.floor = 0
        self.end = 0
        self.settled = 0
        """Settled positions, those below the floor included."""
        self.returned_count = 0
        """Unsettled messages with an attempt above 1."""
        self._values = _NOTHING
        self._base = 0
        """Position of `_values[0]`."""
        self._returned_from = 0
        """No position below is returned; only saves searching."""
        backlog.add(group_id, topic_id, ready.count)

    def forget(self) -> None:
        """The group or topic is gone: take its messages off the backlog."""
        self._hold(_NOTHING)
        self._backlog.add(self._group_id, self._topic_id, self.settled - self._ready.count)

    # -- settled positions

    def span(self, first: int, last: int) -> Values:
        """Values of [first, last), which lies above the floor. Do not write to them."""
        inside = max(0, min(last, self.end) - first)
        start = first - self._base
        if inside == last - first:
            return self._values[start : start + inside]
        values = np.ones(last - first, np.uint16)
        values[:inside] = self._values[start : start + inside]
        foreign = self._ready.foreign(self._group_id, first + inside, last)
        if len(foreign):
            values[foreign - first] = 0
        return values

    def at(self, places: Places) -> Values:
        """Values at any positions. Do not write to them."""
        if len(places) == 1 and int(places[0]) >= self.end:
            return _CLOSED if len(self._ready.foreign(self._group_id, int(places[0]), int(places[0]) + 1)) else _OPEN
        values = np.ones(len(places), np.uint16)
        if not len(places):
            return values
        least, most = int(places.min()), int(places.max())
        if least < self.end:
            if least >= self.floor and most < self.end:
                return self._values[places - self._base]
            values[places < self.floor] = 0
            inside = (places >= self.floor) & (places < self.end)
            values[inside] = self._values[places[inside] - self._base]
        if most >= self.end:
            beyond = np.flatnonzero(places >= self.end)
            hits, rows = self._ready.targets.of(places[beyond])
            values[beyond[hits[rows["group"] != self._group_id]]] = 0
        return values

    def returned(self, limit: int, first: int) -> Places:
        """Up to `limit` unsettled positions from `first` on that came back, rising."""
        begin = max(self._returned_from, self.floor)
        at = max(begin, first)
        parts: list[Places] = []
        missing = min(limit, self.returned_count)
        while at < self.end and missing > 0:
            end = min(self.end, at + CHUNK)
            found = at + np.flatnonzero(self._values[at - self._base : end - self._base] > 1)
            if not parts and len(found) and at == begin:
                self._returned_from = int(found[0])
            parts.append(found[:missing])
            missing -= len(parts[-1])
            at = end
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def growth(self, last: int) -> int:
        """By how many values the array would grow if a position were settled or given back; 0: not at all."""
        end = last + 1
        if end - self._base <= len(self._values):
            return 0
        return max(CAPACITY_LEAST, 2 * (end - self.floor)) - len(self._values)

    # -- changes

    def begin_at(self, position: int) -> None:
        """Nothing from this position on is settled; everything below is."""
        self.floor = self._base = self.end = self._returned_from = position
        self.returned_count = 0
        self._note_settled(position - self.settled)
        self._advance()

    def settle(self, places: Places) -> None:
        """Settle positions, which are rising and unsettled."""
        end = int(places[-1]) + 1
        if self.floor == self.end == int(places[0]) and end - self.end == len(places):
            self.settle_to(end)
            return
        self._cover(end)
        at = places - self._base
        if self.returned_count:
            self.returned_count -= int(np.count_nonzero(self._values[at] > 1))
        self._values[at] = 0
        self._note_settled(len(places))
        self._advance()

    def settle_to(self, end: int) -> None:
        """Settle the positions from the floor to below `end`. The window covers nothing, and none of them is for
        another group: over many topics nearly every settlement, and no array is needed for it."""
        count = end - self.floor
        self.settled += count
        self._backlog.add(self._group_id, self._topic_id, -count)
        self.floor = self._base = self.end = end
        if self._ready.targets.last_position >= end:
            self._advance()

    def give_back(self, places: Places) -> None:
        """End the attempts that are out for positions, which are rising and unsettled: the next attempt counts."""
        self._cover(int(places[-1]) + 1)
        at = places - self._base
        old = self._values[at]
        self._values[at] = np.minimum(old, ATTEMPT_MAX - 1) + 1
        self.returned_count += int(np.count_nonzero(old == 1))
        self._returned_from = min(self._returned_from, int(places[0]))

    def settle_unwanted(self, first: int, wanted: NDArray[np.bool_]) -> int:
        """Settle the unwanted ones of the positions from `first` on, which is not below the floor; returns how many."""
        end = first + len(wanted)
        self._cover(end)
        values = self._values[first - self._base : end - self._base]
        settled = ~wanted & (values != 0)
        count = int(np.count_nonzero(settled))
        if count:
            self.returned_count -= int(np.count_nonzero(values[settled] > 1))
            values[settled] = 0
            self._note_settled(count)
            self._advance()
        return count

    def skip_foreign(self) -> None:
        """Step the floor over positions for other groups, which may have been added."""
        if self.floor == self.end:
            self._advance()

    def raise_floor(self, position: int) -> int:
        """Settle all positions below one that lies above the floor; returns how many were unsettled."""
        if position >= self.end:
            # All that the window covers, and perhaps more: counted without a look at the values.
            unsettled, at = position - self.settled, self.end
            while at < position:
                end = min(position, at + CHUNK)
                unsettled -= len(self._ready.foreign(self._group_id, at, end))
                at = end
            self.begin_at(position)
            return unsettled
        unsettled, at = 0, self.floor
        while at < position:
            end = min(position, at + CHUNK)
            values = self.span(at, end)
            unsettled += int(np.count_nonzero(values))
            self.returned_count -= int(np.count_nonzero(values > 1))
            at = end
        self.floor = position
        self._note_settled(unsettled)
        self._advance()
        return unsettled

    def as_bytes(self) -> bytes:
        """uint16 for each position from the floor on."""
        return self._held().astype("<u2").tobytes() if self.end > self.floor else b""

    def restore(self, floor: int, data: bytes) -> None:
        """Restore what `as_bytes` returned."""
        values = np.frombuffer(data, "<u2")
        self._hold(np.array(values, np.uint16))
        self.floor = self._base = self._returned_from = floor
        self.end = floor + len(values)
        self.returned_count = int(np.count_nonzero(values > 1))
        self._note_settled(floor + int(np.count_nonzero(values == 0)) - self.settled)

    # -- inside

    def _hold(self, values: Values) -> None:
        self._backlog.window_values += len(values) - len(self._values)
        self._values = values

    def _note_settled(self, count: int) -> None:
        self.settled += count
        self._backlog.add(self._group_id, self._topic_id, -count)

    def _held(self) -> Values:
        return self._values[self.floor - self._base : self.end - self._base]

    def _cover(self, end: int) -> None:
        """Extend the array so that `end` is at least this."""
        if end <= self.end:
            return
        if end - self._base > len(self._values):
            used = self._held()
            capacity = max(CAPACITY_LEAST, 2 * (end - self.floor))
            values = np.ones(capacity, np.uint16)
            values[: len(used)] = used
            self._hold(values)
            self._base = self.floor
        start = self.end - self._base
        self._values[start : end - self._base] = 1
        foreign = self._ready.foreign(self._group_id, self.end, end)
        if len(foreign):
            self._values[foreign - self._base] = 0
            self._note_settled(len(foreign))
        self.end = end

    def _advance(self) -> None:
        """Move the floor over settled positions."""
        at, step = self.floor, 256
        while at < self.end:
            end = min(self.end, at + step)
            values = self._values[at - self._base : end - self._base]
            first_open = int(np.argmax(values != 0))
            if values[first_open]:
                self.floor = at + first_open
                return
            at, step = end, min(2 * step, CHUNK)
        while at < self._ready.count:
            foreign = self._ready.foreign(self._group_id, at, at + CHUNK)
            if not len(foreign):
                break
            run = np.flatnonzero(foreign != at + np.arange(len(foreign)))
            skipped = int(run[0]) if len(run) else len(foreign)
            at += skipped
            if skipped < CHUNK:
                break
        if at > self.end:
            self._note_settled(at - self.end)
        self.floor = self._base = self.end = at
        if len(self._values):
            self._hold(_NOTHING)


def largest(counts: Mapping[int, int], limit: int) -> list[int]:
    """The keys of the `limit` largest counts, largest first, by rising key where they are equal. Costs less than 0.1 us
    for each key."""
    keys, numbers = (np.fromiter(values, np.int64, len(counts)) for values in (counts.keys(), counts.values()))
    if len(numbers) > limit:
        rows = np.flatnonzero(numbers >= np.partition(numbers, -limit)[-limit])
        keys, numbers = keys[rows], numbers[rows]
    found: list[int] = keys[np.lexsort((keys, -numbers))[:limit]].tolist()
    return found


class Backlog:
    """Counts dispatched messages that groups have not settled yet: in all, by topic, and by group.

    A message counts once for each group. The counts are updated with each change, so reading them costs the same with
    any number of topics or groups. Also counts the memory of all their windows. Invariant: `by_topic` has exactly the
    topics whose count is not 0, `by_group` the groups, and `total` is the sum of either.

    Changed by the windows of subscriptions and by units that enter a ready queue. No part of the replicated state,
    since it follows from it.
    """

    __slots__ = ("by_group", "by_topic", "total", "window_values")

    def __init__(self) -> None:
        self.total = 0
        self.window_values = 0
        """Values in the arrays of all windows, two bytes each."""
        self.by_topic: dict[int, int] = {}
        self.by_group: dict[int, int] = {}

    def add(self, group_id: int, topic_id: int, count: int) -> None:
        """`count` more messages (fewer, if negative) of this topic wait for this group."""
        if not count:
            return
        self.total += count
        for counts, key in ((self.by_topic, topic_id), (self.by_group, group_id)):
            waiting = counts.get(key, 0) + count
            if waiting:
                counts[key] = waiting
            else:
                del counts[key]

    def arrived(self, topic_id: int, subscriptions: Sequence[Subscription], count: int) -> None:
        """`count` new messages, at least one, wait in each of these subscriptions, which are those of their topic."""
        by_group, added = self.by_group, len(subscriptions) * count
        for subscription in subscriptions:
            group_id = subscription.group_id
            by_group[group_id] = by_group.get(group_id, 0) + count
        if added:
            self.total += added
            self.by_topic[topic_id] = self.by_topic.get(topic_id, 0) + added

    def fullest(self, limit: int) -> list[int]:
        """The `limit` topics with most waiting messages, most first."""
        return largest(self.by_topic, limit)
