"""The commands of `tickwheel`: where each is, and what `tickwheel --help` says of it.

A command is imported when it is called. So help, a node and every short command import only what they need; a test
compares the texts with those of the commands, and names what must not be imported. Other packages add commands by the
entry point group `tickwheel.commands` (a Typer app each).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tickwheel.node.cli.interrupts import interrupt_again
from tickwheel.node.cli.plain_values import take_plain_values

GROUP = "tickwheel.commands"

APPS: dict[str, dict[str, str]] = {
    "messages:messages_app": {
        "schedule": "Schedule one message. Print its id once it is safe on a majority.",
        "consume": "Print messages as they are delivered and settle them, by default with an "
        "acknowledgement. Ctrl-C stops it.",
        "cancel": "Cancel a pending message. Exit code 1 if it was too late or no such message exists.",
        "reschedule": "Move a pending message to another time. Its first id stays valid.",
        "get": "Show state and content of one message.",
    },
    "schedules:schedules_app": {
        "schedules": "Recurring schedules: put, get, list, pause, resume, trigger, backfill, delete, preview."
    },
    "trace:trace_app": {
        "trace": "Show what became of one message, from schedule to settlement: when, and on which node."
    },
    "top:top_app": {
        "top": "Watch the wheel turn: load ahead, rates by topic, backlog, lateness, nodes. q or Ctrl-C stops it."
    },
    "pending:plain_app": {
        "list": "List pending messages in the order of their delivery.",
        "count": "Count pending messages, by time.",
    },
    "local:local_app": {
        "up": "Run a cluster on this machine until Ctrl-C; a second one kills it. Print its addresses when it is up.",
        "demo": "Play a month of real flights on three nodes and kill the master half way.",
    },
    "cluster:cluster_app": {
        "status": "Show every node: role (* holds the lease), term, cursor, lag, rates. Exit code 3 without a master.",
        "transfer": "Hand mastership over, without duplicates.",
        "disk": "Show what the data directory of each node at the given addresses holds: by part, hour and topic.",
        "member": "Nodes of the cluster: add, remove, list.",
        "topic": "Topics: create, delete, list, pause, resume.",
        "group": "Consumer groups: create, update, delete, list, pause, resume, filter, reset.",
        "settings": "Replicated settings: show, change.",
        "whoami": "Show who you are to the cluster, and what you may do.",
        "audit": "Show who changed what, and what was refused: the newest records of all nodes, oldest first.",
        "user": "Users: who may call, and with which roles and quotas.",
        "role": "Roles: what their users may do with which topics and groups.",
    },
    "completion:completion_app": {"completion": "Print the script that completes commands and options in a shell."},
    "context:context_app": {"context": "Clusters by name: add, use, list, show, remove."},
    "backup:backup_app": {
        "backup": "Copy one node's whole state, consistent, while it serves. The first address is "
        "asked; prefer a slave. Run it again to go on with a copy that was interrupted."
    },
    "recovery:recovery_app": {
        "restore": "Check a backup and make it the data of a new cluster of one: the configured node, "
        "which must not be running.",
        "recover": "Continue from this one disk when a majority is lost FOR GOOD. What only the other "
        "nodes knew is lost.",
        "rebuild": "Rebuild a stopped node with damaged files from its journal, if the journal is "
        "complete since the first entry.",
    },
    "dead:dead_app": {"dead": "Dead letters of consumer groups: list, show, replay, purge."},
    "node:node_app": {
        "node": "Run one node until SIGTERM or SIGINT. Exit code 2: configuration; 3: data or identity; 4: removed.",
        "certs": "Make a test authority and certificates signed by it. Not for production: the "
        "authority's key lies beside them.",
        "config": "Check a configuration, or print its reference.",
    },
    "sweeps:sweeps_app": {"pending": "Pending messages: list, count, draw when they are due, cancel and move many."},
}
"""By module and Typer app: the commands, and what help says of each."""

_OTHERS = {
    "bench": "Measure this machine: disk, clock, rates and lateness of three nodes on it. Exit code 1: it is not fit.",
    "chaos": "Faults against the promises: simulated, seeded, replayable.",
    "console": "The cluster in a browser: what is ahead, messages, groups, nodes.",
    "gateway": "HTTP in and out: a REST API, and messages posted to HTTP targets.",
    "pipeline": "Bulk work on Spark: build and load, generate, forecast, audit, archive and replay.",
}
"""Of packages that are part of this distribution."""

PANELS = {
    "Messages": "schedule consume cancel reschedule get trace list count pending schedules dead",
    "Watch": "top status console whoami audit disk",
    "Names, rights and settings": "topic group user role settings",
    "Nodes of a cluster": "up node config certs member transfer",
    "Backup and repair": "backup restore recover rebuild",
    "Other programs": "gateway pipeline demo bench chaos",
    "This command line": "context completion",
}
"""By heading of `tickwheel --help`: its commands, in their order there."""

_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
_APP_OF = {name: app for app, commands in APPS.items() for name in commands}


@cache
def _commands_of(app: typer.Typer, name: str | None = None) -> dict[str, Any]:
    """The commands that a Typer app adds; `name`: it is one command with others below it. Kept: tests run hundreds of
    commands in one process, and to make one of an app takes as long as to make all of it."""
    root = typer.Typer()
    root.callback()(lambda: None)
    root.add_typer(app, name=name)
    command: Any = typer.main.get_command(root)
    found: dict[str, Any] = command.commands
    return found


def load(name: str) -> Any:
    """The command of this name, imported now. Raises KeyError for an unknown one, ImportError for one of a package
    that is not whole."""
    place = _APP_OF.get(name)
    if place is None:
        found = others()[name]
        return _commands_of(found.load(), name)[name]
    module, _, attribute = place.partition(":")
    app = getattr(import_module(f"tickwheel.node.cli.{module}"), attribute)
    return _commands_of(app)[name]


def refuse_empty_paths(command: Any) -> None:
    """Have a command, and those below it, refuse an empty text where a path is wanted: it is what a shell makes of a
    variable that is not set, and Path takes it for the working directory."""
    for parameter in command.params:
        if not isinstance(parameter.process_value, partial):  # it does not yet
            parameter.process_value = partial(_processed, parameter.process_value)
    for below in getattr(command, "commands", {}).values():
        refuse_empty_paths(below)


def _processed(process: Callable[[Any, Any], Any], context: Any, given: Any) -> Any:
    value = process(context, given)
    pairs = zip(given, value, strict=True) if isinstance(value, list | tuple) and given else [(given, value)]
    if any(text == "" and isinstance(path, Path) for text, path in pairs):
        raise typer.BadParameter("'': the path of a file or directory")
    return value


def every() -> list[str]:
    """The names of all commands but those of other packages."""
    return list(_APP_OF)


def others() -> dict[str, EntryPoint]:
    """The commands of other packages."""
    return {found.name: found for found in entry_points(group=GROUP)}


class Root(TyperGroup):
    """`tickwheel` itself: knows all commands and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        take_plain_values(self)
        for commands in APPS.values():
            for name, help_text in commands.items():
                self._know(name, help_text)

    def _know(self, name: str, help_text: str) -> None:
        self.add_command(TyperCommand(name, help=help_text, rich_help_panel=_PANEL_OF.get(name, "Other programs")))

    def list_commands(self, ctx: Any) -> list[str]:
        """All of them, in the order of PANELS; commands of other packages last."""
        for name, found in others().items():
            if name not in self.commands:
                package = found.dist.name if found.dist is not None else found.value
                self._know(name, _OTHERS.get(name, f"Of the package {package}."))
        names = super().list_commands(ctx)
        return [name for name in _PANEL_OF if name in names] + [name for name in names if name not in _PANEL_OF]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called. From here on Ctrl-C interrupts it; until here there was nothing to interrupt."""
        name = args[0]
        if name not in _APP_OF:
            self.list_commands(ctx)
        if name in self.commands:
            try:
                command = load(name)
                take_plain_values(command)
                refuse_empty_paths(command)
                self.add_command(command, name)
            except ImportError as error:
                if name in _APP_OF:
                    raise
                print(f"tickwheel: command {name} is not available: {error}", file=sys.stderr)
                del self.commands[name]
        found = super().resolve_command(ctx, args)
        interrupt_again()
        return found
