"""The command `tickwheel console`.

Listens on loopback unless told otherwise: whoever reaches a console of a cluster without rights may do everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import ssl
from pathlib import Path
from typing import Annotated

import typer

from tickwheel.client import AsyncClient
from tickwheel.client.errors import refused
from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses
from tickwheel.node.cli.output import log_to_stderr, out, tls_files
from tickwheel.node.config.fields import parse_address

BIND_DEFAULT = "127.0.0.1:7780"
TIMEOUT_S = 10.0
"""Of a call to the cluster: a page tells sooner than a program that no master answers."""

app = typer.Typer()


def split_bind(bind: str) -> tuple[str, int]:
    """Host and port of --bind. Raises RequestRefused."""
    try:
        return parse_address(bind, port_min=0)
    except ValueError:
        raise refused("--bind", bind, "host:port or [ipv6]:port, a port from 0 to 65,535") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_of(host: str, names: list[str]) -> frozenset[str]:
    """The names under which browsers may come: a page elsewhere must not get here by a name of its own.

    Empty for an address that stands for all of this machine's, if no name is given.
    """
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere and not names:
        return frozenset()
    return frozenset({host.lower(), "localhost", "127.0.0.1", "::1", *(name.lower() for name in names)})


def check_files(cert_file: Path | None, key_file: Path | None) -> None:
    """Raise RequestRefused unless both are given and belong together, or neither is given."""
    if cert_file is None and key_file is None:
        return
    if cert_file is None or key_file is None:
        raise refused("--cert-file" if cert_file is None else "--key-file", "absent", "both or neither")
    for name, path in (("--cert-file", cert_file), ("--key-file", key_file)):
        try:
            with path.open("rb") as opened:
                opened.read(1)
        except OSError as error:
            raise refused(name, path, f"cannot be read: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise refused("--cert-file", cert_file, f"a certificate and its key, in PEM: {error}") from error


def check_authority(client_ca: Path | None, tokens: Path | None, cert_file: Path | None) -> None:
    """Raise RequestRefused unless a login by certificate has all it needs, or is not wanted at all."""
    if client_ca is None and tokens is None:
        return
    if client_ca is None or tokens is None:
        raise refused("--client-ca" if client_ca is None else "--tokens", "absent", "both or neither")
    if cert_file is None:
        raise refused("--cert-file", "absent", "HTTPS: without it no browser shows a certificate")
    check_authority_file("--client-ca", client_ca)


def check_authority_file(field: str, path: Path) -> None:
    """Raise RequestRefused unless the file has certificates of an authority."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise refused(field, path, f"certificates of an authority, in PEM: {error}") from error
    except OSError as error:
        raise refused(field, path, f"cannot be read: {error.strerror}") from error


@app.callback(invoke_without_command=True)
def console(
    address: Addresses = ADDRESS_DEFAULT,
    bind: Annotated[str, typer.Option(help="host:port for browsers; port 0: any free one.")] = BIND_DEFAULT,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show everything and change nothing.")] = False,
    cert_file: Annotated[Path | None, typer.Option(help="PEM: the certificate of the console, for HTTPS.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="PEM: its key.")] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM: the authority of browsers' certificates, by which users may log in. With --tokens."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="The tokens of those users: lines of NAME TOKEN, readable by the console's user alone."),
    ] = None,
    reports: Annotated[
        Path | None,
        typer.Option(help="A directory of chaos runs, whose reports are shown: each made by chaos run --dir DIR/NAME."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS: tokens cross the network in clear.")
    ] = False,
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="A further name under which browsers reach it, as behind a proxy. Repeat it for several."),
    ] = None,
) -> None:
    """Show the cluster in a browser: the wheel turning, topics, groups, messages, dead letters, nodes.

    On a cluster with rights each visitor logs in with a token, or with a certificate.
    """
    host, port = split_bind(bind)
    check_files(cert_file, key_file)
    check_authority(client_ca, tokens, cert_file)
    if not is_loopback(host) and cert_file is None and not insecure:
        raise refused("--bind", bind, "a loopback address, unless --cert-file and --key-file or --insecure are given")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise refused("package", error.name, "installed: pip install 'tickwheel[console]'") from error
    from tickwheel.console.certificates import TokenFile
    from tickwheel.console.reports import Reports
    from tickwheel.console.serving import Serving, serve

    token_file = TokenFile(tokens) if tokens is not None else None
    found = Reports(reports) if reports is not None else None
    tls = tls_files(address)

    def open_client(token: str) -> AsyncClient:
        return AsyncClient(address, tls=tls, timeout_s=TIMEOUT_S, name="console", token=token)

    log_to_stderr(logging.WARNING)
    asyncio.run(open_client("").close())  # wrong addresses or files are told before a browser asks
    told = Serving(
        host,
        port,
        hosts_of(host, host_name or []),
        read_only,
        cert_file=cert_file,
        key_file=key_file,
        client_ca=client_ca,
        tokens=token_file,
        reports=found,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(open_client, told, lambda url: out.print(f"console at {url}, Ctrl-C stops it")))
