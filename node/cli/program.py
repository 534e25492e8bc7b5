"""The command line `tickwheel`: the root that everything hangs off. main.py starts it.

Owns the order of commands and the mapping from errors to exit codes; never shows a traceback for what a user or a
cluster did. commands.py knows the commands and imports the one that is called.

Exit codes: 0 done; 1 what was asked failed (refused, not found, lost); 2 usage or configuration; 3 the cluster is
unavailable; 4 the outcome is unknown; 5 not permitted; 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.completion import get_completion_inspect_parameters

from tickwheel.node.cli.commands import Root
from tickwheel.node.cli.contexts import ContextError, choose, known_names
from tickwheel.node.cli.interrupts import EXIT_INTERRUPTED

NO_THREAD = "can't start new thread"
"""So Python tells that the system gave none."""
EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_UNKNOWN, EXIT_PERMISSION = 1, 2, 3, 4, 5

USAGE_ERROR: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of every error about arguments: typer carries its own copy of click, or uses the real one."""

app = typer.Typer(
    name="tickwheel",
    cls=Root,
    help="A scheduler for delayed messages that keeps delivering when its master dies.",
    no_args_is_help=True,
    add_completion=False,  # `tickwheel completion` prints the scripts
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("tickwheel"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            autocompletion=known_names,
            help="Use this context (tickwheel context list). TICKWHEEL_CONTEXT does the same.",
        ),
    ] = None,
) -> None:
    """A scheduler for delayed messages that keeps delivering when its master dies."""
    choose(context)


def _told(error: Exception, named: str) -> int:
    """Tell what went wrong, without a traceback; the exit code. Raises an error that is a mistake of ours."""
    from tickwheel.client.errors import ClusterUnavailable, OutcomeUnknown, PermissionRefused, TickwheelError
    from tickwheel.node.cli.hints import of_access
    from tickwheel.node.cli.output import fail
    from tickwheel.node.made_files import LocalClusterError

    if isinstance(error, TickwheelError):
        fail(str(error), error.reason, error.metadata)
        if isinstance(error, ClusterUnavailable):
            return EXIT_UNAVAILABLE
        if isinstance(error, OutcomeUnknown):
            return EXIT_UNKNOWN
        if of_access(error.metadata) or error.metadata.get("field", "").startswith("--"):
            return EXIT_USAGE  # of flags, environment or context: no node was asked
        return EXIT_PERMISSION if isinstance(error, PermissionRefused) else EXIT_FAILED
    if isinstance(error, ContextError):
        fail(str(error), "CONTEXT", {})
        return EXIT_USAGE
    if isinstance(error, LocalClusterError):
        text, *quoted = str(error).split("\n")
        fail(text, "LOCAL_CLUSTER", {}, quoted)
        return EXIT_FAILED
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("tickwheel"):
        fail(
            f"{named} needs the package {error.name}: pip install 'tickwheel[spark]' installs the optional packages",
            "PACKAGE",
            {},
        )
        return EXIT_USAGE
    if isinstance(error, OSError) and not _output_taken():
        fail(f"standard output: {error.strerror or error}", "OUTPUT", {})
        return EXIT_FAILED
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename is not None else ""
        fail(f"{place}{error.strerror or error}", "SYSTEM", {})
        return EXIT_FAILED
    if isinstance(error, MemoryError) or str(error) == NO_THREAD:
        limits = "the limits of memory and of processes (ulimit -v, ulimit -u, or those of the container)"
        fail(f"{str(error) or 'no memory'}: raise {limits}", "SYSTEM", {})
        return EXIT_FAILED
    raise error


def _output_taken() -> bool:
    """Whether what was written to standard output could be passed on, to a file or whoever reads it."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _with_value(problem: Mapping[str, Any]) -> str:
    """What typer's validator found, in our words: the value and what is allowed."""
    text = problem["msg"].removeprefix("Value error, ")
    shown = repr(problem["input"])[:100]
    return text if shown in text else f"{shown}: {text.removeprefix('Input should be ')}"


def _wrong_usage(error: Any, words: list[str]) -> int:
    """Tell what is wrong with the arguments, and where their help is."""
    context = getattr(error, "ctx", None)
    problems = getattr(error.__cause__, "errors", None)
    if problems is not None:
        error.message = _with_value(problems()[0])
    from tickwheel.node.cli.streams import shortened

    error.message = shortened(error.message)
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    if context is not None and not as_json:
        error.show()
    else:
        # Found by the command itself, which no context goes with; or a program reads it.
        from tickwheel.node.cli.options import use_json
        from tickwheel.node.cli.output import fail

        use_json(as_json)
        fail(error.format_message(), "USAGE", {})
    return EXIT_USAGE


def _check_completion() -> None:
    """A shell asks what may come next; see completion.py. Raises BadParameter for what no script of ours sets."""
    get_completion_inspect_parameters()  # makes the shells known
    if os.environ["_TICKWHEEL_COMPLETE"] != "complete_bash":
        return
    for name, allowed in (("COMP_WORDS", ".*"), ("COMP_CWORD", "[0-9]{1,6}")):
        value = os.environ.get(name)
        if value is None or not re.fullmatch(allowed, value, re.DOTALL):
            shown = "absent" if value is None else repr(value[:40])
            raise typer.BadParameter(f"{name}: {shown}: as the script of `tickwheel completion bash` sets it")


def run(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong with a connection is told by the error
    command: Any = typer.main.get_command(app)
    try:
        if "_TICKWHEEL_COMPLETE" in os.environ:
            _check_completion()
        result = command.main(args=arguments, prog_name="tickwheel", standalone_mode=False)
        sys.stdout.flush()
    except USAGE_ERROR as error:
        return _wrong_usage(error, words)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        return EXIT_FAILED
    except Exception as error:
        return _told(error, next((word for word in words if not word.startswith("-")), ""))
    return result if isinstance(result, int) else 0
