"""Commands that cancel or move many pending messages: `tickwheel pending cancel|reschedule|sweeps|stop`.

The work is a job of the cluster. The commands start it and show its progress; interrupting them does it no harm.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tickwheel.client import AsyncClient, Selection, Sweep, SweepState
from tickwheel.node.cli.options import Asked
from tickwheel.node.cli.output import ask, confirm, duration, err, moment_ms, out, print_json, print_table, time_text
from tickwheel.node.cli.pending import Chosen, cold_text, pending_app

sweeps_app = typer.Typer()
"""`tickwheel pending`, with the commands of this module below it."""
sweeps_app.add_typer(pending_app, name="pending")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Detach = Annotated[bool, typer.Option("--detach", help="Start the job, print its id, and do not wait.")]
JobId = Annotated[str, typer.Argument(help="Id of the job, as it was printed.")]


def _as_dict(sweep: Sweep) -> dict[str, Any]:
    return dataclasses.asdict(sweep)


def said_of(sweep: Sweep) -> str:
    """The result of a job so far, in words."""
    verb = "moved" if sweep.action.startswith(("move", "shift")) else "cancelled"
    extra = [
        (sweep.too_late, "too late: already dispatched"),
        (sweep.gone, "cancelled or moved by somebody else"),
        (sweep.too_far, "left alone: the new time is too far ahead"),
        (sweep.undelivered, "dispatched but not settled by a group"),
        (sweep.dead, "dead letters deleted"),
    ]
    words = [f"{sweep.done:,} {verb}", *(f"{count:,} {what}" for count, what in extra if count)]
    return "; ".join(words)


async def _ask(client: AsyncClient, chosen: dict[str, Any], verb: str) -> int:
    """Show the number of messages, ask for confirmation, and return the number. There is no question about none. Raises
    BadParameter without a terminal, Abort on a no."""
    count = (await client.count_pending(**chosen)).total
    if not count:
        return 0
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{count:,} messages would be {verb}; pass --yes to confirm")
    await confirm(f"{count:,} {'message' if count == 1 else 'messages'} will be {verb}.")
    return count


def _selection(chosen: dict[str, Any]) -> Selection:
    """What is chosen. Raises BadParameter for what no sweep takes, before anybody is asked to confirm it."""
    if not any(chosen[name] for name in ("topic", "tag", "key", "key_prefix")):
        raise typer.BadParameter("give a topic, --tag, --key or --key-prefix")
    return Selection(**chosen)


def _nothing(chosen: Selection, action: str) -> Sweep:
    """The result where nothing is selected. No job is begun: it would take what is scheduled meanwhile, and nobody has
    agreed to that."""
    counts = dict.fromkeys(("begun_ms", "ended_ms", "pending", "examined", "done", "too_late", "gone", "too_far"), 0)
    return Sweep(job_id="", state=SweepState.FINISHED, action=action, selection=chosen, **counts)


async def _say_cold(client: AsyncClient) -> None:
    """Print the number of messages in the cold tier, which no selection finds; nothing if there are none."""
    if cold := cold_text((await client.admin.master_status()).cold):
        err.print(cold, style="dim", soft_wrap=True)


async def follow(client: AsyncClient, begun: Sweep, selected: int | None = None) -> Sweep:
    """Show the progress of a job until it has ended. Returns its last state. `selected`: how many messages it is to
    change, if that is known."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
    )
    last = begun
    with Progress(*columns, console=err, transient=True, disable=Asked.json or not err.is_terminal) as progress:
        task = progress.add_task(begun.action, total=1.0, done="")
        try:
            async for last in client.sweeps.follow(begun.job_id):
                handled = last.done + last.too_late + last.gone + last.too_far
                # A job looks at what is pending and not selected, too: both are progress.
                share = max(last.fraction, min(1.0, handled / selected) if selected else 0.0)
                said = f"{last.done:,} of {selected:,} done" if selected else f"{last.done:,} done"
                progress.update(task, completed=share, done=said)
        except asyncio.CancelledError:
            err.print(
                "The job keeps running in the cluster. See: tickwheel pending sweeps. "
                f"Stop it: tickwheel pending stop {begun.job_id}",
                soft_wrap=True,
            )
            raise
    return last


def _report(sweep: Sweep) -> None:
    if Asked.json:
        print_json(_as_dict(sweep))
    elif sweep.ended:
        out.print(said_of(sweep) + (" before it was stopped" if sweep.state == "STOPPED" else ""))
    else:
        out.print(sweep.job_id)


@pending_app.command()
def cancel(chosen: Chosen, yes: Yes = False, detach: Detach = False) -> None:
    """Cancel every pending message of a selection that was scheduled before now."""

    selection = _selection(chosen)

    async def go(client: AsyncClient) -> Sweep:
        await _say_cold(client)
        count = None if yes else await _ask(client, chosen, "cancelled")
        if count == 0:
            return _nothing(selection, "cancel")
        begun = await client.sweeps.cancel(selection)
        return begun if detach else await follow(client, begun, count)

    _report(ask(go))


@pending_app.command()
def reschedule(
    chosen: Chosen,
    at: Annotated[str | None, typer.Option("--at", help="Move all to this time (ISO 8601 or milliseconds).")] = None,
    delay: Annotated[str | None, typer.Option("--delay", help="Move all to this long from now: 30m.")] = None,
    later: Annotated[str | None, typer.Option("--later", help="Move each later by this: 1h.")] = None,
    earlier: Annotated[str | None, typer.Option("--earlier", help="Move each earlier by this.")] = None,
    yes: Yes = False,
    detach: Detach = False,
) -> None:
    """Move every pending message of a selection that was scheduled before now."""
    when: dict[str, Any] = {}
    if at is not None:
        when["due_ms"] = moment_ms("--at", at)
    if delay is not None:
        when["delay"] = duration("--delay", delay)
    if later is not None or earlier is not None:
        when["shift"] = duration("--later", later) if later is not None else -duration("--earlier", str(earlier))
    if len(when) != 1 or (later is not None and earlier is not None):
        raise typer.BadParameter("give exactly one of --at, --delay, --later and --earlier")

    selection = _selection(chosen)

    async def go(client: AsyncClient) -> Sweep:
        await _say_cold(client)
        count = None if yes else await _ask(client, chosen, "moved")
        if count == 0:
            return _nothing(selection, "move")
        begun = await client.sweeps.reschedule(selection, **when)
        return begun if detach else await follow(client, begun, count)

    _report(ask(go))


@pending_app.command()
def sweeps() -> None:
    """List bulk cancels and moves: the running ones and the last that ended."""
    found = ask(lambda client: client.sweeps.list())
    if Asked.json:
        print_json([_as_dict(sweep) for sweep in found])
        return
    rows = [
        (
            escape(sweep.job_id),
            sweep.state.lower() if sweep.ended else f"running, {sweep.fraction:.0%}",
            time_text(sweep.begun_ms)[:19],
            _action(sweep),
            escape(_selected(sweep.selection)),
            said_of(sweep),
        )
        for sweep in found
    ]
    print_table("", ("id", "state", "begun", "what", "of", "so far"), rows, whole=(1, 2))


def _action(sweep: Sweep) -> str:
    if sweep.action.startswith("delete"):
        return escape(sweep.action)
    word, _, value = sweep.action.partition(" to " if " to " in sweep.action else " by ")
    if word == "move":
        return f"move to {time_text(int(value))}"
    return f"shift by {int(value) / 1_000:+,.0f} s" if value else word


def _selected(chosen: Selection) -> str:
    values = {name: value for name, value in dataclasses.asdict(chosen).items() if value}
    for name in ("due_ms_min", "due_ms_max"):
        if name in values:
            values[name] = time_text(values[name])
    return " ".join(f"{name.replace('_', '-')}={value}" for name, value in values.items())


@pending_app.command()
def stop(job_id: JobId) -> None:
    """Stop a bulk cancel or move where it stands. What it has done stays done."""
    _report(ask(lambda client: client.sweeps.stop(job_id)))
