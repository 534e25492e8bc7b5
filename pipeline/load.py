"""Loads a build into a running cluster: sends its bundles to every node, and has them taken over one by one.

Bundles are sent to every reachable node, a few ahead of the one being taken over. A bundle is taken over only once a
majority has it. A node that is down is tried again now and then; later it fetches missing bundles from the others.
A repeated load continues where the cluster stands: no bundle is taken over twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.client import AsyncClient
from tickwheel.client.bulk import LoadProgress
from tickwheel.client.errors import (
    TRANSPORT,
    ClusterUnavailable,
    LimitReached,
    OutcomeUnknown,
    RequestRefused,
    TickwheelError,
)
from tickwheel.client.moments import MILLISECOND
from tickwheel.pipeline.manifest import BuiltBundle, Manifest, ManifestError, check_content, read_manifest
from tickwheel.pipeline.places import PlaceError, local_folder

AHEAD_MAX = 6
"""Bundles that a node may hold before they are taken over."""
SENDERS = 2
"""Bundles under way to one node at a time: the node makes one durable while the next one arrives."""
CONTENTS_MAX = 4
"""Bundles in memory; 27 MB each with messages of 100 bytes."""
AGAIN_S = 1.0
"""Pause before an unreachable node is tried again."""
GIVE_UP_S = 120.0
"""If a bundle cannot be taken over for this long, the load ends; it may be repeated."""


class LoadError(Exception):
    """The load has stopped before its end; a repeat continues from there. The text says why."""


@dataclass(slots=True)
class Progress:
    """The progress of a load."""

    bundles: int
    units: int
    taken: int = 0
    taken_units: int = 0
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes sent in this run, by a node's address."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """The nodes that cannot be reached now: address to reason."""
    seconds: float = 0.0


def _passes(error: TickwheelError) -> bool:
    """Whether a node may take the same bundle later: it is down, hangs, starts anew, or has no room."""
    if isinstance(error, (ClusterUnavailable, OutcomeUnknown, LimitReached)):
        return True
    return error.reason in TRANSPORT or "retry_after_ms" in error.metadata


class _Contents:
    """The contents of the bundles being sent, each read and checked once for all nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: OrderedDict[str, asyncio.Task[_Content]] = OrderedDict()

    async def get(self, built: BuiltBundle) -> _Content:
        """The content of a bundle. Raises ManifestError if it is not the one that was built."""
        task = self._held.get(built.name)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._read, built))
            self._held[built.name] = task
        self._held.move_to_end(built.name)
        while len(self._held) > CONTENTS_MAX:
            self._held.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except OSError as error:
            self._held.pop(built.name, None)
            raise ManifestError(f"{built.path(self._folder)}: it cannot be read: {error}") from error

    def _read(self, built: BuiltBundle) -> _Content:
        check_content(self._folder, built)
        return _Content(built.path(self._folder).read_bytes())


class _Content:
    """A bundle's bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_at(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


class Loader:
    """One load; `run` carries it out once."""

    def __init__(self, client: AsyncClient, folder: Path, manifest: Manifest, job_id: str = "") -> None:
        self._client = client
        self._folder = folder
        self._manifest = manifest
        self.job_id = job_id or f"load-{manifest.sha256[:24]}"
        self.progress = Progress(len(manifest.bundles), manifest.units)
        self._contents = _Contents(folder)
        self._next: dict[str, int] = {}
        """The next bundle to send, by node."""
        self._sent: dict[str, set[int]] = {}
        self._held: dict[str, int] = {}
        """How many bundles each node has received without a gap, counted from the first."""
        self._moved = asyncio.Event()

    async def run(self, told: Callable[[Progress], None] = lambda _: None) -> Progress:
        """Load all bundles. `told` is called a few times a second. Raises LoadError, ManifestError, TickwheelError."""
        started = time.monotonic()
        manifest, progress = self._manifest, self.progress
        addresses = await self._addresses()
        state = await self._known()
        if state.load_sha256 and state.load_sha256 != manifest.sha256:
            raise LoadError(f"job {self.job_id} has loaded something else; choose another job id")
        progress.taken, progress.taken_units = state.taken, state.units
        for topic in manifest.topics:
            await self._client.admin.create_topic(topic)
        senders = [asyncio.create_task(self._send_all(address)) for address in addresses for _ in range(SENDERS)]

        async def tell() -> None:
            while True:
                progress.seconds = time.monotonic() - started
                told(progress)
                await asyncio.sleep(0.25)

        teller = asyncio.create_task(tell())
        try:
            while progress.taken < len(manifest.bundles):  # another load of the job may have had some taken over, too
                await self._take_over(progress.taken, addresses, senders)
        finally:
            for task in (teller, *senders):
                task.cancel()
            await asyncio.gather(teller, *senders, return_exceptions=True)
        progress.seconds = time.monotonic() - started
        told(progress)
        return progress

    async def _known(self) -> LoadProgress:
        """The cluster's state of this load."""
        return await self._client.bulk.load(self.job_id)

    async def _take(self, place: int) -> LoadProgress:
        """Ask the master to take one bundle over."""
        built, manifest = self._manifest.bundles[place], self._manifest
        return await self._client.bulk.take_over(
            self.job_id, manifest.sha256, place + 1, len(manifest.bundles), built.name, built.topics
        )

    async def _addresses(self) -> list[str]:
        """Client addresses of all members. Raises ClusterUnavailable, LoadError."""
        status = await self._client.admin.master_status()
        slot_ms = status.slot // MILLISECOND
        if slot_ms != self._manifest.slot_ms:
            text = f"the cluster has ticks of {slot_ms} ms, the build of {self._manifest.slot_ms} ms"
            raise LoadError(f"{text}; build again with slot_ms={slot_ms}")
        by_id = {peer.node_id: peer.client_address for peer in status.peers if not peer.learner}
        by_id.pop(status.node_id, None)
        return [status.master_address, *sorted(by_id.values())]

    async def _send_all(self, address: str) -> None:
        """Send all bundles not yet taken over to one node, in order. SENDERS such tasks share a node's bundles."""
        progress, bundles = self.progress, self._manifest.bundles
        # The node gets bundles that were taken over in its absence from the other nodes.
        while (place := max(self._next.get(address, 0), progress.taken)) < len(bundles):
            if place >= progress.taken + AHEAD_MAX:
                await self._wait_for_move()
                continue
            self._next[address] = place + 1
            while place >= progress.taken:
                try:
                    await self._send(address, bundles[place])
                except TickwheelError as error:
                    if not _passes(error):
                        raise
                    progress.unreachable[address] = str(error)
                    self._move()
                    await asyncio.sleep(AGAIN_S)
                else:
                    progress.unreachable.pop(address, None)
                    self._note_sent(address, place)
                    break

    def _note_sent(self, address: str, place: int) -> None:
        sent = self._sent.setdefault(address, set())
        sent.add(place)
        held = self._held.get(address, 0)
        while held in sent or held < self.progress.taken:
            sent.discard(held)
            held += 1
        self._held[address] = held
        self._move()

    async def _send(self, address: str, built: BuiltBundle) -> None:
        content = await self._contents.get(built)
        sent = await self._client.bulk.send(address, built.name, built.bytes, content)
        self.progress.sent_bytes[address] = self.progress.sent_bytes.get(address, 0) + sent

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _wait_for_move(self) -> None:
        moved = self._moved
        try:
            async with asyncio.timeout(AGAIN_S):
                await moved.wait()
        except TimeoutError:
            return

    async def _take_over(self, place: int, addresses: list[str], senders: list[asyncio.Task[None]]) -> None:
        """Have one bundle taken over, once a majority and all reachable nodes have it."""
        built, progress = self._manifest.bundles[place], self.progress
        give_up = time.monotonic() + GIVE_UP_S
        problem = "it has not reached a majority of the nodes"
        while True:
            for task in senders:
                if task.done() and task.exception() is not None:
                    raise task.exception() or AssertionError
            with_it = [address for address in addresses if self._held.get(address, 0) > place]
            reachable = [address for address in addresses if address not in progress.unreachable]
            if 2 * len(with_it) > len(addresses) and set(reachable) <= set(with_it):
                try:
                    state = await self._take(place)
                except (LimitReached, ClusterUnavailable, OutcomeUnknown) as error:
                    problem = str(error)
                except RequestRefused as error:
                    if error.reason != "WRONG_STATE":
                        raise
                    problem = str(error)
                    await self._send_again(built, addresses)
                else:
                    progress.taken, progress.taken_units = state.taken, state.units
                    self._move()
                    return
            if time.monotonic() > give_up:
                away = "; ".join(f"{address}: {text}" for address, text in progress.unreachable.items())
                raise LoadError(f"bundle {place + 1} of {progress.bundles}: {problem}. {away}".rstrip())
            await self._wait_for_move()

    async def _send_again(self, built: BuiltBundle, addresses: list[str]) -> None:
        """Send a bundle again to nodes that lost it: it was removed as unclaimed, or the disk was replaced."""
        for address in addresses:
            try:
                await self._send(address, built)
            except TickwheelError as error:
                self.progress.unreachable[address] = str(error)


async def load(
    folder: str | Path, client: AsyncClient, *, job_id: str = "", told: Callable[[Progress], None] = lambda _: None
) -> Progress:
    """Load a build. `job_id` names the load; by default it is a hash of the build, so no build is loaded twice."""
    try:
        path = local_folder(folder, "OUT")
    except PlaceError as error:
        raise LoadError(str(error)) from None
    return await Loader(client, path, read_manifest(path), job_id).run(told)
