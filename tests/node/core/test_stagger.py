"""Merges and checkpoints of the members take turns: never are the disks of a majority busy with them together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.node.core.trio import Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.stagger import SHARE_MS, WAIT_MS_MAX, Stagger
from tickwheel.node.core.world import ClusterMs, Now, SteadyMs


def now_at(cluster_ms: int, steady_ms: int) -> Now:
    return Now(ClusterMs(cluster_ms), SteadyMs(steady_ms), acting=False, dispatching=True)


@pytest.mark.parametrize("count", range(1, 10))
def test_the_others_are_a_majority(count: int) -> None:
    voters = [f"n{number}" for number in range(count)]
    staggers = [Stagger(voter, lambda: voters[::-1]) for voter in voters]
    turns = dict.fromkeys(voters, 0)
    for now_ms in range(0, 20 * SHARE_MS, 50):
        waits = [stagger.wait_ms(ClusterMs(now_ms)) for stagger in staggers]
        if count > 2:
            assert count - waits.count(0) > count // 2
        for voter, stagger, wait in zip(voters, staggers, waits, strict=True):
            turns[voter] += wait == 0
            assert stagger.wait_ms(ClusterMs(now_ms + wait)) == 0
    assert min(turns.values()) > 0 and min(waits) == 0


def test_a_learner_waits_for_nothing() -> None:
    stagger = Stagger("new", lambda: ["n1", "n2", "n3"])
    assert not any(stagger.holds(now_at(now_ms, now_ms), waits=True) for now_ms in range(0, 10 * SHARE_MS, 50))


def test_a_time_that_stands_still_holds_nothing_up_for_long() -> None:
    stagger = Stagger("n2", lambda: ["n1", "n2", "n3"])
    assert stagger.wait_ms(ClusterMs(0)) == SHARE_MS
    held = [stagger.holds(now_at(0, steady_ms), waits=True) for steady_ms in range(1, 3 * WAIT_MS_MAX)]
    assert not all(held[: WAIT_MS_MAX + 1])
    assert held[0] and held[WAIT_MS_MAX + 1], "the next work waits again"


def test_work_that_is_wanted_no_more_leaves_nothing_behind() -> None:
    """A checkpoint that somebody asks for begins out of turn. The next one waits its whole time again."""
    stagger = Stagger("n2", lambda: ["n1", "n2", "n3"])
    assert stagger.holds(now_at(0, 1), waits=True)
    assert not stagger.holds(now_at(0, 2), waits=False)
    assert stagger.holds(now_at(0, 10 * WAIT_MS_MAX), waits=True)


def test_no_two_of_three_members_begin_together() -> None:
    """Each would at the same entry of the log, since all count the same entries and bytes."""
    config = replace(CoreConfig(), segment_bytes=1 << 20, checkpoint_entries=20, buffer_bytes_max=1 << 18)
    world = World(config=config)
    client = Client(world)
    world.elect()
    checkpoints: dict[str, list[int]] = {name: [] for name in world.nodes}
    merges: dict[str, list[int]] = {name: [] for name in world.nodes}
    for name, node in world.nodes.items():
        assert node.host is not None
        core = node.host.core
        begun, merge = core.state.capture_checkpoint, core.wheel.files.merge

        def note_checkpoint(name: str = name, begun: object = begun) -> object:
            checkpoints[name].append(world.now_ms // SHARE_MS)
            return begun()  # type: ignore[operator]

        def note_merge(name: str = name, merge: object = merge) -> object:
            job = merge()  # type: ignore[operator]
            if job is not None:
                merges[name].append(world.now_ms // SHARE_MS)
            return job

        core.state.capture_checkpoint = note_checkpoint  # type: ignore[method-assign,assignment]
        core.wheel.files.merge = note_merge  # type: ignore[method-assign,assignment]
    for _ in range(400):
        client.schedule([600_000] * 100)
        world.run(20)
    for begins in (checkpoints, merges):
        assert min(map(len, begins.values())) > 3
        shares = [share for some in begins.values() for share in set(some)]
        assert len(shares) == len(set(shares)), begins


def test_a_member_at_rest_is_called_again_at_its_turn() -> None:
    """Without input it may tick once a second, and would begin out of turn when it waits no longer."""
    world = World()
    host = world.elect().host
    world.run(1_000)
    assert host is not None
    checkpointer, own = host.core.checkpointer, Stagger(host.core.identity.node_id, host.core.parts.voters)
    late_ms = world.now_ms + 2 * CoreConfig().checkpoint_period_ms
    cluster_ms = next(ms for ms in range(late_ms, late_ms + 10 * SHARE_MS) if own.wait_ms(ClusterMs(ms)))
    held, wait_ms = now_at(cluster_ms, late_ms), own.wait_ms(ClusterMs(cluster_ms))
    assert checkpointer.wait_ms(held) is None
    checkpointer.tick(held)
    assert not checkpointer.running and checkpointer.wait_ms(held) == wait_ms
    checkpointer.tick(now_at(cluster_ms + wait_ms, late_ms + wait_ms))
    assert checkpointer.running
