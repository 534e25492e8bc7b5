"""Spark on a cluster with rights: a token says who the caller is. Without Spark itself, against a node in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from tickwheel.client import Grant, Right
from tickwheel.client.errors import PermissionRefused
from tickwheel.client.staging import StagedState
from tickwheel.pipeline.cli_app import TOKEN_VARIABLE, LoadOptions
from tickwheel.pipeline.options import CONNECTION, Options, connection_of
from tickwheel.pipeline.replay import sink_options
from tickwheel.pipeline.sink import OPTIONS, TickwheelWriter, sink_config
from tickwheel.testing import SyncFakeCluster

SCHEMA = StructType().add("topic", "string").add("due_ms", "long").add("payload", "string")


@dataclass(frozen=True)
class Guarded:
    """A cluster with rights, and the token of a user who may send to pay-* alone."""

    address: str
    token: str


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with SyncFakeCluster() as cluster:
        client = cluster.client
        client.access.set_role("pay", [Grant((Right.SCHEDULE,), topics=("pay-*",))])
        client.access.set_user("shop", ["pay"])
        client.access.set_user("root", ["administrator"])
        token = client.access.create_token("shop").secret
        client.admin.update_settings(rights=True)
        yield Guarded(cluster.address, token)


def writer(guarded: Guarded, **options: str) -> TickwheelWriter:
    """As Spark makes it on the driver."""
    given = {"addresses": guarded.address, "timeout_s": "5", "job_id": "j", "bad_rows": "fail", **options}
    return TickwheelWriter(sink_config(Options(given, OPTIONS), stream=False), SCHEMA)


def rows(topic: str, due_ms: int = 4_000_000_000_000) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pylist([{"topic": topic, "due_ms": due_ms, "payload": "x"}])


def test_a_write_shows_its_token(guarded: Guarded) -> None:
    """On the driver and in every task; without one nobody gets in, and with it only to the user's topics."""
    with pytest.raises(PermissionRefused):
        writer(guarded)
    made = writer(guarded, token=guarded.token)
    with pytest.raises(PermissionRefused, match="mail"):
        made.write(rows("mail", 1))
    made.commit([made.write(rows("pay-1", 1))])
    with connection_of(Options({"addresses": guarded.address, "token": guarded.token}, CONNECTION), 5.0).open() as shop:
        assert shop.staging.job("j").state is StagedState.PUBLISHED


def test_commands_take_the_token_of_the_environment(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the others do: for the client, for Spark's connection, and for what Spark reads. No log shows it."""
    monkeypatch.setenv(TOKEN_VARIABLE, guarded.token)
    options = LoadOptions(addresses=guarded.address)

    async def name() -> str:
        async with options.clients()() as client:
            return (await client.access.who_am_i()).name

    assert asyncio.run(name()) == "shop"
    connection = options.connection()
    with connection.open() as client:
        assert client.access.who_am_i().name == "shop"
    assert connection_of(Options(sink_options(connection), CONNECTION), 5.0) == connection  # of `replay`
    assert options.of_source() == {"addresses": guarded.address, "token": guarded.token}
    assert guarded.token not in repr(connection)
