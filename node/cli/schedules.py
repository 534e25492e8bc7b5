"""Commands about recurring schedules: `tickwheel schedules put|get|list|pause|...`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from rich.markup import escape

from tickwheel.client import (
    AsyncClient,
    Missed,
    NotFound,
    Overlap,
    PutResult,
    RunOutcome,
    Schedule,
    ScheduleRun,
    ScheduleState,
    TickwheelError,
)
from tickwheel.client.moments import MILLISECOND, moment_of, ms_of
from tickwheel.client.schedules import ZONE_RULE
from tickwheel.node.cli.options import Asked, Commands, MadeBy
from tickwheel.node.cli.output import as_dict as answer_as_dict
from tickwheel.node.cli.output import (
    ask,
    duration,
    err,
    headers_of,
    moment_ms,
    out,
    payload_as_dict,
    payload_of,
    print_json,
    print_table,
    say,
    time_text,
)
from tickwheel.node.times import span_text

schedules_group = Commands(
    no_args_is_help=True, help="Recurring schedules: put, get, list, pause, resume, trigger, backfill, delete, preview."
)
schedules_app = typer.Typer()
schedules_app.add_typer(schedules_group, name="schedules")

PAYLOAD_SHOWN = 200
CONTENT = ("key", "tags", "headers", "message_group")
"""What a list does not have, beside the payload."""
RUNS_MISSED_MAX = 100
"""A node counts no further."""

Name = Annotated[str, typer.Argument(help="Name of the schedule.")]
Count = Annotated[int, typer.Option("--count", min=0, help="End after this many runs. 0: no limit.")]
Revision = Annotated[
    int, typer.Option("--revision", min=0, help="Only if this is still the revision, as `get` shows it.")
]
RequestId = Annotated[
    str | None, typer.Option("--request-id", help="A name for this request: a repeat with it makes no run twice.")
]


def _timing(
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            help="Five fields, minute hour day-of-month month day-of-week, or six with the second before them: "
            "'0 9 * * MON-FRI'.",
        ),
    ] = None,
    every: Annotated[
        str | None, typer.Option("--every", help="Instead of --cron, an interval: 30s, 15m, 1h30m, 1d.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option("--zone", help="Time zone of --cron, such as Europe/Berlin. Without it: UTC.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--start", help="No run before it (ISO 8601 or milliseconds). --every counts from it.")
    ] = None,
    end: Annotated[str | None, typer.Option("--end", help="No run after it (ISO 8601 or milliseconds).")] = None,
) -> dict[str, Any]:
    """The options that say when, as arguments of the client's methods."""
    if (cron is None) == (every is None):
        raise typer.BadParameter("give exactly one of --cron and --every")
    if zone == "":
        raise typer.BadParameter(f"'': {ZONE_RULE}", param_hint="--zone")
    return {
        "cron": cron,
        "every": duration("--every", every) if every is not None else None,
        "zone": zone,
        "start": moment_of(moment_ms("--start", start)) if start is not None else None,
        "end": moment_of(moment_ms("--end", end)) if end is not None else None,
    }


Timing = Annotated[dict[str, Any], MadeBy(_timing)]


def _plan(schedule: Schedule) -> str:
    """When it runs, in a line."""
    if schedule.every is not None:
        return f"every {span_text(schedule.every // MILLISECOND)}"
    return f"{schedule.cron} {schedule.zone}".rstrip()


def _utc(moment: datetime | None) -> str:
    """A planned time in UTC; milliseconds only where there are some."""
    return "" if moment is None else time_text(ms_of("time", moment)).replace(".000Z", "Z")


def _local(moment: datetime, zone: str) -> str:
    """As a wall clock there shows it."""
    try:
        return f"{moment.astimezone(ZoneInfo(zone)):%a %Y-%m-%d %H:%M:%S %z}"
    except (ZoneInfoNotFoundError, OverflowError):
        return ""


def _print_times(title: str, times: Sequence[datetime], zone: str) -> None:
    """Planned times in UTC, and in the schedule's own zone."""
    if title:
        out.print(title)
    if zone in ("", "UTC"):
        print_table("", ("UTC", "day"), [(_utc(moment), f"{moment:%a}") for moment in times])
    else:
        print_table("", ("UTC", zone), [(_utc(moment), _local(moment, zone)) for moment in times])


def _state(schedule: Schedule) -> str:
    colour = {ScheduleState.PAUSED: "yellow", ScheduleState.ENDED: "dim"}.get(schedule.state)
    return f"[{colour}]{schedule.state}[/]" if colour else str(schedule.state)


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else ms_of("time", moment)


def _run_dict(run: ScheduleRun) -> dict[str, Any]:
    return answer_as_dict(run) | {"id": run.id or None}


def as_dict(schedule: Schedule) -> dict[str, Any]:
    """The schedule as a JSON object, without its runs."""
    values = answer_as_dict(schedule)
    for name in ("runs", "upcoming_ms", "payload"):
        del values[name]
    values["next_ms"] = values.pop("next_run_ms")
    values["cron"] = schedule.cron or None
    values |= {f"runs_{what}": number for what, number in values.pop("counts").items()}
    if schedule.payload is None:
        return {name: value for name, value in values.items() if name not in CONTENT}
    return values | payload_as_dict(schedule.payload)


def _next_text(schedule: Schedule) -> str:
    """What comes next, as the end of a sentence."""
    if schedule.state == ScheduleState.PAUSED:
        return f"It is paused; `tickwheel schedules resume {schedule.name}` lets it run"
    if schedule.next_run is None:
        return "No run is left"
    zone = f" ({_local(schedule.next_run, schedule.zone)})" if schedule.zone not in ("", "UTC") else ""
    return f"Next run {_utc(schedule.next_run)}{zone}"


@schedules_group.command("put")
def put(
    name: Name,
    topic: Annotated[str, typer.Argument(help="Topic of its messages.")],
    payload: Annotated[str | None, typer.Argument(help="Payload as text. - reads standard input.")] = None,
    *,
    timing: Timing,
    count: Count = 0,
    jitter: Annotated[str | None, typer.Option(help="Delay each run by a random part of this: 30s, 10m.")] = None,
    missed: Annotated[
        Missed, typer.Option(help="Runs that nobody could make in time: make none, the last one, or all.")
    ] = Missed.LAST,
    missed_window: Annotated[
        str | None, typer.Option("--missed-window", help="With --missed all: those of the last 1h, 2d.")
    ] = None,
    late_max: Annotated[
        str | None, typer.Option("--late-max", help="How late a run may be before it counts as missed. Default 1m.")
    ] = None,
    overlap: Annotated[
        Overlap, typer.Option(help="skip: no run while the one before it is not settled.")
    ] = Overlap.ALLOW,
    file: Annotated[Path | None, typer.Option(help="Payload from a file.", exists=True, dir_okay=False)] = None,
    key: Annotated[str, typer.Option(help="Key kept with each message.")] = "",
    tag: Annotated[list[str], typer.Option(help="Tag; repeat for more.")] = [],  # noqa: B006
    header: Annotated[list[str], typer.Option(help="NAME=VALUE; repeat for more.")] = [],  # noqa: B006
    message_group: Annotated[
        str, typer.Option(help="FIFO topics deliver messages of one message group in order.")
    ] = "",
    paused: Annotated[
        bool | None, typer.Option("--paused/--active", help="Create it paused. Default: as it is; a new one is active.")
    ] = None,
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Refuse to replace another one of this name.")] = False,
    revision: Revision = 0,
) -> None:
    """Create a schedule, or replace the one of this name. Repeating the same changes nothing."""
    content = payload_of(payload, file)

    async def go(client: AsyncClient) -> PutResult:
        return await client.schedules.put(
            name,
            topic,
            content,
            **timing,
            count=count,
            jitter=duration("--jitter", jitter) if jitter is not None else None,
            missed=missed,
            missed_window=duration("--missed-window", missed_window) if missed_window is not None else None,
            late_max=duration("--late-max", late_max) if late_max is not None else None,
            overlap=overlap,
            key=key,
            tags=tag,
            headers=headers_of(header),
            message_group=message_group,
            paused=paused,
            if_absent=if_absent,
            expected_revision=revision,
        )

    done = ask(go)
    if Asked.json:
        print_json({"created": done.created, "changed": done.changed, **as_dict(done.schedule)})
        return
    what = "created" if done.created else "replaced" if done.changed else "unchanged"
    out.print(f"{name} {what}. {_next_text(done.schedule)}")


@schedules_group.command("get")
def get(name: Name) -> None:
    """Show one schedule: its definition, the next ten runs, the last ten and what became of them."""

    async def state(client: AsyncClient, run: ScheduleRun) -> str:
        """Of the run's message, in small letters; empty if it has none."""
        if not run.id:
            return ""
        try:
            return (await client.get(run.id)).state.lower()
        except NotFound:
            return "removed"

    async def go(client: AsyncClient) -> tuple[Schedule, list[str]]:
        found = await client.schedules.get(name)
        return found, await asyncio.gather(*(state(client, run) for run in found.runs))

    schedule, states = ask(go)
    if Asked.json:
        runs = [
            _run_dict(run) | {"message_state": said or None} for run, said in zip(schedule.runs, states, strict=True)
        ]
        print_json(as_dict(schedule) | {"upcoming_ms": [_ms(moment) for moment in schedule.upcoming], "runs": runs})
        return
    print_table("", ("schedule", escape(schedule.name)), _definition(schedule))
    if schedule.upcoming:
        paused = " (paused: they are not made)" if schedule.state == ScheduleState.PAUSED else ""
        _print_times(f"\nnext runs{paused}", schedule.upcoming, schedule.zone)
    else:
        out.print("\nNo run is left.")
    if schedule.runs:
        titles = ("planned", "outcome", "later by", "message", "state")
        rows = [
            (_utc(run.planned), _outcome(run), _later(run), run.id, said)
            for run, said in zip(schedule.runs, states, strict=True)
        ]
        out.print("\nlast runs")
        print_table("", titles, rows, right=(2,), whole=(0, 3))
    else:
        out.print("\nNo run was made yet.")


def _definition(schedule: Schedule) -> list[tuple[str, str]]:
    """What was put, and counts; without what is not set."""
    payload = schedule.payload or b""
    text = payload[:PAYLOAD_SHOWN].decode(errors="backslashreplace")
    window = f" within {span_text(schedule.missed_window // MILLISECOND)}" if schedule.missed_window else ""
    late = f", late after {span_text(schedule.late_max // MILLISECOND)}" if schedule.late_max else ""
    counts = [f"{number:,} {what}" for what, number in answer_as_dict(schedule.counts).items() if number]
    rows = [
        ("state", _state(schedule)),
        ("revision", str(schedule.revision)),
        ("when", escape(_plan(schedule))),
        ("start", _utc(schedule.start)),
        ("end", _utc(schedule.end)),
        ("count", f"{schedule.counts.made:,} of {schedule.count:,}" if schedule.count else ""),
        ("jitter", span_text(schedule.jitter // MILLISECOND) if schedule.jitter else ""),
        ("missed runs", f"{schedule.missed}{window}{late}"),
        ("overlap", str(schedule.overlap)),
        ("topic", escape(schedule.topic)),
        ("payload", escape(text) + ("..." if len(payload) > PAYLOAD_SHOWN else "")),
        ("key", escape(schedule.key)),
        ("tags", escape(", ".join(schedule.tags))),
        ("headers", escape(", ".join(f"{name}={value}" for name, value in schedule.headers.items()))),
        ("message group", escape(schedule.message_group)),
        ("runs", ", ".join(counts).replace("no_topic", "without a topic") or "none"),
        ("created", _utc(schedule.created)),
        ("changed", _utc(schedule.changed)),
        ("owner", escape(schedule.owner)),
    ]
    return [row for row in rows if row[1]]


def _outcome(run: ScheduleRun) -> str:
    what = run.outcome.replace("_", " ")
    if run.count <= 1:
        return what
    return f"{what} {run.count:,}" + ("+" if run.count >= RUNS_MISSED_MAX else "")


def _later(run: ScheduleRun) -> str:
    """How much later than planned it is due."""
    if run.due is None or run.outcome == RunOutcome.TRIGGERED:
        return ""
    if run.due <= run.planned:
        return ""
    late_s = (run.due - run.planned).total_seconds()
    return f"{late_s:.3f} s" if late_s < 60 else span_text(round(late_s) * 1_000)


@schedules_group.command("list")
def list_schedules(
    prefix: Annotated[str, typer.Argument(help="Beginning of the names. Without it: all.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")] = 100,
) -> None:
    """List schedules by name."""

    async def go(client: AsyncClient) -> tuple[list[Schedule], bool]:
        found: list[Schedule] = []
        async for schedule in client.schedules.list(prefix):
            if len(found) == limit:
                return found, True
            found.append(schedule)
        return found, False

    found, more = ask(go)
    if Asked.json:
        print_json([as_dict(schedule) for schedule in found])
        return
    rows = [
        (
            escape(schedule.name),
            escape(_plan(schedule)),
            _state(schedule),
            _utc(schedule.next_run) if schedule.state == ScheduleState.ACTIVE else "",
            f"{schedule.counts.made:,}",
        )
        for schedule in found
    ]
    print_table("", ("name", "when", "state", "next run", "made"), rows, right=(4,), whole=(2, 3))
    if more:
        err.print(f"There are more; --limit shows more than {limit:,}.", style="dim", soft_wrap=True)


@schedules_group.command("pause")
def pause(name: Name, revision: Revision = 0) -> None:
    """Make no more runs until it is resumed. Runs made ahead for a later time are cancelled."""
    schedule = ask(lambda client: client.schedules.pause(name, expected_revision=revision))
    say(as_dict(schedule), f"{name} is paused")


@schedules_group.command("resume")
def resume(name: Name, revision: Revision = 0) -> None:
    """Go on with the next planned time. Those that passed while it was paused are not made; see backfill."""
    schedule = ask(lambda client: client.schedules.resume(name, expected_revision=revision))
    say(as_dict(schedule), f"{name} is {schedule.state}. {_next_text(schedule)}")


@schedules_group.command("trigger")
def trigger(name: Name, request_id: RequestId = None) -> None:
    """Make one run now, beside the plan. Print the id of its message."""
    run = ask(lambda client: client.schedules.trigger(name, request_id=request_id))
    say(_run_dict(run), f"{run.id}  due {_utc(run.due)}")


@schedules_group.command("backfill")
def backfill(
    name: Name,
    start: Annotated[str, typer.Option("--from", help="From this planned time on (ISO 8601 or milliseconds).")],
    end: Annotated[str, typer.Option("--until", help="Before this planned time; not in the future.")],
    request_id: RequestId = None,
) -> None:
    """Make the runs of a past time again, due at once."""
    from_ms, until_ms = moment_ms("--from", start), moment_ms("--until", end)

    async def go(client: AsyncClient) -> int:
        try:
            return await client.schedules.backfill(name, moment_of(from_ms), moment_of(until_ms), request_id=request_id)
        except TickwheelError as error:
            facts = error.metadata
            if facts.get("made", "0") != "0":
                err.print(
                    f"{int(facts['made']):,} runs are made. Go on with: tickwheel schedules backfill {name} "
                    f"--from {facts['next_from_ms']} --until {until_ms} --request-id {facts['request_id']}",
                    soft_wrap=True,
                )
            raise

    made = ask(go)
    say({"made": made}, f"{made:,} runs made" if made else "No run was planned then")


@schedules_group.command("delete")
def delete(name: Name, revision: Revision = 0) -> None:
    """Delete a schedule. Runs made ahead for a later time are cancelled. Exit code 1 if there is none."""
    deleted = ask(lambda client: client.schedules.delete(name, expected_revision=revision))
    say({"deleted": deleted}, f"{name} deleted" if deleted else f"there is no schedule {name}")
    if not deleted:
        raise typer.Exit(1)


@schedules_group.command("preview")
def preview(
    timing: Timing,
    count: Count = 0,
    after: Annotated[str | None, typer.Option("--after", help="Times after this one. Without it: after now.")] = None,
    times: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000, help="Show at most this many.")] = 10,
) -> None:
    """Show when such a schedule would run, without creating it."""
    moment = moment_of(moment_ms("--after", after)) if after is not None else None
    found = ask(lambda client: client.schedules.preview(**timing, count=count, after=moment, times=times))
    if Asked.json:
        print_json([_ms(moment) for moment in found])
    elif found:
        _print_times("", found, timing["zone"] or "UTC")
    else:
        out.print("No run is planned")
