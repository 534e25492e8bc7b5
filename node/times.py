"""Times in words, beside the milliseconds that nodes count in. Pure.

What is given as `7d` or as a date must not come back as milliseconds alone. The field's name decides which it is: a
moment or a span.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(r"(?:.*[._]|)(?P<of>[a-z]+)_ms(?:_min|_max)?(?:\[\d+\])?")
_MOMENTS = frozenset({"due", "requested", "planned", "from", "until", "after", "before", "start", "end"})
"""Last words of the fields that hold moments; every other time is a span."""
_WORTH_WORDS_MS = 1_000
_MOMENTS_FROM_MS = 10**12
"""A number in the limit of a moment is a moment from here (2001) on. Below it is a span: none is longer than ten years,
a third of this."""
_STATED = re.compile(r"(?<![\w.-])(?<!since )(-?\d+)(?: ms\b)?(?= to\b| or\b| ahead\b| either\b| when\b|[),;]|$)")
"""The numbers of a limit that are times; a number before another word counts something."""


def span_text(ms: int) -> str:
    """A span for people: 3d, 1h30m; the largest units first."""
    if ms < 0:
        return f"-{span_text(-ms)}"
    parts = []
    for unit, unit_ms in reversed(_UNIT_MS.items()):
        count, ms = divmod(ms, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def in_words(field: str, value: object, limit: str) -> tuple[str, str]:
    """Value and limit of a field, in milliseconds, with words beside each time: `1000 (1s)`, `60000 (1m) to ...`.

    Texts of a field that is no time, or whose value is no whole number, stay as they are.
    """
    found = _TIME.fullmatch(field)
    if found is None or isinstance(value, bool) or not isinstance(value, int):
        return str(value), limit
    moment = found["of"] in _MOMENTS

    def stated(number: re.Match[str]) -> str:
        ms = int(number[1])
        words = _words(ms, moment and ms >= _MOMENTS_FROM_MS)
        if not words:
            return number[0]
        in_brackets = limit[: number.start()].endswith("(") and limit[number.end() :].startswith(")")
        return f"{number[0]}, {words}" if in_brackets else f"{number[0]} ({words})"

    words = _words(value, moment)
    return f"{value} ({words})" if words else str(value), _STATED.sub(stated, limit)


def _words(ms: int, moment: bool) -> str:
    """Empty if they would say nothing more than the number does."""
    if not moment:
        return span_text(ms) if abs(ms) >= _WORTH_WORDS_MS else ""
    try:
        told = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return ""
    return told.isoformat(timespec="milliseconds" if ms % 1_000 else "seconds").replace("+00:00", "Z")
