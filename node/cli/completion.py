"""The command `completion`: the script that completes commands, options and names in a shell. typer writes it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.completion import get_completion_inspect_parameters, shell_complete

completion_app = typer.Typer()

VARIABLE = "_TICKWHEEL_COMPLETE"
"""Set by the script when it asks this program for completions."""


class Shell(StrEnum):
    """The shells that are known."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@completion_app.command()
def completion(context: typer.Context, shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print the script that completes commands and options in a shell.

    bash, in ~/.bashrc: eval "$(tickwheel completion bash)". zsh, in ~/.zshrc behind compinit:
    eval "$(tickwheel completion zsh)". fish: tickwheel completion fish > ~/.config/fish/completions/tickwheel.fish
    """
    get_completion_inspect_parameters()  # makes the shells known
    root: Any = context.find_root().command
    shell_complete(root, {}, "tickwheel", VARIABLE, f"source_{shell.value}")
