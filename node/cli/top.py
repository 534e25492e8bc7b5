"""`tickwheel top`: a live view of a cluster in the terminal, or one picture of it for a pipe.

Uses only calls that any client may make. Nodes may stop and masters may change meanwhile: each call has its own short
deadline, and a part without an answer stays as it was, marked as old. The longer the answer about the load ahead
takes, the less often it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.live import Live

from tickwheel.client import AsyncClient, TickwheelError
from tickwheel.client.errors import Fault
from tickwheel.client.moments import ms_of
from tickwheel.node.cli.options import ADDRESS_DEFAULT, Addresses
from tickwheel.node.cli.output import open_client, out
from tickwheel.node.cli.status import unanswered
from tickwheel.node.cli.top_view import HOUR_MS, HOURS_AHEAD, Heard, draw

top_app = typer.Typer()

TIMEOUT_S = 1.5
"""Time-out of questions to the master; without an answer the view continues."""
LOAD_PERIOD_S = 2.0
LOAD_SHARE = 10
"""Questions for the load ahead take at most this fraction, one in LOAD_SHARE, of the view's time."""
PIPE_HEIGHT, PIPE_WIDTH = 60, 100


class Watcher:
    """Keeps a `Heard` up to date."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.heard = Heard()
        self._clock: tuple[int, float] | None = None
        """(the master's cluster time, when it was received)."""

    def now_ms(self) -> int:
        """The cluster's time, or this machine's while none is known."""
        if self._clock is None:
            return time.time_ns() // 1_000_000
        clock_ms, heard_s = self._clock
        return clock_ms + round((time.monotonic() - heard_s) * 1_000)

    async def nodes(self) -> None:
        """Ask every node for its status."""
        heard = self.heard
        heard.answers = await self._client.admin.know_all()
        for address, answer in heard.answers.items():
            if not isinstance(answer, Fault):
                heard.last[address] = answer
        master = heard.master
        if master is not None and master.clock is not None:
            self._clock = (ms_of("clock", master.clock), time.monotonic())
        for address in [where for where, answer in heard.answers.items() if isinstance(answer, Fault)]:
            self._client.cluster.forget(address)

    async def groups(self) -> None:
        """Ask the master for its groups, and whether sweeps run."""
        if self.heard.master is None:
            return
        try:
            self.heard.groups = await self._client.admin.groups()
            self.heard.sweeps = sum(not sweep.ended for sweep in await self._client.sweeps.list())
            self.heard.trouble = ""
        except TickwheelError as error:
            self.heard.trouble = f"groups are out of date: {error}"

    async def load(self) -> None:
        """Ask the master for the load ahead."""
        if self.heard.master is None:
            return
        hour_ms = self.now_ms() // HOUR_MS * HOUR_MS
        try:
            hours = await self._client.count_pending(bucket_ms=HOUR_MS, due_ms_max=hour_ms + HOURS_AHEAD * HOUR_MS)
            seconds = await self._client.count_pending(bucket_ms=1_000, due_ms_max=hour_ms + HOUR_MS)
        except TickwheelError as error:
            self.heard.trouble = f"the load ahead is out of date: {error}"
            return
        self.heard.hours = {bucket.start_ms: bucket.count for bucket in hours.buckets}
        later = self.heard.master.pending - hours.total if self.heard.master is not None else 0
        if later > 0:
            self.heard.hours[hour_ms + HOURS_AHEAD * HOUR_MS] = later
        self.heard.seconds = {bucket.start_ms: bucket.count for bucket in seconds.buckets}

    async def all(self) -> None:
        """Update everything once."""
        await self.nodes()
        await asyncio.gather(self.groups(), self.load())

    async def keep_nodes(self, interval_s: float) -> None:
        """Update status and groups in a loop."""
        while True:
            await asyncio.gather(self.nodes(), asyncio.sleep(interval_s))
            await self.groups()

    async def keep_load(self) -> None:
        """Update the load ahead in a loop, with pauses in proportion to its cost."""
        while True:
            began_s = time.monotonic()
            await self.load()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(LOAD_PERIOD_S, took_s * LOAD_SHARE))


@top_app.command()
def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and end. Output into a pipe does the same.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between updates of the nodes.")] = 1.0,
    address: Addresses = ADDRESS_DEFAULT,
) -> None:
    """Watch the wheel turn: load ahead, rates by topic, backlog, lateness, nodes. q or Ctrl-C stops it.

    Exit code 3 if no node answers.
    """

    async def go() -> None:
        async with open_client(address, TIMEOUT_S) as client:
            watcher = Watcher(client)
            await watcher.all()
            if once or not out.is_terminal:
                width = out.width if out.is_terminal else max(out.width, PIPE_WIDTH)
                picture = draw(watcher.heard, watcher.now_ms(), width, PIPE_HEIGHT)
                out.print(picture, width=width, crop=False, soft_wrap=True)
                if not watcher.heard.statuses:
                    raise unanswered(watcher.heard.answers, client.cluster.why)
            else:
                await _live(watcher, interval)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(go())


@contextlib.contextmanager
def _told_to_quit() -> Iterator[asyncio.Event]:
    """Set once somebody types q. Meanwhile keys are read one by one and not shown. Without a terminal nobody types."""
    quitting = asyncio.Event()
    if not sys.stdin.isatty():
        yield quitting
        return
    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(keyboard)

    def typed() -> None:
        keys = os.read(keyboard, 64)
        if not keys or b"q" in keys.lower():
            loop.remove_reader(keyboard)  # at the end of the input it would be called for ever
            quitting.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, typed)
    try:
        yield quitting
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


async def _live(watcher: Watcher, interval_s: float) -> None:
    tasks = [asyncio.ensure_future(watcher.keep_nodes(interval_s)), asyncio.ensure_future(watcher.keep_load())]
    try:
        with _told_to_quit() as quitting, Live(console=out, screen=True, auto_refresh=False) as live:
            while not any(task.done() for task in tasks):
                now_ms = watcher.now_ms()
                live.update(draw(watcher.heard, now_ms, out.width, out.height), refresh=True)
                # The hand moves on the second.
                pause_s = min(interval_s, (1_000 - now_ms % 1_000) / 1_000 + 0.01)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(quitting.wait(), pause_s)
                    return
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
