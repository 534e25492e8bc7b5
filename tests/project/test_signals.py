"""What takes signals for a while gives them back, also where the program that Python is embedded in handles them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

from tickwheel.client.sync_worker import SyncWorker
from tickwheel.console.serving import EndingPages
from tickwheel.node.local_cluster import undisturbed
from tickwheel.pipeline.cli_app import interrupted
from tickwheel.pipeline.demo.run import _ended_by_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], object]]:
    """As Python shows handlers that C code installed before it was started: None, which `signal.signal` does not take.
    Returns the way to look at a handler."""
    take, look = signal.signal, signal.getsignal
    before = [(number, look(number)) for number in (*NUMBERS, signal.SIGHUP)]

    def takes(number: int, handler: Any) -> None:
        take(number, handler)

    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", takes)
    yield look
    for number, handler in before:
        take(number, handler)


def of_a_worker() -> AbstractContextManager[None]:
    """That of a SyncWorker while it runs."""
    worker = object.__new__(SyncWorker)
    worker._signals = NUMBERS
    return worker._signals_taken()


TAKERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "worker": of_a_worker,
    "console": lambda: object.__new__(EndingPages).capture_signals(),
    "pipeline": lambda: interrupted(cast(Any, None)),
    "demo": _ended_by_signals,
    "local cluster": undisturbed,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_handlers_that_python_cannot_put_back(taker: str, foreign: Callable[[int], object]) -> None:
    """The end of the work failed with a TypeError, whatever its result was, and later signals stayed taken."""
    with TAKERS[taker]():
        assert all(callable(foreign(number)) or foreign(number) is signal.SIG_IGN for number in NUMBERS)
    assert {foreign(number) for number in NUMBERS} == {signal.SIG_DFL}
