"""The examples of docs/COMING_FROM.md run as they stand there."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tickwheel.client
from tickwheel.testing import FakeCluster

PAGE = Path(__file__).parents[2] / "docs" / "COMING_FROM.md"
EXAMPLES = re.findall(r"^```python\n(# tickwheel\n.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
ORDER = {"number": 17}
REACHED: dict[str, list[object]] = {"send_mail": ["ann", b"payload"], "bill": [b"body", ORDER], "give_up": ["order-17"]}
"""What the examples hand to the functions of the reader, over all of them."""


def test_every_system_has_an_example() -> None:
    """One below each heading."""
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(EXAMPLES) == len(headings) == 6


@pytest.mark.parametrize("example", EXAMPLES, ids=["celery", "asynq", "rocketmq", "sqs", "quartz", "temporal"])
async def test_an_example_handles_what_it_schedules(example: str) -> None:
    """It runs beside a clock that goes on for some days; what it does with the message is what the reader's function
    is given. A message that fails or waits for ever reaches nobody."""
    given: list[object] = []

    def reader(name: str) -> Callable[[object], Awaitable[None]]:
        async def called(value: object) -> None:
            assert value in REACHED[name]
            given.append(value)

        return called

    async with FakeCluster() as cluster:
        names: dict[str, Any] = {name: getattr(tickwheel.client, name) for name in tickwheel.client.__all__}
        names |= {name: reader(name) for name in REACHED} | {"timedelta": timedelta, "client": cluster.client}
        names |= {"payload": b"payload", "body": b"body", "NoSuchAddress": LookupError}
        names |= {"order": "order-17" if "give_up" in example else ORDER}
        code = compile(example, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        work = eval(code, names)
        assert inspect.iscoroutine(work)
        running = asyncio.ensure_future(work)
        await cluster.clock.advance(days=3)
        assert not running.done() or running.result() is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(given) == 1
