"""Times as text: durations such as `1h30m`, and moments of RFC 3339."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_DURATION = re.compile(r"(?:\d{1,12}(?:\.\d{1,9})?(?:ms|s|m|h|d))+\Z")
_PART = re.compile(r"([\d.]+)(ms|s|m|h|d)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def duration_of(text: str) -> timedelta:
    """`250ms`, `5s`, `1h30m`. Raises ValueError with what is allowed."""
    try:
        if not _DURATION.match(text):
            raise ValueError
        return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in _PART.findall(text)), timedelta())
    except (ValueError, OverflowError):
        raise ValueError("a duration is numbers with ms, s, m, h or d, such as 250ms or 1h30m") from None


def moment_of(text: str) -> datetime:
    """A moment with a time zone. Raises ValueError with what is allowed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("a time of RFC 3339 with a zone, such as 2026-12-24T18:00:00+01:00")
    return moment
