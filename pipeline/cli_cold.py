"""The commands of the cold tier: `freeze`, `promote`, `cold status`, `cold clean`. See docs/PIPELINE.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tickwheel.node.cli.options import MadeCommands
from tickwheel.pipeline.cli_app import OfLoad, OnSpark, app, failed, refusing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


A = TypeVar("A")

cold_app = MadeCommands(help="The cold tier: what waits in Parquet outside the cluster.", no_args_is_help=True)

Folder = Annotated[
    str, typer.Argument(metavar="COLD", help="Folder that all machines of Spark mount: a path, or file:///.")
]


def _run(work: Coroutine[Any, Any, A]) -> A:
    from tickwheel.pipeline.cold_store import ColdError
    from tickwheel.pipeline.load import LoadError
    from tickwheel.pipeline.manifest import ManifestError

    try:
        return asyncio.run(work)
    except (ColdError, LoadError, ManifestError) as error:
        raise failed(str(error)) from None


@app.command()
def freeze(
    source: Annotated[str, typer.Argument(metavar="IN.parquet", help="Parquet: a path, or a URI that Spark reads.")],
    folder: Folder,
    topic: Annotated[str, typer.Option(help="Topic of all rows, if there is no such column.")] = "",
    horizon_days: Annotated[float, typer.Option(help="Rows due within this many days go to COLD/_near/<job>.")] = 30.0,
    job_id: Annotated[str, typer.Option(help="Names the job; by default it follows from the file's bytes.")] = "",
    tasks: Annotated[int, typer.Option(help="Number of tasks that share the days; 0: as the rows need.")] = 0,
    *,
    cluster: OfLoad,
    spark: OnSpark,
) -> None:
    """Put rows due far ahead into the cold tier and give them ids. A repeat continues; nothing is stored twice."""
    from tickwheel.client.cold import ColdJob
    from tickwheel.client.errors import TickwheelError
    from tickwheel.pipeline.cold_freeze import FreezeConfig, content_job_id, register, write_parts
    from tickwheel.pipeline.cold_store import IDS, NEAR, REJECTED, ColdError, ColdStore
    from tickwheel.pipeline.inputs import InputError, read_parquet
    from tickwheel.pipeline.sink_rows import SchemaError

    clients = cluster.clients()

    started = time.monotonic()
    with refusing(ColdError, InputError, SchemaError, where=source):
        job = job_id or content_job_id(source, topic)
        store = ColdStore(folder)
        manifest = store.manifest(job)
        if manifest is not None:
            manifest = store.finish(manifest)
            if job_id:
                print(f"job {job} was written before, so {source} is not read again, even if other rows are in it")
        else:
            cluster.reach(cluster.timeout_s)  # rather than write all parts and then find nobody who takes them
            with spark.session() as session:
                config = FreezeConfig(topic, horizon_days, tasks)
                manifest = write_parts(read_parquet(session, source), folder, job, config)
    written = manifest

    async def go() -> ColdJob | None:
        async with clients() as client:
            try:
                return await register(client, folder, written)
            except TickwheelError as error:
                text = f"{error}. Job {job} is written to {store.folder}: the same command registers it, once it can"
                raise type(error)(text, error.reason, error.metadata) from error

    known = _run(go())
    again = " (known before)" if known is not None and known.repeated else ""
    print(f"job {job}: {manifest.rows:,} messages in {len(manifest.parts)} parts{again}; "
          f"{time.monotonic() - started:.1f} s")  # fmt: skip
    if known is not None:
        print(f"their ids: {store.folder / IDS / job}.parquet")
    if manifest.near:
        print(f"{manifest.near:,} rows are nearer than the horizon: build and load {store.folder / NEAR / job}")
    if manifest.rejected:
        print(f"{manifest.rejected:,} rows cannot be messages, with reasons: {store.folder / REJECTED / job}")


@app.command()
def promote(
    folder: Folder,
    until_ms: Annotated[
        int, typer.Option(help="Load what is due before this (ms since 1970); 0: what the horizon has reached.")
    ] = 0,
    horizon_days: Annotated[float, typer.Option(help="How many days ahead messages are loaded.")] = 30.0,
    *,
    cluster: OfLoad,
    spark: OnSpark,
) -> None:
    """Load what has come within the horizon. Run it once a day; repeating it, or two at once, load nothing twice."""
    from tickwheel.pipeline.cold_promote import Promoter, Promotion

    clients = cluster.clients()

    async def go(session: SparkSession) -> Promotion:
        async with clients() as client:
            return await Promoter(session, client, folder).run(until_ms, horizon_days)

    cluster.reach(cluster.timeout_s)
    with refusing(where=folder), spark.session() as session:
        done = _run(go(session))
    print(f"{done.messages:,} messages of {done.parts} parts loaded, {done.moved:,} of them at the times that they "
          f"were moved to; {done.seconds:.1f} s")  # fmt: skip
    if done.late:
        print(f"late: {done.late:,} messages (cancelled ones included) were due already, the first "
              f"{done.late_ms_max / 3_600_000:,.1f} hours ago; they are delivered now, and counted")  # fmt: skip
    if done.problems:
        raise failed("not loaded: " + "; ".join(done.problems))


@cold_app.command()
def status(folder: Folder, cluster: OfLoad) -> None:
    """Show what waits, when it is due, and whether its files exist. Exit code 1 if something is late or missing."""
    from tickwheel.pipeline.cold_status import examine, text_of

    async def go() -> tuple[str, bool]:
        async with cluster.clients()() as client:
            found = await examine(client, folder)
            return text_of(found), found.bad

    text, bad = _run(go())
    print(text)
    if bad:
        raise typer.Exit(1)


@cold_app.command()
def give_up(
    folder: Folder,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="As `cold status` names it.")],
    cluster: OfLoad,
) -> None:
    """Give up a job that could not be written or registered: its rows never become messages. Nothing is deleted yet:
    freezing it again takes it back, until `cold clean` deletes its files, a day later at the earliest."""
    from tickwheel.pipeline import cold_status

    async def go() -> int:
        async with cluster.clients()() as client:
            return await cold_status.give_up(client, folder, job_id)

    print(
        f"job {job_id} is given up: {_run(go()):,} rows that are no messages; in a day `cold clean` deletes its files"
    )


@cold_app.command()
def clean(folder: Folder, cluster: OfLoad) -> None:
    """Delete the files of parts that are loaded and that no moved message needs any more, and what jobs left that were
    killed or given up over a day ago."""
    from tickwheel.pipeline.cold_status import remove_loaded

    async def go() -> tuple[int, int]:
        async with cluster.clients()() as client:
            return await remove_loaded(client, folder)

    files, size = _run(go())
    print(f"{files:,} files deleted, {size / 1e6:,.0f} MB")
