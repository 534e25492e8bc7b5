"""Spark against nodes with TLS: certificates of `tickwheel certs`, on both ports."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from typer.testing import CliRunner

from tickwheel.client import AsyncClient, Client, ColdState, ColdStatus, NodeState, NodeStatus, TlsFiles
from tickwheel.client.errors import ClusterUnavailable, TickwheelError
from tickwheel.client.moments import ms_of
from tickwheel.node.certs import make_certificates
from tickwheel.node.local_cluster import LocalCluster, free_ports
from tickwheel.pipeline.cli import app
from tickwheel.pipeline.cli_app import SparkOptions
from tickwheel.pipeline.cold_store import ColdStore


@pytest.fixture(scope="module")
def secured(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Three nodes with TLS throughout that deliver before they commit; the options that reach them."""
    root = tmp_path_factory.mktemp("tls")
    certs = root / "certs"
    cluster = LocalCluster(root / "nodes", 3, config={"delivery": {"order": "push-first"}})
    make_certificates(certs, {node.node_id: ["127.0.0.1"] for node in cluster.nodes}, ["spark"], ["root"], 1)
    for node in cluster.nodes:
        lines = ["", "[tls]"]
        for port in ("client", "peer"):
            files = {"cert": f"{node.node_id}.crt", "key": f"{node.node_id}.key", "ca": "ca.crt"}
            lines += [f'{port}_{part}_file = "{certs / name}"' for part, name in files.items()]
        with node.config_file.open("a", encoding="utf-8") as config:
            config.write("\n".join(lines) + "\n")
        cluster.start_node(node)
    files = {"ca_file": "ca.crt", "cert_file": "spark.crt", "key_file": "spark.key"}
    options = {name: str(certs / file) for name, file in files.items()}
    with Client(cluster.addresses, tls=TlsFiles(**options)) as client:
        end = time.monotonic() + 60
        while not _serves(client, cluster):
            assert time.monotonic() < end, [node.log_tail() for node in cluster.nodes]
            time.sleep(0.05)
    yield {"addresses": ",".join(cluster.addresses), **options}
    asyncio.run(cluster.stop())


def _serves(client: Client, cluster: LocalCluster) -> bool:
    """Whether all nodes follow one master."""
    try:
        answers = client.admin.statuses(0.5)
    except TickwheelError:
        return False
    serving = [s for s in answers.values() if isinstance(s, NodeStatus) and s.state is NodeState.SERVING]
    return len(serving) == len(cluster.nodes) and len({s.master_id for s in serving} - {""}) == 1


def test_rows_are_written_and_read_over_tls(spark: SparkSession, secured: dict[str, str], tmp_path: Path) -> None:
    """By tasks and driver, to the master and from a slave, with a client's certificate; without one nobody gets in."""
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    rows = spark.range(0, 500, 1, 2).select(
        f.lit(due_ms).alias("due_ms"), f.concat(f.lit("t-"), f.col("id").cast("string")).alias("payload")
    )
    rows.write.format("tickwheel").options(topic="secret", bad_rows="fail", **secured).mode("append").save()
    read = spark.read.format("tickwheel").options(topic="secret", **secured).load()
    assert {bytes(row.payload).decode() for row in read.collect()} == {f"t-{number}" for number in range(500)}
    flags = [word for name, value in secured.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = CliRunner().invoke(app, ["forecast", *flags, "--days", "1"])
    assert done.exit_code == 0 and "secret" in done.output, done.output
    for without in ({"addresses": secured["addresses"]}, {name: secured[name] for name in ("addresses", "ca_file")}):
        with pytest.raises(Exception, match=secured["addresses"].split(",")[0]):
            spark.read.format("tickwheel").options(timeout_s="0.3", **without).load().count()


def test_a_late_promotion_is_delivered_at_once_over_tls_and_pushed_first(
    spark: SparkSession, secured: dict[str, str], tmp_path: Path
) -> None:
    """By the commands, into nodes that deliver before they commit: every message once, cancelled
    ones never, the late ones counted; a certificate without the admin role gets nowhere."""
    admin = secured | {name: secured[name].replace("spark.", "root.") for name in ("cert_file", "key_file")}
    tls = TlsFiles(*(admin[name] for name in ("ca_file", "cert_file", "key_file")))
    first_ms = time.time_ns() // 1_000_000 + 500
    rows = spark.range(0, 60, 1, 2).select(
        f.lit("pushed").alias("topic"),
        (f.lit(first_ms) + f.col("id")).alias("due_ms"),
        f.concat(f.lit("p-"), f.col("id").cast("string")).alias("payload"),
    )
    rows.write.parquet(str(tmp_path / "in"))
    cold = f"file://{tmp_path}/cold%20tier"
    ColdStore(cold).plan("pushed", 1)  # as if the job had begun long ago: all of it is cold

    def run(*words: str, options: dict[str, str] = admin) -> str:
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        done = CliRunner().invoke(app, [*words, *flags, "--timeout-s", "15"])
        return f"{done.output}{done.exception or ''}"

    freeze = ("freeze", f"file://{tmp_path}/in", cold, "--job-id", "pushed")
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    failed = CliRunner().invoke(app, [*freeze, "--addresses", nowhere, "--timeout-s", "0.5"])
    assert nowhere in str(failed.exception) and not list(tmp_path.glob("cold tier/day=*"))
    refused = run(*freeze, options=secured)
    assert "admin" in refused and f"written to {tmp_path}/cold tier: the same command registers it" in refused
    assert "60 messages" in run(*freeze)
    assert "known before" in run(*freeze)

    async def cancel_some() -> None:
        ids = {row["due_ms"]: row["id"] for row in pq.read_table(tmp_path / "cold tier" / "_ids").to_pylist()}
        async with AsyncClient(secured["addresses"], tls=tls) as client:
            for number in range(5):
                assert await client.cancel(ids[first_ms + number]) == "CANCELLED"
            now = (await client.admin.master_status()).clock
            assert now is not None
            await asyncio.sleep(max(0, first_ms + 100 - ms_of("now", now)) / 1_000)  # they are to be late

    async def consume() -> tuple[Counter[str], ColdStatus]:
        got: Counter[str] = Counter()
        async with AsyncClient(secured["addresses"], tls=tls) as client:
            async with client.consumer("g", "pushed") as consumer:
                async for delivery in consumer:
                    got[delivery.payload.decode()] += 1
                    delivery.ack()
                    if len(got) == 55:
                        break
                await consumer.drain()
            assert [message async for message in client.list_pending("pushed")] == []
            return got, (await client.admin.master_status()).cold

    asyncio.run(cancel_some())
    said = run("cold", "status", cold)
    assert said.startswith("late: 60 messages in"), said
    said = run("promote", cold)
    assert said.startswith("55 messages of") and "late: 60 messages" in said, said
    got, status = asyncio.run(consume())
    assert got == Counter(f"p-{number}" for number in range(5, 60))
    assert (status.loaded_late, status.state) == (55, ColdState.EMPTY) and status.loaded_late_max
    assert run("promote", cold).startswith("0 messages of 0 parts")


@pytest.mark.parametrize(
    "words",
    [
        ("load", "out"),
        ("forecast",),
        ("archive", "out"),
        ("replay", "out", "--job-id", "j"),
        ("freeze", "in", "out", "--job-id", "j"),
        ("promote", "out"),
        ("cold", "status", "out"),
    ],
)
def test_a_certificate_without_an_authority_is_refused_by_name(words: tuple[str, ...], tmp_path: Path) -> None:
    """Rather than left out, and the connection made without TLS."""
    places = [str(tmp_path / word) if word in ("in", "out") else word for word in words]
    done = CliRunner().invoke(app, [*places, "--addresses", "127.0.0.1:7100", "--cert-file", "x", "--key-file", "y"])
    assert "option ca_file" in str(done.exception), done.output


@pytest.mark.parametrize(
    "words",
    [
        ("forecast",),
        ("archive", "out"),
        ("replay", "out", "--job-id", "j"),
        ("freeze", "in", "out", "--job-id", "j"),
        ("promote", "out"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_before_spark_starts(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes ten seconds, on a busy machine a minute."""

    def session(_: SparkOptions) -> None:
        raise AssertionError("Spark starts")

    monkeypatch.setattr(SparkOptions, "session", session)
    places = [str(tmp_path / word) if word in ("in", "out") else word for word in words]
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    done = CliRunner().invoke(app, [*places, "--addresses", nowhere])
    assert isinstance(done.exception, ClusterUnavailable) and nowhere in str(done.exception)
