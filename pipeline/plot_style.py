"""What the plots of forecast and audit have in common: the colours of topics, the axis of time, the legend, the page.

The largest topics have a colour each and all others share one: matplotlib's own cycle repeats after ten colours,
and a legend of a thousand topics leaves no room for the plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tickwheel.pipeline.report_folder import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHERS = "(others)"
"""No topic can have this name."""
OTHERS_COLOUR = "0.7"
COLOURS = tuple(f"C{number}" for number in range(10) if number != 7)
"""Matplotlib's colours without its grey."""


@dataclass(frozen=True, slots=True)
class TopicColours:
    """`colours`: of the largest topics, in the order of their names. `others`: all other topics."""

    colours: Mapping[str, str]
    others: tuple[str, ...]


def topic_colours(sizes: Mapping[str, int]) -> TopicColours:
    """The colours of topics of these sizes."""
    largest = sorted(sizes, key=lambda topic: (topic == OTHERS, -sizes[topic], topic))
    named = [topic for topic in largest[: len(COLOURS)] if topic != OTHERS]
    colours = dict(zip(sorted(named), COLOURS, strict=False))
    return TopicColours(colours, tuple(sorted(set(sizes) - set(named))))


def time_axis(axes: Axes) -> None:
    """Label the axis of time in UTC, with as many labels as have room. Its unit is the day since 1970."""
    from matplotlib import dates

    locator = dates.AutoDateLocator(minticks=3, tz=UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]


def legend_beside(axes: Axes) -> None:
    """Put the legend beside the plot, where it covers nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def write_page(path: Path, title: str, heading: str, text: str, picture: tuple[str, str]) -> None:
    """A page of HTML with a text, and below it a picture: its file beside the page, and what it shows."""
    file, shown = picture
    page = (
        f"<!doctype html><meta charset=utf-8><title>tickwheel: {title}</title>"
        "<style>body{font:15px sans-serif;max-width:75em;margin:2em auto}img{max-width:100%}</style>"
        f"<h1>{heading}</h1><pre>{escape(text, quote=False)}</pre><img src={file} alt='{shown}'>\n"
    )
    write_whole(path, page.encode())
