"""Moments and spans of time: aware datetimes and timedeltas for people, whole milliseconds for nodes. Pure.

A time that a node gets is rounded up to a millisecond, so that nothing is due before it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tickwheel.client.errors import refused

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
_UNITS = {
    "ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks",
}  # fmt: skip
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)")
DURATION = re.compile(rf"(?:{_PART.pattern})+")
NAIVE = "a datetime with a time zone: datetime.now(UTC) + ..., or .astimezone() if it is meant in local time"


def ms_of(field: str, moment: datetime) -> int:
    """Milliseconds since 1970. Raises RequestRefused, which names `field`, for a naive datetime."""
    if not isinstance(moment, datetime):
        raise refused(field, repr(moment), NAIVE)
    if moment.utcoffset() is None:
        raise refused(field, repr(moment), NAIVE)
    return -((EPOCH - moment) // MILLISECOND)


def span_ms_of(field: str, span: timedelta) -> int:
    """A span in milliseconds. Raises RequestRefused, which names `field`, for anything but a timedelta."""
    if not isinstance(span, timedelta):
        raise refused(field, repr(span), "a timedelta, such as timedelta(seconds=5)")
    ms, rest = divmod(span, MILLISECOND)
    return ms + bool(rest)


def moment_of(ms: int) -> datetime:
    """The datetime in UTC. A time that no datetime can hold becomes the first or last one there is."""
    try:
        return EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return (datetime.min if ms < 0 else datetime.max).replace(tzinfo=UTC)


def duration_of(text: str) -> timedelta:
    """`250ms`, `5s`, `1h30m`, `52w` as a span. Raises ValueError, which says what a duration is."""
    try:
        if not DURATION.fullmatch(text):
            raise ValueError
        return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in _PART.findall(text)), timedelta())
    except (ValueError, OverflowError):
        raise ValueError(f"a duration is numbers with {', '.join(_UNITS)}, such as 250ms or 1h30m") from None


def moment_if(ms: int) -> datetime | None:
    """The datetime in UTC; None for 0, by which nodes say that there is none."""
    return moment_of(ms) if ms else None


def span_of(ms: float) -> timedelta:
    """The span of so many milliseconds, to the microsecond. One that no timedelta can hold becomes the longest."""
    try:
        return timedelta(milliseconds=ms)
    except OverflowError:
        return timedelta.min if ms < 0 else timedelta.max


def range_ms(
    due_from: datetime | None, due_before: datetime | None, due_ms_min: int, due_ms_max: int
) -> tuple[int, int]:
    """Bounds in milliseconds, from one on and below the other; 0 for none. Raises RequestRefused for a bound that is
    given twice."""
    if due_from is not None:
        if due_ms_min:
            raise refused("due_from", due_from, "not together with due_ms_min")
        due_ms_min = ms_of("due_from", due_from)
    if due_before is not None:
        if due_ms_max:
            raise refused("due_before", due_before, "not together with due_ms_max")
        due_ms_max = ms_of("due_before", due_before)
    return due_ms_min, due_ms_max
