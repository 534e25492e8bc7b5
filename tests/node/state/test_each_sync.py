"""Every fdatasync and every sync of a directory on the way to a checkpoint is needed: without it a power loss harms.

One site at a time is switched off, as if the line were not there; then nodes live, write checkpoints and lose power.
The test fails if a site can go without harm (the sync is not needed, or nobody would notice), and if harm comes with
all of them in place.
"""

from __future__ import annotations

import re
from random import Random

import pytest

from tests.node.state.solo import Harm, Solo
from tickwheel.node.state import sequence
from tickwheel.storage.blocks import BLOCK_BYTES
from tickwheel.wheel.units import HOUR_MS

FILES = {
    "delay log": r"wheel/hours/\d+/0\.log",
    "delay index": r"wheel/hours/\d+/0\.index",
    "heads": r"wheel/hours/\d+/0\.heads",
    "run file (buffer, marks, hour table)": r"wheel/runs/\d+\.run",
    "ready ids": r"state/ready/1\.ids\.\d+",
    "ready targets": r"state/ready/1\.targets\.\d+",
    "ready ticks": r"state/ready/1\.ticks\.\d+",
    "dead letters": r"state/dead/1\.rows\.\d+",
    "payloads of dead letters": r"state/dead/1\.bytes\.\d+",
    "windows": r"state/windows/\d+\.new",
    "manifest": r"manifest\.new",
}
DIRECTORIES = {
    "an hour": r"wheel/hours/\d+",
    "runs": r"wheel/runs",
    "ready": r"state/ready",
    "dead": r"state/dead",
    "windows": r"state/windows",
    "root (manifest)": r"",
}
LIVES = 40


def live(solo: Solo, rng: Random) -> None:
    """Some of everything that a checkpoint covers."""
    start_ms = solo.now_ms
    for _ in range(rng.randrange(1, 4)):
        count = rng.choice((30, 150))
        payload = b"%d" % rng.getrandbits(64) * rng.choice((1, 12))
        solo.publish(sorted(start_ms + rng.randrange(2 * HOUR_MS) for _ in range(count)), payload)
        solo.pump()
    solo.dispatch(start_ms + rng.randrange(HOUR_MS))
    solo.bury(5)
    solo.retry(20, rng.choice((1_000, HOUR_MS // 2)))
    solo.settle(limit=rng.randrange(1, 100))


def harmed(without_file: str | None, without_directory: str | None, lives: int = LIVES) -> int:
    """In how many lives harm came."""
    found = 0
    for seed in range(lives):
        rng = Random(seed)
        solo = Solo(seed)
        if without_file is not None:
            solo.disk.ignore_fsync(lambda path: re.fullmatch(without_file, path) is not None)
        if without_directory is not None:
            solo.disk.ignore_fsync_dir(lambda path: re.fullmatch(without_directory, path) is not None)
        solo.create("g")
        try:
            for _ in range(3):
                live(solo, rng)
                solo.checkpoint()
                if rng.random() < 0.5:
                    live(solo, rng)
                solo.crash()
        except Harm:
            found += 1
            if without_file is not None or without_directory is not None:
                return found
    return found


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(sequence, "KEEP_BYTES", 4_096)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 16)


def test_with_every_sync_no_power_loss_harms() -> None:
    """Forty lives with three power losses each."""
    assert harmed(None, None) == 0


@pytest.mark.parametrize("site", FILES)
def test_without_a_file_sync_power_loss_harms(site: str) -> None:
    """What was said to be durable is not all there, or other bytes are."""
    assert harmed(FILES[site], None)


@pytest.mark.parametrize("site", DIRECTORIES)
def test_without_a_directory_sync_power_loss_harms(site: str) -> None:
    """A file that was synced cannot be found."""
    assert harmed(None, DIRECTORIES[site])
