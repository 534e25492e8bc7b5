"""No input from outside runs as code: a node never unpickles."""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_log import Unpickled


class NoForeignCode(Checker):
    promise: ClassVar[str] = "foreign code"
    kinds: ClassVar[tuple[type[Record], ...]] = (Unpickled,)

    def observe(self, record: Record) -> None:
        assert isinstance(record, Unpickled)
        self.broken(record.at_ns, f"{record.node} has unpickled what a peer sent, and so run its code")
