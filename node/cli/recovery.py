"""Commands for the day after: restore (a backup), rebuild (from the journal), and recover, which continues from one
disk when a majority is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.text import Text

from tickwheel.node.cli.backup import say_origin
from tickwheel.node.cli.interrupts import importing
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import err, fail, out, print_json, say, time_text
from tickwheel.node.config import ConfigError, NodeConfig, read_config

if TYPE_CHECKING:
    from tickwheel.storage.local import LocalDisk

recovery_app = Commands(ask_cluster=False)

EXIT_DATA = 3
ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="TOML file of the new node: a new cluster.id and no other members.")
]


@recovery_app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="Directory of a backup.", exists=True, file_okay=False)],
    config: ConfigFile,
) -> None:
    """Check a backup and make it the data of a new cluster of one: the configured node, which must not be running."""
    with importing():
        from tickwheel.node.backup_files import BackupError, origin_facts, origin_of, restore_backup
        from tickwheel.node.refound import Found, RefoundError, refound
        from tickwheel.node.state.results import ImpossibleStateError
        from tickwheel.storage.disk import DiskError, DiskFullError

    node = _read(config)
    found: list[Found] = []

    def prepare(disk: LocalDisk) -> None:
        found.append(refound(disk, node))

    try:
        origin = origin_of(source)
        if not Asked.json:
            say_origin(origin)
        with Progress(console=err, disable=Asked.json or not err.is_terminal, transient=True) as progress:
            task = progress.add_task("restore", total=None)
            files, size = restore_backup(
                source, node.data_path, lambda done, total: progress.update(task, completed=done, total=total), prepare
            )
    except (BackupError, RefoundError) as error:
        fail(str(error), "BACKUP", {})
        raise typer.Exit(1) from None
    except DiskFullError as error:
        raise _no_room(node.data_path, error) from None
    except (DiskError, ImpossibleStateError) as error:
        fail(f"{source} cannot be restored to {node.data_path}: {error}", "BACKUP", {})
        raise typer.Exit(EXIT_DATA) from None
    if Asked.json:
        facts = {"directory": str(node.data_path), "files": files, "bytes": size, "origin": origin_facts(origin)}
        print_json({**facts, **dataclasses.asdict(found[0])})
        return
    out.print(f"{files} files, {size:,} bytes: {node.data_path}")
    _say_next(found[0], node)


@recovery_app.command()
def recover(
    config: ConfigFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    skip_entry: Annotated[
        list[int] | None,
        typer.Option(
            "--skip-entry", help="Leave out this entry of the journal, which no node can apply; repeat for more."
        ),
    ] = None,
) -> None:
    """Continue from this one disk when a majority is lost FOR GOOD. What only the other nodes knew is lost."""
    with importing():
        from tickwheel.node.refound import RefoundError, refound
        from tickwheel.node.server.identity import IdentityError, read_identity
        from tickwheel.node.state.results import ImpossibleStateError
        from tickwheel.storage.disk import DirectoryInUseError, DiskError, DiskFullError

    node = _read(config)
    path = node.data_path
    try:
        with _stopped_node(path) as disk:
            identity = read_identity(disk)
            if identity is None:
                raise _no_data(path)
            _warn(identity.cluster_id, identity.node_id, node, yes)
            found = refound(disk, node, skip_entry or ())
    except (RefoundError, IdentityError, DirectoryInUseError) as error:
        fail(str(error), "RECOVER", {})
        raise typer.Exit(1) from None
    except DiskFullError as error:
        raise _no_room(path, error) from None
    except (DiskError, ImpossibleStateError) as error:
        fail(f"the data in {path} cannot be used: {error}", "DATA", {})
        raise typer.Exit(EXIT_DATA) from None
    if Asked.json:
        print_json({"directory": str(path), **dataclasses.asdict(found)})
        return
    for skipped in found.skipped:
        err.print(Text.assemble(("left out for good:", "bold red"), f" entry {skipped}"), soft_wrap=True)
    if found.without_journal:
        text = f" this directory had none. What was written after the checkpoint of entry {found.index:,} is lost"
        err.print(Text.assemble(("no journal:", "bold red"), text), soft_wrap=True)
    newest = f", the newest of {time_text(found.newest_ms)}" if found.newest_ms else ""
    out.print(
        f"continues from entry {found.index:,} ({found.replayed:,} of them taken from the journal{newest}); "
        "what the cluster acknowledged later is lost",
        soft_wrap=True,
    )
    _say_next(found, node)


@recovery_app.command()
def rebuild(config: Annotated[Path, typer.Option("--config", "-c", help="TOML file of the stopped node.")]) -> None:
    """Rebuild a stopped node with damaged files from its journal, if the journal is complete since the first entry."""
    with importing():
        from tickwheel.node.rebuild import RebuildError, rebuild
        from tickwheel.node.server.identity import IdentityError, open_identity, read_identity
        from tickwheel.storage.disk import DirectoryInUseError, DiskError, DiskFullError

    try:
        node = read_config(config, os.environ)
    except ConfigError as error:
        fail(str(error), "CONFIG", {})
        raise typer.Exit(2) from None
    path = node.data_path
    try:
        with _stopped_node(path) as disk:
            if read_identity(disk) is None:
                raise _no_data(path)
            open_identity(disk, node.cluster.id, node.node.id, str(path))
            found = rebuild(disk, node.core.segment_bytes)
    except (RebuildError, IdentityError, DirectoryInUseError) as error:
        fail(str(error), "REBUILD", {})
        raise typer.Exit(1) from None
    except DiskFullError as error:
        raise _no_room(path, error) from None
    except DiskError as error:
        fail(f"the data in {path} cannot be used: {error}", "DATA", {})
        raise typer.Exit(EXIT_DATA) from None
    say(
        {"directory": str(path), **dataclasses.asdict(found)},
        f"the next start of {node.node.id} replays all {found.entries:,} entries ({found.bytes:,} bytes)",
    )


@contextlib.contextmanager
def _stopped_node(path: Path) -> Iterator[LocalDisk]:
    """The directory of a stopped node, locked. Raises typer.Exit if there is none, IdentityError, DiskError."""
    from tickwheel.node.server.identity import check_restored
    from tickwheel.storage.disk import DirectoryInUseError, DiskError
    from tickwheel.storage.local import LocalDisk

    if not path.is_dir():
        fail(f"{path} is not a directory; nothing was changed", "NO_DATA", {})
        raise typer.Exit(1)
    try:
        disk = LocalDisk(path)
        disk.lock()
    except DirectoryInUseError:
        raise DirectoryInUseError(f"a node is running on {path}: stop it first; nothing was changed") from None
    except DiskError as error:
        fail(f"{error}. Nothing was changed", "SYSTEM", {})
        raise typer.Exit(1) from None
    try:
        check_restored(disk, str(path))
        yield disk
    finally:
        disk.unlock()


def _no_data(path: Path) -> typer.Exit:
    """Say that the directory is not one of a node."""
    fail(f"{path} holds no data of a node; nothing was changed", "NO_DATA", {})
    return typer.Exit(1)


def _no_room(path: Path, error: Exception) -> typer.Exit:
    """Say that the disk is full."""
    fail(f"{path} has no room: {error}. Make room on its file system and run the command again", "SYSTEM", {})
    return typer.Exit(1)


def _warn(cluster_id: str, node_id: str, node: NodeConfig, yes: bool) -> None:
    """Explain the consequences and ask for confirmation. Raises typer.Exit without it."""
    err.print(f"This gives cluster {cluster_id} up.", style="bold red", end=" ", soft_wrap=True)
    err.print(
        f"The data of its node {node_id} in {node.data_path} becomes "
        f"cluster {node.cluster.id}, with {node.node.id} as its only member.\n"
        "- Messages and acknowledgements that only the lost nodes knew are lost; producers must schedule them again.\n"
        "- What was written but never acknowledged may be delivered, and what was settled may be delivered again.\n"
        f"- No node of cluster {cluster_id} may serve again: two clusters would deliver the same messages.\n"
        "Copy the directory away first. If you can still bring a majority of the disks back, do that instead.",
        soft_wrap=True,
    )
    if yes:
        return
    if not sys.stdin.isatty():
        fail("nothing was changed; pass --yes to confirm", "NOT_CONFIRMED", {})
        raise typer.Exit(2)
    typed = typer.prompt("Type the id of the new cluster to continue", err=True, default="", show_default=False)
    if typed != node.cluster.id:
        fail("nothing was changed", "NOT_CONFIRMED", {})
        raise typer.Exit(1)


def _say_next(found: object, node: NodeConfig) -> None:
    from tickwheel.node.refound import Found

    assert isinstance(found, Found)
    out.print(
        f"cluster {node.cluster.id}, until now {found.old_cluster_id} ({', '.join(found.old_members)}): "
        f"{found.pending:,} pending, {found.ready:,} due and not settled\n"
        f"next: tickwheel node --config ..., then a member at a time: tickwheel member add ID --peer ... --client ...",
        soft_wrap=True,
    )


def _read(config: Path) -> NodeConfig:
    """Read the configuration. It must make this node the only first member; otherwise exit code 2."""
    try:
        node = read_config(config, os.environ)
    except ConfigError as error:
        fail(str(error), "CONFIG", {})
        raise typer.Exit(2) from None
    others = [member.node_id for member in node.members if member.node_id != node.node.id]
    if others or node.cluster.join == "existing":
        named = f"cluster.members names {', '.join(others)}" if others else 'cluster.join is "existing"'
        fail(
            f"{config}: {named}, but the new cluster begins with {node.node.id} alone; the others are added once it "
            "runs, with empty disks",
            "CONFIG",
            {},
        )
        raise typer.Exit(2)
    return node
