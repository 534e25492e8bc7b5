"""A cluster of real nodes for code without a loop: the asynchronous one on a loop in a thread; and Spark's settings."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tickwheel.client import AsyncClient
from tickwheel.client.async_client import Message
from tickwheel.node.local_cluster import LocalCluster

A = TypeVar("A")
FEW_ROWS = {
    # For a few hundred rows generating and compiling code takes longer than the query, and so does planning it anew.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""Settings of the tests' sessions."""


def forget_calls() -> None:
    """Begin a new connection of this thread to the JVM. On the old one the answer to a call that was cut off is still
    to come, and the next call would take it for its own."""
    if SparkContext._gateway is None:
        return
    client = SparkContext._gateway._gateway_client
    connection = client.get_thread_connection()
    if connection is not None:
        client.thread_connection.connection = None
        connection.close()
    session = SparkSession._instantiatedSession
    if session is not None and session._jvm is not None:
        # The new connection has a thread of its own in the JVM. Without an active session there, Spark knows none of
        # the data sources that the session has.
        SparkSession._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)


class RunningCluster:
    """Started on entry, or before by `launch`; every method may be called from the test's thread."""

    def __init__(self, directory: Path, nodes: int = 3) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._thread.start()
        self._cluster = LocalCluster(directory, nodes)

    def wait(self, work: Coroutine[Any, Any, A], timeout_s: float = 160.0) -> A:
        """Run something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def launch(self) -> None:
        """Start the processes and do not wait for them; opens no channel."""
        for node in self._cluster.nodes:
            self._cluster.start_node(node)

    def start_all(self) -> None:
        """Start those that do not run, and wait until all are ready."""
        self.wait(self._cluster.start())

    def __enter__(self) -> RunningCluster:
        self.start_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes and the loop."""
        self.wait(self._cluster.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def addresses(self) -> str:
        """For the option."""
        return ",".join(self._cluster.addresses)

    @property
    def client(self) -> AsyncClient:
        """For `wait`."""
        return self._cluster.client()

    def kill_master(self) -> str:
        """SIGKILL; the id of the node."""

        async def go() -> str:
            node = await self._cluster.master()
            await self._cluster.kill_node(node)
            return node.node_id

        return self.wait(go())

    def settle(self, group: str, topic: str, count: int) -> None:
        """A group acknowledges so many messages."""

        async def go() -> None:
            taken = 0
            async with self.client.consumer(group, topic) as consumer:
                async for delivery in consumer:
                    await delivery.ack()
                    taken += 1
                    if taken == count:
                        break
                await consumer.drain()

        self.wait(go())

    def start(self, node_id: str) -> None:
        """Start a node again and wait until all follow the master."""

        async def go() -> None:
            self._cluster.start_node(self._cluster.node(node_id))
            await self._cluster.wait_ready()

        self.wait(go())

    def messages(self, topic: str) -> list[Message]:
        """Everything that is pending in a topic."""

        async def go() -> list[Message]:
            return [message async for message in self.client.list_pending(topic, content=True, page_size=1_000)]

        return self.wait(go())

    def payloads(self, topic: str) -> Counter[str]:
        """How often each payload is pending in a topic."""
        return Counter((message.payload or b"").decode() for message in self.messages(topic))

    def check_agreement(self) -> None:
        """All nodes come to the same applied index and have the same digest there."""

        async def go() -> None:
            while True:
                asked = [self.client.admin.digest(address) for address in self._cluster.addresses]
                found = await asyncio.gather(*asked)
                if len({digest.applied_index for digest in found}) == 1:
                    assert len({digest.digest for digest in found}) == 1, found
                    return
                await asyncio.sleep(0.05)

        self.wait(go())
