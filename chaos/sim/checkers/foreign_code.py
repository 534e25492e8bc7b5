"""No input from outside runs as code: a node never unpickles."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_log import Unpickled


class NoForeignCode(Checker):
    promise = "foreign code"

    def _on_unpickled(self, record: Unpickled) -> None:
        self.broken(f"{record.node} has unpickled what a peer sent, and so run its code")
