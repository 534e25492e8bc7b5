"""The options that every command shares. Imports nothing that a node does not need."""

from __future__ import annotations

from typing import Annotated

import typer

ADDRESS_DEFAULT = ""
"""Neither flag nor environment names addresses: those of the context hold, or the fallback (contexts.py)."""


def _or_of_the_context(given: str) -> str:
    from tickwheel.node.cli.contexts import addresses_or

    return addresses_or(given)


Addresses = Annotated[
    str,
    typer.Option(
        "--addresses",
        "--address",  # of version 0.1; taken for one version more, as the variable is
        "-a",
        envvar=["TICKWHEEL_ADDRESSES", "TICKWHEEL_ADDRESS"],
        callback=_or_of_the_context,
        show_default="those of the context, or 127.0.0.1:7700",
        help="Nodes of the cluster, host:port separated by commas. Any node will do.",
    ),
]


class Asked:
    """What the command in progress was asked for."""

    json = False
    """Results and errors as JSON."""


def use_json(as_json: bool) -> bool:
    """Set whether later errors are printed as JSON."""
    Asked.json = as_json
    return as_json


AsJson = Annotated[bool, typer.Option("--json", callback=use_json, help="Print JSON.")]
