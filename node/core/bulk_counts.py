"""What a node counts of bulk load since its start, for metrics and status. Belongs to BulkDesk and BundleStore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tickwheel.node.core.failure import Failure

A = TypeVar("A")


@dataclass(slots=True)
class BulkCounts:
    """Changed by the core's thread only."""

    received_bytes: int = 0
    """Of bundles, from clients and peers, also of those that did not become whole."""
    received: int = 0
    """Bundles that became whole here;"""
    fetched: int = 0
    """of those, the ones that this node lacked and had from peers."""
    removed: int = 0
    """Bundles that nobody claimed."""
    takeover_ms: int = 0
    """From the requests for taking over to their answers, of those that were done. Master."""
    refused: Counter[str] = field(default_factory=Counter)
    """Offers, pieces and takings over that were refused, by which of them: `offer`, `piece`, `take_over`."""

    def judged(self, step: str, answer: A) -> A:
        """Counts an answer if it is a refusal; returns it."""
        if isinstance(answer, Failure):
            self.refused[step] += 1
        return answer

    def judging(self, step: str, done: Callable[[A], None]) -> Callable[[A], None]:
        """`done`, and what it is called with is counted if it is a refusal."""
        return lambda answer: done(self.judged(step, answer))
