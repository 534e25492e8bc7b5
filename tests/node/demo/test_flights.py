"""The demo's input and its verdict."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.node.demo.flights import compressed, flights_of
from tickwheel.node.demo.report import Tally


def test_a_month_of_flights() -> None:
    """January 2013: as many as the data has, New York time turned into UTC."""
    flights = flights_of(1)
    assert len(flights) == 27_004
    assert flights[0].departs == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)
    assert flights[0].remind_ms == round(datetime(2013, 1, 1, 9, 45, tzinfo=UTC).timestamp() * 1000)
    times = compressed(flights, 1_000, 30_000)
    assert (times[0], times[-1]) == (1_000, 31_000)
    assert times == sorted(times)


def test_summer_time_is_heeded() -> None:
    """In July New York is four hours behind UTC: the first departure at 5 in the morning is at 9."""
    assert {flight.departs.hour for flight in flights_of(7)[:1]} <= {8, 9}


@given(st.lists(st.integers(0, 9), max_size=60))
def test_verdict_counts_every_reminder(arrivals: list[int]) -> None:
    """Lost, repeated and early are what a plain count says."""
    tally = Tally([100] * 10, scheduled=10)
    for number, place in enumerate(arrivals):
        tally.take(place, 99 if number == 3 else 105)
    assert tally.lost == 10 - len(set(arrivals))
    assert tally.duplicates == len(arrivals) - len(set(arrivals))
    assert tally.early == (1 if len(arrivals) > 3 else 0)
    assert tally.good == (tally.lost == 0 and tally.early == 0)


def test_an_invented_reminder_is_bad() -> None:
    """What nobody scheduled is counted and spoils the verdict."""
    tally = Tally([100], scheduled=1)
    tally.take(0, 101)
    tally.take(7, 101)
    assert (tally.unknown, tally.good) == (1, False)
