"""The stage of a script of wrong clocks: its actions on a run under load, and its expectations of the nodes.

Owns the expectations (`Check`) and the stretches of time in which messages must flow or must not (`Stretch`). Reads
a node where its operator would: status, metrics page, health, log. An expectation is waited for. If it fails, that is
recorded and the script continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.chaos.live.faults import Active, killed, paused, wrong_clock
from tickwheel.chaos.live.supervisor import Scene
from tickwheel.client import TickwheelError
from tickwheel.node.local_cluster import LocalNode
from tickwheel.node.made_files import LocalClusterError
from tickwheel.proto import admin_pb2

LOOK_S = 0.1
WITHIN_S = 20.0
"""Long enough for a node that has hardly a processor; what comes true sooner costs nothing."""
HANDOVER_S = 20.0
MASTER_S = 30.0
SKEW_SLACK_MS = 60.0
"""Beside the error that is shown: a clock may be drifting, and the cluster's time may be steered, while it is read."""
HEARD_MS = 50.0
"""Greatest age of a status when it is heard."""
ASK_S = 2.0
WARNED, RIGHT_AGAIN = "a wall clock is wrong", "a wall clock is right again"
DISAGREE, STOPPED = "the members' clocks do not agree", "dispatch has stopped: the members' clocks do not agree"
JUMP = "refused a jump ahead of the cluster's time"

Look = Callable[[], Awaitable[tuple[bool, str]]]
"""Whether something holds, and what was seen."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something expected, at a true time (ms)."""

    at_ms: float
    what: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which messages are accepted, and those that become due in it come, or none of them does."""

    what: str
    from_ms: float
    until_ms: float
    delivers: bool


class ClockStage:
    """One run's script acts through this. All waits but those of `flows` are for something to be seen."""

    def __init__(self, scene: Scene) -> None:
        self.cluster = scene.cluster
        self.checks: list[Check] = []
        self.stretches: list[Stretch] = []
        self._scene = scene
        self._numbers = 0
        self._log_bytes: dict[str, int] = {}
        self._agree = True

    # -- who is who

    @property
    def nodes(self) -> list[LocalNode]:
        """Nodes that run and are not paused."""
        paused = self.cluster.paused
        return [node for node in self.cluster.nodes if node.running and node.node_id not in paused]

    async def master(self) -> LocalNode:
        """The master, when there is one. Raises LocalClusterError if none is seen."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + MASTER_S
        while True:
            found = self._scene.watch.master()
            if found is not None and found.running:  # its last word may have come just before its end
                return found
            if loop.time() > end_s:
                raise LocalClusterError(f"no master within {MASTER_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def slaves(self) -> list[LocalNode]:
        """All others that run."""
        master = await self.master()
        return [node for node in self.nodes if node is not master]

    # -- doing

    async def strike(self, kind: str, fault: Active) -> int:
        """Begin a fault; its number. What nodes log from now on counts for `logged`."""
        self._log_bytes = {node.node_id: node.log_file.stat().st_size for node in self.cluster.nodes}
        self._numbers += 1
        await self._scene.injector.begin(self._numbers, kind, fault)
        return self._numbers

    async def end(self, number: int) -> None:
        """End it."""
        self._log_bytes = {node.node_id: node.log_file.stat().st_size for node in self.cluster.nodes}
        await self._scene.injector.end(number)

    async def wrong(self, struck: Sequence[LocalNode], by_ms: int) -> int:
        """Put their wall clocks off by this much more from now on."""
        return await self.strike("step", wrong_clock(self.cluster, list(struck), offset_ms=by_ms))

    async def drift(self, node: LocalNode, ppm: int) -> int:
        """Make its oscillator wrong from now on."""
        return await self.strike("drift", wrong_clock(self.cluster, [node], rate_ppm=ppm))

    async def kill(self, struck: Sequence[LocalNode]) -> int:
        """SIGKILL; they are started again at the end of it."""
        kind = "kill-all" if len(struck) == len(self.cluster.nodes) else "kill"
        return await self.strike(kind, Active(list(struck), killed(self.cluster, list(struck))))

    async def pause(self, node: LocalNode) -> int:
        """SIGSTOP, until the end of it."""
        kind = "pause-master" if node is self._scene.watch.master() else "pause"
        return await self.strike(kind, Active([node], paused(self.cluster, [node])))

    async def hand_over(self, node: LocalNode) -> None:
        """Make it master by a planned handover."""

        async def look() -> tuple[bool, str]:
            master = self._scene.watch.master()
            if master is not node:
                with contextlib.suppress(TickwheelError):  # it is asked again
                    await self.cluster.client().admin.transfer(node.node_id)
            return master is node, f"{master.node_id if master else 'nobody'} leads"

        await self.expect(f"{node.node_id} becomes master by a handover", look, HANDOVER_S)

    def clocks_agree(self, holds: bool) -> None:
        """Say whether a majority of the clocks can agree. While none can, a master that does not serve is no broken
        promise."""
        if holds != self._agree:
            self._agree = holds
            self._scene.history.write("agreement", holds=holds)

    async def flows(self, what: str, seconds: float, *, delivers: bool = True) -> None:
        """Expect for `seconds` that messages are accepted. Due ones are delivered; with `delivers` False none is."""
        from_ms = self._scene.time.now_ms()
        await asyncio.sleep(seconds)
        self.stretches.append(Stretch(what, from_ms, self._scene.time.now_ms(), delivers))

    # -- expecting

    async def expect(self, what: str, look: Look, within_s: float = WITHIN_S) -> None:
        """Expect that `look` holds soon."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while True:
            holds, seen = await look()
            if holds or loop.time() > end_s:
                break
            await asyncio.sleep(LOOK_S)
        self.checks.append(Check(self._scene.time.now_ms(), what, holds, seen))

    async def _each(
        self,
        what: str,
        nodes: Iterable[LocalNode],
        holds: Callable[[admin_pb2.NodeStatus], bool],
        seen: Callable[[admin_pb2.NodeStatus], str],
        within_s: float = WITHIN_S,
    ) -> None:
        """Expect this of the fresh statuses of these nodes."""
        asked = list(nodes)

        async def look() -> tuple[bool, str]:
            heard = [(node.node_id, self._scene.watch.heard(node)) for node in asked]
            told = ", ".join(f"{name} {'silent' if found is None else seen(found[0])}" for name, found in heard)
            return all(found is not None and holds(found[0]) for _, found in heard), told

        await self.expect(what, look, within_s)

    async def state_is(self, state: str, nodes: Iterable[LocalNode] | None = None, within_s: float = WITHIN_S) -> None:
        """Status: how the clocks' agreement stands on these nodes, or on all."""
        value = admin_pb2.ClockState.Value(f"CLOCK_{state}")

        def seen(status: admin_pb2.NodeStatus) -> str:
            return admin_pb2.ClockState.Name(status.clock_state).removeprefix("CLOCK_")

        chosen = self.nodes if nodes is None else list(nodes)
        await self._each(f"status: {state}", chosen, lambda status: status.clock_state == value, seen, within_s)
        for node in chosen:
            await self.metric_is(node, "tickwheel_clock_state", {"state": state.lower()}, 1.0, 0.0)

    async def serves(self, *, reason: str = "") -> None:
        """Status of the master, whoever leads by now: it serves; or with a reason, it waits for a time to go by and
        says why, and its health sends consumers away while producers may come."""
        wanted = admin_pb2.NODE_WITHOUT_TIME if reason else admin_pb2.NODE_SERVING
        name = admin_pb2.NodeState.Name(wanted).removeprefix("NODE_")

        async def look() -> tuple[bool, str]:
            master = self._scene.watch.master()
            found = None if master is None else self._scene.watch.heard(master)
            if master is None or found is None:
                return False, "no master"
            status, _ = found
            shown = f"{admin_pb2.NodeState.Name(status.state).removeprefix('NODE_')} {status.state_reason}".strip()
            if status.state != wanted or reason not in status.state_reason:
                return False, f"{master.node_id} {shown}"
            for service, healthy in (("Scheduler", "SERVING"), ("Consumer", "NOT_SERVING" if reason else "SERVING")):
                if (told := await _health(master, service)) != healthy:
                    return False, f"{master.node_id} {shown}, health of {service}: {told}"
            return True, f"{master.node_id} {shown}"

        await self.expect(f"status and health of the master: {name} {reason}".strip(), look, HANDOVER_S)

    async def skew_is_told(self, node: LocalNode, by_ms: float) -> None:
        """Every node shows how far this one's wall clock is off the cluster's time, and warns of it."""
        for teller in self.nodes:
            await self._skew_is(teller, node, by_ms)
        labels = {"peer": node.node_id}
        master = await self.master()
        await self.metric_is(master, "tickwheel_clock_skew_seconds", labels, by_ms / 1_000, SKEW_SLACK_MS / 1_000)
        await self.logged(self.nodes, "warning", WARNED, peer=node.node_id)

    async def _skew_is(self, teller: LocalNode, node: LocalNode, by_ms: float) -> None:
        def skew(status: admin_pb2.NodeStatus) -> tuple[float, float]:
            if status.node_id == node.node_id:
                return status.clock_offset_ms, status.clock_error_ms
            peer = next((peer for peer in status.peers if peer.node_id == node.node_id), admin_pb2.PeerStatus())
            return peer.clock_offset_ms, peer.clock_error_ms

        def holds(status: admin_pb2.NodeStatus) -> bool:
            offset_ms, error_ms = skew(status)
            return abs(offset_ms - by_ms) <= error_ms + SKEW_SLACK_MS

        what = f"status of {teller.node_id}: the clock of {node.node_id} is off by {by_ms:+,.0f} ms"
        await self._each(what, [teller], holds, lambda status: f"{skew(status)[0]:+,.0f} ms")

    async def status_is(self, what: str, node: LocalNode, field: str, low: float, high: float) -> None:
        """A field of its status, a number, is in these bounds."""
        value = attrgetter(field)
        text = f"status of {node.node_id}: {what} from {low:,.0f} to {high:,.0f}"
        await self._each(text, [node], lambda status: low <= value(status) <= high, lambda s: f"{value(s):,.0f}")

    async def metric_is(self, node: LocalNode, name: str, labels: dict[str, str], value: float, slack: float) -> None:
        """A number of its metrics page is that, about."""
        told = ", ".join(f'{key}="{text}"' for key, text in labels.items())
        shown = f"{name}{{{told}}}" if told else name

        async def look() -> tuple[bool, str]:
            try:
                page = await asyncio.to_thread(_fetched, f"http://{node.metrics_address}/metrics")
            except OSError as error:
                return False, str(error)
            found = value_of(page, name, labels)
            return found is not None and abs(found - value) <= slack, "none" if found is None else f"{found:g}"

        await self.expect(f"metrics of {node.node_id}: {shown} is {value:g}", look)

    async def logged(self, nodes: Iterable[LocalNode], level: str, event: str, **fields: object) -> None:
        """Each of these nodes has logged it since the last fault began or ended."""
        asked = list(nodes)
        told = " ".join([event, *(f"{name}={value}" for name, value in fields.items())])

        async def look() -> tuple[bool, str]:
            missing = [
                node.node_id
                for node in asked
                if not any(
                    line.get("level") == level and line.get("event") == event and fields.items() <= line.items()
                    for line in self._lines(node)
                )
            ]
            return not missing, f"not by {', '.join(missing)}" if missing else "by all"

        names = ", ".join(node.node_id for node in asked)
        await self.expect(f"log of {names}, {level}: {told}", look)

    def _lines(self, node: LocalNode) -> list[dict[str, object]]:
        data = node.log_file.read_bytes()[self._log_bytes.get(node.node_id, 0) :]
        return [json.loads(line) for line in data.splitlines() if line.startswith(b"{") and line.endswith(b"}")]

    async def time_is_right(self, node: LocalNode) -> None:
        """Expect its time to be the run's, within the error that it shows and the time to hear it."""

        async def look() -> tuple[bool, str]:
            found = self._scene.watch.heard(node)
            if found is None:
                return False, "silent"
            status, ahead_ms = found
            return -HEARD_MS <= ahead_ms <= status.clock_error_ms + 5.0, f"{ahead_ms:+,.0f} ms"

        await self.expect(f"the time of {node.node_id} is the true one", look)


async def _health(node: LocalNode, service: str) -> str:
    """What the node's health says of a service, or how the question failed."""
    async with grpc.aio.insecure_channel(node.client_address) as channel:
        request = health_pb2.HealthCheckRequest(service=f"tickwheel.v1.{service}")
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=ASK_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def _fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ASK_S) as answer:
        text: str = answer.read().decode("utf-8")
        return text


def value_of(page: str, name: str, labels: dict[str, str]) -> float | None:
    """One number of a metrics page; None if it is not there. Pure."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None
