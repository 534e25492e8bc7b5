"""What a node writes: repeats of a warning are left out and counted, whoever wrote it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import cast

import pytest
import structlog

from tickwheel.node.logs import WARNING_PERIOD_NS, logger, set_up_logs
from tickwheel.replication.ports import Clock


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        """As the test has set it."""
        return self.now_ns


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which gets back its handlers afterwards."""
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    for handler in found.handlers[:]:
        found.removeHandler(handler)
    for handler in handlers:
        found.addHandler(handler)
    found.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("writer", ["node", "library"])
def test_repeated_warnings_are_left_out_and_counted(
    writer: str, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours, and those of a library that knows `logging` alone; errors always pass, and no line is a traceback."""
    clock, stream = Hand(), io.StringIO()
    _, limit = set_up_logs("info", "json", "n1", cast(Clock, clock), stream)

    def warn() -> None:
        if writer == "node":
            logger("test").warning("the disk is slow")
        else:
            logging.getLogger("grpc").warning("the disk is %s", "slow")

    for _ in range(4):
        warn()
    clock.now_ns += WARNING_PERIOD_NS
    warn()
    for _ in range(2):
        logging.getLogger("grpc").error("broken")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"].split(" (")[0] for line in lines] == ["the disk is slow"] * 2 + ["broken"] * 2
    assert lines[1].get("repeated") == 3 or "(repeated 3 times)" in lines[1]["event"]
    assert limit.suppressed == 3 and {line["node"] for line in lines} == {"n1"}
    assert "Traceback" not in capsys.readouterr().err
