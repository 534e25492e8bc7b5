"""Members come and go while the cluster works: who counts, from when, and what a master does about itself."""

from __future__ import annotations

import pytest

from tests.node.core.trio import Client, World, digests, places
from tickwheel.node.core.founding import ClusterFounding
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.failure import Failure
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.admin_pb2 import RemoveMemberRequest
from tickwheel.proto.log_pb2 import AdminCommand, PromoteMember


class Asked:
    """A change that the master was asked for, and its answer."""

    def __init__(self, world: World, command: AdminCommand) -> None:
        self.answer: AdminResult | Failure | None = None
        master = world.elect()
        assert master.host is not None
        master.host.core.serving.start(master.host.core.parts.requests.admin(command), self._answered)
        master.wake()
        world.run_until(lambda: self.answer is not None)

    def _answered(self, answer: AdminResult | Failure) -> None:
        assert self.answer is None, "answered twice"
        self.answer = answer

    @property
    def failure(self) -> Failure:
        assert isinstance(self.answer, Failure)
        return self.answer


def add(name: str) -> AdminCommand:
    """Add a member."""
    node_id, peer_address, client_address = places(name)
    return AdminCommand(
        add_member=admin_pb2.Member(node_id=node_id, peer_address=peer_address, client_address=client_address)
    )


def remove(name: str) -> AdminCommand:
    """Remove one."""
    return AdminCommand(remove_member=RemoveMemberRequest(node_id=name))


def counting(world: World) -> set[str]:
    """The members that count, as the master has applied."""
    host = world.elect().host
    assert host is not None
    return {member.node_id for member in host.core.log.members() if not member.learner}


def test_a_newcomer_counts_once_it_has_caught_up() -> None:
    """Nobody waits for one that is not there; one that has everything counts by itself, and its vote with it."""
    world = World()
    world.elect()
    assert isinstance(Asked(world, add("d")).answer, AdminResult)
    client = Client(world)
    client.schedule([60_000] * 100)
    world.run(3_000)
    assert counting(world) == {"a", "b", "c"}
    world.join("d")
    world.run_until(lambda: counting(world) == {"a", "b", "c", "d"})
    world.run_until(lambda: len(digests(world)) == 1)
    for name in ("a", "b"):
        world.nodes[name].kill()
    world.run(3_000)
    assert world.master() is None, "two of four are no majority"
    world.nodes["a"].start()
    world.elect()


def test_a_newcomer_at_the_address_of_another_member_is_refused() -> None:
    """It was taken in, and nobody could ever reach it. The same member again is no news."""
    world = World()
    world.elect()
    wrong = add("d")
    wrong.add_member.peer_address = "peer-b"
    failure = Asked(world, wrong).failure
    assert (failure.reason, failure.metadata["field"], failure.metadata["value"]) == (
        pb.INVALID_FIELD, "member.peer_address", "peer-b",
    )  # fmt: skip
    assert "member b" in failure.message
    assert isinstance(Asked(world, add("d")).answer, AdminResult)
    assert isinstance(Asked(world, add("d")).answer, AdminResult)


@pytest.mark.parametrize("seed", range(4))
def test_one_grows_to_three_with_restarts_in_the_middle(seed: int) -> None:
    """A lone node adds a second and a third and is killed at some moment of it: it leads again, and nothing is lost."""
    world = World(seed, names="a")
    client = Client(world)
    for name in "bc":
        world.elect()
        world.join(name)
        Asked(world, add(name))
        client.schedule([60_000] * 10)
        world.run(world.rng.randrange(3_000))
        world.nodes["a"].kill()
        world.run(world.rng.randrange(1_000))
        world.nodes["a"].start()
        world.run_until(lambda: name in counting(world), 30_000)  # noqa: B023  # it is called within the round
    world.run_until(lambda: len(digests(world)) == 1)
    world.nodes["a"].kill()
    assert world.elect().name in "bc"


def test_a_learner_does_not_count_after_a_restart_from_a_checkpoint() -> None:
    """P1, P7: two learners that counted in one node's eyes only would elect it against the master's majority."""
    world = World()
    world.elect()
    for name in "de":
        Asked(world, add(name))
    world.run_until(lambda: len(digests(world)) == 1)
    for node in world.nodes.values():
        assert node.host is not None
        written: list[object] = []
        node.host.core.checkpointer.request(Reply.either(written.append))
        node.wake()
        world.run_until(lambda written=written: bool(written))  # type: ignore[misc]
        node.kill()
        node.start()
        assert node.host.core.log.voters == ("a", "b", "c")  # type: ignore[attr-defined]  # RaftLog's
        assert node.host.core.applied.index > 0, "from the checkpoint"
    world.join("d")
    d = world.nodes["d"]
    world.run_until(lambda: counting(world) == {"a", "b", "c", "d"})
    assert d.host is not None and d.host.core.log.voters == ("a", "b", "c", "d")  # type: ignore[attr-defined]


def test_who_was_just_added_is_shown_and_who_was_removed_is_told() -> None:
    """A learner is among the peers before it has ever called; a removed member is refused for good, by its name."""
    world = World()
    world.elect()
    assert isinstance(Asked(world, add("d")).answer, AdminResult)
    master = world.elect()
    assert master.host is not None
    shown = {peer.node_id: peer for peer in node_status(master.host.core).peers}
    assert set(shown) == set("abcd") - {master.name}
    assert (shown["d"].learner, shown["d"].connected) == (True, False)
    assert shown["d"].applied_lag == node_status(master.host.core).commit_index
    assert isinstance(Asked(world, remove("d")).answer, AdminResult)
    refusal = master.host.core.parts.members.refuses("d", "disk-d")
    assert refusal is not None and refusal.final and refusal.removed and "was removed" in refusal.reason
    stranger = master.host.core.parts.members.refuses("e", "disk-e")
    assert stranger is not None and not stranger.final and not stranger.removed


def test_a_master_that_is_removed_hands_over_first() -> None:
    """Who asked is sent to the successor, which does it; the removed node leads no more and its id never comes back."""
    world = World()
    old = world.elect().name
    asked = Asked(world, remove(old))
    new = world.elect()
    assert new.name != old
    assert asked.failure.reason == pb.NOT_MASTER and asked.failure.metadata["master_id"] == new.name
    assert isinstance(Asked(world, remove(old)).answer, AdminResult)
    assert counting(world) == {"a", "b", "c"} - {old}
    world.run(2_000)
    assert world.elect().name != old
    assert "takes a new id" in Asked(world, add(old)).failure.message


def test_a_handover_that_fails_holds_up_no_other_change() -> None:
    """The master stays, says why it was not removed, and goes on with what was asked after it."""
    world = World()
    host = world.elect().host
    assert host is not None
    host.core.listener.handover_ready = lambda peer_id: False  # type: ignore[method-assign]  # nobody catches up in time
    answers: list[AdminResult | Failure] = []
    for command in (add("d"), remove(host.core.identity.node_id), add("e")):
        host.core.serving.start(host.core.parts.requests.admin(command), answers.append)
    world.elect().wake()
    world.run_until(lambda: len(answers) == 3)
    assert [type(answer) for answer in answers] == [AdminResult, Failure, AdminResult]
    assert host.core.leading


def test_whether_a_member_counts_is_part_of_the_state() -> None:
    """P8: nodes that differ in it have different digests."""
    world = World()
    Asked(world, add("d"))
    world.run_until(lambda: len(digests(world)) == 1)
    host = world.elect().host
    assert host is not None
    before = host.core.state.digest().parts["members"]
    Asked(world, AdminCommand(promote_member=PromoteMember(node_id="d")))
    assert host.core.state.digest().parts["members"] != before


def test_the_last_member_that_counts_stays() -> None:
    """Neither the only one, nor the only one beside a learner."""
    world = World(names="a")
    assert "last member" in Asked(world, remove("a")).failure.message
    Asked(world, add("b"))
    assert "last member" in Asked(world, remove("a")).failure.message
    assert isinstance(Asked(world, remove("b")).answer, AdminResult)


def test_changes_asked_at_once_are_made_one_after_the_other() -> None:
    """Each answered once, in order; a member added and removed while others wait is gone."""
    world = World()
    host = world.elect().host
    assert host is not None
    answers: list[AdminResult | Failure] = []
    for command in (add("d"), remove("c" if world.elect().name != "c" else "b"), remove("d"), add("d")):
        host.core.serving.start(host.core.parts.requests.admin(command), answers.append)
    world.elect().wake()
    world.run_until(lambda: len(answers) == 4)
    kinds = [type(answer) for answer in answers]
    assert kinds == [AdminResult, AdminResult, AdminResult, Failure], "an id that was removed does not come back"
    assert len(counting(world)) == 2


def test_the_disk_of_a_member_is_the_one_it_came_with_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one under its name is neither let in nor recorded: the member itself would be refused."""
    monkeypatch.setattr(ClusterFounding, "disk_of", lambda self, node_id: "")  # a cluster of before that was known
    world = World()
    host = world.elect().host
    assert host is not None
    members = host.core.parts.members
    other = next(member.node_id for member in host.core.log.members() if member.node_id != host.core.identity.node_id)
    own = f"disk-{other}"
    assert members.refuses(other, own) is None
    refusal = members.refuses(other, "another")
    assert refusal is not None and not refusal.final
    assert members.refuses(other, own) is None

    def recorded() -> str:
        assert host is not None
        return next(member.disk_uuid for member in host.core.log.members() if member.node_id == other)

    world.run_until(lambda: bool(recorded()))
    assert recorded() == own
    refusal = members.refuses(other, "another")
    assert refusal is not None and refusal.final
