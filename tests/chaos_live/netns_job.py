"""A process of its own that moves into a network namespace, which a test's process must not: a short run between them.

Arguments: a directory, and `run` (prints the verdict as JSON), `failover` (one loss of the master, prints the figures),
`silence` (a slave's and the clients' packets are lost for a while, prints for how many seconds after that somebody
still hears nothing) or `wait` (brings the nodes up, prints one line of JSON about them and waits to be killed). Exit
code 3, with the reason on standard error: this machine gives no namespaces.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import uvloop

from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.losses import Kind, measure
from tickwheel.chaos.live.losses_report import as_json
from tickwheel.chaos.live.namespaces import NamespacesRefused
from tickwheel.chaos.live.network import CLIENTS, Spoiling
from tickwheel.chaos.live.plan import ANY, MASTER, Fault
from tickwheel.chaos.live.supervisor import RunOptions, Supervisor
from tickwheel.chaos.live.switch import switch_for
from tickwheel.client import NodeStatus

SECONDS = 6.0
HOUR_MS = 3_600_000
SILENCE_S = 7.0
"""By now the kernel repeats what was lost every six seconds."""
FAR_MS = 75.0
"""Each way between two nodes."""
FAULTS = [
    Fault(1, "master-alone", MASTER, 2.2, 1.2, 1),
    Fault(2, "loss", ANY, 2.4, 2.0, 2),
    Fault(3, "cut", ANY, 4.6, 0.4, 3),
]


def _run(directory: Path) -> None:
    options = RunOptions(directory, 1, SECONDS, ("partition", "net"), rate=200.0, ahead_ms=1_500)
    print(json.dumps(uvloop.run(Supervisor(options, switch=switch_for(3, 1)).run(FAULTS)).as_json()))


def _failover(directory: Path) -> None:
    print(json.dumps(as_json(uvloop.run(measure(directory, Kind.DROP, 1, 1_000.0, switch=switch_for(3, 1))))))


def _silence(directory: Path) -> None:
    print(json.dumps(uvloop.run(_cut_off(ChaosCluster(directory, 3, 1, switch=switch_for(3, 1))))))


async def _cut_off(cluster: ChaosCluster) -> float:
    """Seconds from the end of the silence until the slave has what came meanwhile, and a client is served. The nodes
    find each other over a far way first."""
    network = cluster.network
    far, silence = Spoiling(delay_ms=FAR_MS), Spoiling(stalled=True)
    everything = network.between(cluster.node_ids, cluster.node_ids)
    network.spoil(everything, far)
    async with cluster, cluster.client() as client:

        async def behind() -> int:
            reached = [
                one.applied_index for one in (await client.admin.statuses()).values() if isinstance(one, NodeStatus)
            ]
            return max(reached) - min(reached) if len(reached) == len(cluster.nodes) else -1

        master = await cluster.master()
        network.heal(everything, far)
        slave = next(node for node in cluster.nodes if node is not master)
        await client.schedule("t", b"before", delay_ms=HOUR_MS)
        while await behind():  # noqa: ASYNC110  # only asking tells
            await asyncio.sleep(0.02)
        ways = network.ways_of(slave.node_id)
        network.spoil(ways, silence)
        await client.schedule("t", b"meanwhile", delay_ms=HOUR_MS)
        assert await behind(), "it was not cut off"
        of_clients = [way for ends, way in network.ways.items() if CLIENTS in ends]
        network.spoil(of_clients, silence)
        asking = asyncio.create_task(client.schedule("t", b"into the silence", delay_ms=HOUR_MS))
        await asyncio.sleep(SILENCE_S)
        network.heal(ways + of_clients, silence)
        began_s = time.monotonic()
        await asyncio.gather(asking, return_exceptions=True)
        await client.schedule("t", b"after", delay_ms=HOUR_MS)
        while await behind():  # noqa: ASYNC110  # only asking tells
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s


def _wait(directory: Path) -> None:
    switch = switch_for(1, 1)
    cluster = ChaosCluster(directory, 1, 1, switch=switch)

    async def up() -> None:
        await cluster.start()
        pids = [node.pid for node in cluster.nodes]
        spaces = [os.stat(space.path).st_ino for space in switch.namespaces.values()]  # noqa: PTH116
        print(json.dumps({"pids": pids, "namespaces": spaces}), flush=True)
        signal.pause()

    uvloop.run(up())


if __name__ == "__main__":
    try:
        {"run": _run, "failover": _failover, "silence": _silence, "wait": _wait}[sys.argv[2]](Path(sys.argv[1]))
    except NamespacesRefused as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from error
