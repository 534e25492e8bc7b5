"""Commands about the nodes of a cluster: member add, remove, list."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient, Member
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import as_dict, ask, err, out, print_json, print_listing, table

member_app = Commands(no_args_is_help=True, help="Nodes of the cluster: add, remove, list.")


def _counts(learner: bool) -> str:
    return "not yet" if learner else "yes"


def _show_members(members: list[Member]) -> None:
    print_listing(
        members,
        ("node", "counts", "clients", "peers", "disk"),
        lambda m: (m.node_id, _counts(m.learner), m.client_address, m.peer_address, m.disk_uuid),
    )


@member_app.command("add")
def member_add(
    node_id: Annotated[str, typer.Argument(help="Id of the new node.")],
    peer_address: Annotated[str, typer.Option("--peer", help="host:port at which its peers reach it.")],
    client_address: Annotated[str, typer.Option("--client", help="host:port at which clients reach it.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds to wait for it to catch up and count.")
    ] = 10.0,
) -> None:
    """Add a node that waits with `cluster.join = "existing"`. It counts once it has caught up."""

    async def go(client: AsyncClient) -> list[Member]:
        with err.status(f"waiting for {escape(node_id)} to catch up"):
            end = time.monotonic() + wait_s
            while True:
                # The same again changes nothing.
                members = await client.admin.add_member(node_id, peer_address, client_address)
                if time.monotonic() >= end or not any(m.learner for m in members if m.node_id == node_id):
                    return members
                await asyncio.sleep(0.2)

    _show_members(ask(go))


@member_app.command("remove")
def member_remove(node_id: Annotated[str, typer.Argument(help="Id of the node.")]) -> None:
    """Remove a node. Its id can never be used again."""
    _show_members(ask(lambda client: client.admin.remove_member(node_id)))


@member_app.command("list")
def member_list() -> None:
    """List the nodes as the master sees them."""
    status = ask(lambda client: client.admin.master_status())
    if Asked.json:
        print_json({"master_id": status.master_id, "peers": [as_dict(peer) for peer in status.peers]})
        return
    rows: list[tuple[object, ...]] = [(status.node_id, "master", status.master_address, _counts(False), "")]
    rows += [
        (
            peer.node_id,
            "connected" if peer.connected else "away",
            peer.client_address or peer.address,
            _counts(peer.learner),
            f"{peer.applied_lag:,}",
        )
        for peer in status.peers
        if peer.node_id != status.node_id
    ]
    out.print(table("", ("node", "state", "clients", "counts", "applied lag"), rows, right=(4,)))
