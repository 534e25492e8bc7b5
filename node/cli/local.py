"""Commands that run a cluster on this machine: up and demo."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tickwheel.node.cli.contexts import ADDRESSES_FALLBACK
from tickwheel.node.cli.interrupts import importing
from tickwheel.node.cli.options import Asked, Commands
from tickwheel.node.cli.output import err, fail, one_line, out, print_json, print_table, table
from tickwheel.node.local_cluster import STOP_S, LocalCluster, LocalNode, on_end, run_to_end, undisturbed
from tickwheel.node.made_files import LocalClusterError, MadeFiles

local_app = Commands(ask_cluster=False)

FOLLOW_PERIOD_S = 0.2
PORT_FIRST = 7700
PORT_MAX = 65_535


@local_app.command()
def up(
    nodes: Annotated[
        int,
        typer.Option("--nodes", "-n", min=1, max=9, help="Number of node processes. One is enough for development."),
    ] = 3,
    data: Annotated[Path, typer.Option(help="Directory of the cluster. Existing data is used again.")] = Path(
        "tickwheel-data"
    ),
    port: Annotated[
        int, typer.Option(min=0, max=PORT_MAX, help="Client port of the first node. 0: any free port.")
    ] = PORT_FIRST,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="First remove what an earlier `up` made in the directory.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not print the nodes' logs, nor what they do while they start.")
    ] = False,
    node: Annotated[
        str, typer.Option("--node", help="Start only this node, which has ended, beside the others that still run.")
    ] = "",
) -> None:
    """Run a cluster on this machine until Ctrl-C; a second one kills it. Print its addresses when it is up.

    If one node has ended, `tickwheel up --node n2` in another terminal starts it again.
    """
    if node:
        if fresh:
            raise typer.BadParameter("--fresh and --node do not go together")
        ended = _start_again(data, node, quiet=quiet)
        raise typer.Exit(ended)
    if port > PORT_MAX - nodes + 1:
        raise typer.BadParameter(f"{port}: {nodes} nodes need {nodes} ports, the last at most {PORT_MAX}")
    made = MadeFiles(data)
    with made.lock():
        if (fresh or made.unfinished()) and (left := made.remove()):
            err.print(f"{data}: left alone: {', '.join(left)}", soft_wrap=True)
        cluster = LocalCluster(data, nodes, client_port=port)
        cluster.check_ports()
        ended = asyncio.run(_run_until_told(cluster, quiet=quiet))
    if ended:
        raise typer.Exit(1)


def _start_again(data: Path, node_id: str, *, quiet: bool) -> bool:
    """Run one node of a cluster that was made here. Returns whether it ended by itself. Raises LocalClusterError."""
    known = MadeFiles(data).names()
    if node_id not in known:
        there = f"there are {', '.join(known)}" if known else "no cluster was made there"
        raise LocalClusterError(f"{data} has no node {node_id}: {there}")
    cluster = LocalCluster(data)
    cluster.check_ports(only=node_id)
    return asyncio.run(_run_until_told(cluster, quiet=quiet, only=node_id))


async def _run_until_told(cluster: LocalCluster, *, quiet: bool, only: str = "") -> bool:
    """Run the cluster, or `only` this node of it, until a signal comes or no node is left. A second signal kills what
    has not stopped. Returns whether a node ended by itself, or not as it should when it was told to stop.

    Raises typer.Abort if the signal came before the cluster was ready.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, signalled)
    on_end(signalled)

    def told(text: str) -> None:
        if not (quiet or Asked.json):
            err.print(f"{loop.time() - begun_s:5.1f} s  {text}", style="dim", soft_wrap=True)

    begun_s = loop.time()
    starting = asyncio.ensure_future(cluster.bring_up(told, only))
    stopping = asyncio.ensure_future(stop.wait())
    ended = [False]
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise typer.Abort
        starting.result()
        run = [node for node in cluster.nodes if not only or node.node_id == only]
        _show(cluster, run)
        ended = await asyncio.gather(*(_follow(node, stop, quiet or Asked.json) for node in run))
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        stopped = await _stop(cluster, hurry)
    return any(ended) or not stopped


async def _stop(cluster: LocalCluster, hurry: asyncio.Event) -> bool:
    """Stop the nodes, and say of each that did not end as it should what became of it; there is one: False."""
    running = [node for node in cluster.nodes if node.running]
    if not Asked.json:
        err.print("Stopping ...")
    stopping, hurried = asyncio.ensure_future(cluster.stop()), asyncio.ensure_future(hurry.wait())
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    hurried.cancel()
    await asyncio.gather(stopping, hurried, return_exceptions=True)
    killed = [] if stopping.cancelled() else stopping.result()
    good = True
    for node in running:
        code = node.process.returncode if node.process is not None else 0
        if code in (0, -signal.SIGTERM):  # so ends one that has just been started
            continue
        good = False
        facts, reason, what = {"node_id": node.node_id}, "NODE_KILLED", "was killed before it had stopped"
        if code != -signal.SIGKILL:
            reason, what = "NODE_ENDED", f"ended with code {code}; see {node.log_file}"
        elif node in killed:
            what = f"was killed: it did not stop within {STOP_S:g} s"
        fail(f"node {node.node_id} {what}", reason, facts)
    return good


def _address_option(cluster: LocalCluster) -> str:
    """The option by which other commands find the cluster; empty if a node has the default address."""
    return "" if ADDRESSES_FALLBACK in cluster.addresses else f" --addresses {','.join(cluster.addresses)}"


def _show(cluster: LocalCluster, run: list[LocalNode]) -> None:
    """`run`: the nodes that this command has started."""
    if Asked.json:
        print_json(
            {
                "addresses": cluster.addresses,
                "nodes": [
                    {
                        "node_id": node.node_id,
                        "client_address": node.client_address,
                        "peer_address": node.peer_address,
                        "metrics_address": node.metrics_address,
                        "log": str(node.log_file),
                        "pid": node.pid,
                    }
                    for node in run
                ],
            }
        )
        return
    rows = [(node.node_id, node.client_address, f"http://{node.metrics_address}/metrics", node.pid) for node in run]
    print_table("", ("node", "clients", "metrics", "process"), rows)
    place = cluster.directory if cluster.directory.is_absolute() else f"./{cluster.directory}"
    out.print(
        f"\nReady. Try:\n  tickwheel schedule hello world --delay 5s{_address_option(cluster)}\n"
        f"Data is in {place}, the log of each node in its folder there. Ctrl-C stops it.\n",
        soft_wrap=True,
    )


async def _follow(node: LocalNode, stop: asyncio.Event, quiet: bool) -> bool:
    """Print new lines of the node's log until `stop` or its end. Returns whether it has ended."""
    place = node.log_file.stat().st_size
    while not stop.is_set():
        if not node.running:
            fail(f"node {node.node_id} has ended; see {node.log_file}", "NODE_ENDED", {"node_id": node.node_id})
            return True
        if not quiet and node.log_file.stat().st_size > place:
            with node.log_file.open("rb") as log:
                log.seek(place)
                new = log.read()
            whole = new.rfind(b"\n") + 1
            place += whole
            for line in new[:whole].decode(errors="replace").splitlines():
                err.print(f"{node.node_id}  {one_line(_sentence(line))}", soft_wrap=True)
        try:
            await asyncio.wait_for(stop.wait(), FOLLOW_PERIOD_S)
        except TimeoutError:
            continue
    return False


def _sentence(line: str) -> str:
    try:
        record = json.loads(line)
        event = record.pop("event")
    except (ValueError, KeyError, AttributeError, TypeError):
        return line
    hidden = {"timestamp", "level", "node_id", "cluster_id"}
    return " ".join([str(event), *(f"{name}={value}" for name, value in record.items() if name not in hidden)])


@local_app.command()
def demo(
    month: Annotated[int, typer.Option(min=1, max=12, help="Month of 2013.")] = 1,
    seconds: Annotated[float, typer.Option(min=5, max=600, help="Play the month in this many seconds.")] = 28.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the data directory.")] = False,
) -> None:
    """Play a month of real flights on three nodes and kill the master half way.

    Exit code 1 if anything was lost or early.
    """
    with importing():
        from tickwheel.node.demo.flights import FlightsMissingError
        from tickwheel.node.demo.run import Demo

    directory = Path(tempfile.mkdtemp(prefix="tickwheel-demo-"))
    run = Demo(directory, month=month, span_s=seconds, console=err, live=err.is_terminal and not Asked.json)
    started = time.monotonic()
    try:
        tally = run_to_end(run.run())
    except FlightsMissingError as error:
        fail(str(error), "PACKAGE_MISSING", {})
        raise typer.Exit(2) from None
    finally:
        if not keep:
            with undisturbed():
                shutil.rmtree(directory, ignore_errors=True)
    events = run.events
    report = {
        "scheduled": tally.scheduled,
        "delivered": tally.delivered,
        "lost": tally.lost,
        "early": tally.early,
        "invented": tally.unknown,
        "duplicates": tally.duplicates,
        "lateness_p50_ms": round(tally.lateness(50), 1),
        "lateness_p99_ms": round(tally.lateness(99), 1),
        "without_master_ms": events.without_master_ms,
        "first_delivery_after_kill_ms": events.first_delivery_ms,
        "killed": events.killed,
        "new_master": events.new_master,
        "killed_node_is_back": events.restarted,
        "seconds": round(time.monotonic() - started, 1),
    }
    good = tally.good and events.restarted
    if Asked.json:
        print_json({**report, "good": good})
    else:
        out.print(table("", ("", ""), [(name.replace("_", " "), value) for name, value in report.items()]))
        if good:
            out.print("Nothing lost, nothing early.", style="bold green")
            if tally.duplicates:
                repeated = "message came" if tally.duplicates == 1 else "messages came"
                said = f"{tally.duplicates:,} {repeated} again: the killed master had just handed them out"
                out.print(f"{said} (docs/PROMISES.md, P5).", style="dim", soft_wrap=True)
        else:
            out.print("FAILED", style="bold red")
    if not good:
        raise typer.Exit(1)
