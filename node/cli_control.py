"""Commands that change what a group takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from tickwheel.client import AsyncClient
from tickwheel.node.cli_cluster import Name, as_dict, group_app
from tickwheel.node.cli_output import ADDRESS_DEFAULT, Addresses, AsJson, open_client, out, print_json, use_json
from tickwheel.proto import admin_pb2


def _change_group(
    address: str, as_json: bool, change: Callable[[AsyncClient], Awaitable[admin_pb2.Group]], said: str
) -> None:
    use_json(as_json)

    async def go() -> admin_pb2.Group:
        async with open_client(address) as client:
            return await change(client)

    group = asyncio.run(go())
    print_json(as_dict(group)) if as_json else out.print(said, markup=False)


@group_app.command("filter")
def group_filter(
    name: Name,
    filter: Annotated[str, typer.Argument(help="'a || b', or '*' for everything.")],
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Give a group another tag filter, from its floor on. What was skipped before stays skipped."""
    _change_group(
        address, as_json, lambda client: client.admin.set_group_filter(name, filter), f"{name} takes {filter}"
    )
