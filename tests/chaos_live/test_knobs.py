"""The knobs of a node under chaos: wrong clocks whose monotonic one never runs back, and a disk that is full, slow or
fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.knobs import Knobs, read_effects, write_knobs
from tickwheel.chaos.live.node_start import Panel, SpoiltClock, SpoiltSystem
from tickwheel.storage import local
from tickwheel.storage.disk import FsyncFailedError
from tickwheel.storage.local import LocalDisk

SOON_S = 20.0


def _until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end_s


def _true_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _is_true(clock: SpoiltClock) -> bool:
    """Whether the monotonic clock is the machine's."""
    before_ns = _true_ns()
    return before_ns <= clock.monotonic_ns() <= _true_ns()


def test_a_clock_that_nobody_turned_is_right(tmp_path: Path) -> None:
    """Without a fault a node under chaos has the machine's own clocks."""
    clock = SpoiltClock(Panel(tmp_path / "knobs.json"))
    before_ms = time.time_ns() // 1_000_000
    assert before_ms <= clock.wall_ms() <= time.time_ns() // 1_000_000
    assert _is_true(clock)


def test_a_step_moves_the_wall_clock_alone(tmp_path: Path) -> None:
    """A step of the wall clock leaves the monotonic one as it is, and the node's answer counts wrong readings."""
    file = tmp_path / "knobs.json"
    clock = SpoiltClock(Panel(file))
    write_knobs(file, Knobs(1, offset_ms=-600_000))
    _until(lambda: clock.wall_ms() < time.time() * 1_000 - 599_000)
    assert _is_true(clock)
    _until(lambda: clock.wall_ms() > 0 and read_effects(file).turn == 1 and read_effects(file).readings > 0)


def test_drift_bends_both_clocks_and_never_turns_one_back(tmp_path: Path) -> None:
    """A fast oscillator, then a slow one: the monotonic clock goes on from where it is."""
    file = tmp_path / "knobs.json"
    clock = SpoiltClock(Panel(file))
    readings = [clock.monotonic_ns()]
    for turn, rate_ppm in enumerate((500_000, -500_000), 1):
        write_knobs(file, Knobs(turn, rate_ppm=rate_ppm))
        while read_effects(file).turn != turn:
            readings.append(clock.monotonic_ns())
        # Each reading lies between two of the machine's, however long this process waits for a processor.
        first_ns, began_ns, second_ns = _true_ns(), clock.monotonic_ns(), _true_ns()
        while _true_ns() < second_ns + 200_000_000:
            readings.append(clock.monotonic_ns())
        third_ns, ended_ns, last_ns = _true_ns(), clock.monotonic_ns(), _true_ns()
        rate = 1 + rate_ppm / 1e6
        assert (third_ns - second_ns) * rate * 0.99 <= ended_ns - began_ns <= (last_ns - first_ns) * rate * 1.01
    assert readings == sorted(readings)


def test_a_full_disk_refuses_what_needs_room_and_takes_what_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a real one: an overwrite within a file works, growth and reservation fail with ENOSPC, and both are
    counted as evidence."""
    file = tmp_path / "knobs.json"
    panel = Panel(file)
    system = SpoiltSystem(panel)
    descriptor = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    try:
        assert system.pwritev(descriptor, [b"abcd"], 0) == 4
        write_knobs(file, Knobs(1, disk_full=True))
        panel.look(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 1_000_000_000)
        assert system.pwritev(descriptor, [b"wxyz"], 0) == 4
        with pytest.raises(OSError, match="space") as refused:
            system.pwritev(descriptor, [b"more"], 2)
        assert refused.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="space"):
            system.posix_fallocate(descriptor, 0, 1 << 20)
        monkeypatch.setattr(local, "os", system)
        disk = LocalDisk(tmp_path)
        assert disk.space_left() == 0 < disk.space_total()
        write_knobs(file, Knobs(2))
        panel.look(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 2_000_000_000)
        assert system.pwritev(descriptor, [b"more"], 4) == 4
        assert read_effects(file).refusals == 2
    finally:
        os.close(descriptor)


def test_a_failed_sync_is_told_at_once_and_takes_along_what_it_would_have_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who went on after it would acknowledge what is not there: what was synced before stays, what was written since is
    zeros, also after a part of it was cut off, and the answer names the process that has to stop."""
    file = tmp_path / "knobs.json"
    panel = Panel(file)
    monkeypatch.setattr(local, "os", SpoiltSystem(panel))
    log = LocalDisk(tmp_path).open("log", create=True)
    try:
        log.append(b"kept")
        log.fsync()
        log.append(b"lost")
        log.append(b"cut")
        log.truncate(9)
        write_knobs(file, Knobs(1, sync_fails=True))
        panel.look(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 1_000_000_000)
        with pytest.raises(FsyncFailedError, match="'log'"):
            log.fsync()
        assert log.read_at(0, 100) == b"kept" + bytes(5)
        effects = read_effects(file)
        assert (effects.failed_syncs, effects.pid) == (1, os.getpid())
    finally:
        log.close()


def test_a_slow_disk_makes_syncs_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes at least so much longer, and is counted as evidence."""
    file = tmp_path / "knobs.json"
    panel = Panel(file)
    monkeypatch.setattr(local, "os", SpoiltSystem(panel))
    write_knobs(file, Knobs(1, sync_ms=30))
    panel.look(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 1_000_000_000)
    log = LocalDisk(tmp_path).open("log", create=True)
    try:
        began_s = time.monotonic()
        log.append(b"x")
        log.fsync()
        assert time.monotonic() - began_s >= 0.03
        panel.look(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 2_000_000_000)
        assert read_effects(file).slow_syncs == 1
    finally:
        log.close()


async def test_a_knob_counts_as_turned_when_the_process_has_read_it(tmp_path: Path) -> None:
    """A node that is just starting, or does not get a processor, still goes by what was before; one that is gone goes
    by nothing any more."""
    cluster = ChaosCluster(tmp_path, 1, 1)
    [node] = cluster.nodes
    async with cluster:
        await cluster.master()
        assert await cluster.has_read(node, cluster.turn(node, rate_ppm=1), SOON_S)
        cluster.pause(node)
        turn = cluster.turn(node, rate_ppm=2)
        assert not await cluster.has_read(node, turn, 0.1)
        cluster.resume(node)
        assert await cluster.has_read(node, turn, SOON_S)
        await cluster.kill(node)
        turn = cluster.turn(node, rate_ppm=3)
        assert await cluster.has_read(node, turn, 0.0)
        cluster.start_node(node)
        assert not await cluster.has_read(node, turn, 0.0)
        assert await cluster.has_read(node, turn, SOON_S)


def test_a_node_whose_supervisor_has_ended_before_does_not_start(tmp_path: Path) -> None:
    """It took the process that had adopted it for the one to end with, and stayed for ever."""
    files = ["--config", str(tmp_path / "none.toml"), "--knobs", str(tmp_path / "knobs.json")]
    command = [sys.executable, "-m", "tickwheel.chaos.live.node_start", *files, "--parent"]
    codes = [subprocess.run([*command, str(parent)], check=False).returncode for parent in (os.getppid(), os.getpid())]
    assert codes == [1, 2], "the second comes as far as its configuration, which is not there"
