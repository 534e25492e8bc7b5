"""Commands about the cluster: status, transfer, member, topic, group, settings."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.live import Live
from rich.table import Table

from tickwheel.client.errors import ClusterUnavailable, Fault
from tickwheel.node.cli_output import (
    ADDRESS_DEFAULT,
    Addresses,
    AsJson,
    err,
    open_client,
    out,
    print_json,
    table,
    time_text,
    use_json,
)
from tickwheel.node.cli_policy import AttemptsMax, Factor, Initial, Jitter, Longest, policy_from
from tickwheel.proto import admin_pb2

cluster_app = typer.Typer()
member_app = typer.Typer(no_args_is_help=True, help="Nodes of the cluster.")
topic_app = typer.Typer(no_args_is_help=True, help="Topics.")
group_app = typer.Typer(no_args_is_help=True, help="Consumer groups.")
settings_app = typer.Typer(no_args_is_help=True, help="Replicated settings.")
cluster_app.add_typer(member_app, name="member")
cluster_app.add_typer(topic_app, name="topic")
cluster_app.add_typer(group_app, name="group")
cluster_app.add_typer(settings_app, name="settings")

_WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}

Name = Annotated[str, typer.Argument(help="Name.")]


def as_dict(message: Message) -> dict[str, Any]:
    """A proto message with its own field names, defaults included; enums by name, integers as numbers."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if field.cpp_type in _WIDE and value is not None:  # which MessageToDict writes as text
            found[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif (
            isinstance(value, list) and field.message_type is not None and not field.message_type.GetOptions().map_entry
        ):
            found[field.name] = [as_dict(item) for item in getattr(message, field.name)]
    return found


def _short(name: str, prefix: str = "NODE_") -> str:
    return name.removeprefix(prefix).lower()


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
    ),
)


def _by_node(answer: tuple[str, admin_pb2.NodeStatus | Fault]) -> tuple[bool, str]:
    """In the order of ids; who does not answer comes last."""
    address, status = answer
    return (isinstance(status, Fault), address if isinstance(status, Fault) else status.node_id)


def status_table(answers: dict[str, admin_pb2.NodeStatus | Fault]) -> Table:
    """A column a node: role, term, cursor, lag and rates."""
    peers = {
        peer.node_id: peer
        for status in answers.values()
        if isinstance(status, admin_pb2.NodeStatus) and status.role == admin_pb2.MASTER
        for peer in status.peers
    }
    answers = dict(sorted(answers.items(), key=_by_node))
    columns = [_column_of(status, peers) for status in answers.values()]
    rows = [(name, *cells) for name, cells in zip(ROWS, zip(*columns, strict=True), strict=True) if any(cells)]
    return table("", ("", *answers), rows, right=range(1, len(answers) + 1))


def _clock(status: admin_pb2.NodeStatus) -> str:
    """The node's wall clock against the cluster's time, and how far that may be off."""
    state = admin_pb2.ClockState.Name(status.clock_state).removeprefix("CLOCK_").lower()
    if status.clock_state in (admin_pb2.CLOCK_UNAGREED, admin_pb2.CLOCK_OWN):
        return f"[yellow]{state}[/]"
    text = f"{status.clock_offset_ms:+,.1f} ms, error {status.clock_error_ms:,.1f}"
    return text if status.clock_state == admin_pb2.CLOCK_AGREED else f"{text} [yellow]{state}[/]"


def _column_of(status: admin_pb2.NodeStatus | Fault, peers: dict[str, admin_pb2.PeerStatus]) -> list[str]:
    if isinstance(status, Fault):
        return ["", "[red]no answer[/]", *[""] * (len(ROWS) - 2)]
    master = status.role == admin_pb2.MASTER
    peer = peers.get(status.node_id)
    role = _short(admin_pb2.Role.Name(status.role))
    return [
        status.node_id,
        f"[bold green]{role}[/]{'*' if status.lease_held else ''}" if master else role,
        _short(admin_pb2.NodeState.Name(status.state)),
        status.state_reason,
        str(status.term),
        time_text(status.cursor_due_ms)[11:-1] if status.cursor_due_ms else "-",
        str(status.tick),
        f"{status.local_index:,}",
        "-" if master else f"{status.sync_age_ms} ms",
        "-" if peer is None else f"{peer.applied_lag:,}",
        f"{status.pending:,}",
        f"{status.ready:,}",
        f"{status.in_flight:,}",
        f"{status.schedule_rate:,.0f}",
        f"{status.dispatch_rate:,.0f}",
        f"{status.deliver_rate:,.0f}",
        f"{status.settle_rate:,.0f}",
        f"{status.loop_lag_ms} ms",
        _clock(status),
        f"{status.disk_bytes_free / (1 << 30):,.1f} GiB",
    ]


@cluster_app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between looks with --watch.")] = 1.0,
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """What every node says: role (* holds the lease), term, cursor, lag, rates. Exit code 3 without a master."""
    use_json(as_json)

    async def go() -> bool:
        async with open_client(address) as client:

            async def look() -> dict[str, admin_pb2.NodeStatus | Fault]:
                answers = await client.admin.statuses()
                for answer in list(answers.values()):
                    if isinstance(answer, admin_pb2.NodeStatus):
                        client.cluster.learn(answer.master_address, answer.term)
                new = [known for known in client.cluster.addresses if known not in answers]
                return await client.admin.statuses() if new else answers

            async def members() -> None:
                """Ask the master for the others: one address is enough to see all."""
                for answer in (await look()).values():
                    if isinstance(answer, admin_pb2.NodeStatus):
                        for peer in answer.peers:
                            if peer.client_address:
                                client.cluster.add(peer.client_address)

            await members()
            answers = dict(sorted((await look()).items(), key=_by_node))
            if watch and not as_json and out.is_terminal:
                with Live(status_table(answers), console=out, auto_refresh=False) as live:
                    while True:
                        await asyncio.sleep(interval)
                        answers = dict(sorted((await look()).items(), key=_by_node))
                        live.update(status_table(answers), refresh=True)
            while True:
                if as_json:
                    print_json(
                        [
                            {"address": where, "error": answer.message}
                            if isinstance(answer, Fault)
                            else {"address": where, **as_dict(answer)}
                            for where, answer in answers.items()
                        ]
                    )
                else:
                    out.print(status_table(answers))
                if not watch:
                    break
                await asyncio.sleep(interval)
                answers = dict(sorted((await look()).items(), key=_by_node))
            return any(
                isinstance(answer, admin_pb2.NodeStatus) and answer.role == admin_pb2.MASTER
                for answer in answers.values()
            )

    if not asyncio.run(go()):
        raise ClusterUnavailable("no node says that it is master", "NO_MASTER")


@cluster_app.command()
def transfer(
    target: Annotated[str, typer.Argument(help="Node id; none: the one that is furthest.")] = "",
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Hand the master role over, without duplicates."""
    use_json(as_json)

    async def go() -> admin_pb2.TransferMasterResponse:
        async with open_client(address) as client:
            return await client.admin.transfer(target)

    answer = asyncio.run(go())
    if as_json:
        print_json(as_dict(answer))
    else:
        out.print(f"{answer.master_id} is master in term {answer.term}; pause {answer.pause_ms} ms")


def _counts(learner: bool) -> str:
    return "not yet" if learner else "yes"


def _show_members(members: list[admin_pb2.Member], as_json: bool) -> None:
    if as_json:
        print_json([as_dict(member) for member in members])
        return
    rows = [(m.node_id, _counts(m.learner), m.client_address, m.peer_address, m.disk_uuid) for m in members]
    out.print(table("", ("node", "counts", "clients", "peers", "disk"), rows))


@member_app.command("add")
def member_add(
    node_id: Annotated[str, typer.Argument(help="Id of the new node.")],
    peer_address: Annotated[str, typer.Option("--peer", help="host:port where its peers reach it.")],
    client_address: Annotated[str, typer.Option("--client", help="host:port where clients reach it.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds to wait until it has caught up and counts.")
    ] = 10.0,
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Add a node, which waits with `cluster.join = "existing"`. It counts once it has caught up."""
    use_json(as_json)

    async def go() -> list[admin_pb2.Member]:
        async with open_client(address, timeout_s=60.0) as client:
            member = admin_pb2.Member(node_id=node_id, peer_address=peer_address, client_address=client_address)
            with err.status(f"waiting until {node_id} has caught up"):
                end = time.monotonic() + wait_s
                while True:
                    members = await client.admin.add_member(member)  # the same again changes nothing
                    if time.monotonic() >= end or not any(m.learner for m in members if m.node_id == node_id):
                        return members
                    await asyncio.sleep(0.2)

    _show_members(asyncio.run(go()), as_json)


@member_app.command("remove")
def member_remove(
    node_id: Annotated[str, typer.Argument(help="Id of the node.")],
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Remove a node; its id is never used again."""
    use_json(as_json)

    async def go() -> list[admin_pb2.Member]:
        async with open_client(address) as client:
            return await client.admin.remove_member(node_id)

    _show_members(asyncio.run(go()), as_json)


@member_app.command("list")
def member_list(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """The nodes as the master sees them."""
    use_json(as_json)

    async def go() -> admin_pb2.NodeStatus:
        async with open_client(address) as client:
            return await client.admin.master_status()

    status = asyncio.run(go())
    if as_json:
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


@topic_app.command("create")
def topic_create(
    name: Name,
    fifo: Annotated[bool, typer.Option("--fifo", help="Messages of one group in order.")] = False,
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Create a topic."""
    use_json(as_json)

    async def go() -> admin_pb2.Topic:
        async with open_client(address) as client:
            return await client.admin.create_topic(name, fifo=fifo)

    topic = asyncio.run(go())
    print_json(as_dict(topic)) if as_json else out.print(f"topic {topic.name}")


@topic_app.command("delete")
def topic_delete(name: Name, address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Delete a topic."""
    use_json(as_json)

    async def go() -> None:
        async with open_client(address) as client:
            await client.admin.delete_topic(name)

    asyncio.run(go())
    print_json({"deleted": name}) if as_json else out.print(f"{name} is deleted")


@topic_app.command("list")
def topic_list(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """All topics."""
    use_json(as_json)

    async def go() -> list[admin_pb2.Topic]:
        async with open_client(address) as client:
            return await client.admin.topics()

    topics = asyncio.run(go())
    if as_json:
        print_json([as_dict(topic) for topic in topics])
        return
    rows = [(t.name, "fifo" if t.fifo else "", "paused" if t.paused else "", f"{t.dispatched:,}") for t in topics]
    out.print(table("", ("topic", "order", "state", "dispatched"), rows, right=(3,)))


@group_app.command("create")
def group_create(
    name: Name,
    topics: Annotated[list[str], typer.Argument(help="Its topics.")],
    start_from: Annotated[str, typer.Option(help="earliest or latest.")] = "earliest",
    filter: Annotated[str, typer.Option(help="Tags that it takes: 'a || b'; '*' or none: all.")] = "",
    broadcasting: Annotated[
        bool, typer.Option("--broadcasting", help="Each consumer gets every message; nothing is retried.")
    ] = False,
    initial: Initial = None,
    factor: Factor = 2.0,
    longest: Longest = None,
    jitter: Jitter = 0.0,
    attempts_max: AttemptsMax = 0,
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Create a consumer group."""
    use_json(as_json)
    if start_from not in {"earliest", "latest"}:
        raise typer.BadParameter("--start-from is earliest or latest")
    policy = policy_from(initial, factor, longest, jitter, attempts_max)

    async def go() -> admin_pb2.Group:
        async with open_client(address) as client:
            return await client.admin.create_group(
                name, topics, start_from=start_from, filter=filter, broadcasting=broadcasting, retry=policy
            )

    group = asyncio.run(go())
    print_json(as_dict(group)) if as_json else out.print(f"group {group.name} of {', '.join(group.topics)}")


@group_app.command("update")
def group_update(
    name: Name,
    initial: Initial = None,
    factor: Factor = 2.0,
    longest: Longest = None,
    jitter: Jitter = 0.0,
    attempts_max: AttemptsMax = 0,
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Replace a group's retry policy; without --retry-initial messages come again at the delay levels."""
    use_json(as_json)
    policy = policy_from(initial, factor, longest, jitter, attempts_max)

    async def go() -> admin_pb2.Group:
        async with open_client(address) as client:
            return await client.admin.update_group(name, policy)

    group = asyncio.run(go())
    print_json(as_dict(group)) if as_json else out.print(f"group {group.name} retries as said from now on")


@group_app.command("delete")
def group_delete(name: Name, address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """Delete a consumer group."""
    use_json(as_json)

    async def go() -> None:
        async with open_client(address) as client:
            await client.admin.delete_group(name)

    asyncio.run(go())
    print_json({"deleted": name}) if as_json else out.print(f"{name} is deleted")


@group_app.command("list")
def group_list(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """All consumer groups."""
    use_json(as_json)

    async def go() -> list[admin_pb2.Group]:
        async with open_client(address) as client:
            return await client.admin.groups()

    groups = asyncio.run(go())
    if as_json:
        print_json([as_dict(group) for group in groups])
        return
    rows = [
        (
            g.name,
            ", ".join(g.topics),
            g.filter or "*",
            "paused" if g.paused else "",
            g.consumers,
            f"{g.backlog:,}",
            f"{g.in_flight:,}",
            f"{g.dead:,}",
        )
        for g in groups
    ]
    titles = ("group", "topics", "tags", "state", "consumers", "backlog", "out", "dead")
    out.print(table("", titles, rows, right=(4, 5, 6, 7)))


@settings_app.command("get")
def settings_get(address: Addresses = ADDRESS_DEFAULT, as_json: AsJson = False) -> None:
    """The replicated settings."""
    use_json(as_json)

    async def go() -> admin_pb2.Settings:
        async with open_client(address) as client:
            return await client.admin.settings()

    _show_settings(asyncio.run(go()), as_json)


@settings_app.command("set")
def settings_set(
    changes: Annotated[list[str], typer.Argument(help="NAME=VALUE.")],
    address: Addresses = ADDRESS_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Change replicated settings, for all nodes at once."""
    use_json(as_json)
    settings = admin_pb2.Settings()
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in admin_pb2.Settings.DESCRIPTOR.fields_by_name:
            known = ", ".join(admin_pb2.Settings.DESCRIPTOR.fields_by_name)
            raise typer.BadParameter(f"{change}: NAME=VALUE, where NAME is one of {known}")
        try:
            setattr(settings, name, _value(name, text))
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(f"{change}: {error}") from None

    async def go() -> admin_pb2.Settings:
        async with open_client(address) as client:
            return await client.admin.update_settings(settings)

    _show_settings(asyncio.run(go()), as_json)


def _value(name: str, text: str) -> object:
    field = admin_pb2.Settings.DESCRIPTOR.fields_by_name[name]
    if field.type == field.TYPE_STRING:
        return text
    if field.type == field.TYPE_BOOL:
        if text not in {"true", "false"}:
            raise ValueError("true or false")
        return text == "true"
    return int(text)


def _show_settings(settings: admin_pb2.Settings, as_json: bool) -> None:
    values = {field.name: value for field, value in settings.ListFields()}
    if as_json:
        print_json(values)
    else:
        rows = [(name, str(value).lower() if isinstance(value, bool) else value) for name, value in values.items()]
        out.print(table("", ("setting", "value"), rows))
