"""Counts of bulk load since the node's start, for metrics and status. Belongs to BulkLoad and BundleStore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tickwheel.node.failure import RequestError


@dataclass(slots=True)
class BulkCounts:
    """Changed by the core's thread only."""

    received_bytes: int = 0
    """Bytes of bundles from clients and peers, including bundles that were never completed."""
    received: int = 0
    """Bundles completed on this node,"""
    fetched: int = 0
    """and of those, bundles that it lacked and fetched from peers."""
    removed: int = 0
    """Unclaimed bundles that were removed."""
    takeover_ms: int = 0
    """Total time from request to answer of successful takeovers, on the master."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by step: `offer`, `piece`, `take_over`."""

    @contextmanager
    def counting(self, step: str) -> Iterator[None]:
        """Count a RequestError that is raised in a `with`."""
        try:
            yield
        except RequestError:
            self.refused[step] += 1
            raise
