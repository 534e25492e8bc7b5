"""Subcommands about one node: `config check`, `config reference`, `config metrics`, `certs`.

Exit code 2: the configuration is wrong. A node starts here, so each command imports what it needs.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tickwheel.node.cli.hints import HINTS
from tickwheel.node.cli.interrupts import importing
from tickwheel.node.cli.options import AsJson
from tickwheel.node.config import ConfigError, read_config
from tickwheel.node.config.fields import NAME
from tickwheel.node.config.relations import Problem

EXIT_CONFIG = 2
_HINT = f"Hint: {HINTS['CONFIG']}."

node_app = typer.Typer(no_args_is_help=True)
config_app = typer.Typer(no_args_is_help=True, help="Check a configuration, or print its reference.")
node_app.add_typer(config_app, name="config")


@config_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="TOML file of a node.")],
    environment: Annotated[bool, typer.Option(help="Let TICKWHEEL_* variables override the file.")] = True,
    as_json: AsJson = False,
) -> None:
    """Read a file as a node would. List all problems."""
    from tickwheel.node.cli.output import print_json
    from tickwheel.node.tls import read_tls

    try:
        config = read_config(file, os.environ if environment else {})
        read_tls(config)
        problem, remark = _looked_at(config.data_path)
        if problem:
            raise ConfigError([Problem("node.data_dir", config.node.data_dir, problem)])
    except ConfigError as error:
        if as_json:
            print_json({"file": str(file), "problems": [str(problem) for problem in error.problems]})
        else:
            typer.echo(str(error), err=True)
            typer.echo(f"{file}: {len(error.problems)} problem(s)\n{_HINT}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    if as_json:
        found = {"file": str(file), "node": config.node.id, "cluster": config.cluster.id, "problems": []}
        print_json({**found, "remarks": [remark] if remark else []})
        return
    typer.echo(f"{file}: node {config.node.id} of cluster {config.cluster.id}, no problems")
    if remark:
        typer.echo(f"node.data_dir = {config.node.data_dir}: {remark}")


def _looked_at(path: Path) -> tuple[str, str]:
    """Why no node can have its data at a path, whoever runs it; and why this user's cannot. Empty: one may, as far as
    this user sees."""
    for place in (path, *path.parents):
        try:
            found = place.stat()
            if not stat.S_ISDIR(found.st_mode):
                return f"{place} is not a directory", ""
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                return f"{place} is on a file system that is mounted read-only", ""
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                return f"{place} is a link that leads nowhere", ""
        except PermissionError:
            return "", ""
        except OSError as error:  # a name that is too long, or a ring of links
            return f"{str(place)[:100]}: {error.strerror}", ""
        else:
            if os.access(place, os.W_OK | os.X_OK):
                return "", ""
            return "", f"this user cannot write to {place}; the node must run as one who can"
    return "", ""


@config_app.command("reference")
def print_reference() -> None:
    """Print docs/CONFIG.md."""
    from tickwheel.node.config.reference import reference

    typer.echo(reference(), nl=False)


@config_app.command("metrics")
def print_metrics() -> None:
    """Print docs/METRICS.md."""
    from tickwheel.node.metrics import reference

    typer.echo(reference(), nl=False)


@contextmanager
def _without_rich() -> Iterator[None]:
    """structlog would load it for tracebacks in colour, which no node writes: that was a tenth of a node's start."""
    if "rich" in sys.modules:
        yield
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["rich"]


@node_app.command("node")
def node_command(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file (docs/CONFIG.md).")] = None,
    assignments: Annotated[
        list[str], typer.Option("--set", help="name=value, for instance node.id=n1. It overrides file and environment.")
    ] = [],  # noqa: B006
    insecure: Annotated[bool, typer.Option(help="Same as --set listen.insecure=true.")] = False,
) -> None:
    """Run one node until SIGTERM or SIGINT. Exit code 2: configuration; 3: data or identity; 4: removed."""
    with importing(), _without_rich():
        from tickwheel.node.server.process import run_node

    flags: dict[str, object] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            typer.echo(f"--set {text}: name=value\n{_HINT}", err=True)
            raise typer.Exit(EXIT_CONFIG)
        flags[name.strip()] = value
    if insecure:
        flags["listen.insecure"] = True
    try:
        read = read_config(config, os.environ, flags)
    except ConfigError as error:
        typer.echo(f"{error}\n{_HINT}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    raise typer.Exit(run_node(read))


@node_app.command("certs")
def certs(
    out: Annotated[Path, typer.Option(help="Directory for the files.")],
    node: Annotated[list[str], typer.Option(help="ID or ID=HOST,HOST: a node and its hosts.")] = [],  # noqa: B006
    client: Annotated[list[str], typer.Option(help="Name of a client.")] = [],  # noqa: B006
    admin: Annotated[list[str], typer.Option(help="Name of an administrator.")] = [],  # noqa: B006
    days: Annotated[int, typer.Option(min=1, max=3650, help="How many days the certificates are valid.")] = 365,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace existing certificates of the same names.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a test authority and certificates signed by it. Not for production: the authority's key lies beside them."""
    with importing():
        from tickwheel.node.certs import make_certificates
        from tickwheel.node.cli.output import fail, print_json

    nodes = {text.partition("=")[0]: [h for h in text.partition("=")[2].split(",") if h] for text in node}
    wrong = [name for name in [*nodes, *client, *admin] if not NAME.match(name)]
    if wrong:
        limit = "1 to 64 characters of [A-Za-z0-9_.-], not starting with a dot"
        fail(f"name: {wrong[0]!r}: {limit}", "USAGE", {"field": "name", "value": wrong[0], "limit": limit})
        raise typer.Exit(EXIT_CONFIG)
    try:
        written = make_certificates(out, nodes, client, admin, days, replace=replace)
    except (OSError, ValueError) as error:
        why = str(error)
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename not in (None, str(out)) else ""
            why = f"{place}{error.strerror}"
        fail(f"certificates cannot be made in {out}: {why}", "CERTS" if isinstance(error, ValueError) else "SYSTEM", {})
        raise typer.Exit(1) from None
    paths = [out / "ca.crt", *written]
    if as_json:
        print_json([str(path) for path in paths])
        return
    for path in paths:
        typer.echo(path)
