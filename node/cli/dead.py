"""Commands about dead letters: list, show, replay, purge."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient
from tickwheel.client.dead import Changed, DeadLetter
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import ask, out, payload_as_dict, print_json, print_table, time_text

dead_group = Commands(no_args_is_help=True, help="Dead letters of consumer groups: list, show, replay, purge.")
dead_app = typer.Typer()
dead_app.add_typer(dead_group, name="dead")

Group = Annotated[str, typer.Argument(help="Consumer group.")]
Numbers = Annotated[list[int] | None, typer.Argument(help="Numbers, as `dead list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All that exist now.")]


def as_dict(letter: DeadLetter) -> dict[str, Any]:
    """The letter as a JSON object."""
    values = dataclasses.asdict(letter)
    return values | payload_as_dict(values.pop("payload"))


def _chosen(numbers: list[int] | None, everything: bool) -> list[int] | None:
    if bool(numbers) == everything:
        raise typer.BadParameter("give either numbers or --all")
    return None if everything else numbers


@dead_group.command("list")
def dead_list(
    group: Group, limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")] = 100
) -> None:
    """List the dead letters of a group, oldest first."""

    async def first(client: AsyncClient) -> tuple[int, list[DeadLetter]]:
        found: list[DeadLetter] = []
        total = (await client.dead.page(group, size=1)).total
        async for letter in client.dead.list(group):
            found.append(letter)
            if len(found) >= limit:
                break
        return total, found

    total, letters = ask(first)
    if Asked.json:
        print_json({"queue": f"%DLQ%{group}", "total": total, "letters": [as_dict(letter) for letter in letters]})
        return
    titles = ("number", "id", "topic", "cause", "attempts", "died", "error")
    rows = [
        (str(x.number), x.id, x.topic, x.cause, str(x.attempts), time_text(x.died_ms), escape(x.error[:60]))
        for x in letters
    ]
    print_table(f"%DLQ%{group}: {total:,}", titles, rows, right=(0, 4), whole=(1, 5))


@dead_group.command("show")
def dead_show(group: Group, number: Annotated[int, typer.Argument(help="Number, as `dead list` shows it.")]) -> None:
    """Show one dead letter: cause, error, times and payload."""
    letter = as_dict(ask(lambda client: client.dead.get(group, number)))
    if Asked.json:
        print_json(letter)
        return
    for name in ("first_due_ms", "died_ms"):
        letter[name.removesuffix("_ms")] = time_text(letter.pop(name))
    unsaid: tuple[object, ...] = ("", (), {}, None)
    said = [(name, value) for name, value in letter.items() if value not in unsaid and value is not False]
    print_table("", ("field", "value"), [(name, escape(str(value))) for name, value in said])


@dead_group.command("replay")
def dead_replay(group: Group, numbers: Numbers = None, everything: All = False) -> None:
    """Deliver dead letters to their group again, with attempts from 1."""
    chosen = _chosen(numbers, everything)
    _say(ask(lambda client: client.dead.replay(group, chosen)), "replayed")


@dead_group.command("purge")
def dead_purge(group: Group, numbers: Numbers = None, everything: All = False) -> None:
    """Delete dead letters."""
    chosen = _chosen(numbers, everything)
    _say(ask(lambda client: client.dead.purge(group, chosen)), "purged")


def _say(result: Changed, what: str) -> None:
    if Asked.json:
        print_json({what: result.changed, "missing": result.missing, "kept": result.kept})
        return
    missing = f", {result.missing:,} not found" if result.missing else ""
    kept = f", {result.kept:,} kept: their topic no longer belongs to the group" if result.kept else ""
    out.print(f"{result.changed:,} {what}{missing}{kept}")
