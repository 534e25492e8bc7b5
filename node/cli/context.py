"""Commands about contexts, the names under which the command line knows clusters: `tickwheel context`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tickwheel.node.cli import contexts
from tickwheel.node.cli.contexts import ADDRESS_VARIABLES, Context, ContextError
from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses, Asked, Commands
from tickwheel.node.cli.output import out, print_json, print_table, say, warn

_commands = Commands(ask_cluster=False, no_args_is_help=True, help="Clusters by name: add, use, list, show, remove.")
context_app = typer.Typer()
"""`tickwheel context`, with the commands of this module below it."""
context_app.add_typer(_commands, name="context")


Name = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=contexts.known_names)]


def _checked(name: str) -> str:
    if not contexts.NAME.fullmatch(name):
        raise typer.BadParameter(f"{name!r}: a name has up to 64 letters, digits, dots, dashes and underscores")
    return name


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


@_commands.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the new context.", callback=_checked)],
    addresses: Annotated[
        str, typer.Option("--addresses", "-a", help="Nodes of the cluster, host:port separated by commas.")
    ],
    tls_ca: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Authority of the nodes.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Its key.")] = None,
    tls_name: Annotated[
        str, typer.Option(help="Name in the nodes' certificates, if it is not the one that is dialled.")
    ] = "",
    token: Annotated[
        str, typer.Option(help="Token of a user. - reads it from standard input, which no history of a shell keeps.")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a context of this name.")] = False,
) -> None:
    """Add a context. The first one is used from then on."""
    if not contexts.split(addresses):
        raise typer.BadParameter(f"--addresses {addresses!r}: host:port, separated by commas")
    from tickwheel.client.cluster import checked_address, checked_token

    for address in contexts.split(addresses):
        checked_address(address)
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    if tls_ca is None and (tls_cert is not None or tls_name):
        raise typer.BadParameter("--tls-cert and --tls-name need --tls-ca")
    if token == "-":
        token = sys.stdin.readline().strip()
        if not token:
            raise typer.BadParameter("'-': a token on standard input, which was empty", param_hint="--token")
    checked_token(token)
    made = Context(
        ",".join(contexts.split(addresses)),
        tls_ca=_absolute(tls_ca),
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
        tls_name=tls_name,
        token=token,
    )
    with contexts.changing() as found:
        if name in found.known and not replace:
            raise ContextError(f"context {name}: exists already; --replace replaces it")
        found.known[name] = made
        found.current = found.current or name
        current = found.current
    if Asked.json:
        print_json({"name": name, "current": current})
    else:
        out.print(f"{name} added" + (", and in use" if name == current else f"; {current} is in use"))


@_commands.command()
def use(name: Name) -> None:
    """Use a context from now on, in every shell."""
    with contexts.changing() as found:
        found.get(name)
        found.current = name
    say({"current": name}, f"{name} is in use")
    if os.environ.get(contexts.VARIABLE):
        warn(f"{contexts.VARIABLE}={os.environ[contexts.VARIABLE]} of this shell still comes first")


@_commands.command("list")
def list_contexts() -> None:
    """List the contexts; * marks the one in use."""
    found = contexts.read()
    rows = [
        {
            "name": name,
            "current": name == found.current,
            "addresses": contexts.split(one.addresses),
            "tls": bool(one.tls_ca),
            "token": bool(one.token),
        }
        for name, one in sorted(found.known.items())
    ]
    if Asked.json:
        print_json(rows)
    elif not rows:
        out.print(f"no contexts yet; without one commands ask {contexts.ADDRESSES_FALLBACK} (tickwheel context add)")
    else:
        cells = [
            (
                "*" if row["current"] else "",
                row["name"],
                "yes" if row["tls"] else "no",
                "yes" if row["token"] else "no",
                ", ".join(contexts.split(found.known[str(row["name"])].addresses)),
            )
            for row in rows
        ]
        print_table("", ("", "context", "TLS", "token", "addresses"), cells, whole=(1,))


@_commands.command()
def show(address: Addresses = ADDRESS_DEFAULT) -> None:
    """Show what holds here and now, and where each value comes from: flag, environment or context."""
    name, context, chosen_by = contexts.in_use()
    variables = [variable for variable in ADDRESS_VARIABLES if os.environ.get(variable) == address]
    source = "default"
    if name and address == context.addresses:
        source = f"context {name}"
    elif variables:
        source = variables[0]
    elif address != contexts.ADDRESSES_FALLBACK:
        source = "--addresses"
    access = contexts.access_for(address)
    rows = [("context", name, chosen_by)] if name else []
    rows.append(("addresses", address, source))
    rows += [(key, "***" if key == "token" else value, access.sources[key]) for key, value in access.values.items()]
    if Asked.json:
        print_json({key: {"value": value, "from": origin} for key, value, origin in rows})
        return
    shown = [tuple(map(escape, row)) for row in rows]
    print_table("", ("", "value", "from"), shown, whole=(0,))
    if access.unused:
        warn(unused_text(access.unused))


def unused_text(name: str) -> str:
    """Why a context's TLS files and token are left aside."""
    return f"These addresses are not all of context {name}: its TLS files and token are not used."


@_commands.command()
def remove(name: Name) -> None:
    """Remove a context, with its token. Certificates stay where they are."""
    with contexts.changing() as found:
        found.get(name)
        del found.known[name]
        if found.current == name:
            found.current = ""
    say({"removed": name}, f"{name} removed")
