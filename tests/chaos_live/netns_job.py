"""A process of its own that moves into a network namespace, which a test's process must not: a short run between them.

Arguments: a directory, and `run` (prints the verdict as JSON), `failover` (one loss of the master, prints the figures)
or `wait` (brings the nodes up, prints one line of JSON about them and waits to be killed). Exit code 3, with the reason
on standard error: this machine gives no namespaces.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.losses import Kind, measure
from tickwheel.chaos.live.losses_report import as_json
from tickwheel.chaos.live.namespaces import NamespacesRefused
from tickwheel.chaos.live.plan import ANY, MASTER, Fault
from tickwheel.chaos.live.supervisor import RunOptions, Supervisor
from tickwheel.chaos.live.switch import Switch, switch_for

SECONDS = 6.0
FAULTS = [
    Fault(1, "master-alone", MASTER, 2.2, 1.2, 1),
    Fault(2, "loss", ANY, 2.4, 2.0, 2),
    Fault(3, "cut", ANY, 4.6, 0.4, 3),
]


def _run(directory: Path) -> None:
    options = RunOptions(directory, 1, SECONDS, ("partition", "net"), rate=200.0, ahead_ms=1_500, netns=True)
    supervisor = Supervisor(options)
    supervisor.move_in()
    print(json.dumps(uvloop.run(supervisor.run(FAULTS)).as_json()))


def _failover(directory: Path) -> None:
    switch = switch_for(3, 1)
    switch.move_in()
    print(json.dumps(as_json(uvloop.run(measure(directory, Kind.DROP, 1, 1_000.0, switch=switch)))))


def _wait(directory: Path) -> None:
    switch = Switch(["n1"], 1)
    switch.move_in()
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
        {"run": _run, "failover": _failover, "wait": _wait}[sys.argv[2]](Path(sys.argv[1]))
    except NamespacesRefused as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from error
