"""What a part of a core does when this node begins or ceases to lead."""

from __future__ import annotations

from tickwheel.node.core.failure import Failure
from tickwheel.node.core.world import ClusterMs


class Part:
    """A part that has something of a single reign, and is in `NodeCore.parts`. Each method is optional.

    - `end` may come without `begin`: a master that does not know the time, or has not applied its own first command,
      serves nobody and is deposed all the same. Do not count on an `end` between two `begin`s either.
    - When `end` is called, `Kernel.refusal` already says who leads now, and whoever is told so may ask again at once.
    - `NodeCore.parts` is the order of the ends: first what moves the wheel and the log, then what holds requests, last
      the deliveries and who waits for them. Parts begin in the reverse order, so the wheel moves last. Both orders are
      behaviour.
    """

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """This node leads in `term`, has applied everything before it, and knows the time."""

    def end(self, failure: Failure) -> None:
        """This node leads no more: stop at once, and tell whoever waits for an answer `failure`."""
