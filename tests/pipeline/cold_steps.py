"""A freeze without Spark that is killed at each of its file operations in turn, and each time done again.

Prints a line for each kill: the files that the repeat left beside those of an undisturbed freeze, and those it lacks.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pandas  # noqa: F401  # pyarrow would import it after the fork
import pyarrow as pa

from tickwheel.pipeline.cold_freeze import PartWriter
from tickwheel.pipeline.cold_store import DAY_MS, ColdFile, ColdJobManifest, ColdStore, write_ids

ROWS = 10
ROWS_A_DAY = 8
FIRST_MS = 20_000 * DAY_MS
OPERATIONS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir"}
PART = ("path", "day", "rows", "due_min_ms", "due_max_ms", "bytes", "sha256", "topics")


def freeze(folder: Path, attempt: str) -> None:
    """What the driver and a task do on disk, up to the ids of all messages."""
    store = ColdStore(folder)
    store.belong_to("cluster")
    manifest = store.manifest("job")
    if manifest is None:
        boundary_ms = store.plan("job", FIRST_MS)
        columns = {
            "due_ms": pa.array([FIRST_MS + row * DAY_MS // ROWS_A_DAY for row in range(ROWS)], pa.int64()),
            "payload": pa.array([b"%d" % row for row in range(ROWS)], pa.binary()),
        }
        writer = PartWriter(folder, "job", attempt, "topic", ROWS_A_DAY)
        rows = [*writer.take(pa.RecordBatch.from_pydict(columns)), *writer.rest()]
        parts = [ColdFile(**{name: row[name] for name in PART}) for row in rows]
        manifest = ColdJobManifest("job", boundary_ms, ROWS, 0, 0, [], [], parts)
    manifest = store.finish(manifest)
    first = store.first_part("job")
    if first is None:
        store.registered("job", first := 1)
    write_ids(store, manifest, first, lambda part: f"0-{part}-")


def in_a_process(folder: Path, attempt: str, dies_at: int) -> int:
    """Freeze in a process that SIGKILLs itself at a file operation; 0: at none. Returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    done = 0

    def count(event: str, args: object) -> None:
        nonlocal done
        if event in OPERATIONS:
            done += 1
            if done == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    freeze(folder, attempt)
    os._exit(0)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def main(root: Path) -> None:
    assert in_a_process(root / "whole", "first", 0) == 0
    whole = files(root / "whole")
    step = 1
    status: int = signal.SIGKILL
    while status:
        folder = root / str(step)
        status = in_a_process(folder, "first", step)
        assert status in (0, signal.SIGKILL), f"killed at {step}: {status}"
        assert in_a_process(folder, "second", 0) == 0, f"killed at {step}: the repeat fails"
        print(step, sorted(files(folder) - whole), sorted(whole - files(folder)), flush=True)
        step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
