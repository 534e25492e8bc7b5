"""The command `backup`: copies a node's state, and goes on by itself when the copy breaks.

A copy breaks when the connection does, the node restarts or its machine is lost. The same node is asked again for a
while, since it has most of what has arrived; then the other addresses are asked in turn. What has arrived stays in the
directory, so that the same command goes on where this one ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID
from rich.text import Text

from tickwheel.client import AsyncClient, BackupOrigin
from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.errors import ClusterUnavailable, Fault, TickwheelError
from tickwheel.node.cli.interrupts import importing
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import duration, err, fail, open_client, out, print_json, time_text, warn

if TYPE_CHECKING:
    from tickwheel.node.backup_files import BackupWriter

backup_app = Commands()

PAUSE_S_FIRST, PAUSE_S_MAX = 0.2, 10.0
SAME_NODE_S = 60.0
"""How long a silent node is asked again before another is asked: that one has the same bundles, but seldom the same
files of the wheel."""
PASSES = frozenset({"WRONG_STATE", "NODE_FAULT", "LIMIT_REACHED", "RESOURCE_EXHAUSTED"})
"""Reasons that end once a node has restarted or has room, beside those for which a call is worth repeating anyway."""

SILENCE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})


@backup_app.command()
def backup(
    directory: Annotated[Path, typer.Argument(help="Empty or new directory, or that of an interrupted backup.")],
    stale: Annotated[
        bool, typer.Option("--stale", help="Accept a node that takes no part or is far behind its master.")
    ] = False,
    retry_for: Annotated[
        str, typer.Option("--retry-for", help="Give up when nothing has come for this long, such as 30s or 1h.")
    ] = "10m",
) -> None:
    """Copy one node's whole state, consistent, while it serves. The first address is asked; prefer a slave. Run it
    again to go on with a copy that was interrupted.

    A copy that breaks goes on by itself: with the same node, and after a minute also with the others of the addresses.
    """
    patience_s = duration("--retry-for", retry_for).total_seconds()
    with importing():
        from tickwheel.node.backup_files import BackupError, BackupWriter, origin_facts
        from tickwheel.storage.disk import DiskError

    started = time.monotonic()
    advice = f"What has arrived stays in {directory}: the same command goes on with it"
    writer: BackupWriter | None = None
    try:
        with Progress(console=err, disable=Asked.json or not err.is_terminal, transient=True) as progress:
            task = progress.add_task("compare", total=None)
            writer = BackupWriter(directory, lambda done, total: progress.update(task, completed=done, total=total))
            if writer.held_bytes:
                warn(f"{directory}: goes on with {writer.held_bytes:,} bytes of an interrupted backup")
            addresses = [name.strip() for name in Asked.addresses.split(",") if name.strip()]
            asyncio.run(_Copy(addresses, writer, stale, patience_s, progress, task).run())
            writer.finish()
    except (BackupError, DiskError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            text = f"{directory}: {error.strerror}"
        fail(f"{text}. {advice}" if writer is not None and writer.held_bytes else text, "BACKUP", {})
        raise typer.Exit(1) from None
    except TickwheelError as error:
        if writer is None or not writer.held_bytes:
            raise
        raise type(error)(f"{error}. {advice}", error.reason, error.metadata) from error
    except KeyboardInterrupt:
        if writer is not None and writer.held_bytes:
            warn(f"interrupted. {advice}")
        raise
    finally:
        if writer is not None:
            writer.close()
    seconds = time.monotonic() - started
    if Asked.json:
        facts = {"directory": str(directory), "files": writer.files, "bytes": writer.bytes, "seconds": seconds}
        print_json({**facts, "origin": origin_facts(writer.origin)})
    else:
        out.print(f"{writer.files} files, {writer.bytes:,} bytes in {seconds:.1f} s: {directory}", soft_wrap=True)
        say_origin(writer.origin)


class _Copy:
    """One run of the command: tries until a copy is complete."""

    def __init__(
        self,
        addresses: list[str],
        writer: BackupWriter,
        stale: bool,
        patience_s: float,
        progress: Progress,
        task: TaskID,
    ) -> None:
        self._addresses = addresses
        self._writer = writer
        self._stale = stale
        self._patience_s = patience_s
        self._progress = progress
        self._task = task
        self._asked = 0
        """Number of the address that gave the last chunk;"""
        self._heard_s: float | None = None
        """and when it did."""

    async def run(self) -> None:
        """Fill the writer. Raises TickwheelError for a refusal, or when nothing has come for the patience."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        told = ""
        async with open_client(",".join(self._addresses)) as client:
            while True:
                heard_s = self._heard_s
                number = self._next()
                try:
                    await self._try(client, number)
                    return
                except TickwheelError as error:
                    if self._heard_s is None or not _passes(error):
                        raise self._of(number, error) from error
                    deadline = Deadline(self._heard_s + self._patience_s - time.monotonic())
                    if deadline.over:
                        raise self._of(number, error) from error
                    if self._heard_s != heard_s:
                        backoff.reset()
                        told = ""
                    told = self._tell(number, error, told)
                    await backoff.pause(deadline)

    def _next(self) -> int:
        """The address to ask."""
        silent_s = 0.0 if self._heard_s is None else time.monotonic() - self._heard_s
        return (self._asked + int(silent_s // SAME_NODE_S)) % len(self._addresses)

    async def _try(self, client: AsyncClient, number: int) -> None:
        from tickwheel.replication.copied_file import HELD_FILES_MAX

        await _answers(client, self._addresses[number])
        held = self._writer.begin()[:HELD_FILES_MAX]
        copy = client.admin.backup(self._addresses[number], stale=self._stale, held=held)
        async with contextlib.aclosing(copy) as chunks:
            async for chunk in chunks:
                self._writer.write(chunk)
                self._asked, self._heard_s = number, time.monotonic()
                what = "compare" if chunk.comparing else "backup"
                self._progress.update(
                    self._task, description=what, total=chunk.total_bytes, completed=self._writer.bytes
                )
        if not self._writer.complete:
            raise ClusterUnavailable("the node ended the copy before its last file", "UNAVAILABLE")

    def _tell(self, number: int, error: TickwheelError, told: str) -> str:
        """Say what broke, unless that was said. Returns what is said by now."""
        text = str(self._of(number, error))
        if text != told:
            warn(f"the copy broke and will go on: {text}")
        return text

    def _of(self, number: int, error: TickwheelError) -> TickwheelError:
        """The error, with the address that was asked."""
        address = self._addresses[number]
        if address in str(error):
            return error
        return type(error)(f"{address}: {error}", error.reason, error.metadata)


async def _answers(client: AsyncClient, address: str) -> None:
    """Raise ClusterUnavailable if a node says nothing. A copy may begin minutes after it was asked for, once a
    checkpoint is written; a status comes at once."""
    try:
        await client.admin.status(address)
    except TickwheelError as error:
        fault = Fault(error.reason, str(error), error.metadata)
        if fault.reason in SILENCE:
            raise ClusterUnavailable(f"{address}: {client.cluster.why(fault)}", "UNAVAILABLE") from error


def _passes(error: TickwheelError) -> bool:
    return error.reason in PASSES or Fault(error.reason, "").elsewhere


def say_origin(origin: BackupOrigin | None) -> None:
    """Print cluster, node, index, time and age of a backup, and why it may be old."""
    if origin is None:
        out.print("the origin of this backup is unknown: an earlier version made it")
        return
    age = timedelta(seconds=max(0, round(time.time() - origin.made.timestamp())))
    lag = f", {origin.lag_entries:,} entries behind" if origin.lag_entries else ""
    out.print(
        f"cluster {origin.cluster_id}, node {origin.node_id}, up to entry {origin.applied_index:,}{lag}; "
        f"made {time_text(origin.made)}, {age} ago",
        soft_wrap=True,
    )
    if origin.stale_reason:
        err.print(Text.assemble(("This backup may be old:", "bold red"), f" {origin.stale_reason}"), soft_wrap=True)
