"""The network between simulated machines: one connection for each direction of each pair.

A connection is first in, first out; what leaves at one moment arrives together. A frame is lost only with
its connection; a blocked direction holds frames back (they come late, in a burst, if it opens before the
connection is given up). A replaying connection delivers frames twice. Frames travel as bytes, so no two
machines share an object.

`Fabric` is the whole network with the switches of the faults, `NetworkPort` what one machine sees of it
(`replication.ports.Network`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tickwheel.chaos.sim.world import MS, World
from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.frames import Refusal

LATENCY_NS_LEAST = 150_000
LATENCY_NS_MOST = 2 * MS
REDIAL_NS_MOST = 200 * MS
# A blocked connection is given up after a time between these: keepalive of the transport.
GIVE_UP_NS_LEAST = 300 * MS
GIVE_UP_NS_MOST = 6_000 * MS
QUEUE_FRAMES_MAX = 1_024
REPLAY_DEPTH = 16
NS_PER_BYTE = 8


class Callee(Protocol):
    """A process that peers dial."""

    def refuses(self, peer_id: str) -> Refusal | None:
        """Why a peer that dials is turned away: it is no member, or comes with another disk. None: it is not."""
        ...


class Host(Protocol):
    """A machine, as the network sees it."""

    name: str
    boot: int
    frozen: bool

    @property
    def process(self) -> Callee | None: ...

    @property
    def network(self) -> NetworkPort: ...

    def frame(self, peer: str, data: bytes) -> None: ...

    def peer_up(self, peer: str) -> None: ...

    def peer_down(self, peer: str) -> None: ...

    def turn_away(self, refusal: Refusal) -> None: ...


H = TypeVar("H", bound=Host)


class Link:
    """One direction between two machines and its current connection, if any."""

    def __init__(self, fabric: Fabric[Any], world: World, sender: str, receiver: str) -> None:
        self._fabric = fabric
        self._world = world
        self._rng = world.stream(f"link/{sender}/{receiver}")
        self.sender = sender
        self.receiver = receiver
        self.mark = f"{sender}>{receiver} ".encode()
        """Prefix of each frame of this link in the digest of the run."""
        self.sender_boot = 0
        self.receiver_boot = 0
        self.epoch = 0
        self.up = False
        self.wanted = False
        self.dialling = False
        self.blocked = 0
        self.extra_delay_ns = 0
        self.replay_rate = 0.0
        self.delivered = 0
        self.lost = 0
        self.held_back = 0
        self.replayed = 0
        self.watchers: list[Callable[[Link, bytes], None]] = []
        """Faults that look at what was handed over."""
        self._latest_ns = 0
        self._in_flight = 0
        self._departure_ns = -1
        self._departing: list[bytes] | None = None
        self._stalled: list[bytes] = []
        self._recent: deque[bytes] = deque(maxlen=REPLAY_DEPTH)

    def want(self, wanted: bool) -> None:
        """The sender wants this connection (again), or no more."""
        self.wanted = wanted
        if wanted and not self.up and not self.dialling:
            self.dialling = True
            self._world.after(self._rng.randrange(MS, 20 * MS), self._dial)
        elif not wanted and self.up:
            self.reset()

    def send(self, data: bytes) -> bool:
        """Queue a frame; False without a connection or at the limit."""
        if not self.up or self._in_flight >= QUEUE_FRAMES_MAX:
            return False
        world = self._world
        self._in_flight += 1
        if self._departure_ns == world.now_ns and self._departing is not None:
            self._departing.append(data)
            return True
        latency_ns = self._rng.randrange(LATENCY_NS_LEAST, LATENCY_NS_MOST) + self.extra_delay_ns
        when_ns = max(self._latest_ns + 1, world.now_ns + latency_ns) + len(data) * NS_PER_BYTE
        self._latest_ns = when_ns
        self._departure_ns = world.now_ns
        self._departing = [data]
        world.at(when_ns, self._arrive, self.epoch, self._departing)
        return True

    def reset(self) -> None:
        """The connection breaks: what is in flight is lost, the sender is told and dials again."""
        if not self.up:
            return
        self.up = False
        self.epoch += 1
        self.lost += self._in_flight
        self._in_flight = 0
        self._stalled.clear()
        self._departing = None
        self._recent.clear()
        sender: Host = self._fabric.machines[self.sender]
        if sender.boot == self.sender_boot:
            sender.peer_down(self.receiver)
        if self.wanted and not self.dialling:
            self.dialling = True
            self._world.after(self._rng.randrange(5 * MS, REDIAL_NS_MOST), self._dial)

    def block(self) -> None:
        """Nothing passes until `unblock`; blocks count."""
        self.blocked += 1
        if self.blocked == 1 and self.up:
            self._world.after(self._rng.randrange(GIVE_UP_NS_LEAST, GIVE_UP_NS_MOST), self._give_up, self.epoch)

    def unblock(self) -> None:
        self.blocked -= 1
        if self.blocked == 0 and self._stalled:
            stalled, self._stalled = self._stalled, []
            for data in stalled:
                self._hand_over(data)

    def _give_up(self, epoch: int) -> None:
        if self.blocked and self.epoch == epoch:
            self.reset()

    def _dial(self) -> None:
        self.dialling = False
        if self.up or not self.wanted:
            return
        sender: Host = self._fabric.machines[self.sender]
        receiver: Host = self._fabric.machines[self.receiver]
        back = self._fabric.links[self.receiver, self.sender]
        if sender.process is None:
            return
        called = None if receiver.frozen or sender.frozen or self.blocked or back.blocked else receiver.process
        refusal = called.refuses(self.sender) if called is not None else None
        if refusal is not None and refusal.final:
            sender.turn_away(refusal)
        if called is None or refusal is not None:
            self.dialling = True
            self._world.after(self._rng.randrange(MS, REDIAL_NS_MOST), self._dial)
            return
        self.up = True
        self.epoch += 1
        self.sender_boot = sender.boot
        self.receiver_boot = receiver.boot
        self._latest_ns = self._world.now_ns
        sender.peer_up(self.receiver)
        receiver.network.learn(self.sender)

    def _arrive(self, epoch: int, segment: list[bytes]) -> None:
        if epoch != self.epoch:
            return
        if self.blocked or self._stalled:
            self.held_back += len(segment)
            self._stalled += segment
            return
        for data in segment:
            self._hand_over(data)

    def _hand_over(self, data: bytes) -> None:
        self._in_flight -= 1
        receiver: Host = self._fabric.machines[self.receiver]
        if receiver.boot != self.receiver_boot or receiver.process is None:
            self.lost += 1
            return
        self.delivered += 1
        receiver.frame(self.sender, data)
        for watcher in self.watchers:
            watcher(self, data)
        if self.replay_rate:
            self._recent.append(data)
            if self._rng.random() < self.replay_rate:
                self.replayed += 1
                receiver.frame(self.sender, self._rng.choice(self._recent))


class Fabric(Generic[H]):
    """All links; faults turn its switches."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rng = world.stream("fabric")
        self.machines: dict[str, H] = {}
        self.links: dict[tuple[str, str], Link] = {}

    def add(self, machine: H) -> None:
        """A machine joins; it has links to and from all that are there."""
        for other in self.machines:
            self.links[machine.name, other] = Link(self, self.world, machine.name, other)
            self.links[other, machine.name] = Link(self, self.world, other, machine.name)
        self.machines[machine.name] = machine

    def of(self, name: str) -> list[Link]:
        """Links from and to a machine, in a fixed order."""
        return [link for ends, link in sorted(self.links.items()) if name in ends]

    def machine_stopped(self, name: str, silent: bool) -> None:
        """A process ended. Its peers notice at once (the kernel closes) or, after a power loss, some time later."""
        for link in self.of(name):
            if link.sender == name or not silent:
                link.reset()
            elif link.up:
                self.world.after(self._rng.randrange(10 * MS, 1_500 * MS), self._noticed, link, link.epoch)
            if link.sender == name:
                link.wanted = False

    def _noticed(self, link: Link, epoch: int) -> None:
        if link.epoch == epoch:
            link.reset()


class NetworkPort:
    """The network as one boot of a machine sees it."""

    def __init__(self, fabric: Fabric[Any], name: str) -> None:
        self._fabric = fabric
        self._name = name
        self._world = fabric.world
        self.peers: set[str] = set()
        self.sent: Callable[[str, PeerFrame], None] = lambda peer_id, frame: None
        """Told of every frame that was put on its way."""

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        """Queue a frame; False if there is no connection or its queue is full."""
        link = self._fabric.links.get((self._name, peer_id))
        if link is None or not link.up:
            return False
        data = frame.SerializeToString()
        world = self._world
        world.mark(link.mark + data)
        if world.story is not None:
            world.tell(self._name, f"-> {peer_id} {describe(frame)}")
        if not link.send(data):
            return False
        self.sent(peer_id, frame)
        return True

    def learn(self, peer_id: str) -> None:
        """A peer that may speak has called, and said where it is: call back."""
        if peer_id not in self.peers:
            self.peers.add(peer_id)
            self._fabric.links[self._name, peer_id].want(True)

    def set_peers(self, addresses: dict[str, str]) -> None:
        """Dial those named that exist, drop the others."""
        self.peers = set(addresses)
        for (sender, receiver), link in sorted(self._fabric.links.items()):
            if sender == self._name:
                link.want(receiver in addresses)


def describe(frame: PeerFrame) -> str:
    """A frame in a few words, for the story."""
    kind = frame.WhichOneof("body") or "empty"
    head = f"term {frame.term} {kind}"
    if kind == "append_entries":
        body = frame.append_entries
        before = f" after {body.previous_index}" if body.HasField("previous_index") else " (bare)"
        entries = f" {body.entries[0].index}..{body.entries[-1].index}" if body.entries else ""
        return f"{head}{before}{entries} commit {body.commit_index}"
    if kind == "append_result":
        result = frame.append_result
        return f"{head} next {result.next_index}{' reset' if result.reset else ''}{' ok' if result.success else ''}"
    if kind == "request_vote":
        asked = frame.request_vote
        return f"{head} last {asked.last_log_index}/{asked.last_log_term}{' transfer' if asked.transfer else ''}"
    if kind == "vote":
        return f"{head} {'granted' if frame.vote.granted else 'refused'}"
    if kind == "sync":
        return f"{head} tick {frame.sync.tick}/{frame.sync.local_index} leases {len(frame.sync.leases)}"
    return head
