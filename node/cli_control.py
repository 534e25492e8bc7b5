"""Commands that steer delivery: pause and resume, another filter or another place for a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from tickwheel.client import AsyncClient
from tickwheel.node.cli_cluster import Name, as_dict, group_app, topic_app
from tickwheel.node.cli_output import (
    ADDRESS_DEFAULT,
    Addresses,
    AsJson,
    moment_ms,
    open_client,
    out,
    print_json,
    time_text,
    use_json,
)
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


@group_app.command("pause")
def group_pause(name: Name, address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Hand out nothing to the group until it is resumed; what is out can be settled."""
    _change_group(address, as_json, lambda client: client.admin.pause_group(name), f"group {name} is paused")


@group_app.command("resume")
def group_resume(name: Name, address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Go on after a pause."""
    _change_group(
        address, as_json, lambda client: client.admin.pause_group(name, paused=False), f"group {name} goes on"
    )


@group_app.command("reset")
def group_reset(
    name: Name,
    to: Annotated[str, typer.Option(help="earliest, latest, or a time: ISO 8601 or milliseconds since 1970.")],
    topic: Annotated[list[str], typer.Option(help="Only this topic; may be given several times.")] = [],  # noqa: B006
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Let a group begin anew at another place. What is out is void, and attempts begin at 1."""
    start_ms = 0 if to in {"earliest", "latest"} else moment_ms(to)
    start_from = to if to in {"earliest", "latest"} else "time"
    _change_group(
        address,
        as_json,
        lambda client: client.admin.reset_group(name, start_from, start_ms=start_ms, topics=topic),
        f"group {name} begins anew at {time_text(start_ms) if start_ms else to}",
    )


def _pause_topic(name: str, paused: bool, address: str, as_json: bool) -> None:
    use_json(as_json)

    async def go() -> admin_pb2.Topic:
        async with open_client(address) as client:
            return await client.admin.pause_topic(name, paused=paused)

    topic = asyncio.run(go())
    print_json(as_dict(topic)) if as_json else out.print(f"topic {name} {'is paused' if paused else 'goes on'}")


@topic_app.command("pause")
def topic_pause(name: Name, address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Hand out nothing of the topic, to any group, until it is resumed. Messages still become ready."""
    _pause_topic(name, True, address, as_json)


@topic_app.command("resume")
def topic_resume(name: Name, address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Go on after a pause."""
    _pause_topic(name, False, address, as_json)
