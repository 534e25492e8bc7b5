"""The command `tickwheel gateway`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses
from tickwheel.node.cli.output import fail, log_to_stderr, open_client

app = typer.Typer(help="HTTP in and out: a REST API, and deliveries posted to HTTP targets. See docs/HTTP.md.")

EXIT_CONFIG = 2


@app.callback(invoke_without_command=True)
def gateway(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="A TOML file; docs/HTTP.md has its fields.")
    ],
    addresses: Addresses = ADDRESS_DEFAULT,
    check: Annotated[bool, typer.Option("--check", help="Only check the file.")] = False,
) -> None:
    """HTTP in and out: a REST API, and deliveries posted to HTTP targets. See docs/HTTP.md."""
    from tickwheel.gateway.config import GatewayConfigError, read_config
    from tickwheel.gateway.running import Gateway

    try:
        read = read_config(config)
    except GatewayConfigError as error:
        for line in str(error).splitlines():
            fail(line, "GATEWAY_CONFIG", {})
        raise typer.Exit(EXIT_CONFIG) from None
    if check:
        count = len(read.targets)
        print(
            f"{config}: {count} target{'s' if count != 1 else ''}, "
            + (f"REST API on {read.listen.bind}" if read.listen else "no REST API")
            + (", the console beside it" if read.console else "")
        )
        return
    log_to_stderr(logging.INFO)

    async def go() -> None:
        await Gateway(read, lambda token: open_client(addresses, token=token)).run()

    asyncio.run(go())
