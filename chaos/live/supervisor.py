"""One run from its first process to its verdict: nodes, load, faults; heal, drain, digests, verdict.

Owns the run's directory and what is left there: `supervisor.jsonl` and `workload.jsonl` (the history, from which
`verdict.py` alone judges), the nodes' directories and logs. Records of its own:

| k | fields |
|---|---|
| run | seed, seconds, nodes, families, rate, netns, planned (number of faults), case (of a script, else empty) |
| load | the load has begun; faults count their times from here |
| heal | the last fault has ended |
| healed | seconds until one node led and all followed; absent if that took longer than HEAL_S |
| drain | no more is scheduled |
| drained | code of the workload's process |
| digest | node, applied, digest, parts |
| topics | names and dispatched counts of all topics: dead letters have one of their own |
| done | the end |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.chaos.live.cluster import ChaosCluster, within
from tickwheel.chaos.live.history import HistoryWriter, TrueTime, anchor_now, read_history
from tickwheel.chaos.live.injector import Injector
from tickwheel.chaos.live.knobs import read_json
from tickwheel.chaos.live.plan import Fault, plan
from tickwheel.chaos.live.switch import Switch
from tickwheel.chaos.live.verdict import Verdict, judge
from tickwheel.chaos.live.watch import Watch
from tickwheel.client import AsyncClient, TickwheelError
from tickwheel.node.made_files import LocalClusterError

HEAL_S = 30.0
AFTER_HEAL_S = 2.0
"""How long the load continues after the heal, to show that the cluster works."""
LOAD_S = 30.0
"""The load's first acknowledgement comes within this."""
DRAINED_S = 660.0
"""Above what the workload allows itself."""
DIGESTS_S = 20.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run. Equal options give an equal plan."""

    directory: Path
    seed: int
    seconds: float
    families: Sequence[str]
    nodes: int = 3
    rate: float = 500.0
    ahead_ms: int = 6_000
    """Messages are due up to so far ahead."""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Laid over the configuration of every node."""
    wrong_ms: int = 0
    """All nodes' clocks are wrong by this much from their first start; load and verdict go by that time."""
    case: str = ""
    """Name of the script that is played instead of a plan."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A run under load, for a script that brings about the faults instead of a plan."""

    cluster: ChaosCluster
    watch: Watch
    injector: Injector
    history: HistoryWriter
    time: TrueTime


Script = Callable[[Scene], Awaitable[None]]


class RunFailed(Exception):
    """The run itself could not be carried out; this says nothing about the nodes."""


class Supervisor:
    """Use once: `run`."""

    def __init__(
        self, options: RunOptions, told: Callable[[str], None] = lambda line: None, switch: Switch | None = None
    ) -> None:
        """`told` gets a line for people whenever something happens. With a `switch` the nodes live in its namespaces,
        without one there are proxies between them."""
        self._options = options
        self._told = told
        self._packets = switch is not None
        self._directory = options.directory.resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._time = TrueTime(anchor_now() + options.wrong_ms)
        self._history = HistoryWriter(self._directory / "supervisor.jsonl", self._time)
        self._cluster = ChaosCluster(
            self._directory / "nodes", options.nodes, options.seed, options.config, switch=switch
        )
        self._watch = Watch(self._cluster, self._history, self._time)
        self._injector = Injector(self._cluster, self._watch, self._history, told)
        self._load: subprocess.Popen[bytes] | None = None

    async def run(self, faults: Sequence[Fault] | None = None, script: Script | None = None) -> Verdict:
        """The whole run, with the faults of its seed or these, or with a script, which then takes the time that it
        takes. Raises RunFailed if it could not be carried out."""
        options = self._options
        if script is not None:
            faults = ()
        elif faults is None:
            faults = plan(options.seed, options.seconds, options.families, packets=self._packets)
        self._history.write(
            "run",
            seed=options.seed,
            seconds=options.seconds,
            nodes=options.nodes,
            families=list(options.families),
            rate=options.rate,
            netns=self._packets,
            planned=len(faults),
            case=options.case,
        )
        if options.wrong_ms:
            for node in self._cluster.nodes:
                self._cluster.turn(node, offset_ms=options.wrong_ms)
        alive: asyncio.Task[None] | None = None
        try:
            await self._cluster.start()
            self._watch.start()
            await self._begin_load()
            alive = asyncio.create_task(self._injector.keep_alive())
            self._history.write("load")
            if script is not None:
                await script(Scene(self._cluster, self._watch, self._injector, self._history, self._time))
            else:
                self._told(f"load of {options.rate:g} messages/s, {len(faults)} faults in {options.seconds:g} s")
                end_s = asyncio.get_running_loop().time() + options.seconds
                await self._injector.run(faults)
                await asyncio.sleep(max(0.0, end_s - asyncio.get_running_loop().time()))
            await self._heal()
            await self._drain()
            await self._digests()
        except LocalClusterError as error:
            raise RunFailed(str(error)) from error
        finally:
            if alive is not None:
                alive.cancel()
                await asyncio.gather(alive, return_exceptions=True)
            await self._watch.stop()
            if self._load is not None and self._load.poll() is None:
                self._load.kill()
                self._load.wait()
            self._history.write("done")
            self._history.close()
            await self._cluster.stop()
        self._told("judging")
        return judge(read_history([self._directory / "supervisor.jsonl", self._directory / "workload.jsonl"]))

    # -- the load

    async def _begin_load(self) -> None:
        module = "tickwheel.chaos.live.workload"
        command = [sys.executable, "-P", "-m", module, "--addresses", ",".join(self._cluster.addresses)]
        command += ["--directory", str(self._directory), "--anchor", repr(self._time.anchor_ms)]
        command += ["--seed", str(self._options.seed), "--rate", repr(self._options.rate)]
        command += ["--ahead-ms", str(self._options.ahead_ms)]
        command += ["--parent", str(os.getpid())]
        self._load = _begin_process(command, self._directory / "workload.log")
        end = asyncio.get_running_loop().time() + LOAD_S
        while not read_json(self._directory / "progress.json").get("got"):
            if self._load.poll() is not None or asyncio.get_running_loop().time() > end:
                raise RunFailed(f"the workload did not begin; see {self._directory / 'workload.log'}")
            await asyncio.sleep(LOOK_S)

    # -- the end

    async def _heal(self) -> None:
        await self._injector.heal()
        for node in self._cluster.nodes:
            self._cluster.resume(node)
            self._cluster.start_node(node)
        self._cluster.network.heal_all()
        self._history.write("heal")
        began_s = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError, LocalClusterError):  # what is missing is for the verdict to say
            async with asyncio.timeout(HEAL_S):
                await self._cluster.wait_ready(all_serve=False)
                while not await self._all_follow():  # noqa: ASYNC110  # only asking tells
                    await asyncio.sleep(LOOK_S)
                self._history.write("healed", seconds=round(asyncio.get_running_loop().time() - began_s, 3))
        await asyncio.sleep(AFTER_HEAL_S)

    async def _all_follow(self) -> bool:
        """Whether every node runs and names the same master."""
        answers = await self._cluster.statuses()
        masters = {getattr(status, "master_id", "") for status in answers.values()}
        return len(masters) == 1 and "" not in masters and not self._cluster.died()

    async def _drain(self) -> None:
        load = self._load
        assert load is not None
        self._history.write("drain")
        self._told("draining")
        if load.poll() is None:
            load.send_signal(signal.SIGTERM)
        await within(DRAINED_S, lambda: load.poll() is not None)  # if not, the verdict sees no exit code
        self._history.write("drained", code=load.poll())

    async def _digests(self) -> None:
        """Until all nodes stand at one index, or time is up; then what each of them says."""
        end = asyncio.get_running_loop().time() + DIGESTS_S
        async with AsyncClient([node.client_address for node in self._cluster.nodes]) as client:
            while True:
                found = {}
                for node in self._cluster.nodes:
                    with contextlib.suppress(TickwheelError):
                        found[node.node_id] = await client.admin.digest(node.client_address)
                equal = len({digest.applied_index for digest in found.values()}) == 1
                if (equal and len(found) == len(self._cluster.nodes)) or asyncio.get_running_loop().time() > end:
                    break
                await asyncio.sleep(LOOK_S)
            for node_id, digest in found.items():
                parts = {name: part.hex() for name, part in sorted(digest.parts.items())}
                self._history.write(
                    "digest", node=node_id, applied=digest.applied_index, digest=digest.digest.hex(), parts=parts
                )
            with contextlib.suppress(TickwheelError):
                topics = await client.admin.topics()
                self._history.write("topics", topics={topic.name: topic.dispatched for topic in topics})


def _begin_process(command: list[str], log_file: Path) -> subprocess.Popen[bytes]:
    with log_file.open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
