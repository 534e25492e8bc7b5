"""Commands that steer delivery: pause and resume, another filter or another place for a group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from rich.text import Text

from tickwheel.client import AsyncClient, DiskUse, Group, TickwheelError
from tickwheel.client.errors import Fault
from tickwheel.node.cli.options import Asked
from tickwheel.node.cli.output import as_dict, ask, out, place, print_json, print_table, say, time_text, warn
from tickwheel.node.cli.status import status_app, unanswered
from tickwheel.node.cli.topics import Name, group_app, topic_app


def _change_group(change: Callable[[AsyncClient], Awaitable[Group]], said: str) -> None:
    group = ask(change)
    say(as_dict(group), said)


@group_app.command("filter")
def group_filter(name: Name, filter: Annotated[str, typer.Argument(help="'a || b', or '*' for everything.")]) -> None:
    """Give a group another tag filter, from its floor on. What was skipped before stays skipped."""
    _change_group(lambda client: client.admin.set_group_filter(name, filter), f"{name} takes {filter}")


@group_app.command("pause")
def group_pause(name: Name) -> None:
    """Hand out nothing to the group until it is resumed. Deliveries in flight can be settled."""
    _change_group(lambda client: client.admin.pause_group(name), f"group {name} paused")


@group_app.command("resume")
def group_resume(name: Name) -> None:
    """Resume after a pause."""
    _change_group(lambda client: client.admin.pause_group(name, paused=False), f"group {name} resumed")


@group_app.command("reset")
def group_reset(
    name: Name,
    to: Annotated[str, typer.Option(help="earliest, latest, or a time: ISO 8601 or milliseconds since 1970.")],
    topic: Annotated[list[str], typer.Option(help="Only this topic; repeat for more.")] = [],  # noqa: B006
) -> None:
    """Reset a group to another place. Deliveries in flight become invalid, and attempts begin at 1."""
    start_from, start_ms = place("--to", to)
    _change_group(
        lambda client: client.admin.reset_group(name, start_from, start_ms=start_ms, topics=topic),
        f"group {name} reset to {time_text(start_ms) if start_ms else to}",
    )


def _pause_topic(name: str, paused: bool) -> None:
    topic = ask(lambda client: client.admin.pause_topic(name, paused=paused))
    say(as_dict(topic), f"topic {name} {'paused' if paused else 'resumed'}")


@topic_app.command("pause")
def topic_pause(name: Name) -> None:
    """Hand out nothing of the topic to any group until it is resumed. Messages still become ready."""
    _pause_topic(name, True)


@topic_app.command("resume")
def topic_resume(name: Name) -> None:
    """Resume after a pause."""
    _pause_topic(name, False)


@status_app.command("disk")
def disk(
    topics: Annotated[
        bool, typer.Option("--topics", help="Also show topics. This reads the indexes of the hours.")
    ] = False,
    hours: Annotated[int, typer.Option(min=0, help="Show this many of the largest hours.")] = 10,
) -> None:
    """Show what the data directory of each node at the given addresses holds: by part, hour and topic."""

    async def of_each(client: AsyncClient) -> tuple[dict[str, DiskUse], dict[str, str]]:
        uses: dict[str, DiskUse] = {}
        faults: dict[str, Fault] = {}
        for one in list(client.cluster.addresses):
            try:
                uses[one] = await client.admin.disk_use(one, by_topic=topics)
            except TickwheelError as error:
                if error.reason not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                faults[one] = Fault(error.reason, str(error))
        if not uses:
            raise unanswered(faults, client.cluster.why)
        return uses, {one: client.cluster.why(fault) for one, fault in faults.items()}

    uses, silent = ask(of_each, timeout_s=60.0)
    if Asked.json:
        print_json([*map(as_dict, uses.values()), *({"address": one, "error": why} for one, why in silent.items())])
        return
    for one, why in silent.items():
        warn(f"{one}: no answer: {why}")
    for use in uses.values():
        used = 100 * (1 - use.bytes_free / use.bytes_total) if use.bytes_total else 0.0
        mark = f", mark {use.high_water_percent} %" if use.high_water_percent else ""
        above = " schedules are refused" if use.above_high_water else ""
        free = f"  {use.bytes_free / (1 << 30):,.1f} GiB free, {used:.0f} % used{mark}"
        out.print(Text.assemble((use.node_id, "bold"), free, (above, "red")))
        print_table("", ("part", "bytes"), [(part.name, f"{part.bytes:,}") for part in use.parts], right=(1,))
        largest = sorted(sorted(use.hours, key=lambda hour: -hour.bytes)[:hours], key=lambda hour: hour.start)
        if use.hours_left_out:
            out.print(f"the latest {use.hours_left_out:,} hours are left out")
        rows = [(time_text(hour.start)[:16], f"{hour.bytes:,}") for hour in largest]
        print_table("", ("hour (UTC)", "bytes"), rows, right=(1,))
        if topics:
            by_topic = [(item.topic or "(deleted)", f"{item.messages:,}", f"{item.bytes:,}") for item in use.topics]
            print_table("", ("topic", "messages", "bytes"), by_topic, right=(1, 2))
            if use.topics_left_out:
                out.print(f"and {use.topics_left_out:,} smaller topics")
