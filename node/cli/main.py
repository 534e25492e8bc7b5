"""The command line `tickwheel`: the root that everything hangs off.

Owns the order of commands and the mapping from errors to exit codes; never shows a traceback for what a user or a
cluster did. `cli_node` brings node, config and certs; other packages register by the entry point group
`tickwheel.commands` (a Typer app each). Heavy imports happen in the commands.

Exit codes: 0 done; 1 what was asked failed (refused, not found, lost); 2 usage or configuration; 3 the cluster is
unavailable; 4 the outcome is unknown; 5 not permitted; 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer

from tickwheel.client.errors import ClusterUnavailable, OutcomeUnknown, PermissionRefused, TickwheelError
from tickwheel.node.cli import control as cli_control  # noqa: F401  # they hang below cli_cluster and cli_pending
from tickwheel.node.cli.cluster import cluster_app
from tickwheel.node.cli.dead import dead_app
from tickwheel.node.cli.local import local_app
from tickwheel.node.cli.messages import messages_app
from tickwheel.node.cli.node import node_app
from tickwheel.node.cli.output import fail
from tickwheel.node.cli.pending import pending_app, plain_app
from tickwheel.node.cli.recovery import recovery_app
from tickwheel.node.cli.top import top_app
from tickwheel.node.cli.trace import trace_app
from tickwheel.node.made_files import LocalClusterError

EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_UNKNOWN, EXIT_PERMISSION, EXIT_INTERRUPTED = 1, 2, 3, 4, 5, 130

USAGE_ERROR: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What every complaint about arguments derives from: typer carries its own copy of click, or uses the real one."""

app = typer.Typer(
    name="tickwheel",
    help="A scheduler for delayed messages that keeps delivering on time when its master dies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (messages_app, trace_app, top_app, plain_app, local_app, cluster_app, recovery_app, dead_app, node_app):
    app.add_typer(part)
app.add_typer(pending_app, name="pending")


def _say_version(asked: bool) -> None:
    if asked:
        print(version("tickwheel"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A scheduler for delayed messages that keeps delivering on time when its master dies."""


def _mount_others(named: str) -> None:
    """Commands of other packages: that which was named, or all if nothing or something unknown was."""
    others = entry_points(group="tickwheel.commands")
    for found in others.select(name=named) or others:
        try:
            app.add_typer(found.load(), name=found.name)
        except ImportError as error:
            print(f"tickwheel: command {found.name} is not available: {error}", file=sys.stderr)


def exit_code_of(error: TickwheelError) -> int:
    """The exit code of a client's error."""
    if isinstance(error, ClusterUnavailable):
        return EXIT_UNAVAILABLE
    if isinstance(error, OutcomeUnknown):
        return EXIT_UNKNOWN
    if isinstance(error, PermissionRefused):
        return EXIT_PERMISSION
    return EXIT_FAILED


def run(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    named = next((word for word in words if not word.startswith("-")), "")
    command: Any = typer.main.get_command(app)
    if named not in command.commands:
        _mount_others(named)  # a node imports no simulation
        command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="tickwheel", standalone_mode=False)
    except USAGE_ERROR as error:
        error.show()
        return EXIT_USAGE
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; nothing is left to be said
        return EXIT_FAILED
    except LocalClusterError as error:
        fail(str(error), "LOCAL_CLUSTER", {})
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tickwheel"):
            raise
        fail(
            f"{named} needs the package {error.name}: pip install 'tickwheel[spark]' installs the optional packages",
            "PACKAGE",
            {},
        )
        return EXIT_USAGE
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        fail(f"{place}{error.strerror or error}", "SYSTEM", {})
        return EXIT_FAILED
    except TickwheelError as error:
        fail(str(error), error.reason, error.metadata)
        return exit_code_of(error)
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
