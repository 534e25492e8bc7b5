"""Moments and spans of time: aware datetimes and timedeltas for people, whole milliseconds for nodes. Pure.

A time that a node gets is rounded up to a millisecond, so that nothing is due before it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tickwheel.client.errors import refused

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
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


def span_of(ms: int) -> timedelta:
    """The span of so many milliseconds."""
    return timedelta(milliseconds=ms)


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
