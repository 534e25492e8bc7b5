"""A switch between network namespaces: every packet from one end to another passes here, or does not.

Owns what happens to a packet on its way. Where the proxy holds back bytes that the kernel has already acknowledged,
here packets are really lost, late, or out of order, and the kernels' TCP at both ends has to deal with it:
retransmissions that back off, connections that stay half open, attempts to connect that end in silence. All of a node's
traffic goes this way, that between peers and that with clients. Needs `namespaces.py`; runs in the loop of whoever
starts it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time

from tickwheel.chaos.live.namespaces import Namespace, enter
from tickwheel.chaos.live.network import CLIENTS, Counts, Network, Way
from tickwheel.chaos.live.packets import ends, refusal

PACKET_BYTES_MAX = 65_536
PACKETS_A_TURN = 64
"""Read from one end before the others have their turn."""
UNDER_WAY_MAX = 4_096
"""Packets that are late at a time; more are lost, as in every queue of a network."""


class Switch(Network):
    """All ways of a cluster whose nodes live in namespaces of their own. `start` in a running loop; `stop` at the end,
    which closes the namespaces too."""

    held_unit = "packets lost"

    def __init__(self, node_ids: list[str], seed: int) -> None:
        """Make a namespace for each node and one for clients. Raises NamespacesRefused."""
        super().__init__(node_ids, seed)
        self.namespaces: dict[str, Namespace] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way = 0
        try:
            for number, end in enumerate([*node_ids, CLIENTS], 1):
                self.namespaces[end] = Namespace(number)
        except BaseException:
            self._close()
            raise
        self._end_of = {socket.inet_aton(one.address): end for end, one in self.namespaces.items()}

    def held(self, counts: Counts) -> int:
        return counts.dropped

    def start(self) -> None:
        """Carry packets from now on."""
        self._loop = asyncio.get_running_loop()
        for namespace in self.namespaces.values():
            self._loop.add_reader(namespace.tunnel, self._carry, namespace.tunnel)

    async def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            for namespace in self.namespaces.values():
                loop.remove_reader(namespace.tunnel)
        self._close()

    def _close(self) -> None:
        for namespace in self.namespaces.values():
            namespace.close()

    def _carry(self, tunnel: int) -> None:
        for _ in range(PACKETS_A_TURN):
            try:
                packet = os.read(tunnel, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            self._pass_on(packet)

    def _pass_on(self, packet: bytes) -> None:
        addresses = ends(packet)
        if addresses is None:
            return  # the kernel looks for IPv6 neighbours
        source, target = self._end_of.get(addresses[0]), self._end_of.get(addresses[1])
        if source is None or target is None or source == target:
            return
        way = self.ways[source, target]
        way.counts.bytes += len(packet)
        if way.cut or self.ways[target, source].cut:
            self._refuse(packet, source, way)
        elif not way.passes or (way.lost_share and self._rng.random() < way.lost_share):
            way.counts.dropped += 1
        else:
            self._send(packet, target, way)

    def _refuse(self, packet: bytes, source: str, way: Way) -> None:
        answer = refusal(packet)
        if answer is not None:
            way.counts.reset += 1
            self._write(answer, source)

    def _send(self, packet: bytes, target: str, way: Way) -> None:
        now_s = time.monotonic()
        due_s = way.due_s(now_s, len(packet), self._rng)
        if due_s <= now_s:
            self._write(packet, target)
        elif self._under_way < UNDER_WAY_MAX and self._loop is not None:
            self._under_way += 1
            self._loop.call_later(due_s - now_s, self._arrive, packet, target)
        else:
            way.counts.dropped += 1

    def _arrive(self, packet: bytes, target: str) -> None:
        self._under_way -= 1
        if self._loop is not None:
            self._write(packet, target)

    def _write(self, packet: bytes, end: str) -> None:
        try:
            os.write(self.namespaces[end].tunnel, packet)
        except BlockingIOError:
            return  # its queue is full: lost, as on every network


def switch_for(nodes: int, seed: int) -> Switch:
    """A switch for a cluster of `nodes` new nodes. To be made before any loop or client: the calling thread moves to
    where these can be reached, for good. Whatever else this process talks to cannot be reached from there. Raises
    NamespacesRefused."""
    switch = Switch([f"n{number}" for number in range(1, nodes + 1)], seed)
    enter(switch.namespaces[CLIENTS].path)
    return switch
