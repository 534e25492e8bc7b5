"""Commands about pending messages: `tickwheel pending list|count|histogram`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient, ColdStatus, Message, PendingCount
from tickwheel.node.cli.charts import columns, short
from tickwheel.node.cli.messages import as_dict
from tickwheel.node.cli.options import Asked, Commands, MadeBy
from tickwheel.node.cli.output import as_dict as answer_as_dict
from tickwheel.node.cli.output import ask, moment_ms, out, print_json, print_table, time_text

pending_app = Commands(
    no_args_is_help=True, help="Pending messages: list, count, draw when they are due, cancel and move many."
)
plain_app = Commands()
"""`tickwheel list` and `tickwheel count`, the same commands under short names."""

WIDTHS_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000}
SHORT_WIDTHS = {"1s": "second", "1m": "minute", "1h": "hour"}
ROW_BUCKETS = {"second": 60, "minute": 60, "hour": 24}
"""Columns of a row of the histogram: a minute's seconds, an hour's minutes, a day's hours."""
LABELS = {"second": "%m-%d %H:%M", "minute": "%m-%d %H:00", "hour": "%a %m-%d"}
RULERS = {
    "second": "0         10        20        30        40        50        ",
    "minute": "0         10        20        30        40        50        ",
    "hour": "0  3  6  9  12 15 18 21 ",
}
AUTO_SECONDS_MS, AUTO_MINUTES_MS = 10 * 60_000, 12 * 3_600_000
"""Longest span shown by second, and by minute."""


def _selection(
    topic: Annotated[str, typer.Argument(help="Topic. Without it: all topics.")] = "",
    tag: Annotated[str, typer.Option("--tag", help="With this tag.")] = "",
    key: Annotated[str, typer.Option("--key", help="With this key.")] = "",
    key_prefix: Annotated[str, typer.Option("--key-prefix", help="With a key that begins with this.")] = "",
    after: Annotated[
        str | None, typer.Option("--from", help="Due from this time on (ISO 8601 or milliseconds).")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Due before this time.")] = None,
) -> dict[str, Any]:
    """The options as arguments of the client's methods."""
    return {
        "topic": topic,
        "tag": tag,
        "key": key,
        "key_prefix": key_prefix,
        "due_ms_min": moment_ms("--from", after) if after else 0,
        "due_ms_max": moment_ms("--until", until) if until else 0,
    }


Chosen = Annotated[dict[str, Any], MadeBy(_selection)]


@pending_app.command("list")
@plain_app.command("list")
def list_pending(
    chosen: Chosen,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 100,
    content: Annotated[bool, typer.Option("--content", help="Show the payload.")] = False,
) -> None:
    """List pending messages in the order of their delivery."""

    async def go(client: AsyncClient) -> tuple[list[Message], ColdStatus]:
        found: list[Message] = []
        async for message in client.list_pending(**chosen, content=content, meta=True, page_size=min(limit, 1_000)):
            found.append(message)
            if len(found) == limit:
                break
        return found, (await client.admin.master_status()).cold

    found, cold = ask(go)
    if Asked.json:
        print_json([as_dict(message) for message in found])
        return
    with_keys = any(m.unique_key for m in found)
    rows = [
        (
            time_text(m.due_ms),
            m.topic,
            m.id + (f" retry {m.attempts} of {m.group}" if m.group else ""),
            *((escape(m.unique_key),) if with_keys else ()),
            escape(m.key),
            escape(" ".join(m.tags)),
            f"{m.payload_bytes:,}",
            escape((m.payload or b"")[:60].decode(errors="replace")),
        )
        for m in found
    ]
    unique = ("unique key",) if with_keys else ()
    titles = ("due", "topic", "id", *unique, "key", "tags", "bytes", "payload" if content else "")
    print_table("", titles, rows, right=(5 + len(unique),), whole=(0, 2))
    if len(found) == limit:
        out.print(f"the first {limit:,}; --limit shows more", style="dim")
    print_cold(cold)


def cold_text(cold: ColdStatus) -> str:
    """A sentence about the messages in the cold tier, which lists, counts and sweeps do not see; empty if none wait."""
    waiting = cold.messages + cold.moved  # a moved one waits although its part may be loaded
    if not waiting:
        return ""
    first = f", the first due {time_text(cold.next_due)[:19]}Z" if cold.next_due is not None else ""
    return (
        f"not among them: {cold.messages:,} messages of all topics in {cold.parts:,} parts of the cold tier "
        f"({cold.cancelled:,} cancelled, {cold.moved:,} moved){first}; tickwheel pipeline cold status"
    )


def print_cold(cold: ColdStatus) -> None:
    """Print the sentence about the cold tier; nothing if none wait there."""
    if text := cold_text(cold):
        out.print(text, style="dim")


def _count(chosen: dict[str, Any], bucket_ms: int) -> tuple[PendingCount, ColdStatus]:
    async def go(client: AsyncClient) -> tuple[PendingCount, ColdStatus]:
        counted = await client.count_pending(**chosen, bucket_ms=bucket_ms)
        return counted, (await client.admin.master_status()).cold

    return ask(go)


def _as_json(counted: PendingCount, cold: ColdStatus) -> dict[str, Any]:
    names = ("messages", "parts", "cancelled", "moved", "next_due_ms")
    found = answer_as_dict(cold)
    return {**dataclasses.asdict(counted), "cold": {name: found[name] for name in names}}


@pending_app.command()
@plain_app.command()
def count(chosen: Chosen, bucket: Annotated[str, typer.Option(help="Width of a bucket: 1s, 1m or 1h.")] = "1h") -> None:
    """Count pending messages, by time."""
    if bucket not in SHORT_WIDTHS:
        raise typer.BadParameter("--bucket must be 1s, 1m or 1h")
    counted, cold = _count(chosen, WIDTHS_MS[SHORT_WIDTHS[bucket]])
    if Asked.json:
        print_json(_as_json(counted, cold))
        return
    rows = [(time_text(b.start_ms), f"{b.count:,}") for b in counted.buckets]
    print_table("", ("from", "pending"), rows, right=(1,))
    out.print(f"{counted.total:,} pending")
    print_cold(cold)


@pending_app.command()
def histogram(
    chosen: Chosen,
    by: Annotated[str, typer.Option(help="second, minute, hour; auto: chosen by the time range.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Draw at most this many rows.")] = 48,
    linear: Annotated[
        bool,
        typer.Option(
            "--linear", help="Draw heights in proportion. Otherwise they are square roots, so that low values show."
        ),
    ] = False,
) -> None:
    """Draw when pending messages are due. A row is a day by hour, an hour by minute, or a minute by second, in UTC."""
    if by not in {*WIDTHS_MS, "auto"}:
        raise typer.BadParameter(f"{by[:40]!r}: second, minute, hour or auto", param_hint="--by")
    width = by if by != "auto" else "hour"
    counted, cold = _count(chosen, WIDTHS_MS[width])
    if by == "auto" and counted.buckets:
        span_ms = counted.buckets[-1].start_ms + WIDTHS_MS["hour"] - counted.buckets[0].start_ms
        if chosen["due_ms_max"] and chosen["due_ms_min"]:
            span_ms = chosen["due_ms_max"] - chosen["due_ms_min"]
        if span_ms <= AUTO_MINUTES_MS:
            width = "second" if span_ms <= AUTO_SECONDS_MS else "minute"
            counted, cold = _count(chosen, WIDTHS_MS[width])
    if Asked.json:
        print_json({"by": width, **_as_json(counted, cold)})
        return
    for line in drawn(counted, width, rows, linear):
        out.print(line, no_wrap=True, overflow="ignore", crop=False)
    print_cold(cold)


def drawn(counted: PendingCount, width: str, rows_max: int, linear: bool) -> Iterator[str]:
    """The lines of the histogram. Rows without a message are left out, and a line gives their number."""
    if not counted.buckets:
        yield "nothing is pending"
        return
    bucket_ms, per_row = WIDTHS_MS[width], ROW_BUCKETS[width]
    row_ms = bucket_ms * per_row
    by_row: dict[int, list[int]] = {}
    for bucket in counted.buckets:
        row = by_row.setdefault(bucket.start_ms // row_ms * row_ms, [0] * per_row)
        row[bucket.start_ms % row_ms // bucket_ms] += bucket.count
    peak = max(max(row) for row in by_row.values())
    spread = 2 if width == "hour" else 1
    ruler = RULERS[width] if spread == 1 else "".join(f"{hour:<6}" for hour in range(0, 24, 3))
    margin = max(len(_label(start_ms, width)) for start_ms in by_row)
    yield f"{'':{margin}} {ruler}  total"
    before_ms: int | None = None
    for number, (start_ms, row) in enumerate(sorted(by_row.items())):
        if number == rows_max:
            left = sum(sum(row) for row in list(dict(sorted(by_row.items())).values())[number:])
            yield f"{'':{margin}} ... {len(by_row) - number:,} rows more with {left:,}; --rows, --from, or a wider --by"
            break
        if before_ms is not None and start_ms > before_ms + row_ms:
            yield f"{'':{margin}} · {(start_ms - before_ms) // row_ms - 1:,} without a message"
        heights = columns(row, peak) if linear else columns([value**0.5 for value in row], peak**0.5)
        drawn_row = "".join(character * spread for character in heights)
        yield f"{_label(start_ms, width):{margin}} {drawn_row} {short(sum(row)):>6}"
        before_ms = start_ms
    first, last = counted.buckets[0].start_ms, counted.buckets[-1].start_ms
    top = max(counted.buckets, key=lambda bucket: bucket.count)
    yield f"{counted.total:,} pending from {time_text(first)[:19]}Z to {time_text(last)[:19]}Z"
    yield f"the fullest {width}: {top.count:,} at {time_text(top.start_ms)[:19]}Z"


def _label(start_ms: int, width: str) -> str:
    return datetime.fromtimestamp(start_ms / 1_000, UTC).strftime(LABELS[width])
