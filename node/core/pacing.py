"""When the entries of the log leave: three rules of the proposer, each with what it has measured.

Schedules have a window of bytes (`PublishWindow`), entries leave apart (`Spacing`), and the next entry of schedules
waits a moment for callers who just got their answers (`ReturningCallers`). Soft state; times are the cluster's.
"""

from __future__ import annotations

GATHER_BYTES_MAX = 64 << 10
"""Waiting commands of this many bytes are worth an entry: they wait no longer."""
COMMIT_MS = 50
"""Time from proposal to apply that the window of schedules aims at. The log at full speed on two cores needs about 20
ms for what one round trip holds."""
WINDOW_BYTES_MIN = 128 << 10
OTHERS_MS = 1_000
"""Schedules leave room for other commands while one of those was proposed no longer ago than this."""
SPACING = 2
SPACING_MS_MIN, SPACING_MS_MAX = 8, 40
"""Entries that are spaced leave SPACING times as long apart as they take, within these bounds."""
UNHURRIED_MS_MIN = 24
"""Least time to a spaced entry with nothing that anybody waits for: dispatches, which go ahead, and settlements."""
RATE_MS = 250
"""The rate of messages is measured over this time."""
RETURN_MS_MAX = 3
"""Longest wait for callers to send again; at most half of the time in which they got their answers."""
SKIPS_MAX = 64


class PublishWindow:
    """How many bytes of schedules may be under way in the log: as many as it commits and applies in COMMIT_MS.

    Shrinks in proportion when an entry takes longer, but once a round trip, by half at most, and only beside other
    commands. Grows by what came in time.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = bytes_max
        self._bytes_max = bytes_max
        self._in_flight = 0
        self._shrunk_ms = 0
        self._others_ms = -OTHERS_MS

    @property
    def open(self) -> bool:
        """Whether another entry may leave. A single one always may, whatever its size."""
        return self._in_flight < self.bytes

    def proposed(self, size: int, now_ms: int, *, others: bool) -> None:
        """An entry leaves with `size` bytes of schedules. `others`: it holds other commands too."""
        self._in_flight += size
        if others:
            self._others_ms = now_ms

    def answered(self, size: int, proposed_ms: int, now_ms: int, *, committed: bool) -> None:
        """An entry with `size` bytes of schedules has its answer."""
        self._in_flight -= size
        if not committed or not size:
            return
        took_ms = now_ms - proposed_ms
        if took_ms <= COMMIT_MS or not self.shared(now_ms):
            self.bytes = min(self._bytes_max, self.bytes + size)
        elif proposed_ms >= self._shrunk_ms:
            self._shrunk_ms = now_ms
            self.bytes = max(WINDOW_BYTES_MIN, self.bytes * max(COMMIT_MS, took_ms // 2) // took_ms)

    def shared(self, now_ms: int) -> bool:
        """Whether other commands were proposed lately."""
        return now_ms - self._others_ms <= OTHERS_MS


class Spacing:
    """How far apart entries leave.

    An entry costs every node the same work however little is in it: processors, disks, frames. So where schedules share
    the nodes with deliveries, the next entry leaves SPACING times as long after the last one as entries take lately:
    the slower the nodes, the fewer and larger the entries. Where few messages come, entries are not spaced: callers who
    wait for each answer would wait longer, and save little. Schedules without deliveries are not spaced either.
    """

    def __init__(self, rate_min: int) -> None:
        """`rate_min`: messages a second from which on entries are spaced."""
        self.ms = 0
        self._rate_min = rate_min
        self._took_ms = 0.0
        self._messages = 0
        self._counts_from_ms = 0

    @property
    def unhurried_ms(self) -> int:
        """How far entries with nothing that anybody waits for leave after the last one."""
        return max(self.ms, UNHURRIED_MS_MIN) if self.ms else 0

    def answered(self, messages: int, proposed_ms: int, now_ms: int, *, shared: bool) -> None:
        """An entry with so many messages has been committed and applied. `shared`: not only schedules come."""
        self._took_ms += (max(0, now_ms - proposed_ms) - self._took_ms) / 8
        self._messages += messages
        counted_ms = now_ms - self._counts_from_ms
        if 0 <= counted_ms < RATE_MS:
            return
        many = shared and self._messages * 1_000 >= self._rate_min * counted_ms > 0
        self.ms = min(SPACING_MS_MAX, max(SPACING_MS_MIN, int(SPACING * self._took_ms))) if many else 0
        self._messages, self._counts_from_ms = 0, now_ms


class ReturningCallers:
    """Holds the next entry of schedules for a moment when callers that just got their answers will send again.

    Callers that each wait for their answer otherwise fall into two groups that take turns: one waits while the entry of
    the other is under way. Then each entry has half of them, and each call takes two rounds. Disks are scheduled in the
    same way (S. Iyer and P. Druschel, "Anticipatory scheduling", SOSP 2001). If the callers stay away, ever more
    entries leave at once before the next one is held. Callers are counted by their requests, whatever their sizes; a
    caller alone is never held up.
    """

    def __init__(self) -> None:
        self.until_ms = 0
        """End of the wait for them; 0: they are not awaited. Set to 0 when an entry leaves with all that waited."""
        self._wanted = 0
        self._enough = 0
        self._alone_until_ms = 0
        """Until then they are callers who bring one message each; 0: they brought more."""
        self._skips = 0
        """Entries that leave at once before one is held again."""
        self._skips_next = 1

    def answered(
        self, callers: int, size: int, took_ms: int, waiting: int, now_ms: int, *, alone: bool = False
    ) -> None:
        """An entry with `size` bytes of schedules has been answered, and no other is under way; so many requests wait
        for the next. `alone`: each caller brought one message."""
        self._wanted = waiting + callers
        hold_ms = min(RETURN_MS_MAX, took_ms // 2)
        self._alone_until_ms = now_ms + max(1, hold_ms) if alone else 0
        if size >= GATHER_BYTES_MAX or hold_ms <= 0:
            return
        if self._skips:
            self._skips -= 1
            return
        self.until_ms = now_ms + hold_ms
        self._enough = waiting + (callers + 1) // 2

    def leaves_ms(self, waiting: int, now_ms: int) -> int | None:
        """When an entry of so many requests leaves: `until_ms` while more are awaited; now, if callers who bring one
        message each are all waiting again, so soon that nobody else can have come. None: they do not decide it."""
        if self.until_ms:
            # More left than was ever held: the cluster's time was set back.
            if waiting < self._wanted and 0 < self.until_ms - now_ms <= RETURN_MS_MAX:
                return self.until_ms
            self.until_ms = 0
            if waiting >= self._enough:
                self._skips_next = 1
            else:
                self._skips, self._skips_next = self._skips_next, min(SKIPS_MAX, 2 * self._skips_next)
        return now_ms if waiting >= self._wanted and now_ms <= self._alone_until_ms else None
