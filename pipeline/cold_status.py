"""The state of a cold tier: compares the cluster's record with the files in the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path

from tickwheel.client import AsyncClient, ColdState, ColdStatus, NodeStatus
from tickwheel.client.cold import ColdPart
from tickwheel.pipeline.cold_store import ColdError, ColdFile, ColdJobManifest, ColdStore

DAYS_SHOWN = 40
_NEXT = "freeze it again, or give it up: tickwheel pipeline cold give-up"


@dataclass(slots=True)
class Examined:
    """What `examine` found."""

    status: ColdStatus
    now: datetime | None
    """The cluster's time; None: it has none yet."""
    days: dict[date, tuple[int, int]] = field(default_factory=dict)
    """(waiting parts, waiting messages) by UTC day."""
    problems: list[str] = field(default_factory=list)
    """Needed files that are missing or changed, and jobs that are not registered."""
    done_files: int = 0
    """Number of files that are no longer needed."""

    @property
    def bad(self) -> bool:
        """Whether anything is late or cannot be loaded."""
        return bool(self.problems) or self.status.state is ColdState.LATE


async def examine(client: AsyncClient, folder: str | Path) -> Examined:
    """Ask the cluster and look at the folder. Raises ColdError, TickwheelError kinds."""
    store = ColdStore(folder)
    problems: list[str] = []
    inventory = await _Inventory.take(client, store, problems)
    found = Examined(inventory.status.cold, inventory.status.clock, problems=problems)
    parts, numbered = inventory.parts, inventory.numbered
    counts: Counter[date] = Counter()
    rows: Counter[date] = Counter()
    for part in parts:
        if not part.loaded:
            counts[part.day] += 1
            rows[part.day] += part.rows
    found.days = {day: (counts[day], rows[day]) for day in sorted(counts)}
    for part in parts:
        if part.loaded and not part.moved:
            continue
        file = numbered.get(part.number)
        problem = f"job {part.job_id} is not known in {store.folder}" if file is None else store.problem_of(file)
        if problem:
            found.problems.append(f"part {part.number}: {problem}")
    for job_id in store.jobs():
        with suppress(ColdError):  # that is among the problems
            manifest = store.manifest(job_id)
            if store.is_given_up(job_id):
                continue
            if manifest is None:
                found.problems.append(f"job {job_id}: it was not completely written; {_NEXT}")
            elif manifest.parts and store.first_part(job_id) is None:
                found.problems.append(f"job {job_id}: it is written but not registered; {_NEXT}")
    found.done_files = sum((store.folder / path).exists() for path in inventory.done())
    return found


@dataclass(frozen=True, slots=True)
class _Inventory:
    """The records of the folder, then those of the cluster. In this order a part that is registered meanwhile cannot
    seem to be finished."""

    numbered: dict[int, ColdFile]
    parts: list[ColdPart]
    last_part: int
    status: NodeStatus

    @staticmethod
    async def take(client: AsyncClient, store: ColdStore, problems: list[str] | None = None) -> _Inventory:
        """`problems`: as of `ColdStore.numbered`."""
        store.belong_to((await client.admin.master_status()).cluster_id)
        numbered = store.numbered(problems)
        parts, last_part = await client.cold.parts()
        return _Inventory(numbered, parts, last_part, await client.admin.master_status())

    def done(self) -> list[str]:
        """Files of loaded parts without a moved message that still waits."""
        known = {part.number: part for part in self.parts}
        done, needed = [], set()  # parts with the same rows are one file
        for number, file in self.numbered.items():
            part = known.get(number)
            if part is None:
                # The cluster has forgotten it, so its hours are gone. But messages moved from it may still wait:
                # nobody knows of which part they are, so there must be none at all.
                over = number <= self.last_part and not self.status.cold.moved
            else:
                over = part.loaded and not part.moved and part.sha256.hex() == file.sha256
            if over:
                done.append(file.path)
            else:
                needed.add(file.path)
        return [path for path in done if path not in needed]


async def give_up(client: AsyncClient, folder: str | Path, job_id: str) -> int:
    """Give up a job that is not registered: its rows never become messages. `remove_loaded` deletes its files, near and
    rejected rows too, a day later. Returns the number of its rows; 0: it was not completely written.

    Raises ColdError: there is no such job, or it is registered. TickwheelError kinds.
    """
    store = ColdStore(folder)
    manifest = store.manifest(job_id)
    if job_id not in store.jobs():
        raise ColdError(f"job {job_id}: {store.folder} knows no such job")
    if manifest is not None and not manifest.parts:
        raise ColdError(f"job {job_id}: it is done; all its rows were near or rejected")
    inventory = await _Inventory.take(client, store)
    if store.first_part(job_id) is not None or _registered(inventory.parts, job_id, manifest):
        raise ColdError(f"job {job_id}: it is registered, and its rows are messages: cancel those that are not wanted")
    store.give_up(job_id)
    return 0 if manifest is None else manifest.rows


def _registered(parts: Sequence[ColdPart], job_id: str, manifest: ColdJobManifest | None) -> bool:
    """Whether the cluster has the parts of a job, although the folder may not know it."""
    written = set() if manifest is None else {part.sha256 for part in manifest.parts}
    return any(part.job_id == job_id and part.sha256.hex() in written for part in parts)


async def remove_loaded(client: AsyncClient, folder: str | Path) -> tuple[int, int]:
    """Delete files that are no longer needed: of loaded parts, of jobs given up over a day ago, and unfinished ones of
    killed jobs. Returns (files, bytes)."""
    store = ColdStore(folder)
    count = size = 0
    inventory = await _Inventory.take(client, store)
    for file in (*(store.folder / path for path in inventory.done()), *store.left()):
        if file.exists():
            count, size = count + 1, size + file.stat().st_size
            store.remove(file)
    for job_id in store.jobs():
        if not store.is_given_up(job_id) or store.first_part(job_id) is not None:
            continue
        # Its registration may have been under way when it was given up: then it is one that has to be frozen again.
        if not _registered(inventory.parts, job_id, store.manifest(job_id)):
            for file in store.remove_given_up(job_id):
                count, size = count + 1, size + file.stat().st_size
    return count, size


def text_of(found: Examined) -> str:
    """The state as text for an operator."""
    status = found.status
    state = status.state.replace("_", " ")
    lines = [
        f"{state}: {status.messages:,} messages in {status.parts:,} parts of {status.days:,} days; "
        f"{status.cancelled:,} cancelled, {status.moved:,} moved, {status.loaded_late:,} loaded late so far"
    ]
    if status.next_due is not None:
        when = ""
        if found.now is not None:
            ahead = (status.next_due - found.now) / timedelta(days=1)
            when = f", in {ahead:.1f} days" if ahead >= 0 else f", {-ahead * 24:.1f} hours ago"
        lines.append(f"next message not loaded yet: {status.next_due:%Y-%m-%d %H:%M:%SZ}{when}")
    for day, (parts, rows) in list(found.days.items())[:DAYS_SHOWN]:
        noun = "part " if parts == 1 else "parts"
        lines.append(f"  {day:%Y-%m-%d}  {parts:>6,} {noun}  {rows:>14,} messages")
    if len(found.days) > DAYS_SHOWN:
        lines.append(f"  and {len(found.days) - DAYS_SHOWN:,} more days")
    if found.done_files:
        lines.append(f"{found.done_files:,} files are no longer needed: tickwheel pipeline cold clean")
    return "\n".join([*lines, *(f"PROBLEM {text}" for text in found.problems)])
