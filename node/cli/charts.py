"""Numbers as characters: bars, and rows of small columns. Pure text, so that pipes and terminals without
colour read it.

A column that is not empty is never drawn as empty, and only the highest one is full.
"""

from __future__ import annotations

from collections.abc import Sequence

EIGHTHS_UP = " ▁▂▃▄▅▆▇█"
EIGHTHS_RIGHT = " ▏▎▍▌▋▊▉█"


def column(value: float, peak: float) -> str:
    """One character whose height is value in proportion to peak."""
    if value <= 0 or peak <= 0:
        return EIGHTHS_UP[0]
    return EIGHTHS_UP[max(1, min(8, int(8 * value / peak)))]


def columns(values: Sequence[float], peak: float | None = None) -> str:
    """A character for each value. `peak`: the value of full height; by default the largest value."""
    top = max(values, default=0.0) if peak is None else peak
    return "".join(column(value, top) for value in values)


def bar(value: float, peak: float, width: int) -> str:
    """A bar of at most `width` characters, to an eighth of one."""
    if value <= 0 or peak <= 0:
        return ""
    eighths = max(1, min(8 * width, round(8 * width * value / peak)))
    full, rest = divmod(eighths, 8)
    return EIGHTHS_RIGHT[8] * full + (EIGHTHS_RIGHT[rest] if rest else "")


def short(number: float) -> str:
    """A number in at most five characters: 999, 9,999, 12.3k, 4.56M."""
    number = float(number)
    if number < 10_000:
        return f"{number:,.0f}"
    for limit, unit in ((1e6, "k"), (1e9, "M"), (1e12, "G")):
        if number < limit:
            value = number / limit * 1_000
            return f"{value:.1f}{unit}" if value < 100 else f"{value:.0f}{unit}"
    return f"{number:.0e}"


def fitting(name: str, width: int) -> str:
    """A name in at most `width` characters. The middle is left out, since long names often begin alike."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"
