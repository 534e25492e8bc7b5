"""Commands that show the role and state of every node, and hand mastership over: status, transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tickwheel.client import (
    AsyncClient,
    BulkStatus,
    ClockState,
    ColdState,
    ColdStatus,
    NodeRole,
    NodeStatus,
    PeerStatus,
    ServerInfo,
)
from tickwheel.client.cluster import REFUSALS
from tickwheel.client.errors import ClusterUnavailable, Fault, PermissionRefused, TickwheelError, error_of
from tickwheel.client.moments import MILLISECOND
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import as_dict, ask, ms_text, out, print_json, say, table, time_text

status_app = Commands()


SERVER_ROWS = ("version", "up", "set up")
ROWS = (
    *("node", "role", "state", "why", "term", "cursor (UTC)", "tick", "local index", "sync age", "applied lag"),
    *(
        "pending",
        "ready",
        "out",
        "schedule /s",
        "dispatch /s",
        "deliver /s",
        "settle /s",
        "loop lag",
        "clock",
        "disk free",
        "bulk load",
        "cold tier",
    ),
    *SERVER_ROWS,
)
Seen = tuple[NodeStatus | Fault, ServerInfo | Fault]
"""The answers of a node: its status, and its version and services."""


def _by_node(answer: tuple[str, Seen]) -> tuple[bool, str]:
    """Sort key: by node id; nodes without an answer come last, by address."""
    address, (status, _) = answer
    return (isinstance(status, Fault), address if isinstance(status, Fault) else status.node_id)


def each_once(answers: Mapping[str, Seen]) -> dict[str, Seen]:
    """The answers without those of a node that answers under an earlier address: it may have an address of its own for
    each caller, as in a container, of which this host dials only some."""
    nodes: dict[str, str] = {}
    own: dict[str, str] = {}
    for address, (status, _) in answers.items():
        if isinstance(status, NodeStatus):
            nodes.setdefault(status.node_id, address)
            own |= {peer.client_address: peer.node_id for peer in status.peers}
            if status.role is NodeRole.MASTER:
                own[status.master_address] = status.node_id

    def first(address: str, status: NodeStatus | Fault) -> str:
        node_id = own.get(address, "") if isinstance(status, Fault) else status.node_id
        return nodes.get(node_id, address)

    return {address: seen for address, seen in answers.items() if first(address, seen[0]) == address}


def unanswered(answers: Mapping[str, object], why: Callable[[Fault], str]) -> TickwheelError:
    """The error because no node answered, with the reason for each."""
    faults = [fault for fault in answers.values() if isinstance(fault, Fault)]
    if faults and all(isinstance(error_of(fault), PermissionRefused) for fault in faults):
        return error_of(faults[0])
    said = "; ".join(f"{address}: {why(fault)}" for address, fault in answers.items() if isinstance(fault, Fault))
    return ClusterUnavailable(f"no node can be reached: {said}", "NO_MASTER")


def status_table(answers: dict[str, Seen], why: Callable[[Fault], str]) -> Table:
    """A table with one column a node: role, term, cursor, lag and rates. `why`: the reason of a missing answer."""
    peers = {
        peer.node_id: peer
        for status, _ in answers.values()
        if isinstance(status, NodeStatus) and status.role is NodeRole.MASTER
        for peer in status.peers
    }
    answers = dict(sorted(answers.items(), key=_by_node))
    columns = [[*_column_of(status, peers, why), *_server(info)] for status, info in answers.values()]
    rows = [(name, *cells) for name, cells in zip(ROWS, zip(*columns, strict=True), strict=True) if any(cells)]
    made = table("", ("", *answers), rows, right=range(1, len(answers) + 1), whole=(0,))
    for column in made.columns[1:]:
        column.no_wrap = False  # a long reason must not push the names of the rows out of the terminal
    return made


def _clock(status: NodeStatus) -> str:
    """Offset of the node's wall clock from the cluster's time, and the error of that time."""
    if status.clock_error is None:
        return f"[yellow]{status.clock_state}[/]"
    text = f"{status.clock_offset / MILLISECOND:+,.1f} ms, error {status.clock_error / MILLISECOND:,.1f}"
    return text if status.clock_state is ClockState.AGREED else f"{text} [yellow]{status.clock_state}[/]"


def _cold(cold: ColdStatus) -> str:
    """Number of messages in the cold tier, or how late they are; empty if none waits."""
    if cold.state is ColdState.EMPTY:
        return ""
    if cold.state is ColdState.LATE:
        return f"[red]{cold.late / timedelta(hours=1):,.1f} h late[/]"
    words = {ColdState.BEHIND: " [yellow]promotion is behind[/]", ColdState.DUE_SOON: " [red]due soon[/]"}
    return f"{cold.messages:,}{words.get(cold.state, '')}"


def _column_of(status: NodeStatus | Fault, peers: dict[str, PeerStatus], why: Callable[[Fault], str]) -> list[str]:
    if isinstance(status, Fault):
        role = "refused" if status.reason in REFUSALS else "no answer"
        return ["", f"[red]{role}[/]", "", escape(why(status)), *[""] * (len(ROWS) - len(SERVER_ROWS) - 4)]
    master = status.role is NodeRole.MASTER
    peer = peers.get(status.node_id)
    return [
        status.node_id,
        f"[bold green]{status.role}[/]{'*' if status.lease_held else ''}" if master else status.role,
        status.state,
        "; ".join(reason for reason in (status.state_reason, status.certificate_reason) if reason),
        str(status.term),
        time_text(status.cursor_due)[11:-1] if status.cursor_due is not None else "-",
        str(status.tick),
        f"{status.local_index:,}",
        "-" if master else ms_text(status.sync_age),
        "-" if peer is None else f"{peer.applied_lag:,}",
        f"{status.pending:,}",
        f"{status.ready:,}",
        f"{status.in_flight:,}",
        f"{status.schedule_rate:,.0f}",
        f"{status.dispatch_rate:,.0f}",
        f"{status.deliver_rate:,.0f}",
        f"{status.settle_rate:,.0f}",
        ms_text(status.loop_lag),
        _clock(status),
        f"{status.disk_bytes_free / (1 << 30):,.1f} GiB",
        _bulk(status.bulk),
        _cold(status.cold) if master else "",
    ]


def _server(info: ServerInfo | Fault) -> list[str]:
    """The cells of SERVER_ROWS; empty for an older node, or without a right to read."""
    if isinstance(info, Fault):
        return [""] * len(SERVER_ROWS)
    names = [info.delivery_order, *(name for name in ("tls", "rights") if getattr(info, name))]
    return [info.version, str(timedelta(seconds=info.uptime // timedelta(seconds=1))), ", ".join(names)]


def _bulk(bulk: BulkStatus) -> str:
    """Bulk loads since the node's start; empty without any."""
    if not (bulk.received_bytes or bulk.bundles_taken_over or bulk.refused):
        return ""
    text = f"{bulk.messages_taken_over:,} in {bulk.bundles_taken_over:,}, {bulk.received_bytes / 1e6:,.0f} MB in"
    return f"{text}, {bulk.refused:,} refused" if bulk.refused else text


def _as_json(address: str, status: NodeStatus | Fault, info: ServerInfo | Fault) -> dict[str, object]:
    if isinstance(status, Fault):
        return {"address": address, "error": status.message}
    server = {} if isinstance(info, Fault) else {"server": as_dict(info)}
    return {"address": address, **as_dict(status), **server}


@status_app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Update the view until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between updates with --watch.")] = 1.0,
) -> None:
    """Show every node: role (* holds the lease), term, cursor, lag, rates. Exit code 3 without a master."""

    async def go(client: AsyncClient) -> None:
        async def look() -> dict[str, Seen]:
            """By node. One address is enough to see all."""
            statuses = await client.admin.know_all()
            infos = await client.admin.server_infos()
            seen = each_once({address: (status, infos[address]) for address, status in statuses.items()})
            return dict(sorted(seen.items(), key=_by_node))

        answers = await look()
        if watch and not Asked.json and out.is_terminal:
            with Live(status_table(answers, client.cluster.why), console=out, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(interval)
                    answers = await look()
                    live.update(status_table(answers, client.cluster.why), refresh=True)
        while True:
            if Asked.json:
                print_json([_as_json(where, *answer) for where, answer in answers.items()])
            else:
                out.print(status_table(answers, client.cluster.why))
            if not watch:
                break
            await asyncio.sleep(interval)
            answers = await look()
        statuses = [status for status, _ in answers.values() if isinstance(status, NodeStatus)]
        if not statuses:
            raise unanswered({address: status for address, (status, _) in answers.items()}, client.cluster.why)
        if not any(status.role is NodeRole.MASTER for status in statuses):
            raise ClusterUnavailable("no node reports that it is master", "NO_MASTER")

    ask(go)


@status_app.command()
def transfer(
    target: Annotated[str, typer.Argument(help="Node id. Without it: the slave that is furthest ahead.")] = "",
) -> None:
    """Hand mastership over, without duplicates."""
    answer = ask(lambda client: client.admin.transfer(target))
    say(as_dict(answer), f"{answer.master_id} is master in term {answer.term}; pause {ms_text(answer.pause)}")
