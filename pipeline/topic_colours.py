"""The topics that a plot shows one by one, each with a colour of its own; all others share one colour.

Matplotlib's own cycle begins anew after ten colours: two topics would look alike, and a legend of a thousand topics
leaves no room for the plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
