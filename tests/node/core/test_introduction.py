"""A node that is behind hears from those who call it who the members are: whom it lets in by that, and whom not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.node.core import trio
from tests.node.core.loading import Loader, begin, bundle_of
from tests.node.core.test_membership import Asked, add, counting, remove
from tests.node.core.trio import MS, Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.host import NodeHost, raft_config
from tickwheel.node.core.membership import Membership
from tickwheel.node.state.results import AdminResult
from tickwheel.proto.peer_pb2 import Hello
from tickwheel.replication.grpc_network import MEMBERS_MAX, hello_of, shown_in
from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.pysyncobj_seam import JournalView

KNOCK_NS = 50 * MS


class Doors(World):
    """Nodes call whom they want to be connected to, and the called side judges who calls, as over the network."""

    def __init__(self, config: CoreConfig | None = None) -> None:
        self.opened: set[tuple[str, str]] = set()
        super().__init__(config=config)
        self._knock()

    def connected(self, one: str, other: str) -> bool:
        return super().connected(one, other) and (one, other) in self.opened and self._wants(one, other)

    def _wants(self, one: str, other: str) -> bool:
        """Who waits to be added calls back whoever calls, until it knows members."""
        learned = not self.host(one).core.log.members() and (other, one) in self.opened
        return other in self.nodes[one].calls or learned

    def _knock(self) -> None:
        for one, other in itertools.permutations(self.nodes, 2):
            caller, called = self.nodes[one], self.nodes[other]
            if not super().connected(one, other):
                self.opened.discard((one, other))
                continue
            assert caller.host is not None and called.host is not None
            if not self._wants(one, other):
                if (one, other) in self.opened:
                    self.opened.discard((one, other))
                    caller.host.peer_disconnected(other)
                continue
            if (one, other) in self.opened:
                continue
            shown = shown_in(hello_of("", caller.host.core.parts.members.introduction()))
            if called.host.core.parts.members.refuses(one, f"disk-{one}", shown) is None:
                self.opened.add((one, other))
                caller.host.peer_connected(other)
                caller.wake()
        self.at(self.now_ns + KNOCK_NS, self._knock)

    def host(self, name: str) -> NodeHost:
        host = self.nodes[name].host
        assert host is not None, self.nodes[name].fatal
        return host

    def change(self, change: object) -> None:
        """Ask whoever leads until it is done: one that is to remove itself hands over first."""
        assert callable(change)
        self.run_until(lambda: isinstance(Asked(self, change()).answer, AdminResult))

    def agree(self) -> bool:
        """Whether those that are up have the same state."""
        up = [node.host.core.state.digest() for node in self.nodes.values() if node.host is not None]
        return len({(digest.applied_index, digest.digest) for digest in up}) == 1


def replaced(*, by_checkpoint: bool = False) -> tuple[Doors, str, str]:
    """A slave was away while a member was added that then came to lead, and the master that it knew was removed.

    Returns the world, the slave, still cut off, and the only other one that it knows.
    """
    period_ms = 300 if by_checkpoint else 1 << 40
    world = Doors(replace(CoreConfig(), segment_bytes=1 << 16, checkpoint_period_ms=period_ms))
    old = world.elect().name
    slave, other = sorted(set("abc") - {old})
    world.run_until(lambda: all(m.disk_uuid for name in "abc" for m in world.host(name).core.log.members()), 20_000)
    world.cut_off(slave)
    world.change(lambda: add("d"))
    world.join("d")
    world.cut.add(frozenset((slave, "d")))
    world.run_until(lambda: "d" in counting(world), 30_000)
    client = Client(world)
    for name in (old, other, "d"):
        if by_checkpoint:
            object.__setattr__(world.host(name)._raft, "journal_tail_bytes_max", 1)
    for _ in range(20):
        client.schedule([60_000] * 100)
        world.run(100)
    world.change(lambda: remove(old))
    world.nodes[old].kill()
    world.elect()
    return world, slave, other


@pytest.mark.parametrize("by_checkpoint", [False, True], ids=["by its log", "by a checkpoint"])
def test_it_catches_up_with_those_that_it_never_heard_of(by_checkpoint: bool) -> None:
    """P10: a majority is up, the slave and a member that was added while it was away; the only ones that it knows are
    removed or dead. It was out of reach, and with it the cluster, until one that it knew came back."""
    world, slave, other = replaced(by_checkpoint=by_checkpoint)
    world.nodes[other].kill()
    world.run(2_000)
    assert world.master() is None, "one of three is no majority"
    world.cut.clear()
    assert world.elect().name == "d"
    world.run_until(world.agree)
    assert (world.host(slave).installs > 0) == by_checkpoint
    world.run_until(lambda: counting(world) == {slave, other, "d"})
    assert world.host(slave).core.log.introduced() == NO_INTRODUCTION, "it has applied as much itself"
    assert world.host(slave).core.parts.members.introduction().applied_index == world.host(slave).core.applied.index
    assert {"d", other} == world.nodes[slave].calls


def test_it_can_elect_whom_it_never_heard_of_after_a_restart() -> None:
    """What was shown is forgotten with the process: whoever calls shows it again."""
    world, slave, other = replaced(by_checkpoint=True)
    world.nodes[other].kill()
    world.cut.clear()
    world.run_until(lambda: "d" in world.nodes[slave].calls)
    world.nodes[slave].kill()
    world.run(1_000)
    world.nodes[slave].start()
    assert "d" not in world.nodes[slave].calls
    assert world.elect().name == "d"
    world.run_until(world.agree)


def test_two_that_are_both_behind_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: a slave was away while all others were replaced. The master has all of the log, but lost with its power how
    far that was committed: it has applied nothing, knows of the slave from the third node alone, and that one is lost.
    The two are a majority, but the master showed what it had applied, so the slave did not let it in."""
    world = Doors(replace(CoreConfig(), checkpoint_period_ms=1 << 40))
    slave = sorted(set("abc") - {world.elect().name})[0]
    world.run_until(lambda: all(m.disk_uuid for name in "abc" for m in world.host(name).core.log.members()), 20_000)
    world.cut_off(slave)
    for name in "de":
        world.change(lambda name=name: add(name))
        world.join(name)
        world.cut.add(frozenset((slave, name)))
        while name not in counting(world):
            world.run(50)
    while left := sorted(counting(world) - {slave, "d", "e"}):
        world.change(lambda name=left[0]: remove(name))
        world.nodes[left[0]].kill()
    master = world.elect().name
    third = "e" if master == "d" else "d"
    world.run_until(lambda: all(m.disk_uuid for m in world.host(third).core.log.members()), 20_000)
    world.nodes[master].kill()
    monkeypatch.setattr(JournalView, "getRaftCommitIndex", lambda self: 0)
    world.run_until(lambda: (third, master) not in world.opened)
    world.nodes[master].start()
    log = world.host(master).core.log
    world.run_until(lambda: log.introduced() != NO_INTRODUCTION)
    world.nodes[third].kill()
    assert log.introduced().named(slave) and log.status().applied_index == 0 and not log.members()
    world.cut.clear()
    assert world.elect().name == master
    world.run_until(world.agree)


def led_by_a_late_one(monkeypatch: pytest.MonkeyPatch) -> Doors:
    """d leads, which was added long after the log began; entries travel a few at a time."""
    little = replace(raft_config(CoreConfig()), batch_entries_max=4, window_messages_max=2)
    monkeypatch.setattr(trio, "raft_config", lambda config: little)
    world = Doors(replace(CoreConfig(), checkpoint_period_ms=1 << 40))
    world.elect()
    world.run_until(lambda: all(m.disk_uuid for name in "abc" for m in world.host(name).core.log.members()), 20_000)
    client = Client(world)
    for _ in range(100):
        client.schedule([60_000])
        world.run(5)
    world.change(lambda: add("d"))
    world.join("d")
    world.run_until(lambda: "d" in counting(world), 30_000)
    while (master := world.elect().name) != "d":
        world.change(lambda name=master: remove(name))
        world.nodes[master].kill()
    return world


@pytest.mark.parametrize("newcomers", ["e", "ef"], ids=["one", "two at once"])
def test_a_newcomer_keeps_those_who_called_it_first(newcomers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: it reads the log from the founders on, piece by piece. The first list that it reads does not name the
    master: it hung up on it, could tell it no more what it had, and was a learner for ever."""
    world = led_by_a_late_one(monkeypatch)
    for name in newcomers:
        world.change(lambda name=name: add(name))
        world.join(name)
    world.run_until(lambda: set(newcomers) <= counting(world), 30_000)
    world.run_until(world.agree)
    assert all(world.host(name).installs == 0 for name in newcomers)


def test_a_newcomer_asks_those_whom_it_was_shown_for_a_bundle() -> None:
    """It waits for a bundle at an entry from before anybody who is left was added: it asked the founders alone, who
    are gone, and stood there for ever, though it came to count and could be elected."""
    world = Doors(replace(CoreConfig(), checkpoint_period_ms=1 << 40))
    begin(world)
    data, _ = bundle_of([world.now_ms + 3_600_000 + n for n in range(50)])
    Loader(world, [data]).load()
    world.change(lambda: add("d"))
    world.join("d")
    world.run_until(lambda: "d" in counting(world), 30_000)
    while left := sorted(counting(world) - {"d"}):
        world.change(lambda name=left[0]: remove(name))
        world.nodes[left[0]].kill()
    world.change(lambda: add("e"))
    world.join("e")
    world.run_until(lambda: "e" in counting(world), 30_000)
    world.run_until(world.agree)
    assert world.host("e").core.parts.bulk.counts.fetched == 1 and world.host("e").installs == 0


def test_what_a_newcomer_is_shown_before_anybody_knows_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master records a disk when it has seen it; until then a newcomer is shown without one, and must believe that
    while its own log has no other. Who does not know itself yet that it is a member has to call again: its word would
    not be heard later, for the stream stays open."""
    world = led_by_a_late_one(monkeypatch)
    world.change(lambda: add("e"))
    world.join("e")
    members, log = world.host("e").core.parts.members, world.host("e").core.log
    shown = with_disk(world.host("d").core.parts.members.introduction(), "e", "")
    assert not log.members()
    early = members.refuses("f", "disk-f", replace(shown, applied_index=shown.applied_index - 1))
    assert early is not None and "not read yet" in early.reason and not early.final
    assert members.refuses("f", "disk-f", NO_INTRODUCTION) is None, "an older version shows nothing"
    assert log.introduced() == NO_INTRODUCTION
    assert members.refuses("d", "disk-d", shown) is None and log.introduced() == shown
    world.run_until(lambda: bool(log.members()))
    assert "d" not in {member.node_id for member in log.members()}
    later = replace(shown, applied_index=1 << 40)
    assert members.refuses("d", "disk-d", with_disk(later, "e", "another")) is None and log.introduced() == shown
    assert members.refuses("d", "disk-d", later) is None and log.introduced() == later


def without(shown: Introduction, name: str) -> tuple[Member, ...]:
    return tuple(member for member in shown.members if member.node_id != name)


def with_disk(shown: Introduction, name: str, disk_uuid: str) -> Introduction:
    """The same, but for one's disk."""
    changed = tuple(replace(m, disk_uuid=disk_uuid) if m.node_id == name else m for m in shown.members)
    return replace(shown, members=changed)


def test_who_is_let_in_by_what_it_shows() -> None:
    """Only a member of this very cluster, with its own disk, by a later state of the log than this node has applied:
    strangers, wiped disks and who was removed stay out, as do those whom newer word does not name."""
    world, slave, _ = replaced()
    members, log = world.host(slave).core.parts.members, world.host(slave).core.log
    true = shown_in(hello_of("", world.host("d").core.parts.members.introduction()))
    applied = world.host(slave).core.applied.index
    assert true.applied_index > applied and true.named("d") is not None
    false = {
        "shows nothing, as older versions do": NO_INTRODUCTION,
        "is not among those that it shows": replace(true, members=without(true, "d")),
        "is of a cluster that this node is not in": replace(true, members=without(true, slave)),
        "knows this node with another disk": with_disk(true, slave, "another"),
        "knows this node, but not its disk": with_disk(true, slave, ""),
        "is known with another disk": with_disk(true, "d", "another"),
        "knows no more than this node": replace(true, applied_index=applied),
    }
    calls = set(world.nodes[slave].calls)
    for why, shown in false.items():
        refusal = members.refuses("d", "disk-d", shown)
        assert refusal is not None and "not a member" in refusal.reason and not refusal.final, why
        assert log.introduced() == NO_INTRODUCTION and world.nodes[slave].calls == calls, why
    assert members.introduction().applied_index == applied
    assert members.refuses("d", "disk-d", true) is None
    assert world.nodes[slave].calls == calls | {"d"}, "what it knew by its own log stays"
    assert members.introduction() == true, "it shows others what it was shown, until it has applied as much"
    wiped = members.refuses("d", "a new one")
    assert wiped is not None and wiped.final
    assert members.refuses("d", "disk-d") is None, "by what it has shown before"
    older = Introduction(true.applied_index - 1, (*true.members, Member("e", "peer-e", "", "disk-e")))
    assert members.refuses("e", "disk-e", older) is not None, "newer word does not name it any more"
    assert log.introduced() == members.introduction() == true
    newer = Introduction(true.applied_index + 1, (*without(true, "d"), Member("e", "peer-e", "", "disk-e")))
    assert members.refuses("e", "disk-e", newer) is None
    assert members.refuses("d", "disk-d", true) is not None and world.nodes[slave].calls == calls | {"e"}


def test_a_member_whose_disk_is_another_shows_nothing() -> None:
    """What a wiped disk brings is not listened to, even if it names this node rightly."""
    world, slave, other = replaced()
    members, log = world.host(slave).core.parts.members, world.host(slave).core.log
    shown = replace(world.host("d").core.parts.members.introduction(), applied_index=1 << 40)
    refusal = members.refuses(other, "another", with_disk(shown, other, "another"))
    assert refusal is not None and refusal.final
    assert log.introduced() == NO_INTRODUCTION
    assert members.refuses(other, f"disk-{other}", shown) is None
    assert log.introduced() == shown, "a member that is known shows it as well"


def test_what_was_shown_is_kept_over_a_checkpoint() -> None:
    """The stream by which it came stays open, so it would not be shown again."""
    world, slave, _ = replaced()
    host = world.host(slave)
    shown = replace(world.host("d").core.parts.members.introduction(), applied_index=1 << 40)
    assert host.core.parts.members.refuses("d", "disk-d", shown) is None
    host._checkpoint_needed("d")
    world.run_until(lambda: host.installs > 0)
    assert host.core.log.introduced() == shown and host.core.applied.index > 0


def test_who_was_removed_stays_out_whatever_it_shows() -> None:
    """Its own log may end before it was removed, and that of another cluster's twin may go on for ever."""
    world = Doors()
    world.run_until(lambda: all(m.disk_uuid for name in "abc" for m in world.host(name).core.log.members()), 20_000)
    world.change(lambda: add("d"))
    shown = world.host("a").core.parts.members.introduction()
    world.change(lambda: remove("d"))
    world.run_until(world.agree)
    members: Membership = world.host("a").core.parts.members
    for index in (shown.applied_index, 1 << 40):
        assert members.refuses("d", "disk-d", replace(shown, applied_index=index)) is not None
    assert world.host("a").core.log.introduced() == NO_INTRODUCTION


def test_the_form_on_the_wire() -> None:
    """It comes as it left; too much of it, or none, is nothing."""
    shown = Introduction(7, (Member("a", "x:1", "", "disk-a"), Member("b", "y:1", "")))
    hello = hello_of("here:1", shown)
    assert hello.peer_address == "here:1" and shown_in(Hello.FromString(hello.SerializeToString())) == shown
    assert shown_in(Hello(peer_address="here:1")) == NO_INTRODUCTION
    many = Introduction(7, shown.members[:1] * (MEMBERS_MAX + 1))
    assert shown_in(hello_of("", many)) == NO_INTRODUCTION
