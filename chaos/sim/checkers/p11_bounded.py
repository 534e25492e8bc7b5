"""P11: every queue, buffer, batch and map stays within its limit; nothing is sent twice unasked."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_log import SentAgain
from tickwheel.chaos.sim.history_machines import SizesSeen


class Bounded(Checker):
    """`most` is the highest fill seen of each thing."""

    promise = "P11"

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def _on_sent_again(self, record: SentAgain) -> None:
        self.broken(
            f"{record.node} sends entry {record.index} to {record.peer} again; it has sent up to "
            f"{record.sent_before} on this connection"
        )

    def _on_sizes_seen(self, record: SizesSeen) -> None:
        for name, now, limit in record.sizes:
            if now > self.most.get(name, -1):
                self.most[name] = now
            if now > limit:
                self.broken(f"{record.node}: {name} holds {now}, its limit is {limit}")
