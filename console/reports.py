"""Reports of chaos runs: directories that `tickwheel chaos run --dir` or `chaos clock --dir` has left in one place.

Of a run only `report.json` is read, never its page: the console's own pages show it. Whoever can write there is not
trusted. Names and links lead nowhere else, a file has a size, each field a type and a limit, and a bad file is listed
with what is wrong. Numbers and texts pass; markup stays text.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tickwheel.client.errors import NotFound, RequestRefused, printable, refused
from tickwheel.console.files import content_of, is_file, opened
from tickwheel.console.shown import Json

FILE = "report.json"
FILE_BYTES_MAX = 16 << 20
ENTRIES_MAX = 10_000
"""Entries of the directory that are looked at."""
PAGE = 50
NAME_CHARACTERS_MAX = 200
TEXT_MAX = 2_000
WORD_MAX = 200
"""Characters of names, kinds and units."""
FIELDS_MAX = 1_000
ITEMS_MAX = 250_000
"""Of any object and of any list in a report."""
SHOWN_MAX = 500
"""Failovers, broken promises and expectations that a page shows."""
KINDS_MAX = 50
"""Kinds of faults, families and nodes that a page shows."""
MARKS_MAX = 5_000
"""Faults, and changes of a node's role, that a picture shows."""
POINTS_MAX = 1_500
"""Of a chart; more are drawn together."""
NUMBER_MAX = 1e15

PROMISES = {
    "P1": "no loss",
    "P2": "no invention",
    "P3": "never early",
    "P4": "soon, after the heal",
    "P5": "few duplicates",
    "P6": "monotone cursor",
    "P7": "one master",
    "P8": "same state",
    "P9": "definite cancel",
    "P10": "live",
    "P11": "bounded",
    "process": "nodes stay up",
    "audit": "the audit says the same",
    "clock": "the nodes say what is wrong with clocks",
}
"""As in the verdict of a run."""

_LATENESS = "messages p50 p99 p99_9 worst"
_CLOCK = "earliest_ms clock_error_ms time_ahead_ms time_beyond_ms"
_AUDIT = "scheduled lost early duplicated without_master_ms"


class Fields:
    """An object of a report, field by field. What is absent has its default; what is wrong is refused by its place."""

    def __init__(self, value: Any, place: str) -> None:
        """Raises RequestRefused unless it is an object."""
        if not isinstance(value, dict) or len(value) > FIELDS_MAX:
            shown = f"{len(value):,} fields" if isinstance(value, dict) else value
            _wrong(place or "content", shown, f"an object of at most {FIELDS_MAX:,} fields")
        self._values: dict[str, Any] = value
        self._place = place

    def place(self, name: str) -> str:
        """Where a field stands."""
        return f"{self._place}.{name}" if self._place else name

    def must(self, *names: str) -> None:
        """Raise RequestRefused if a field is absent: a verdict is not guessed."""
        for name in names:
            if name not in self._values:
                _wrong(self.place(name), "absent", "a field of every report")

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._values)

    def text(self, name: str) -> str:
        """A text, cut to TEXT_MAX; empty if it is absent."""
        return text_of(self._values.get(name, ""), self.place(name))

    def word(self, name: str) -> str:
        """A text, cut to WORD_MAX; empty if it is absent."""
        return self.text(name)[:WORD_MAX]

    def words(self, name: str) -> list[str]:
        """The first KINDS_MAX of a list of texts; none if it is absent."""
        return [text_of(item, place)[:WORD_MAX] for item, place in self.each(name)[:KINDS_MAX]]

    def number(self, name: str) -> float:
        """A number; 0 if it is absent."""
        return number_of(self._values.get(name, 0), self.place(name))

    def maybe(self, name: str) -> float | None:
        """A number, or none."""
        value = self._values.get(name)
        return None if value is None else number_of(value, self.place(name))

    def flag(self, name: str) -> bool:
        """True or false; false if it is absent."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            _wrong(self.place(name), value, "true or false")
        return value

    def fields(self, name: str) -> Fields:
        """An object; an empty one if it is absent."""
        return Fields(self._values.get(name, {}), self.place(name))

    def each(self, name: str) -> list[tuple[Any, str]]:
        """The items of a list with the place of each; none if it is absent."""
        value = self._values.get(name, [])
        if not isinstance(value, list) or len(value) > ITEMS_MAX:
            shown = f"{len(value):,} items" if isinstance(value, list) else value
            _wrong(self.place(name), shown, f"a list of at most {ITEMS_MAX:,}")
        return [(item, f"{self.place(name)}[{at}]") for at, item in enumerate(value)]

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(item, place) for item, place in self.each(name)]

    def shown(self, **names: str) -> Json:
        """Some fields; `names`: by the method that reads them, as `word="kind unit"`."""
        return {name: getattr(self, read)(name) for read, some in names.items() for name in some.split()}

    def numbers(self, name: str) -> dict[str, float]:
        """An object whose fields are numbers."""
        inner = self.fields(name)
        return {_clean(each)[:WORD_MAX]: inner.number(each) for each in inner.names()}


def _wrong(place: str, value: object, limit: str) -> NoReturn:
    raise refused(_clean(place), _clean(value if isinstance(value, str) else repr(value)), limit)


def _clean(text: str) -> str:
    """The beginning of a text, as any encoder takes it."""
    return printable(text[:TEXT_MAX])


def text_of(value: Any, place: str) -> str:
    """A text, cut to a limit. Raises RequestRefused."""
    if not isinstance(value, str):
        _wrong(place, value, "a text")
    return _clean(value)


def number_of(value: Any, place: str) -> float:
    """A number within bounds. Raises RequestRefused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= NUMBER_MAX:
        _wrong(place, value, f"a number from {-NUMBER_MAX:g} to {NUMBER_MAX:g}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def decoded(content: bytes) -> Fields:
    """The content of a file. Raises RequestRefused."""
    try:
        return Fields(json.loads(content, parse_constant=_no_constant), "")
    except (ValueError, RecursionError) as error:
        why = "it nests without end" if isinstance(error, RecursionError) else str(error)
        raise refused("content", _clean(content[:40].decode("utf-8", "replace")), f"JSON: {_clean(why)}") from None


def _about(report: Fields) -> Json:
    run = report.fields("run")
    return run.shown(word="case", number="began_ms seconds nodes rate", maybe="seed", flag="netns", words="families")


def _verdict(report: Fields) -> Json:
    report.must("run", "holds", "void", "broken_counts")
    counts, holds, void = report.numbers("broken_counts"), report.flag("holds"), report.text("void")
    if holds != (not counts):
        _wrong("holds", str(holds).lower(), "false if broken_counts has a promise, else true")
    return {"verdict": "void" if void else "held" if holds else "broken", "void": void, "broken_counts": counts}


def _figures(report: Fields) -> Json:
    counts, duplicates = report.numbers("counts"), report.numbers("duplicates")
    gaps = [failover.number("without_ms") for failover in report.objects("failovers")]
    return {
        "acknowledged": counts.get("acknowledged", 0),
        "delivered": counts.get("delivered", 0),
        "lost": counts.get("lost", 0),
        "early": report.numbers("broken_counts").get("P3", 0),
        "again": sum(duplicates.values()),
        "again_failover": duplicates.get("failover", 0),
        "failovers": len(gaps),
        "without_median_ms": statistics.median(gaps) if gaps else None,
        "without_max_ms": max(gaps, default=None),
        "outside": report.fields("outside").shown(number=_LATENESS),
        "inside": report.fields("inside").shown(number=_LATENESS),
    }


def _fault_kinds(report: Fields) -> list[Json]:
    rows: dict[str, Json] = {}
    for fault in report.objects("faults"):
        kind = fault.word("kind")
        row = rows.setdefault(kind, {"kind": kind, "injected": 0, "effective": 0, "seen": 0, "unit": ""})
        seen = fault.number("count")
        row["injected"] += 1
        row["effective"] += seen > 0
        row["seen"] += seen
        row["unit"] = fault.word("unit") or row["unit"]
    return list(rows.values())[:KINDS_MAX]


def summary(report: Fields) -> Json:
    """A row of the list."""
    return {**_verdict(report), **_about(report), "figures": _figures(report), "faults": _fault_kinds(report)}


def whole(report: Fields) -> Json:
    """Everything that the page of one report shows."""
    checks, audit = report.objects("checks"), report.fields("audit")
    counts = report.numbers("broken_counts")
    asked = {"audit": bool(audit.names()), "clock": bool(checks)}
    judged = [promise for promise in PROMISES if asked.get(promise, True) or promise in counts]
    return summary(report) | {
        "promises": [{"promise": promise, "title": PROMISES[promise]} for promise in judged],
        "broken": [
            one.shown(word="promise", number="at_s", text="text") for one in report.objects("broken")[:SHOWN_MAX]
        ],
        "doubts": {
            "without_effect": len(report.each("without_effect")),
            "elections": report.number("elections_without_fault"),
            "unjudged_ms": [number_of(item, place) for item, place in report.each("unjudged_ms")[:SHOWN_MAX]],
            **report.shown(number="starved_share dead_letters"),
        },
        "duplicates": report.numbers("duplicates"),
        "clock": report.shown(number=_CLOCK),
        "struck": [_fault(fault) for fault in report.objects("faults")[:MARKS_MAX]],
        "masters": [
            failover.shown(number="at_s term without_ms", word="old new cause", maybe="silence_ms")
            for failover in report.objects("failovers")[:SHOWN_MAX]
        ],
        "roles": _roles(report),
        "load_ms": report.fields("run").number("began_ms") - report.fields("marks").number("run") * 1_000,
        "series": _series(report.fields("series")),
        "checks": [one.shown(number="at_s", text="what seen", flag="passed") for one in checks[:SHOWN_MAX]],
        "audit": audit.shown(number=_AUDIT) if asked["audit"] else None,
    }


def _fault(fault: Fields) -> Json:
    told = fault.shown(word="kind detail unit", words="struck", number="from_s", maybe="until_s")
    return {**told, "seen": fault.number("count")}


def _roles(report: Fields) -> list[Json]:
    roles = report.fields("roles")
    until = report.fields("heard_until")
    found = []
    for node in roles.names()[:KINDS_MAX]:
        changes = []
        for item, place in roles.each(node)[:MARKS_MAX]:
            if not isinstance(item, list) or len(item) != 2:
                _wrong(place, item, "a time and a role")
            changes.append((number_of(item[0], f"{place}[0]"), text_of(item[1], f"{place}[1]")[:WORD_MAX]))
        found.append({"node": _clean(node)[:WORD_MAX], "changes": changes, "until_s": until.maybe(node)})
    return found


def _series(series: Fields) -> Json:
    """The curves, with at most POINTS_MAX points: a point of several has the mean of their rates and the worst of their
    latenesses."""
    seconds = [number_of(item, place) for item, place in series.each("seconds")]
    size = max(1, -(-len(seconds) // POINTS_MAX))
    found: Json = {"seconds": seconds[::size]}
    for name, together in (("acknowledged", statistics.fmean), ("delivered", statistics.fmean)):
        found[name] = _drawn_together(series, name, len(seconds), size, together)
    for name in ("late_p50", "late_p99", "late_worst"):
        found[name] = _drawn_together(series, name, len(seconds), size, max)
    return found


def _drawn_together(
    series: Fields, name: str, length: int, size: int, together: Callable[[Sequence[float]], float]
) -> list[float | None]:
    items = series.each(name)
    if len(items) != length:
        _wrong(series.place(name), f"{len(items):,} items", f"{length:,}, as many as seconds")
    values = [None if item is None else number_of(item, place) for item, place in items]
    found: list[float | None] = []
    for at in range(0, length, size):
        known = [value for value in values[at : at + size] if value is not None]
        found.append(together(known) if known else None)
    return found


class Reports:
    """The reports of one directory. A thread reads one file at a time. What the list shows of a file is kept until the
    file changes."""

    def __init__(self, directory: Path) -> None:
        """Raises RequestRefused unless it is a directory that can be read."""
        self._directory = directory
        self._known: dict[str, tuple[tuple[int, ...], Json]] = {}
        self._reading = asyncio.Lock()
        try:
            self._names()
        except OSError as error:
            why = f"a directory that can be read: {error.strerror}"
            raise refused("--reports", directory, why) from error

    async def page(self, number: int) -> Json:
        """A page of the list, the newest first."""
        async with self._reading:
            return await asyncio.to_thread(self._page, number)

    async def one(self, name: str) -> Json:
        """One report. Raises NotFound, or RequestRefused with what is wrong with its file."""
        async with self._reading:
            return await asyncio.to_thread(self._one, name)

    def _names(self) -> tuple[list[str], bool]:
        """The names of directories, and whether there are more than ENTRIES_MAX entries."""
        found: list[str] = []
        with os.scandir(self._directory) as entries:
            for at, entry in enumerate(entries):
                if at >= ENTRIES_MAX:
                    return found, True
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
        return found, False

    def _page(self, number: int) -> Json:
        try:
            names, more = self._names()
        except OSError as error:
            raise refused("--reports", self._directory, f"a directory that can be read: {error.strerror}") from error
        stamped = [(stamp, name) for name in names if (stamp := self._stamp(name))]
        stamped.sort(reverse=True)
        self._known = {name: known for _, name in stamped if (known := self._known.get(name)) is not None}
        pages = max(1, -(-len(stamped) // PAGE))
        number = min(number, pages)
        shown = stamped[(number - 1) * PAGE : number * PAGE]
        return {
            "items": [self._row(name, stamp) for stamp, name in shown],
            "found": len(stamped),
            "total": len(stamped),
            "page": number,
            "pages": pages,
            "without": len(names) - len(stamped),
            "more": more,
            "entries_max": ENTRIES_MAX,
        }

    def _stamp(self, name: str) -> tuple[int, ...]:
        """When the report of a directory was written, and which file it is; empty: there is none."""
        try:
            found = (self._directory / name / FILE).lstat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size)

    def _row(self, name: str, stamp: tuple[int, ...]) -> Json:
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        row: Json = {"name": name, "shown": name if showable(name) else ascii(name)[1:-1][:NAME_CHARACTERS_MAX]}
        try:
            row |= summary(decoded(self._content(name)))
        except RequestRefused as error:
            row |= {"name": "", "trouble": str(error)}
        else:
            row["trouble"] = ""
        self._known[name] = (stamp, row)
        return row

    def _one(self, name: str) -> Json:
        return {"name": name, **whole(decoded(self._content(name)))}

    def _content(self, name: str) -> bytes:
        """The bytes of a report, found below the directory and nowhere else, whatever its name says or a link does."""
        if not showable(name):
            raise refused("name", ascii(name), f"1 to {NAME_CHARACTERS_MAX} printable characters without /")
        try:
            with (
                opened(self._directory / name, os.O_NOFOLLOW | os.O_DIRECTORY) as run,
                opened(FILE, os.O_NOFOLLOW, run) as descriptor,
            ):
                if not is_file(os.fstat(descriptor)):
                    raise refused(FILE, name, "a file")
                content = content_of(descriptor, FILE_BYTES_MAX)
        except FileNotFoundError:
            raise NotFound(f"there is no report {name}", "NOT_FOUND", {"field": "name", "value": name}) from None
        except OSError as error:
            links = error.errno in (errno.ELOOP, errno.ENOTDIR)
            why = "a file in a directory, without links" if links else f"a file that can be read: {error.strerror}"
            raise refused(FILE, name, why) from None
        if content is None:
            raise refused(FILE, name, f"at most {FILE_BYTES_MAX:,} bytes")
        return content


def showable(name: str) -> bool:
    """Whether a name of a directory can stand in an address and on a page."""
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable() and "/" not in name and not name.startswith(".")
