"""The contract of a part of the core that must act when this node begins or ceases to lead."""

from __future__ import annotations

from tickwheel.node.core.failure import Failure
from tickwheel.node.core.world import ClusterMs


class Part:
    """A member of `NodeCore.parts`: it keeps state that belongs to a single reign. Both methods are optional.

    - `end` may come without `begin`: a master can be deposed before it knows the time or has applied its own first
      command. Do not count on an `end` between two `begin`s either.
    - When `end` is called, `Kernel.refusal` already names the new master. A caller told so may ask again at once.
    - `NodeCore.parts` gives the order of the ends: first the parts that move the wheel and the log, then those that
      hold requests, last the deliveries and the parts waiting for them. Parts begin in the reverse order, so the wheel
      moves last. Other code depends on both orders.
    """

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """This node leads in `term`, has applied every earlier entry, and knows the time."""

    def end(self, failure: Failure) -> None:
        """This node leads no more: stop at once, and answer every waiting caller with `failure`."""
