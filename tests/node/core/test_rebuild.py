"""A cluster of one that took bundles over makes its state anew from its journal, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.node.core.loading import Loader, begin, bundle_of, name_of
from tests.node.core.trio import Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.message_ids import message_id_of
from tickwheel.node.core.promise import Reply
from tickwheel.node.rebuild import RebuildError, rebuild
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.proto import scheduler_pb2
from tickwheel.storage.bundle import bundle_path
from tickwheel.storage.disk import DiskError
from tickwheel.wheel.units import HOUR_MS

CONFIG = replace(
    CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=1 << 14, preload_ms=1_000, checkpoint_period_ms=500
)
CANCELLED, MOVED = (3, 4), 8


class Alone:
    """A node with messages of its clients and of three bundles: for this hour, for the next, for one that was over.
    Some are cancelled, one is moved, some delivered; a checkpoint holds all that. Then it lost its power."""

    def __init__(self) -> None:
        self.world = World(11, "a", CONFIG)
        begin(self.world)
        self.node = self.world.elect()
        self.client = Client(self.world)
        self.client.schedule([3_000 + 40 * number for number in range(100)])
        now_ms = self.world.now_ms
        this, soon = bundle_of([now_ms + (3_500 if n < 80 else 11_000) + 30 * n for n in range(120)], "soon-")
        following, far = bundle_of([now_ms + HOUR_MS + 100 * n for n in range(90)], "far-")
        over, past = bundle_of([now_ms - HOUR_MS + n for n in range(20)], "past-")
        self.wanted = soon | far | past
        self.datas = [this, following, over]
        Loader(self.world, self.datas).load("a")
        first = (now_ms // HOUR_MS + 1) << 32
        for number in CANCELLED:
            assert self.cancel(first | number) == scheduler_pb2.CANCELLED
            del self.wanted[b"far-%d" % number]
        request = scheduler_pb2.RescheduleRequest(id=message_id_of(first | MOVED, 0), due_ms=now_ms + 16_000)
        moved = self.ask(lambda core, done: core.serving.start(handlers.reschedule(core, request, EVERYBODY), done))
        assert moved.outcome == scheduler_pb2.RESCHEDULED
        self.wanted[b"far-%d" % MOVED] = now_ms + 16_000
        self.client.consume()
        self.world.run(8_000)  # all is quiet then for a while
        assert {b"m99", b"soon-79", b"past-19"} < self.client.got.keys() and b"soon-80" not in self.client.got
        written = self.core.checkpointer.written
        self.core.checkpointer.request(Reply.either(self.core.checkpointer.copied))
        self.world.run_until(lambda: self.core.checkpointer.written > written)
        self.applied = self.core.applied.index
        self.before = self.content()
        self.killed_ms = self.world.now_ms
        self.node.kill()

    @property
    def core(self) -> NodeCore:
        """Of the running node."""
        assert self.node.host is not None, self.node.fatal
        return self.node.host.core

    def ask(self, question: Callable[[NodeCore, Callable[[Any], None]], None]) -> Any:
        """The answer of the node."""
        answers: list[Any] = []
        assert self.node.host is not None
        question(self.node.host.core, answers.append)
        self.node.wake()
        self.world.run_until(lambda: bool(answers))
        return answers[0]

    def cancel(self, id64: int) -> Any:
        """What becomes of it."""
        return self.ask(lambda core, done: core.serving.start(core.parts.requests.cancel(id64), done))

    def content(self) -> dict[str, bytes]:
        """Of the state, without what an election and the time move."""
        parts = self.ask(lambda core, done: done(core.state.digest())).parts
        return {name: value for name, value in parts.items() if name not in {"term", "wheel.cursor"}}

    def bundle(self, number: int) -> str:
        """Where one of the three lies."""
        return bundle_path(name_of(self.datas[number]))


def test_loaded_messages_come_back_as_they_were() -> None:
    """P1, P3, P6, P8: what was cancelled, moved, dispatched and settled stays so, to the digest, though the files of
    the checkpoint were damaged; what was still to come comes once."""
    alone = Alone()
    world, client, disk = alone.world, alone.client, alone.node.disk
    for name in disk.list("wheel/runs"):
        disk.flip(f"wheel/runs/{name}", disk.size(f"wheel/runs/{name}") // 2)
    with pytest.raises(DiskError, match="wheel/runs"):
        alone.node.start()
    assert rebuild(disk, CONFIG.segment_bytes).entries > 10
    alone.node.start()
    world.run_until(lambda: alone.core.applied.index >= alone.applied)
    assert alone.content() == alone.before
    world.run(15_000)
    far = {record for record in alone.wanted if record.startswith(b"far-")} - {b"far-%d" % MOVED}
    assert client.got.keys() == (alone.wanted.keys() | client.acked.keys()) - far
    assert alone.core.wheel.pending == len(far)
    for record, seen in client.got.items():
        due_ms = alone.wanted.get(record, client.acked.get(record, 0))
        assert all(when >= due_ms for when, _, _ in seen)
    assert all(alone.killed_ms - 100 < client.got[record][0][0] <= alone.killed_ms for record in client.repeated())


@pytest.mark.parametrize("harm", ["is not here any more", "is damaged"])
def test_without_all_bundles_nothing_is_changed(harm: str) -> None:
    """A replay needs them as they were: one that is gone would be waited for in vain, a damaged one stops the node
    again, when its state has gone. With the file put back it goes on."""
    alone = Alone()
    disk, path = alone.node.disk, alone.bundle(1)
    before = {name: disk.list(name) for name in ("", "wheel", "state", "journal", "bulk")}
    if harm == "is not here any more":
        disk.remove(path)
    else:
        disk.flip(path, disk.size(path) // 2)
    with pytest.raises(RebuildError, match=f"{path} {harm}.*nothing was changed"):
        rebuild(disk, CONFIG.segment_bytes)
    disk.remove(path)
    file = disk.open(path, create=True)
    file.append(alone.datas[1])
    file.close()
    assert {name: disk.list(name) for name in before} == before
    assert rebuild(disk, CONFIG.segment_bytes).entries > 10
    alone.node.start()
    alone.world.run_until(lambda: alone.core.applied.index >= alone.applied)
    assert alone.content() == alone.before
