"""When recurring schedules run: cron texts and intervals, both changes of a zone's clock, and texts that are wrong,
never match, or are made to take long.

A walk over every minute of some days is the model: it knows nothing of days, months or changes, only what a wall clock
shows at each moment.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tickwheel.node.core.schedule import calendar as calendar_module
from tickwheel.node.core.schedule.calendar import (
    CRON_CHARACTERS_MAX,
    INTERVAL_MS_MAX,
    INTERVAL_MS_MIN,
    LATEST_MS,
    Calendar,
    Pattern,
    calendar_of,
)
from tickwheel.node.failure import RequestError

MINUTE_S, DAY_S = 60, 86_400
FOREVER_MS = 1 << 60
ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "America/Santiago",  # changes at midnight
    "Australia/Lord_Howe",  # by 30 minutes
    "Africa/Casablanca",  # around Ramadan
    "Africa/Cairo",  # at midnight, on a Friday
    "Asia/Kathmandu",  # 5:45 ahead, no changes
    "America/St_Johns",
    "UTC",
]


def ms_of(text: str) -> int:
    """A moment, in ISO 8601 with an offset or Z."""
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def shown(calendar: Calendar, after: str, count: int) -> list[str]:
    """The planned times after a moment as the zone's wall clock shows them."""
    zone = ZoneInfo(calendar.zone or "UTC")
    times = calendar.between(ms_of(after), FOREVER_MS, count)
    return [datetime.fromtimestamp(ms / 1_000, zone).isoformat() for ms in times]


@cache
def changes(zone: str) -> list[int]:
    """Days around which the offset changes from 2026 to 2029, in seconds; some day for a zone without changes."""
    place, found = ZoneInfo(zone), []
    day_s = ms_of("2026-01-01T00:00Z") // 1_000
    for _ in range(4 * 366):
        here, there = (datetime.fromtimestamp(s, place).utcoffset() for s in (day_s, day_s + DAY_S))
        if here != there:
            found.append(day_s)
        day_s += DAY_S
    return found or [ms_of("2026-02-27T00:00Z") // 1_000]


@cache
def walls(zone: str, from_s: int, until_s: int) -> list[tuple[int, datetime]]:
    """What the wall clock shows at every minute."""
    place = ZoneInfo(zone)
    return [
        (s, datetime.fromtimestamp(s, place).replace(tzinfo=None, fold=0)) for s in range(from_s, until_s, MINUTE_S)
    ]


def model(pattern: Pattern, by_clock: bool, zone: str, from_s: int, until_s: int) -> list[int]:
    """The planned minutes from one to another, by looking at the wall clock of every minute."""

    def matches(wall: datetime) -> bool:
        parsed = pattern._parsed
        hits = wall.minute in parsed.minutes and wall.hour in parsed.hours and wall.month in parsed.months
        return hits and parsed.match_day(wall.date())

    seen = walls(zone, from_s - DAY_S, until_s + DAY_S)
    if by_clock:
        return [s for s, wall in seen if from_s <= s < until_s and matches(wall)]
    planned: set[int] = set()
    wall = seen[0][1]
    for s, now in seen:
        while wall <= now:  # also those that the clock leaves out
            if matches(wall):
                planned.add(s)
            wall += timedelta(minutes=1)
    return sorted(s for s in planned if from_s <= s < until_s)


def fields(least: int, most: int) -> st.SearchStrategy[str]:
    """A field of a cron text: numbers, ranges, steps and lists."""
    number = st.integers(least, most)
    part = st.one_of(
        number.map(str),
        st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}"),
        st.tuples(st.integers(least, most - 1), st.integers(1, 9)).map(lambda pair: f"{pair[0]}-{most}/{pair[1]}"),
    )
    return st.lists(part, min_size=1, max_size=3).map(",".join)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Cron texts of five fields that run on many days, most of them at night, when clocks change."""
    minute = draw(st.one_of(st.sampled_from(["*", "*/15", "*/7", "0", "30", "0,30"]), fields(0, 59)))
    hour = draw(st.one_of(st.sampled_from(["*", "*/2", "0", "1", "2", "3", "1-3", "23"]), fields(0, 23)))
    day = draw(st.sampled_from(["*", "*/2", "L", "LW", "25-31", "1-7"]))
    weekday = draw(st.sampled_from(["*", "SUN", "FRI-SAT", "5L", "0#1", "1-7"]))
    return f"{minute} {hour} {day} * {weekday}"


@settings(max_examples=80, deadline=None)
@given(text=texts(), zone=st.sampled_from(ZONES), data=st.data())
@example(text="0 3 * * *", zone="Australia/Lord_Howe", data=None)
@example(text="*/10 * * * *", zone="Africa/Cairo", data=None)
def test_as_a_walk_over_every_minute(text: str, zone: str, data: st.DataObject | None) -> None:
    """Around every change of the clock, and on days without one, the planned times are those of the model."""
    days = changes(zone) if data is None else [data.draw(st.sampled_from(changes(zone)))]
    calendar = calendar_of(cron=text, zone=zone)
    pattern = Pattern(text)
    for day_s in days:
        from_s, until_s = day_s - DAY_S, day_s + 3 * DAY_S
        expected = model(pattern, any(field.startswith("*") for field in text.split()[:2]), zone, from_s, until_s)
        found = calendar.between(from_s * 1_000 - 1, until_s * 1_000 - 1, 100_000)
        assert [ms // 1_000 for ms in found] == expected


@settings(max_examples=60, deadline=None)
@given(text=texts(), zone=st.sampled_from(ZONES), data=st.data())
def test_any_moment_between(text: str, zone: str, data: st.DataObject) -> None:
    """Asked at any millisecond, also between and at planned times, next and last agree with the list of all."""
    calendar = calendar_of(cron=text, zone=zone)
    from_ms = (data.draw(st.sampled_from(changes(zone))) - DAY_S) * 1_000
    times = calendar.between(from_ms, from_ms + 3 * DAY_S * 1_000, 10_000)
    assume(times)
    near = data.draw(st.sampled_from(times)) + data.draw(
        st.integers(-5_000_000, 5_000_000) | st.integers(-1_000, 1_000)
    )
    assume(from_ms < near < from_ms + 3 * DAY_S * 1_000)
    later = [ms for ms in times if ms > near]
    earlier = [ms for ms in times if ms <= near]
    if later:
        assert calendar.next_after(near) == later[0]
    if earlier:
        assert calendar.last_until(near) == earlier[-1]


@settings(max_examples=30, deadline=None)
@given(text=texts(), zone=st.sampled_from(["Europe/Berlin", "America/New_York"]))
def test_as_cronsim_where_it_follows_debian(text: str, zone: str) -> None:
    """For five fields in zones that change by an hour, the parser's own walk knows the rules of Debian's cron."""
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    calendar = calendar_of(cron=text, zone=zone)
    walk = CronSim(text, begin.astimezone(ZoneInfo(zone)))
    theirs = [round(next(walk).timestamp() * 1_000) for _ in range(300)]
    assert calendar.between(round(begin.timestamp() * 1_000), FOREVER_MS, 300) == theirs


def test_a_time_that_is_left_out() -> None:
    """In Berlin there is no 02:30 on 29 March 2026. A fixed time runs at 03:00, when the clock changes; a text by the
    clock does not run in that hour."""
    after = "2026-03-28T02:30+01:00"
    assert shown(calendar_of(cron="30 2 * * *", zone="Europe/Berlin"), after, 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:00+02:00",
    ]
    assert shown(calendar_of(cron="15 30 2 * * *", zone="Europe/Berlin"), "2026-03-28T12:00+01:00", 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T02:30:15+02:00",
    ]
    assert shown(calendar_of(cron="*/30 * * * *", zone="Europe/Berlin"), "2026-03-29T01:20+01:00", 3) == [
        "2026-03-29T01:30:00+01:00",
        "2026-03-29T03:00:00+02:00",
        "2026-03-29T03:30:00+02:00",
    ]
    assert shown(calendar_of(cron="*/30 2 * * *", zone="Europe/Berlin"), "2026-03-28T12:00+01:00", 1) == [
        "2026-03-30T02:00:00+02:00"
    ]


def test_several_left_out_run_once() -> None:
    """All fixed times that one change leaves out are one run, and also that of the change's own time."""
    assert shown(calendar_of(cron="0,30 2-3 * * *", zone="Europe/Berlin"), "2026-03-28T12:00+01:00", 2) == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-29T03:30:00+02:00",
    ]


def test_a_time_that_comes_twice() -> None:
    """In Berlin 02:30 comes twice on 25 October 2026. A fixed time runs the first time; a text by the clock twice."""
    assert shown(calendar_of(cron="30 2 * * *", zone="Europe/Berlin"), "2026-10-24T12:00+02:00", 2) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]
    assert shown(calendar_of(cron="30 * * * *", zone="Europe/Berlin"), "2026-10-25T01:40+02:00", 3) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-25T02:30:00+01:00",
        "2026-10-25T03:30:00+01:00",
    ]


def test_asked_in_the_second_pass() -> None:
    """Asked while the hour comes the second time, fixed times of that hour have run."""
    calendar = calendar_of(cron="0-59 2 * * *", zone="Europe/Berlin")
    assert shown(calendar, "2026-10-25T02:10+01:00", 1) == ["2026-10-26T02:00:00+01:00"]
    assert shown(calendar, "2026-10-25T02:58:30+02:00", 2) == ["2026-10-25T02:59:00+02:00", "2026-10-26T02:00:00+01:00"]


def test_half_an_hour() -> None:
    """On Lord Howe Island the clock changes by 30 minutes."""
    calendar = calendar_of(cron="15 2 * * *", zone="Australia/Lord_Howe")
    assert shown(calendar, "2026-10-03T12:00+10:30", 2) == ["2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"]
    calendar = calendar_of(cron="45 1 * * *", zone="Australia/Lord_Howe")
    assert shown(calendar, "2026-04-04T12:00+11:00", 2) == ["2026-04-05T01:45:00+11:00", "2026-04-06T01:45:00+10:30"]


@pytest.mark.parametrize(
    ("text", "march", "october"),
    [
        ("30 2 * * *", ["03:00+02"], ["02:30+02"]),
        ("0,30 2 * * *", ["03:00+02"], ["02:00+02", "02:30+02"]),
        ("30 * * * *", ["01:30+01", "03:30+02"], ["01:30+02", "02:30+02", "02:30+01", "03:30+01"]),
        (
            "*/30 * * * *",
            ["01:00+01", "01:30+01", "03:00+02", "03:30+02"],
            ["01:00+02", "01:30+02", "02:00+02", "02:30+02", "02:00+01", "02:30+01", "03:00+01", "03:30+01"],
        ),
        ("*/30 2 * * *", [], ["02:00+02", "02:30+02", "02:00+01", "02:30+01"]),
        ("0 */2 * * *", ["00:00+01", "04:00+02"], ["00:00+02", "02:00+02", "02:00+01", "04:00+01"]),
    ],
)
def test_the_table_of_the_guide(text: str, march: list[str], october: list[str]) -> None:
    """docs/SCHEDULES.md shows these for the two changes of 2026 in Berlin, between the hours that are of interest."""
    calendar, zone = calendar_of(cron=text, zone="Europe/Berlin"), ZoneInfo("Europe/Berlin")
    for day, expected in (("2026-03-29", march), ("2026-10-25", october)):
        hours = (0, 4) if text == "0 */2 * * *" else (1, 3)
        night = [
            datetime.fromtimestamp(ms / 1_000, zone)
            for ms in calendar.between(ms_of(f"{day}T00:00Z") - 8_000_000, FOREVER_MS, 99)
        ]
        found = [
            f"{m:%H:%M}{m:%z}"[:-2] for m in night if m.date().isoformat() == day and hours[0] <= m.hour <= hours[1]
        ]
        assert found == expected


def test_seconds_and_names() -> None:
    """Six fields begin with the second; names and numbers mean the same."""
    assert shown(calendar_of(cron="*/20 * * * * *"), "2026-01-01T00:00Z", 3) == [
        "2026-01-01T00:00:20+00:00",
        "2026-01-01T00:00:40+00:00",
        "2026-01-01T00:01:00+00:00",
    ]
    names = calendar_of(cron="0 9 * jan,Dec mon-FRI").between(0, FOREVER_MS, 50)
    assert names == calendar_of(cron="0 0 9 * 1,12 1-5").between(0, FOREVER_MS, 50)


@pytest.mark.parametrize(
    ("text", "dates"),
    [
        ("0 0 L * *", ["2027-01-31", "2027-02-28", "2027-03-31"]),
        ("0 0 LW * *", ["2027-01-29", "2027-02-26", "2027-03-31"]),
        ("0 0 * * FRI#2", ["2027-01-08", "2027-02-12", "2027-03-12"]),
        ("0 0 * * 5L", ["2027-01-29", "2027-02-26", "2027-03-26"]),
        ("0 0 13 * FRI", ["2027-01-01", "2027-01-08", "2027-01-13"]),
        ("0 0 */13 * FRI", ["2027-01-01", "2027-05-14", "2027-08-27"]),
        ("0 0 29 2 *", ["2028-02-29", "2032-02-29", "2036-02-29"]),
        ("0 0 * 2 MON#5", ["2044-02-29", "2072-02-29", "2112-02-29"]),
    ],
)
def test_days(text: str, dates: list[str]) -> None:
    """Last day, last working day, nth and last weekday; two restricted fields of days mean either, unless one begins
    with a star; the day that comes every 40 years around 2100."""
    found = shown(calendar_of(cron=text), "2026-12-31T12:00Z", 3)
    assert [moment[:10] for moment in found] == dates


def test_an_interval() -> None:
    """Counted from the start, which is the first; without a start from 1970, so on the quarters of the hour."""
    start = ms_of("2026-05-05T10:00Z")
    calendar = calendar_of(interval_ms=7_000, start_ms=start, end_ms=start + 15_000)
    assert calendar.between(0, FOREVER_MS, 10) == [start, start + 7_000, start + 14_000]
    assert calendar.next_after(start - 1) == start and calendar.next_after(start) == start + 7_000
    assert calendar.last_until(start - 1) is None and calendar.last_until(start + 13_999) == start + 7_000
    assert calendar.last_until(FOREVER_MS) == start + 14_000
    assert shown(calendar_of(interval_ms=900_000), "2026-05-05T10:01Z", 1) == ["2026-05-05T10:15:00+00:00"]


def test_start_and_end_belong_to_it() -> None:
    """Both are inclusive."""
    start, end = ms_of("2026-05-05T09:00Z"), ms_of("2026-05-07T09:00Z")
    calendar = calendar_of(cron="0 9 * * *", start_ms=start, end_ms=end)
    assert len(calendar.between(0, FOREVER_MS, 10)) == 3
    assert calendar.next_after(end) is None and calendar.last_until(FOREVER_MS) == end
    assert calendar.last_until(start - 1) is None


def refusal(**spec: object) -> dict[str, str]:
    """What the refusal of a specification says to programs."""
    with pytest.raises(RequestError) as caught:
        calendar_of(**spec)  # type: ignore[arg-type]
    metadata = caught.value.failure.metadata
    # Between the words of a limit the text says milliseconds in words.
    assert all(word in caught.value.failure.message for part in metadata.values() for word in part.split())
    return metadata


@pytest.mark.parametrize(
    ("spec", "field", "limit"),
    [
        ({"cron": "61 * * * *"}, "cron", "minute: 0 to 59"),
        ({"cron": "61 * * * * *"}, "cron", "second: 0 to 59"),
        ({"cron": "* 24 * * *"}, "cron", "hour: 0 to 23"),
        ({"cron": "* * 0 * *"}, "cron", "day-of-month: 1 to 31"),
        ({"cron": "* * * 13 *"}, "cron", "month: 1 to 12"),
        ({"cron": "* * * * MON-SUN"}, "cron", "MON-SUN is 1-7"),
        ({"cron": "*/0 * * * *"}, "cron", "minute: 0 to 59"),
        ({"cron": "5-1 * * * *"}, "cron", "from low to high"),
        ({"cron": "-1 * * * *"}, "cron", "minute"),
        ({"cron": "1,,2 * * * *"}, "cron", "minute"),
        ({"cron": "* * * *"}, "cron", "five fields"),
        ({"cron": "@daily"}, "cron", "five fields"),
        ({"cron": "* * * * *\n"}, "cron", "five fields"),
        ({"cron": "\u0665 * * * *"}, "cron", "five fields"),
        ({"cron": "0 0 30 2 *"}, "cron", "1 to 31 where its months have that day"),
        ({"cron": "0 0 31 4,6,9,11 *"}, "cron", "1 to 31 where its months have that day"),
        ({"cron": "* * */20 * 1L"}, "cron", "no month has such a day"),
        ({"cron": "1," * 200 + "1 * * * *"}, "cron", "at most 256 characters"),
        ({"cron": "0 0 * * *", "zone": "Berlin"}, "zone", "did you mean Europe/Berlin?"),
        ({"cron": "0 0 * * *", "zone": "europe/berlin"}, "zone", "did you mean Europe/Berlin?"),
        ({"cron": "0 0 * * *", "zone": "new york"}, "zone", "did you mean America/New_York?"),
        ({"cron": "0 0 * * *", "zone": "../etc/passwd"}, "zone", "IANA"),
        ({"cron": "0 0 * * *", "zone": "/etc/localtime"}, "zone", "IANA"),
        ({"cron": "0 0 * * *", "zone": "localtime"}, "zone", "IANA"),
        ({"cron": "0 0 * * *", "zone": "right/UTC"}, "zone", "IANA"),
        ({"cron": "0 0 * * *", "zone": "Europe"}, "zone", "IANA"),
        ({"cron": "0 0 * * *", "zone": "a\0b"}, "zone", "IANA"),
        ({}, "cron", "exactly one"),
        ({"cron": "0 0 * * *", "interval_ms": 1_000}, "cron", "exactly one"),
        ({"interval_ms": INTERVAL_MS_MIN - 1}, "interval_ms", str(INTERVAL_MS_MIN)),
        ({"interval_ms": INTERVAL_MS_MAX + 1}, "interval_ms", str(INTERVAL_MS_MAX)),
        ({"interval_ms": 1_000, "zone": "UTC"}, "zone", "interval"),
        ({"interval_ms": 1_000, "start_ms": -1}, "start_ms", str(LATEST_MS)),
        ({"interval_ms": 1_000, "end_ms": LATEST_MS + 1}, "end_ms", str(LATEST_MS)),
        ({"interval_ms": 1_000, "start_ms": 5_000, "end_ms": 4_999}, "end_ms", "5000"),
        ({"cron": "0 0 29 2 *", "start_ms": 1_800_000_000_000, "end_ms": 1_801_000_000_000}, "end_ms", "first run"),
    ],
)
def test_refused(spec: dict[str, object], field: str, limit: str) -> None:
    """A refusal names the field and what is allowed there, and what one may have meant."""
    metadata = refusal(**spec)
    assert metadata["field"] == field and limit in metadata["limit"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("0123456789*/-,LW#? MONFRIJAN\t\n"), max_size=40) | st.text(max_size=300))
def test_any_text_is_taken_or_refused(text: str) -> None:
    """No text raises anything else, and what is taken runs."""
    assume(text)
    try:
        calendar = calendar_of(cron=text)
    except RequestError:
        assert len(text) > 0
    else:
        assert calendar.next_after(0) is not None


@pytest.mark.parametrize("ms", [-(1 << 62), -1, LATEST_MS - 1, LATEST_MS, LATEST_MS + 1, 1 << 62])
def test_moments_far_away(ms: int) -> None:
    """Any number is a moment: before 1970 everything lies ahead, from 2400 on nothing does."""
    for calendar in (calendar_of(cron="0 0 * * *", zone="Asia/Tokyo"), calendar_of(interval_ms=1_000)):
        following, last = calendar.next_after(ms), calendar.last_until(ms)
        assert (following is None) == (ms >= LATEST_MS - 1) or following == LATEST_MS
        assert (last is None) == (ms < 0)


HOSTILE = [
    "0 0 29 2 */7",
    "59 59 23 29 2 */7",
    "0 0 31 * 7#5",
    "* * */28 2 1#5",
    "0 0 L 2 *",
    ",".join(map(str, range(60))) + " 23 31 12 *",
    "*/1 */1 */1 */1 */1 */1",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_takes_long(text: str) -> None:
    """Parsing and every question stay far below what the node's loop notices, also for texts that rarely match."""
    begin = time.process_time()
    for number in range(16):
        Pattern(f"{text}{' ' * (number + 1)}")
        calendar = calendar_of(cron=text, zone="Australia/Lord_Howe", start_ms=number)
        calendar.next_after(ms_of("2097-01-01T00:00Z") + number)
        calendar.last_until(ms_of("2103-01-01T00:00Z") + number)
    assert (time.process_time() - begin) / (16) < 0.020


def test_characters() -> None:
    """The longest text that is taken."""
    text = "0 0 * * *"
    calendar_of(cron=text + " " * (CRON_CHARACTERS_MAX - len(text)))


@pytest.mark.parametrize("error", [PermissionError("tzfile"), ValueError("Invalid TZif file")])
def test_a_zone_whose_data_cannot_be_read_is_refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's data may be damaged: that is said with the field, of a new schedule and of one that is there."""

    def unreadable(_: str) -> ZoneInfo:
        raise error

    monkeypatch.setattr(calendar_module, "ZoneInfo", unreadable)
    calendar_module._zone.cache_clear()
    with pytest.raises(RequestError) as refused:
        calendar_of(cron="0 9 * * *", zone="Europe/Berlin", interval_ms=0, start_ms=0, end_ms=0)
    assert (refused.value.failure.metadata["field"], refused.value.failure.metadata["value"]) == (
        "zone",
        "Europe/Berlin",
    )
    assert str(error) in refused.value.failure.message
