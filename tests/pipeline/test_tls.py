"""Spark against nodes with TLS: certificates of `tickwheel certs`, on both ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tickwheel.client import Client, TlsFiles
from tickwheel.client.errors import TickwheelError
from tickwheel.node.certs import make_certificates
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto import admin_pb2


@pytest.fixture(scope="module")
def secured(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Three nodes with TLS throughout; the options that reach them."""
    root = tmp_path_factory.mktemp("tls")
    certs = root / "certs"
    cluster = LocalCluster(root / "nodes", 3)
    make_certificates(certs, {node.node_id: ["127.0.0.1"] for node in cluster.nodes}, ["spark"], [], 1)
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
    yield {"endpoints": ",".join(cluster.addresses), **options}
    asyncio.run(cluster.stop())


def _serves(client: Client, cluster: LocalCluster) -> bool:
    """Whether all nodes follow one master."""
    try:
        answers = client.wait(client.asynchronous.admin.statuses(0.5))
    except TickwheelError:
        return False
    serving = [s for s in answers.values() if isinstance(s, admin_pb2.NodeStatus) and s.state == admin_pb2.NODE_SERVING]
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
    for without in ({"endpoints": secured["endpoints"]}, {name: secured[name] for name in ("endpoints", "ca_file")}):
        with pytest.raises(Exception, match=secured["endpoints"].split(",")[0]):
            spark.read.format("tickwheel").options(timeout_s="1", **without).load().count()
