"""A disk that is full, fails or returns other bytes: nothing acknowledged is lost, nothing wrong handed on."""

from __future__ import annotations

import re
from random import Random

import pytest

from tests.node.state.solo import Damage, Solo
from tickwheel.node.state import sequence
from tickwheel.storage.blocks import BLOCK_BYTES
from tickwheel.storage.disk import DiskFullError, FsyncFailedError
from tickwheel.wheel.units import HOUR_MS


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(sequence, "KEEP_BYTES", 4_096)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 2_048)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 16)


def live(solo: Solo, rng: Random) -> None:
    """Messages over three hours, some dispatched, settled, buried."""
    start_ms = solo.now_ms
    payload = b"%d" % rng.getrandbits(64) * 8
    solo.publish(sorted(start_ms + rng.randrange(3 * HOUR_MS) for _ in range(200)), payload)
    solo.dispatch(start_ms + HOUR_MS // 4)
    solo.bury(3)
    solo.settle(limit=20)


@pytest.mark.parametrize("seed", range(12))
def test_a_merge_on_a_full_disk_is_done_again(seed: int) -> None:
    """Wherever the space ends: the attempt is given up, all can be read, and the next one continues cleanly."""
    rng = Random(seed)
    solo = Solo(seed)
    solo.create("g")
    refused = 0
    for _ in range(12):
        live(solo, rng)
        solo.disk.fill(rng.randrange(60_000))
        for job in solo.wheel.jobs(solo.now_ms):
            try:
                job.run()
            except DiskFullError:
                refused += 1
                solo.wheel.abandon(job)
            else:
                solo.wheel.finish(job)
        solo.disk.make_room()
        solo.check()
        if rng.random() < 0.3:
            solo.checkpoint()
        if rng.random() < 0.3:
            solo.crash()
    assert refused
    solo.pump()
    solo.crash()


@pytest.mark.parametrize("seed", range(12))
def test_a_checkpoint_on_a_full_disk_leaves_the_one_before(seed: int) -> None:
    """Wherever the space ends, in ready files, windows, run file or manifest: the log is not cut, nothing is lost."""
    rng = Random(seed)
    solo = Solo(seed)
    solo.create("g")
    refused = 0
    for _ in range(10):
        live(solo, rng)
        cut = solo.cut
        solo.disk.fill(rng.randrange(70_000))
        try:
            solo.checkpoint()
        except DiskFullError:
            refused += 1
            assert solo.cut == cut
        if rng.random() < 0.4:
            solo.crash()
        solo.disk.make_room()
        solo.pump()
        solo.check()
    assert refused
    solo.checkpoint()
    solo.crash()


@pytest.mark.parametrize(
    "site",
    [
        r"wheel/hours/.*",
        r"wheel/runs/.*",
        r"state/ready/.*",
        r"state/dead/.*",
        r"state/windows/.*",
        r"manifest\.new",
        "",
    ],
)
def test_a_failed_sync_ends_the_checkpoint_and_the_next_start_loses_nothing(site: str) -> None:
    """The error says that the process must stop; what the sync covered may be gone for good, and is not needed."""
    for seed in range(6):
        rng = Random(seed)
        solo = Solo(seed)
        solo.create("g")
        live(solo, rng)
        solo.pump()
        solo.checkpoint()
        live(solo, rng)
        solo.pump()
        solo.disk.fail_fsync(1, lambda path: re.fullmatch(site, path) is not None)
        with pytest.raises(FsyncFailedError):
            solo.checkpoint()
        solo.disk.kill()
        solo.restart()
        solo.check()
        solo.checkpoint()
        solo.crash()


def paths_of(solo: Solo, path: str = "") -> list[str]:
    """All files."""
    found = []
    for name in solo.disk.list(path):
        inner = f"{path}/{name}" if path else name
        node = solo.disk._find(tuple(inner.split("/")))
        found += paths_of(solo, inner) if hasattr(node, "entries") else [inner]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_other_bytes_are_noticed_and_never_handed_on(seed: int) -> None:
    """One byte of any file flips: start or read says which file is damaged, or nobody reads that byte."""
    rng = Random(seed)
    damaged: set[str] = set()
    solo = Solo(seed)
    solo.create("g")
    for _ in range(3):
        live(solo, rng)
        solo.pump()
    solo.checkpoint()
    live(solo, rng)
    digest = solo.state.digest().digest
    for path in paths_of(solo):
        for _ in range(6):
            offset = rng.randrange(solo.disk.size(path))
            mask = 1 << rng.randrange(8)
            solo.disk.flip(path, offset, mask)
            try:
                solo.restart()
                assert solo.state.digest().digest == digest
                solo.check()
            except Damage as damage:
                damaged.add(re.sub(r"\d+", "N", path))
                assert path.rpartition("/")[2].removesuffix(".new") in str(damage) or "manifest" in str(damage)
            solo.disk.flip(path, offset, mask)
            solo.disk.kill()
    solo.restart()
    solo.check()
    assert {"wheel/hours/N/N.log", "wheel/hours/N/N.index", "wheel/hours/N/N.heads", "wheel/runs/N.run"} <= damaged
    assert {"state/windows/N", "manifest"} <= damaged


def test_damage_met_by_a_merge_stops_it() -> None:
    """The file to append to is shorter than it was: no later chunk is written behind the gap."""
    solo = Solo()
    solo.create("g")
    live(solo, Random(1))
    solo.pump()
    hour = solo.disk.list("wheel/hours")[0]
    file = solo.disk.open(f"wheel/hours/{hour}/0.index")
    file.truncate(file.size() - 96)
    live(solo, Random(2))
    merge = next(job for job in solo.wheel.jobs(0) if job.kind == "merge")
    with pytest.raises(Exception, match=r"0\.index.*ends before"):
        merge.run()
