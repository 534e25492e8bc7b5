"""A consumer's stream whose caller is gone before the core answers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, cast

import pytest

from tickwheel.node.core.promise import Promise
from tickwheel.node.core.serving import Serving
from tickwheel.node.failure import Failure, not_master
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.consumer_stream import ConsumerStream
from tickwheel.node.state.rights import AccessControl
from tickwheel.proto import consumer_pb2

SERVER = Path(__file__).parents[3] / "node" / "server"


def failed(error: BaseException) -> None:
    """The process would end."""
    raise AssertionError("the node must go on") from error


class Session:
    """One open consumer; only whether it was closed."""

    closed = False

    def close(self) -> None:
        """See ConsumerSession."""
        self.closed = True


class Core:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.opened: Promise[Session] = Promise()
        self.serving = Serving(lambda bits: 0)
        self.parts = self.consumers = self

    async def open(self, request: object, deliver: object, closed: object, actor: str) -> Session:
        """See ConsumerRequests."""
        return await self.opened


@pytest.mark.parametrize("answer", [Session(), not_master(None, None)])
async def test_a_caller_that_goes_while_its_group_is_created(answer: Session | Failure) -> None:
    """The answer comes in the very pass of the loop in which the call was cancelled, before the stream hears of that.

    It must not raise inside the core, and nobody may be left holding a session.
    """
    core = Core()
    calls = Calls(lambda: cast(Any, core), lambda: None, failed)
    anybody = Caller("", "none", True, AccessControl(), lambda: False)
    stream = ConsumerStream(calls, 1 << 20, anybody, consumer_pb2.OpenConsumer(group="g"))
    opening = asyncio.ensure_future(stream.open())
    await asyncio.sleep(0)
    assert not opening.done()
    opening.cancel()
    core.opened.keep(answer)
    with pytest.raises(asyncio.CancelledError):
        await opening
    stream.close()
    assert isinstance(answer, Failure) or answer.closed
    assert stream.opened() is None


def test_futures_get_their_results_in_one_place() -> None:
    """Each other place would have to think of the caller that is gone, and one did not."""
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(SERVER.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\.set_(result|exception)\b", line) and path.name != "resolving.py"
    ]
    assert found == []
