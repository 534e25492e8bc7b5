"""Bundles and who loads them, for tests of bulk load on three simulated nodes."""

from __future__ import annotations

import hashlib

import google_crc32c
import numpy as np

from tests.node.core.trio import MS, Client, Node, World, digests
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import bulk_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage import bundle
from tickwheel.storage.unit import UNIT

PIECE_BYTES = 1_000

PIECE_BYTES = 1_000


def bundle_of(due_ms: list[int], tag: str = "x") -> tuple[bytes, dict[bytes, int]]:
    """A bundle for topic `t`, and what it brings: record -> due time."""
    due = sorted(due_ms)
    records = [b"%s%d" % (tag.encode(), number) for number in range(len(due))]
    units = np.zeros(len(due), UNIT)
    units["due_requested_ms"] = due
    units["size"] = [len(record) for record in records]
    pieces = bundle.build(units, b"".join(records), slot_ms=1_000, topics=1)
    return b"".join(pieces), dict(zip(records, due, strict=True))


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Loader:
    """Loads bundles as the command does: to every node that it reaches, then taken over one by one."""

    def __init__(self, world: World, datas: list[bytes], job_id: str = "job") -> None:
        self.world = world
        self.datas = datas
        self.job_id = job_id
        self.sha = hashlib.sha256("".join(map(name_of, datas)).encode()).hexdigest()
        self.failures: list[Failure] = []
        self.taken = 0
        self.units = 0

    def send(self, node: Node, data: bytes) -> None:
        """All pieces of one bundle, each after the answer to the one before."""
        assert node.host is not None
        bulk, name = node.host.core.parts.bulk, name_of(data)
        boot = node.boot

        def go_on(state: bulk_pb2.BundleState | Failure) -> None:
            if isinstance(state, Failure):
                self.failures.append(state)
            elif not state.held and boot == node.boot:
                piece = data[state.bytes : state.bytes + PIECE_BYTES]
                bulk.take(name, len(data), state.bytes, piece, google_crc32c.value(piece), Reply.either(go_on))

        try:
            go_on(bulk.offer(name, len(data)))
        except RequestError as error:
            self.failures.append(error.failure)

    def send_all(self, names: str = "abc") -> None:
        """To the nodes of these names that are up, and wait."""
        for data in self.datas:
            for name in names:
                if self.world.nodes[name].host is not None:
                    self.send(self.world.nodes[name], data)
            self.world.run(5 + len(data) / PIECE_BYTES * 2)

    def request(self, place: int) -> bulk_pb2.TakeOverRequest:
        return bulk_pb2.TakeOverRequest(
            job_id=self.job_id,
            load_sha256=self.sha,
            sequence=place + 1,
            bundles=len(self.datas),
            name=name_of(self.datas[place]),
            topics=["t"],
        )

    def ask(self, place: int) -> list[bulk_pb2.LoadState | Failure]:
        """Ask the master to take one over; the list gets the answer."""
        answers: list[bulk_pb2.LoadState | Failure] = []
        master = self.world.elect()
        assert master.host is not None
        core = master.host.core
        core.serving.start(core.parts.bulk.take_over(self.request(place)), answers.append)
        master.wake()
        return answers

    def take_over(self, place: int) -> bulk_pb2.LoadState:
        """Until it is done, however often the master changes."""
        limit_ns = self.world.now_ns + 60_000 * MS
        while self.world.now_ns < limit_ns:
            answers = self.ask(place)
            self.world.run_until(lambda answers=answers: bool(answers))  # type: ignore[misc]
            if isinstance(answers[0], bulk_pb2.LoadState):
                return answers[0]
            self.failures.append(answers[0])
            self.world.run(100)
        raise AssertionError(f"not taken over: {self.failures[-1]}")

    def load(self, names: str = "abc") -> bulk_pb2.LoadState:
        self.send_all(names)
        for place in range(len(self.datas)):
            state = self.take_over(place)
        return state


def admin(world: World, command: AdminCommand) -> None:
    """Have a command carried out."""
    answers: list[AdminResult | Failure] = []
    master = world.elect()
    assert master.host is not None
    master.host.core.serving.start(master.host.core.parts.requests.admin(command), answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], AdminResult)


def begin(world: World) -> None:
    world.elect()
    admin(world, AdminCommand(create_topic=CreateTopicRequest(name="t")))
    admin(world, AdminCommand(create_group=CreateGroupRequest(name="g", topics=["t"])))


def start(node: Node) -> None:
    """Unless somebody else did."""
    if node.host is None:
        node.start()


def settle_down(world: World) -> None:
    """Until all nodes have applied the same."""
    world.run_until(lambda: len({d[0] for d in digests(world)}) == 1, 20_000)
    assert len(digests(world)) == 1


def check(client: Client, wanted: dict[bytes, int]) -> None:
    """Everything once, nothing early, nothing else."""
    assert client.got.keys() == wanted.keys() | client.acked.keys()
    assert not client.repeated()
    for record, seen in client.got.items():
        due_ms = wanted.get(record, client.acked.get(record, 0))
        assert all(when >= due_ms for when, _, _ in seen)
