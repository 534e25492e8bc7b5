"""The contract of a part of the core that follows mastership or time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.node.failure import Failure
from tickwheel.node.metrics import MetricValue


class Part:
    """A member of `Parts.ordered`. Every method is optional.

    - `end` may come without `begin`: a master can be deposed before it knows the time or has applied its own first
      command. Do not count on an `end` between two `begin`s either.
    - When `end` is called, `Kernel.require_master` already names the new master. A caller told so may ask at once.
    - Ticks come after input, after what the log or the clock has changed, and when `wait_ms` asked for one; not with
      what concerns the log alone. They come to every node, unless the part is `of_master`. A part that acts for the
      cluster checks `now.acting`: an elected master may have no lease yet, or have lost it.
    - `Parts.ordered` gives the order of ticks and ends: first the parts that move the wheel and the log, then those
      that hold requests, last the deliveries and the parts waiting for them. Parts begin in the reverse order, so the
      wheel moves last. Other code depends on these orders.
    """

    of_master = False
    """It has nothing to do by time between `end` and the next election of this node: it gets no tick then, and is not
    asked how long it can wait."""

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """This node leads in `term`, has applied every earlier entry, and knows the time."""

    def end(self, failure: Failure) -> None:
        """This node no longer leads: stop at once, and answer every waiting caller with `failure`."""

    def tick(self, now: Now) -> None:
        """Do what is due. Proposals are sent once every part has had its turn."""

    def wait_ms(self, now: Now) -> int | None:
        """Milliseconds from `now` until the next tick is needed, at the latest; 0 or less: at once. None: an arrival or
        an answer will bring the tick. Called after the ticks."""
        return None

    def upkeep(self, now: Now) -> Iterator[None] | None:
        """Forget and count what can wait. Called about once a second. Long work returns an iterator of turns, of a few
        milliseconds each. Each tick takes one turn, and the next upkeep begins after the last. Anything may happen
        between two turns, even the end of the mastership."""
        return None

    def metrics(self) -> Mapping[str, MetricValue]:
        """Values by name, of the metrics that this part counts (the table is in node/metrics.py)."""
        return {}
