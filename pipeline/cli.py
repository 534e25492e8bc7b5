"""The commands `tickwheel pipeline ...`: bulk load and what belongs to it. See docs/PIPELINE.md.

Spark, Arrow and the client are imported by the commands that need them, so that the others start at once.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.node.cli.options import MadeBy
from tickwheel.pipeline.cli_app import ClusterOptions, Master, OfCluster, OfLoad, OnSpark, app, failed, refusing
from tickwheel.pipeline.cli_cold import cold_app

if TYPE_CHECKING:
    from tickwheel.pipeline.load import Progress

app.add_typer(cold_app, name="cold")

__all__ = ["app"]

_WHEN = "A time like 2026-11-21 or 2026-11-21T10:00 (UTC), or milliseconds since 1970."
NOTHING_NOTED = "{}: these events name no message, so there is nothing to judge (storage.events_bytes_max)"
MS_DIGITS_MIN = 12
"""Milliseconds since 1970 have at least this many digits from 1973 on."""


@app.command()
def build(
    source: Annotated[str, typer.Argument(metavar="IN.parquet", help="Parquet: a path, or a URI that Spark reads.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="New folder for what is built; a path, or file:///.")],
    topic: Annotated[str, typer.Option(help="Topic of all rows, if there is no such column.")] = "",
    slot_ms: Annotated[int, typer.Option(help="Width of a tick of the cluster in ms: 1000, 500, 200 or 100.")] = 1_000,
    on_rejected: Annotated[
        str, typer.Option(help="Rows that cannot be messages: `write` them with reasons to OUT/_rejected, or `fail`.")
    ] = "write",
    tasks: Annotated[int, typer.Option(help="At least this many tasks, if there are that many hours.")] = 8,
    *,
    spark: OnSpark,
) -> None:
    """Turn rows into bundles that a cluster takes over as they are."""
    from tickwheel.pipeline.build import BuildConfig, BuildError, build_parquet
    from tickwheel.pipeline.inputs import InputError
    from tickwheel.pipeline.sink_rows import SchemaError

    with refusing(BuildError, InputError, SchemaError, where=source):
        config = BuildConfig(topic=topic, slot_ms=slot_ms, on_rejected=on_rejected, tasks=tasks)
        with spark.session(quick=True) as session:
            started = time.monotonic()
            made = build_parquet(session, source, out, config)
            seconds = time.monotonic() - started
    print(
        f"{made.units:,} messages in {len(made.bundles)} bundles ({made.bytes / 1e6:,.0f} MB), "
        f"{made.rejected:,} rows rejected; {seconds:.1f} s, {made.units / seconds:,.0f} messages/s"
    )


@app.command()
def load(
    folder: Annotated[str, typer.Argument(metavar="OUT", help="What `build` made; a path, or file:///.")],
    job_id: Annotated[str, typer.Option(help="Names the load; by default it follows from what was built.")] = "",
    *,
    cluster: OfLoad,
) -> None:
    """Load what was built into a running cluster. A repeat continues where it stopped; nothing is loaded twice."""
    from tickwheel.pipeline.load import LoadError
    from tickwheel.pipeline.load import load as load_build
    from tickwheel.pipeline.manifest import ManifestError

    clients = cluster.clients()

    async def go() -> Progress:
        async with clients() as client:
            return await load_build(folder, client, job_id=job_id, told=_tell)

    try:
        done = asyncio.run(go())
    except (LoadError, ManifestError) as error:
        raise failed(str(error)) from None
    sent = sum(done.sent_bytes.values()) / 1e6
    what = f"{done.taken_units:,} messages taken over in {done.taken} bundles"
    print(f"\r{what}; {sent:,.0f} MB sent in {done.seconds:.1f} s")
    for address, reason in done.unreachable.items():
        print(f"{address} was not reached and fetches what it lacks from the others: {reason}", file=sys.stderr)


def _tell(progress: Progress) -> None:
    if sys.stderr.isatty():
        sent = sum(progress.sent_bytes.values()) / 1e6
        text = f"{progress.taken}/{progress.bundles} bundles, {progress.taken_units:,} messages, {sent:,.0f} MB sent"
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


@app.command()
def generate(
    path: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="File to write.")],
    rows: Annotated[int, typer.Option(help="Messages.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="The same seed and options give the same file.")] = 0,
    start_ms: Annotated[int, typer.Option(help="First due time, milliseconds since 1970; 0: in ten minutes.")] = 0,
    payload_bytes: Annotated[int, typer.Option(help="Size of each payload, in bytes.")] = 100,
    topics: Annotated[
        str, typer.Option(help="Topics, separated by commas; each half as frequent as the one before.")
    ] = "reminders,invoices,retries",
    span_days: Annotated[float, typer.Option(help="No due time is further ahead.")] = 730.0,
    median_days: Annotated[float, typer.Option(help="Half of the messages are due within this.")] = 3.0,
    burst_share: Annotated[float, typer.Option(help="Share of messages that are due at full hours.")] = 0.2,
    keys: Annotated[bool, typer.Option(help="Give each message a key.")] = False,
) -> None:
    """Write a realistic schedule: rhythm of the day, bursts at full hours, a tail of up to two years."""
    from tickwheel.pipeline.schedules import ScheduleConfig, write_schedule

    try:
        config = ScheduleConfig(
            rows=rows,
            start_ms=start_ms or int(time.time() * 1_000) + 600_000,
            seed=seed,
            topics=tuple(name for name in topics.split(",") if name),
            payload_bytes=payload_bytes,
            keys=keys,
            span_days=span_days,
            median_days=median_days,
            burst_share=burst_share,
        )
    except ValueError as error:
        raise failed(str(error)) from None
    print(f"{write_schedule(config, path):,} messages in {path}")


@dataclass(frozen=True)
class _PendingOptions(ClusterOptions):
    addresses: Annotated[
        str,
        typer.Option("--addresses", "--endpoints", help="Nodes whose pending messages are looked at, host:port,..."),
    ] = ""


@app.command()
def forecast(
    source: Annotated[
        str, typer.Argument(metavar="[IN.parquet]", help="Parquet file or folder; default: what is pending is read.")
    ] = "",
    days: Annotated[float, typer.Option(help="How far ahead, in days, at most 60.")] = 7.0,
    capacity: Annotated[
        float, typer.Option(help="Messages a second that the cluster delivers; a second with more is hot.")
    ] = 10_000.0,
    start_ms: Annotated[int, typer.Option(help="Start of the forecast, milliseconds since 1970; 0: now.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for forecast.png and forecast.html.")] = None,
    *,
    cluster: Annotated[ClusterOptions, MadeBy(_PendingOptions)],
    spark: OnSpark,
) -> None:
    """Tell what is coming: load by topic and hour, hot seconds, and the jitter window that would flatten them."""
    from tickwheel.pipeline import forecast as looking
    from tickwheel.pipeline.inputs import InputError, read_parquet

    if bool(source) == bool(cluster.addresses):
        raise failed("either a Parquet file or --addresses must be given")
    if not source:
        cluster.reach()
    with refusing(looking.ForecastError, InputError, where=source or cluster.addresses):
        config = looking.ForecastConfig(start_ms or int(time.time() * 1_000), days, capacity)
        with spark.session() as session:
            if source:
                frame = read_parquet(session, source)
            else:
                reader = session.read.format("tickwheel").option("content", "false")
                reader = reader.options(**cluster.of_source())
                reader = reader.option("due_ms_min", str(config.start_ms)).option("due_ms_max", str(config.end_ms))
                frame = reader.load()
            found = looking.forecast(frame, config)
    print(looking.tables(found))
    for path in looking.plots(found, out) if out is not None else []:
        print(path)


@app.command()
def archive(
    folder: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URI of the archive. Existing files stay.")],
    group: Annotated[str, typer.Option(help="Consumer groups, separated by commas; default: all.")] = "",
    from_: Annotated[str, typer.Option("--from", help=f"Only messages first due at this time or later. {_WHEN}")] = "",
    to: Annotated[str, typer.Option(help=f"Only messages first due before this time. {_WHEN}")] = "",
    *,
    cluster: OfCluster,
    spark: OnSpark,
) -> None:
    """Add what groups have settled, and their dead letters, to an archive in Parquet; each message once.

    Run it at least every hour: nodes remove messages soon after all groups have settled their hour. Messages for which
    a run came too late are counted and reported.
    """
    from tickwheel.pipeline.archive import archive as add
    from tickwheel.pipeline.archive_place import ArchiveError
    from tickwheel.pipeline.settled import LettersGoingError

    connection = cluster.connection()
    names = [name.strip() for name in group.split(",") if name.strip()]
    from_ms, to_ms = _time_ms("--from", from_), _time_ms("--to", to)
    cluster.reach()
    with refusing(ArchiveError, LettersGoingError, where=folder), spark.session() as session:
        added = add(session, folder, connection, names, from_ms=from_ms, to_ms=to_ms)
    for one in added:
        how = ", ".join(f"{count:,} {what}" for what, count in sorted(one.how.items()) if what != "dead")
        print(
            f"{one.group}: {one.settled:,} settled messages ({how or 'none'}) and {one.dead:,} dead letters added, "
            f"{one.known:,} were there"
        )
        for name, count in one.missing.items():
            print(
                f"{one.group}: too late for up to {count:,} messages of topic {name}, which had been removed from the "
                "nodes; run it at least every hour"
            )


@app.command()
def replay(
    folder: Annotated[str, typer.Argument(metavar="ARCHIVE", help="Folder or URI that `archive` filled.")],
    job_id: Annotated[str, typer.Option(help="Names the replay: under one name nothing is scheduled twice.")],
    where: Annotated[
        str, typer.Option(help="Condition in SQL, for instance \"topic = 'x' AND kind = 'dead'\".")
    ] = "true",
    shift: Annotated[str, typer.Option(help="New due time: this much after the first one, as 2h, 1d12h, 52w.")] = "",
    due: Annotated[
        str, typer.Option(help="New due time: an expression in SQL, a bigint (ms since 1970) or a timestamp.")
    ] = "",
    topic: Annotated[str, typer.Option(help="Topic for all messages; default: each message's own.")] = "",
    on_key_conflict: Annotated[
        str,
        typer.Option(
            help="Keep unique keys, and do this if another message holds one: `refuse`, `use-existing` or `replace`. "
            "Default: unique keys are dropped."
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be scheduled.")] = False,
    *,
    cluster: OfCluster,
    spark: OnSpark,
) -> None:
    """Schedule messages of an archive again, exactly once by job id."""
    from tickwheel.client import KeyConflict
    from tickwheel.pipeline import replay as again
    from tickwheel.pipeline.archive import read_archive
    from tickwheel.pipeline.archive_place import ArchiveError

    connection = cluster.connection()
    config = again.ReplayConfig(where, shift, due, topic, on_key_conflict.replace("-", "_"))
    if not dry_run:
        cluster.reach()
    with refusing(ArchiveError, again.ReplayError), spark.session() as session:
        rows = read_archive(session, folder)
        if dry_run:
            print(again.summary(again.selected(rows, config)))
            return
        count = again.replay(rows, connection, job_id, config)
    left = ", except those whose unique key was held" if config.on_key_conflict == KeyConflict.USE_EXISTING else ""
    print(f"{count:,} messages scheduled as job {job_id}{left}; under that name none of them is scheduled again")


def _time_ms(option: str, text: str) -> int:
    """0 for none."""
    if not text or text == "0":
        return 0
    if text.isdecimal():
        # A date without dashes, or seconds, would be a moment of 1970.
        if len(text) < MS_DIGITS_MIN:
            raise failed(f"{option}: {text}: {_WHEN}")
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise failed(f"{option}: {text!r}: {_WHEN}") from None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="New folder for reports; default: a temporary one.")] = None,
    days: Annotated[int, typer.Option(min=1, max=365, help="Days of the year of flights.")] = 365,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="One day is squeezed into this.")] = 20.0,
    master: Master = "local[*]",
) -> None:
    """A year of flights into three nodes: build, load, list, forecast; one day of it scheduled, delivered, audited."""
    from rich.console import Console

    from tickwheel.node.demo.flights import FlightsMissingError
    from tickwheel.node.local_cluster import undisturbed
    from tickwheel.pipeline.demo.run import DemoConfig, PipelineDemo
    from tickwheel.pipeline.session import NoJavaError

    if out is not None and out.exists() and any(out.iterdir()):
        raise failed(f"{out}: it is not empty; name a new folder")
    folder = out or Path(tempfile.mkdtemp(prefix="tickwheel-pipeline-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, markup=False)
    try:
        good = PipelineDemo(DemoConfig(folder.absolute(), days, seconds, master=master), console).run()
    except (NoJavaError, FlightsMissingError, KeyboardInterrupt) as error:
        if out is None:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, KeyboardInterrupt):
            raise failed(str(error)) from None
        console.print("\nended; all processes are stopped")
        raise typer.Exit(130) from None
    if good:
        console.print("nothing lost, nothing early, nothing twice", style="bold green")
    else:
        console.print("FAILED", style="bold red")
        raise typer.Exit(1)


@app.command()
def audit(
    out: Annotated[Path, typer.Option(help="Folder for events, faults, lateness and audit.html.")],
    directories: Annotated[
        list[str] | None,
        typer.Argument(metavar="NODE=DIR...", help="Nodes and their data directories, or copies of them."),
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="Folder of events that are already exported, instead of directories.")
    ] = None,
    until_ms: Annotated[
        int, typer.Option(help="Messages due later (ms since 1970) are not judged as lost; 0: ten seconds ago.")
    ] = 0,
    early_ms: Annotated[
        int, typer.Option(help="Clock error in ms: a delivery at most this early does not count as early.")
    ] = 0,
    *,
    spark: OnSpark,
) -> None:
    """Report what was lost, early, delivered twice, delivered although cancelled, or never scheduled, and how late
    messages were, from the events that nodes noted. Exit code 1 if a promise was broken."""
    from tickwheel.pipeline import audit as judging
    from tickwheel.pipeline.event_export import export_events
    from tickwheel.pipeline.report_folder import InUseError, report_in

    if bool(directories) == (events is not None):
        raise failed("either data directories or --events must be given")
    if events is not None and not any(events.glob("*.parquet")):
        raise failed(f"{events}: there is no Parquet file in it")
    named = {name: Path(path) for name, _, path in (item.partition("=") for item in directories or ())}
    for name, path in named.items():
        if not name or not (path / "events").is_dir():
            raise failed(f"{name}={path}: there is no folder {path}/events")
    noted = NOTHING_NOTED.format(events or ", ".join(directories or ()))
    with refusing(InUseError, where=str(events or "the events")), report_in(out) as folder:
        written = [name for name in (*judging.TITLES, judging.LATENESS, judging.PAGE) if (out / name).exists()]
        if written:
            raise failed(f"{out / written[0]}: it exists already; name a new folder for each audit")
        if named and (out / "events").exists() and any((out / "events").iterdir()):
            raise failed(f"{out / 'events'}: it is not empty; name a new folder for each audit")
        read = events or folder / "events"
        if named and not export_events(named, read):
            raise failed(noted)
        with spark.session() as session:
            config = judging.AuditConfig(until_ms or int(time.time() * 1_000) - 10_000, early_ms)
            found = judging.audit(session.read.parquet(str(read)), config)
            if not found.scheduled and not found.delivered:
                raise failed(noted)
            text = judging.report(found, folder)
            broken = found.broken()
    print(text)
    print(out / judging.PAGE)
    if broken:
        said = ", ".join(f"{judging.TITLES[name]} {count:,}" for name, count in broken.items())
        print(f"a promise was broken: {said}", file=sys.stderr)
        raise typer.Exit(1)
