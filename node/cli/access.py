"""Commands about rights: user, role, whoami, audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated

import typer
from rich.markup import escape

from tickwheel.client import AsyncClient, AuditRecord, Grant, KnownBy, Quotas, Right
from tickwheel.client import User as KnownUser
from tickwheel.client.errors import Fault
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import (
    as_dict,
    ask,
    duration,
    err,
    out,
    print_json,
    print_listing,
    print_table,
    say,
    warn,
)
from tickwheel.node.cli.status import unanswered

access_app = Commands()
user_app = Commands(no_args_is_help=True, help="Users: who may call, and with which roles and quotas.")
role_app = Commands(no_args_is_help=True, help="Roles: what their users may do with which topics and groups.")
access_app.add_typer(user_app, name="user")
access_app.add_typer(role_app, name="role")

RIGHTS = [right for right in Right if right is not Right.UNKNOWN]

Name = Annotated[str, typer.Argument(help="Name.")]
User = Annotated[str, typer.Argument(help="Name of the user.")]


def _time(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%SZ") if moment is not None else "never"


@user_app.command("set")
def user_set(
    name: Name,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="Role; repeat for more. Without it the user has no role.")
    ] = None,
    messages_per_s: Annotated[int, typer.Option(min=0, help="Messages a second; 0: no limit.")] = 0,
    bytes_per_s: Annotated[int, typer.Option(min=0, help="Bytes a second.")] = 0,
    pending_max: Annotated[int, typer.Option(min=0, help="Pending messages in its topics.")] = 0,
    topics_max: Annotated[int, typer.Option(min=0, help="Topics that it creates.")] = 0,
    groups_max: Annotated[int, typer.Option(min=0, help="Groups that it creates.")] = 0,
    streams_max: Annotated[int, typer.Option(min=0, help="Calls that it holds open at one node.")] = 0,
    connections_max: Annotated[int, typer.Option(min=0, help="Connections to one node.")] = 0,
) -> None:
    """Create a user, or replace its roles and quotas. A certificate with this common name authenticates the user."""
    quotas = Quotas(
        messages_per_s=messages_per_s,
        bytes_per_s=bytes_per_s,
        pending_max=pending_max,
        topics_max=topics_max,
        groups_max=groups_max,
        streams_max=streams_max,
        connections_max=connections_max,
    )
    user = ask(lambda client: client.access.set_user(name, role or [], quotas))
    say(as_dict(user), f"user {user.name}: {', '.join(user.roles) or 'no role'}")


@user_app.command("delete")
def user_delete(name: Name) -> None:
    """Delete a user and its tokens."""
    ask(lambda client: client.access.delete_user(name))
    say({"deleted": name}, f"{name} deleted")


@user_app.command("list")
def user_list() -> None:
    """List all users."""
    print_listing(
        ask(lambda client: client.access.users()),
        ("user", "roles", "quotas", "tokens"),
        lambda user: (user.name, ", ".join(user.roles), _quotas(user.quotas), _tokens(user)),
    )


def _quotas(quotas: Quotas) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in as_dict(quotas).items() if value)


def _tokens(user: KnownUser) -> str:
    return ", ".join(f"{token.id} {token.label}".strip() for token in user.tokens)


@user_app.command("token")
def user_token(
    user: User,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    lifetime: Annotated[str, typer.Option(help="How long it is valid, such as 30d. Without it: for ever.")] = "",
) -> None:
    """Create a token and print its secret, once. Nodes keep only its hash."""
    counts = duration("--lifetime", lifetime) if lifetime else None
    created = ask(lambda client: client.access.create_token(user, label=label, lifetime=counts))
    if Asked.json:
        print_json(as_dict(created))
        return
    expires = _time(created.token.expires)
    err.print(f"token {created.token.id} of {user}, expires: {expires}. It is shown only once:", soft_wrap=True)
    print(created.secret)


@user_app.command("revoke")
def user_revoke(
    user: User, token_id: Annotated[str, typer.Argument(help="Id of the token, as `user list` shows it.")]
) -> None:
    """Revoke a token."""
    changed = ask(lambda client: client.access.revoke_token(user, token_id))
    say(as_dict(changed), f"token {token_id} of {user} revoked")


@role_app.command("set")
def role_set(
    name: Name,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="RIGHTS:TOPICS[:GROUPS], each with commas, * for any characters, as schedule,read:pay-* or "
            f"consume:pay-*:billing. Rights: {', '.join(RIGHTS)}. Repeat for more."
        ),
    ] = None,
) -> None:
    """Create a role, or replace what it allows."""
    grants = [grant_from(text) for text in allow or []]
    role = ask(lambda client: client.access.set_role(name, grants))
    say(as_dict(role), f"role {role.name}: {_grants(role.grants) or 'nothing'}")


def grant_from(text: str) -> Grant:
    """RIGHTS:TOPICS[:GROUPS] as a grant; a usage error otherwise."""
    names, *patterns = text.split(":")
    if not 1 <= len(patterns) <= 2:
        raise typer.BadParameter(f"{text}: RIGHTS:TOPICS or RIGHTS:TOPICS:GROUPS")
    rights: list[Right] = []
    for name in filter(None, names.split(",")):
        if name not in RIGHTS:
            raise typer.BadParameter(f"{text}: {name} is not one of {', '.join(RIGHTS)}")
        rights.append(Right(name))
    topics, groups = (tuple(filter(None, part.split(","))) for part in [*patterns, ""][:2])
    if Right.CONSUME in rights and not groups:
        raise typer.BadParameter(f"{text}: consume needs patterns for groups, too, as consume:pay-*:billing")
    return Grant(tuple(rights), topics, groups)


def _grants(grants: Sequence[Grant]) -> str:
    parts = []
    for grant in grants:
        text = f"{', '.join(grant.rights)} topics {' '.join(grant.topics) or 'none'}"
        parts.append(f"{text} groups {' '.join(grant.groups)}" if grant.groups else text)
    return "; ".join(parts)


@role_app.command("delete")
def role_delete(name: Name) -> None:
    """Delete a role that no user has."""
    ask(lambda client: client.access.delete_role(name))
    say({"deleted": name}, f"{name} deleted")


@role_app.command("list")
def role_list() -> None:
    """List all roles and what they allow."""
    roles = ask(lambda client: client.access.roles())
    print_listing(roles, ("role", "allows"), lambda role: (role.name, escape(_grants(role.grants))))


@access_app.command("whoami")
def whoami() -> None:
    """Show who you are to the cluster, and what you may do."""
    caller = ask(lambda client: client.access.who_am_i())
    if Asked.json:
        print_json(as_dict(caller))
        return
    shows = "known by nothing: neither certificate nor token" if caller.by is KnownBy.NONE else f"known by {caller.by}"
    out.print(f"{caller.name or 'nobody'}, {shows}; rights are {'on' if caller.rights else 'off'}")
    if caller.unrestricted:
        by_role = "what the role of its certificate allows"
        if caller.by is KnownBy.NONE:
            by_role = "everything without TLS, with TLS what a client may"
        out.print(f"may do {'everything' if caller.rights else by_role}")
    for grant in caller.grants:
        out.print(_grants([grant]))
    if caller.grants_left_out:
        out.print(f"and {caller.grants_left_out} more; `tickwheel role list` has all")


@access_app.command("audit")
def audit(limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000, help="Records.")] = 50) -> None:
    """Show who changed what, and what was refused: the newest records of all nodes, oldest first."""

    async def read(client: AsyncClient) -> dict[str, list[AuditRecord] | Fault]:
        await client.admin.know_all()
        answers = await client.access.audit(limit)
        faults = {node: answer for node, answer in answers.items() if isinstance(answer, Fault)}
        if len(faults) == len(answers):
            raise unanswered(faults, client.cluster.why)
        return answers | {node: replace(fault, message=client.cluster.why(fault)) for node, fault in faults.items()}

    answers = ask(read)
    records: list[AuditRecord] = []
    for node, answer in answers.items():
        if isinstance(answer, Fault):
            warn(f"{node} does not answer: {answer.message}")
        else:
            records += answer
    records = sorted(records, key=lambda record: record.at)[-limit:]
    if Asked.json:
        for record in records:
            print_json(as_dict(record))
        return
    rows = [(_time(r.at), r.node_id, r.user or "-", r.method, escape(r.request), escape(r.result)) for r in records]
    print_table("", ("time", "node", "user", "call", "request", "result"), rows)
