"""The client port of a simulated node: its handlers, gate and audit log as they are, on an event loop without threads.

The loop takes its steps within the turns of its machine, after the input and after the tick. Its time is the machine's.
A process that ends takes its loop along: what its handlers were about to do is never done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from tickwheel.client.errors import Fault, fault_of_status
from tickwheel.node.config import NodeConfig
from tickwheel.node.config.sections import ClusterSection, ListenSection, NodeSection
from tickwheel.node.core.host import NodeHost
from tickwheel.node.core.world import Ports
from tickwheel.node.server.client_port import ClientPort
from tickwheel.node.server.errors import DETAILS_KEY
from tickwheel.node.server.house import watch_rights
from tickwheel.replication.ports import Clock
from tickwheel.testing.channel import MetadataPairs, ServerCall
from tickwheel.transport.server import Head

NS_PER_S = 1_000_000_000
ADDRESS = "simulated:7700"


class _NoSelector:
    """There are no sockets."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class _Loop(asyncio.BaseEventLoop):
    """An event loop that never waits."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._selector = _NoSelector()
        self.set_exception_handler(self._failed)
        self.error: BaseException | None = None

    def _failed(self, loop: object, context: dict[str, Any]) -> None:
        self.error = self.error or context.get("exception") or RuntimeError(context["message"])

    def time(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in a selector."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Code that is called from it, for as long as a `with`."""
        before = asyncio._get_running_loop()  # noqa: SLF001  # what run_forever does; there is no other way in
        asyncio._set_running_loop(self)  # noqa: SLF001
        try:
            yield
        finally:
            asyncio._set_running_loop(before)  # noqa: SLF001

    def run_ready(self) -> None:
        """Call all that is due, and what comes of it at once."""
        with self.inside():
            self._run_once()  # type: ignore[attr-defined]
            while self._ready:  # type: ignore[attr-defined]
                self._run_once()  # type: ignore[attr-defined]
        error, self.error = self.error, None
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget all that it was to call, and close."""
        left = asyncio.all_tasks(self)
        self._ready.clear()  # type: ignore[attr-defined]
        for task in sorted(left, key=lambda task: task.get_name()):
            with suppress(BaseException):
                task.get_coro().close()
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    def next_ns(self) -> int | None:
        """When a timer is due."""
        timers = [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        return min((-int(-timer.when() * NS_PER_S // 1) for timer in timers), default=None)


class _Caller:
    """The client's end of a call. `failed` gets what `took` or `over` raises, as a checker does: the task of the
    handler would keep it for itself."""

    def __init__(
        self,
        took: Callable[[bytes], None],
        over: Callable[[Fault | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.loop = None
        self._took = took
        self._over = over
        self._failed = failed

    def take(self, data: bytes) -> None:
        """A response."""
        try:
            self._took(data)
        except BaseException as error:
            self._failed(error)

    def take_status(self, code: grpc.StatusCode, details: str, trailing: MetadataPairs) -> None:
        """The end of the call."""
        status = next((value for key, value in trailing if key == DETAILS_KEY), None)
        fault = fault_of_status(status) if isinstance(status, bytes) else Fault(code.name, details)
        try:
            self._over(None if code is grpc.StatusCode.OK else fault)
        except BaseException as error:
            self._failed(error)


class Door:
    """One for each process. It may be called in a turn of the machine alone."""

    def __init__(self, name: str, host: NodeHost, ports: Ports, wake: Callable[[], None]) -> None:
        for name in ("asyncio", "tickwheel.testing"):  # of handlers whose process has ended
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._loop = _Loop(ports.clock)
        config = NodeConfig(
            cluster=ClusterSection(id="simulated"),
            node=NodeSection(id=name, data_dir="simulated"),
            listen=ListenSection(client_bind=ADDRESS),
        )
        port = ClientPort(config, lambda: host.core, ports, wake, lambda _: wake(), self._failed, Counter())
        self._port = port
        self._looks = self._loop.create_task(watch_rights(host, port.node.consumers))

    def _failed(self, error: BaseException) -> None:
        self._loop.error = self._loop.error or error

    # -- turns

    def run(self) -> None:
        """Let handlers do what they can."""
        self._loop.run_ready()

    def next_ns(self) -> int | None:
        """The machine's monotonic_ns at which handlers want another turn; None: they do not ask for one."""
        return self._loop.next_ns()

    def close(self) -> None:
        """End all handlers where they are. What they do at their end reaches nobody."""
        self._loop.drop()

    # -- calls

    def ask(
        self, method: str, request: Message, metadata: MetadataPairs, answer: Callable[[bytes | Fault], None]
    ) -> None:
        """A call with one message each way."""
        answers: list[bytes] = []

        def over(fault: Fault | None) -> None:
            answer(answers[0] if fault is None else fault)

        self.take(self.open(method, metadata, answers.append, over), request.SerializeToString())

    def open(
        self,
        method: str,
        metadata: MetadataPairs,
        took: Callable[[bytes], None],
        over: Callable[[Fault | None], None],
    ) -> ServerCall:
        """Begin a call. `run` must be called after what is done with it."""
        call: Any = ServerCall(self, method, metadata, _Caller(took, over, self._failed))  # type: ignore[arg-type]
        with self._loop.inside():
            call.begin()
        return call  # type: ignore[no-any-return]

    def take(self, call: ServerCall, data: bytes) -> None:
        """A request of a call arrives."""
        with self._loop.inside():
            call.take(data)
        self.run()

    def cut(self, call: ServerCall) -> None:
        """The caller is gone."""
        with self._loop.inside():
            call.cut(grpc.StatusCode.CANCELLED, "the caller has given up")
        self.run()

    # -- `channel.Node`

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def message_bytes_max(self) -> int:
        return self._port.server.limits.message_bytes_max

    def find(self, method: str) -> Any:
        return self._port.server.find(Head(method, (), None, None, b"", 0, None))

    def tell(self, loop: object, call: Callable[[], None]) -> bool:
        call()
        return True

    def note(self, call: ServerCall, *, ended: bool) -> None:
        """Nobody asks which calls there are."""
