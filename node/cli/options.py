"""The options that commands share. Imports nothing that a node does not need."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

ADDRESS_DEFAULT = ""
"""Neither flag nor environment names addresses: those of the context hold, or the fallback (contexts.py)."""


class Asked:
    """What the command in progress was asked for. The callbacks of the options set it."""

    addresses = ""
    """Nodes of the cluster."""
    json = False
    """Results and errors as JSON."""


def _use_addresses(given: str) -> str:
    from tickwheel.node.cli.contexts import addresses_or

    Asked.addresses = addresses_or(given)
    return Asked.addresses


def use_json(as_json: bool) -> bool:
    """Set whether results and later errors are printed as JSON."""
    Asked.json = as_json
    return as_json


Addresses = Annotated[
    str,
    typer.Option(
        "--addresses",
        "--address",  # of version 0.1; taken for one version more, as the variable is
        "-a",
        envvar=["TICKWHEEL_ADDRESSES", "TICKWHEEL_ADDRESS"],
        callback=_use_addresses,
        show_default="those of the context, or 127.0.0.1:7700",
        help="Nodes of the cluster, host:port separated by commas. Any node will do.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", callback=use_json, help="Print JSON.")]

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class MadeBy:
    """Marks a parameter of a command: its value is what `make` returns for options of its own, which the command has in
    place of the parameter."""

    make: Callable[..., Any]


class MadeCommands(typer.Typer):
    """Commands that may have parameters marked by MadeBy."""

    shared: Callable[..., None] | None = None
    """Its options are those of every command."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Command], Command]:
        register = super().command(name, **settings)

        def decorate(command: Command) -> Command:
            register(_with_options(command, self.shared))
            return command

        return decorate


class Commands(MadeCommands):
    """Commands that all have --json and, if they ask a cluster, --addresses. Those are not passed to a command, which
    finds them in `Asked`."""

    def __init__(self, *, ask_cluster: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.shared = _of_cluster if ask_cluster else _of_all


def _of_all(as_json: AsJson = False) -> None:
    """The options of every command."""


def _of_cluster(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """The options of commands that ask a cluster."""


def _options_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
    ]


def _with_options(command: Callable[..., None], shared: Callable[..., None] | None) -> Callable[..., None]:
    """The command as typer is to see it: with the shared options, and with those of its marked parameters."""
    made: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    options: list[inspect.Parameter] = []
    for option in _options_of(command):
        marks = [mark for mark in get_args(option.annotation)[1:] if isinstance(mark, MadeBy)]
        found = _options_of(marks[0].make) if marks else [option]
        options += found
        if marks:
            made[option.name] = (marks[0].make, [own.name for own in found])
    added = _options_of(shared) if shared is not None else []

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for option in added:
            del given[option.name]
        for name, (make, own) in made.items():
            given[name] = make(**{option: given.pop(option) for option in own})
        command(**given)

    options += added
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run
