"""An event loop whose time passes only while it waits: hours of pauses and deadlines cost nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tickwheel.client import backoff

A = TypeVar("A")


class _Instant(selectors.SelectSelector):
    """Adds the time that it should wait to the clock."""

    now_s = 1_000.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever wake this loop"
        self.now_s += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


def run(work: Coroutine[Any, Any, A]) -> A:
    """Run a coroutine in virtual time, and with it the client's deadlines."""
    loop = _Loop()
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patch.setattr(backoff, "time", SimpleNamespace(monotonic=loop.time))
        return runner.run(work)
