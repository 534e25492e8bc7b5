"""When a recurring schedule runs: by a cron text in a time zone, or every so many milliseconds.

Pure: no clock and no state; the only data outside the arguments are those of the time zones (zoneinfo: the system's, or
else the package tzdata). The master computes planned times and writes them into the log, so apply never asks here.

cronsim parses the text and says which days of a month match. The walk over the times is ours: it treats texts with and
without seconds alike, changes of a zone's clock of any size, and never takes long (`Pattern`).

Changes of a zone's clock, as Debian's cron treats them. A text by the clock has a second, minute or hour that begins
with `*`: it runs whenever the wall clock shows a matching time, so not at all in an hour that is left out, and twice in
an hour that comes twice. Any other text has fixed times: each runs exactly once. If the time is left out, it runs at
the moment of the change, once for all such times. If it comes twice, it runs the first time.
"""

from __future__ import annotations

from bisect import bisect_left
from calendar import monthrange
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache, lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from tickwheel.node.failure import invalid

CRON_CHARACTERS_MAX = 256
"""More than any text needs that somebody can read; bounds what parsing one costs."""
ZONE_CHARACTERS_MAX = 64
INTERVAL_MS_MIN = 1_000
"""As often as a cron text can."""
INTERVAL_MS_MAX = 400 * 86_400_000
LATEST_MS = 13_569_465_600_000
"""The year 2400. Nothing is planned from here on."""
PATTERNS_KEPT = 4_096
"""Parsed cron texts; 100,000 schedules usually have few different ones."""

_DAY_S = 86_400
_EPOCH = date(1970, 1, 1).toordinal()
_MONTHS_SEARCHED = 12 * 41
"""Those that match rarest, 29 February on one weekday, are 40 years apart around 2100."""
_YEARS_BACK_S = 41 * 366 * _DAY_S
_FIELDS = {
    "second": "0 to 59",
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31 where its months have that day, L (last day) or LW (last day from Monday to Friday)",
    "month": "1 to 12 or JAN to DEC",
    "day-of-week": "0 to 7 or SUN to SAT (0 and 7 are Sunday), 5L (last Friday) or 2#1 (first Tuesday)",
}
_FORM = "lists a,b, ranges a-b from low to high (MON-SUN is 1-7) and steps */n or a-b/n"


def _shapes() -> dict[tuple[int, int], date]:
    """A first day of a month of every length that begins on every weekday: which days of a month match depends on
    these two only."""
    found: dict[tuple[int, int], date] = {}
    for year in range(2000, 2028):
        for month in range(1, 13):
            first, length = monthrange(year, month)
            found[length, first] = date(year, month, 1)
    return found


_SHAPES = _shapes()
_LENGTHS = {month: (28, 29) if month == 2 else (monthrange(2000, month)[1],) for month in range(1, 13)}


class Pattern:
    """A parsed cron text: which wall times match. A wall time is the number of seconds that a clock without a zone has
    counted since 1970-01-01T00:00. Raises RequestError for a wrong text, and for one that never matches."""

    __slots__ = ("_days", "_hours", "_minutes", "_months", "_parsed", "_seconds", "by_clock")

    def __init__(self, text: str) -> None:
        if len(text) > CRON_CHARACTERS_MAX:
            raise invalid("cron", text, f"at most {CRON_CHARACTERS_MAX} characters")
        fields = text.split() if text.isascii() and text.isprintable() else []
        if len(fields) not in (5, 6):
            raise invalid(
                "cron", text, "five fields (minute hour day-of-month month day-of-week) or six (a second before these)"
            )
        try:
            self._parsed = CronSim(text, datetime(2000, 1, 1))
        except CronSimError as error:
            field = str(error).removeprefix("Bad ")
            raise invalid("cron", text, f"{field}: {_FIELDS[field]}; {_FORM}") from None
        self._seconds = sorted(self._parsed.seconds)
        self._minutes = sorted(self._parsed.minutes)
        self._hours = sorted(self._parsed.hours)
        self._months = frozenset(self._parsed.months)
        self._days: dict[tuple[int, int], tuple[int, ...]] = {}
        self.by_clock = any(field.startswith("*") for field in fields[:-3])
        """Whether it follows the wall clock through a change; otherwise each of its times runs once."""
        if not any(
            self._days_of(length, first) for month in self._months for length in _LENGTHS[month] for first in range(7)
        ):
            raise invalid("cron", text, "a date that exists: no month has such a day")

    def _days_of(self, length: int, first: int) -> tuple[int, ...]:
        """The matching days of a month with so many days that begins on this weekday."""
        days = self._days.get((length, first))
        if days is None:
            begin = _SHAPES[length, first]
            days = tuple(day for day in range(1, length + 1) if self._parsed.match_day(begin.replace(day=day)))
            self._days[length, first] = days
        return days

    def _day_from(self, day: date) -> date | None:
        """The first matching day that is not before `day`."""
        year, month, least = day.year, day.month, day.day
        for _ in range(_MONTHS_SEARCHED):
            if month in self._months:
                first, length = monthrange(year, month)
                days = self._days_of(length, first)
                place = bisect_left(days, least)
                if place < len(days):
                    return date(year, month, days[place])
            least = 1
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
        return None

    def _time_from(self, second: int) -> int | None:
        """The first matching second of a day that is not before this one."""
        hour, rest = divmod(second, 3_600)
        minute, rest = divmod(rest, 60)
        place = bisect_left(self._hours, hour)
        if place == len(self._hours):
            return None
        if self._hours[place] == hour:
            at = bisect_left(self._minutes, minute)
            if at < len(self._minutes) and self._minutes[at] == minute:
                exact = bisect_left(self._seconds, rest)
                if exact < len(self._seconds):
                    return hour * 3_600 + minute * 60 + self._seconds[exact]
                at += 1
            if at < len(self._minutes):
                return hour * 3_600 + self._minutes[at] * 60 + self._seconds[0]
            place += 1
            if place == len(self._hours):
                return None
        return self._hours[place] * 3_600 + self._minutes[0] * 60 + self._seconds[0]

    def wall_from(self, wall: int) -> int | None:
        """The first matching wall time that is not before `wall`; None: there is none."""
        number, second = divmod(wall, _DAY_S)
        today = date.fromordinal(_EPOCH + number)
        day = self._day_from(today)
        if day == today:
            time = self._time_from(second)
            if time is not None:
                return number * _DAY_S + time
            day = self._day_from(date.fromordinal(_EPOCH + number + 1))
        if day is None:
            return None
        first = self._hours[0] * 3_600 + self._minutes[0] * 60 + self._seconds[0]
        return (day.toordinal() - _EPOCH) * _DAY_S + first


@lru_cache(PATTERNS_KEPT)
def _pattern(text: str) -> Pattern:
    return Pattern(text)


@cache
def _zone_names() -> frozenset[str]:
    """The names that IANA gives out: not the other files of a system's folder, such as localtime, posix or right."""
    return frozenset((files("tzdata") / "zones").read_text(encoding="ascii").split()) - {"Factory"}


@cache
def _zone_hints() -> dict[str, str]:
    """Names by what people type: in small letters, or only the last part."""
    names = sorted(_zone_names(), key=lambda name: not name.startswith("Etc/"))
    last = {name.rpartition("/")[2].lower(): name for name in names}
    return last | {name.lower(): name for name in names}


@lru_cache(1_024)
def _zone(name: str) -> ZoneInfo:
    if name in _zone_names():
        try:
            return ZoneInfo(name)
        except (OSError, ValueError, LookupError) as error:
            # The host's file is damaged, or may not be read.
            raise invalid("zone", name, f"a zone whose data this node can read: {error}") from None
    hint = _zone_hints().get(name.lower().replace(" ", "_")) if len(name) <= ZONE_CHARACTERS_MAX else None
    allowed = "an IANA time zone such as Europe/Berlin or UTC"
    raise invalid("zone", name, allowed + (f"; did you mean {hint}?" if hint else ""))


def _offset_s(zone: ZoneInfo, moment_s: int) -> int:
    """Seconds by which the zone's wall clock is ahead of UTC at a moment."""
    offset = datetime.fromtimestamp(moment_s, zone).utcoffset()
    assert offset is not None
    return offset.days * _DAY_S + offset.seconds


def _change_s(zone: ZoneInfo, before_s: int, after_s: int) -> int:
    """The first second after the change of the offset that lies between two moments."""
    old = _offset_s(zone, before_s)
    while after_s - before_s > 1:
        middle = (before_s + after_s) // 2
        if _offset_s(zone, middle) == old:
            before_s = middle
        else:
            after_s = middle
    return after_s


def _wall_at(zone: ZoneInfo, moment_s: int, by_clock: bool) -> int:
    """The least wall time that may run at this moment or later."""
    now = datetime.fromtimestamp(moment_s, zone)
    offset = _offset_s(zone, moment_s)
    if by_clock:
        return moment_s + offset
    if now.fold:
        # The wall clock shows this time again: the times that come twice have run.
        earlier = now.replace(fold=0).utcoffset()
        assert earlier is not None
        old = earlier.days * _DAY_S + earlier.seconds
        return _change_s(zone, moment_s - (old - offset), moment_s) + old
    # At the moment of a change the times that it leaves out run.
    return moment_s + min(offset, _offset_s(zone, moment_s - 1))


def _moment_from(pattern: Pattern, zone: ZoneInfo, moment_s: int) -> int | None:
    """The first planned moment that is not before this one.

    Goes from one change of the offset to the next, since between two of them the wall clock runs evenly. Days without
    a match are jumped over, so there are some turns at most.
    """
    offset = _offset_s(zone, moment_s)
    wall = _wall_at(zone, moment_s, pattern.by_clock)
    while True:
        found = pattern.wall_from(wall)
        if found is None:
            return None
        candidate = max(moment_s, found - offset)
        far = min(candidate, moment_s + _DAY_S)
        if _offset_s(zone, far) == offset:  # no zone changes twice within a day
            if far == candidate:
                return candidate
            # No wall time between `wall` and `found` matches, and no offset is as large as two days.
            moment_s = max(far, found - 2 * _DAY_S)
            offset = _offset_s(zone, moment_s)
            wall = moment_s + offset
            continue
        moment_s = _change_s(zone, moment_s, far)
        old, offset = offset, _offset_s(zone, moment_s)
        wall = moment_s + (offset if pattern.by_clock else old)


@dataclass(frozen=True, slots=True)
class Calendar:
    """The planned times of one schedule, in milliseconds since 1970. Made by `calendar_of`."""

    cron: str
    zone: str
    interval_ms: int
    start_ms: int
    end_ms: int
    """0: it never ends."""

    def next_after(self, ms: int) -> int | None:
        """The first planned time that is later than `ms`; None: there is none."""
        least = max(ms + 1, self.start_ms, 0)
        if least > (self.end_ms or LATEST_MS) or least > LATEST_MS:
            return None
        found = self._from(least)
        return found if found is not None and found <= (self.end_ms or LATEST_MS) else None

    def _from(self, ms: int) -> int | None:
        """The first time that is not before `ms`, wherever the schedule ends."""
        if self.interval_ms:
            return self.start_ms + -(-(ms - self.start_ms) // self.interval_ms) * self.interval_ms
        found = _moment_from(_pattern(self.cron), _zone(self.zone), -(-ms // 1_000))
        return None if found is None else found * 1_000

    def last_until(self, ms: int) -> int | None:
        """The last planned time that is not later than `ms`; None: there is none. Takes some 40 steps at most, however
        many times lie before it."""
        ms = min(ms, self.end_ms or LATEST_MS, LATEST_MS)
        if self.interval_ms:
            past = (ms - self.start_ms) // self.interval_ms
            return self.start_ms + past * self.interval_ms if past >= 0 else None
        found = None
        for back_s in (60, 3_600, _DAY_S, 32 * _DAY_S, 366 * _DAY_S, _YEARS_BACK_S):
            found = self.next_after(ms - back_s * 1_000)
            if found is not None and found <= ms:
                break
        if found is None or found > ms:
            return None
        after = ms
        while found < after:
            middle = (found + after) // 2
            later = self.next_after(middle)
            if later is None or later > ms:
                after = middle
            else:
                found = later
        return found

    def between(self, from_ms: int, to_ms: int, count_max: int) -> list[int]:
        """The planned times later than `from_ms` and not later than `to_ms`, oldest first, the first `count_max`."""
        times: list[int] = []
        while len(times) < count_max:
            found = self.next_after(from_ms)
            if found is None or found > to_ms:
                break
            times.append(found)
            from_ms = found
        return times


def calendar_of(
    *, cron: str = "", zone: str = "", interval_ms: int = 0, start_ms: int = 0, end_ms: int = 0
) -> Calendar:
    """The calendar of a cron text, or of an interval counted from `start_ms` (without it from 1970, so that 15 minutes
    are the quarters of every hour). Start and end belong to it; 0: none. Without a zone it goes by UTC.

    Raises RequestError, with the field, its value and what is allowed.
    """
    for name, value in (("start_ms", start_ms), ("end_ms", end_ms)):
        if not 0 <= value <= LATEST_MS:
            raise invalid(name, value, f"0 (none) to {LATEST_MS}")
    if bool(cron) == bool(interval_ms):
        raise invalid("cron", cron or "none", "exactly one of cron and interval_ms")
    if interval_ms:
        if not INTERVAL_MS_MIN <= interval_ms <= INTERVAL_MS_MAX:
            raise invalid("interval_ms", interval_ms, f"{INTERVAL_MS_MIN} to {INTERVAL_MS_MAX}")
        if zone:
            raise invalid("zone", zone, "none: an interval has no wall clock; only cron does")
    else:
        _pattern(cron)
        zone = _zone(zone or "UTC").key
    made = Calendar(cron, zone, interval_ms, start_ms, end_ms)
    if end_ms and made.next_after(-1) is None:
        raise invalid(
            "end_ms",
            end_ms,
            "a time that is not before the first run" if end_ms >= start_ms else f"at least start_ms, {start_ms}",
        )
    return made
