"""The options that every command shares. Imports nothing that a node does not need."""

from __future__ import annotations

from typing import Annotated

import typer

ADDRESS_DEFAULT = "127.0.0.1:7700"

Addresses = Annotated[
    str,
    typer.Option(
        "--addresses",
        "--address",  # of version 0.1; taken for one version more, as the variable is
        "-a",
        envvar=["TICKWHEEL_ADDRESSES", "TICKWHEEL_ADDRESS"],
        help="Nodes of the cluster, host:port separated by commas. Any node will do.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
