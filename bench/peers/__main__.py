"""`make bench-peers`: tickwheel beside NATS JetStream, Redis and RocketMQ, one after the other on this machine.

Each system runs in a fresh directory, with its load program beside it: paced, as fast as it goes, and scheduling alone.
Prints one table; each run is a line of bench/results/peers.jsonl. A system that cannot be fetched or fails has a line
in the table that says so, and the exit code is 3 or 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tickwheel.bench.load import CALLERS, PAYLOAD_BYTES
from tickwheel.bench.peers import tools
from tickwheel.bench.peers.outcome import (
    FULL,
    PACED,
    SCHEDULE,
    Outcome,
    ResultError,
    Spent,
    outcome,
    record,
    table,
    warnings,
)
from tickwheel.bench.peers.systems import Load, Nats, Redis, Rocketmq, System, Tickwheel
from tickwheel.bench.processor import machine_s, processor_s
from tickwheel.node.local_cluster import run_to_end

RESULTS = Path("bench/results/peers.jsonl")
EXIT_FAILED, EXIT_MISSING = 1, 3
LINE_BYTES_MAX = 64 << 20
"""A result counts messages by millisecond of lateness."""
OVERHEAD_S = 150.0
"""Time that a load program may take beyond the seconds of its load: start, warm-up, two times up to 40 s to drain."""
QUICK_S, QUICK_SYSTEMS = 2.0, ("tickwheel-columns",)


@dataclass(frozen=True, slots=True)
class Contender:
    """A system with one way of sending."""

    name: str
    label: str
    system: type[System]
    mode: str
    window: int


CONTENDERS = {
    one.name: one
    for one in (
        Contender("tickwheel-columns", "tickwheel, batches of columns", Tickwheel, "columns", 0),
        Contender("tickwheel-rows", "tickwheel, `producer.send`", Tickwheel, "rows", 0),
        Contender("tickwheel-calls", f"tickwheel, {CALLERS} callers of one Python client", Tickwheel, "unary", CALLERS),
        Contender("tickwheel-go-calls", f"tickwheel, {CALLERS} callers in Go", Tickwheel, "go-unary", CALLERS),
        Contender("tickwheel-go-stream", "tickwheel, Go stream, one a batch", Tickwheel, "go-stream", 2_000),
        Contender("tickwheel-go-rows", "tickwheel, Go stream, 1,000 a batch", Tickwheel, "go-rows", 16),
        Contender("nats", "NATS JetStream R3, 2,000 under way", Nats, "async", 2_000),
        Contender("redis", "Redis, one server, pipelines of 1,000", Redis, "pipelines", 1_000),
        Contender("rocketmq", "RocketMQ, one broker, 2,000 under way", Rocketmq, "async", 2_000),
    )
}


def chosen(words: str) -> list[Contender]:
    """The systems that a list of names selects; a name also selects those that begin with it. Raises ValueError."""
    found: dict[str, Contender] = {}
    for word in words.replace(",", " ").split():
        named = {name: one for name, one in CONTENDERS.items() if name == word or name.startswith(f"{word}-")}
        if not named:
            raise ValueError(f"SYSTEMS: {word!r}: one of tickwheel, {', '.join(CONTENDERS)}")
        found |= named
    return list(found.values())


async def measure(contender: Contender, system: System, case: str, load: Load) -> Outcome:
    """Run the load program once, and count what is spent between its lines BEGIN and END. Raises ResultError."""
    elections = await system.elections()
    process = await asyncio.create_subprocess_exec(
        *await system.command(load, contender.window),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    complaints = asyncio.create_task(process.stderr.read())
    seen: dict[str, tuple[float, float, float, float]] = {}
    result = ""
    try:
        async with asyncio.timeout(load.seconds + OVERHEAD_S):
            async for line in process.stdout:
                word, _, rest = line.decode().strip().partition(" ")
                if word in ("BEGIN", "END"):
                    spent = processor_s(system.pids()), processor_s([process.pid])
                    seen[word] = time.perf_counter(), *spent, machine_s()
                    process.stdin.write(b"\n")
                elif word == "RESULT":
                    result = rest
            code = await process.wait()
    except TimeoutError:
        raise ResultError(f"the load program was not done after {load.seconds + OVERHEAD_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        said = " ".join((await complaints).decode(errors="replace").split())
        await process.wait()
    if code or not result or len(seen) != 2:
        raise ResultError(f"{case}: the load program ended with code {code}: {said[-600:]}")
    if said:
        print(f"{contender.name}, {case}: {said[:600]}", file=sys.stderr)
    wall_s, servers_s, load_s, busy_s = (end - begin for begin, end in zip(seen["BEGIN"], seen["END"], strict=True))
    if elections is not None:
        elections = (await system.elections() or elections) - elections
    return outcome(contender.name, case, load.rate, result, Spent(wall_s, servers_s, load_s, busy_s, elections))


@contextlib.asynccontextmanager
async def serving(contender: Contender) -> AsyncIterator[tuple[System, str]]:
    """The system, started in a fresh directory, and its version. Stops it and removes the directory at the end."""
    tools.BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="run-", dir=tools.BUILD) as directory:
        system = contender.system(Path(directory), contender.mode)
        version = await asyncio.to_thread(system.prepare)
        try:
            await system.start()
            yield system, version
        finally:
            await system.stop()


async def run(contender: Contender, seconds: float, rate: float, told: Callable[[Outcome, str], None]) -> None:
    """All cases against one start; tells each outcome, with the system's version, as soon as it is known.

    Raises MissingError, StartError, ResultError.
    """
    loads = {
        PACED: Load("deliver", seconds, rate, PAYLOAD_BYTES),
        FULL: Load("deliver", seconds, 0.0, PAYLOAD_BYTES),
        SCHEDULE: Load("schedule", seconds, 0.0, PAYLOAD_BYTES),
    }
    async with serving(contender) as (system, version):
        for case, load in loads.items():
            told(await measure(contender, system, case, load), version)


def settings(version: str, seconds: float) -> dict[str, object]:
    """The conditions under which a line was measured."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "version": version,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "payload_bytes": PAYLOAD_BYTES,
        "seconds": seconds,
    }


def main(words: list[str] | None = None) -> int:
    """Measure what was asked for; see EXIT_FAILED and EXIT_MISSING."""
    parser = argparse.ArgumentParser(prog="tickwheel.bench.peers", description=__doc__)
    parser.add_argument("--systems", default="", help=f"all by default; of {', '.join(CONTENDERS)}, or how they begin")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each load is sent")
    parser.add_argument("--rate", type=float, default=5_000.0, help="messages a second of the paced load")
    parser.add_argument("--runs", type=int, default=3, help="how often all are measured, in turn")
    parser.add_argument("--quick", action="store_true", help="one run of seconds, tickwheel alone; no lines are kept")
    given = parser.parse_args(words)
    try:
        contenders = chosen(given.systems or " ".join(QUICK_SYSTEMS if given.quick else CONTENDERS))
    except ValueError as error:
        parser.error(str(error))
    if given.seconds <= 0 or given.rate <= 0 or given.runs < 1:
        parser.error("seconds, rate and runs must be more than 0")
    seconds, runs = (min(QUICK_S, given.seconds), 1) if given.quick else (given.seconds, given.runs)
    outcomes: list[Outcome] = []
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    failed: dict[str, str] = {}

    def told(one: Outcome, version: str) -> None:
        outcomes.append(one)
        versions[CONTENDERS[one.system].system.name] = version
        if not given.quick:
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a", encoding="utf-8") as lines:
                lines.write(f"{record(one, settings(version, seconds))}\n")

    for number in range(runs):
        for contender in contenders:
            if contender.name in missing:
                continue
            print(f"{contender.name}, run {number + 1} of {runs} ...", flush=True)
            try:
                run_to_end(run(contender, seconds, given.rate, told))
            except tools.MissingError as error:
                missing[contender.name] = str(error)
                print(f"missing: {error}", file=sys.stderr)
            except Exception as error:  # the others still run; the exit code tells
                failed[contender.name] = f"run {number + 1}: {error}"
                traceback.print_exception(error)
    rows = [(one.name, one.label) for one in contenders]
    print(f"\n{table(rows, outcomes, failed | missing, given.rate)}\n")
    for system in dict.fromkeys(one.system for one in contenders):
        print(f"{system.name} {versions.get(system.name, '')}: acknowledged means {system.acknowledged}")
    for text in [*warnings(outcomes), *(f"{name} failed, {text}" for name, text in failed.items())]:
        print(text)
    return EXIT_FAILED if failed else EXIT_MISSING if missing else 0


if __name__ == "__main__":
    sys.exit(main())
