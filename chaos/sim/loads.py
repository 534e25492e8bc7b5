"""Bulk loaders: bundles of messages that were built outside go to all nodes piece by piece and are taken over in order.

A loader sends a bundle to every node that answers, and asks the master to take it over until it is. Some die on the
way and start the same load over; some repeat a finished load. Some of what was loaded is cancelled, before or
after it is due.
"""

from __future__ import annotations

from tickwheel.chaos.sim.asking import AskingClients, founding
from tickwheel.chaos.sim.carriers import Bundle, Carrier, Load, bundle_data
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_messages import Row
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.message_ids import id_of
from tickwheel.proto import scheduler_pb2

TOPIC = "catalogue"
GROUPS = ("shelves", "mirrors")
CROWDS = tuple(Crowd(group, (TOPIC,), consumers=1) for group in GROUPS)
LOAD_EVERY_NS = 900 * MS
OPEN_MOST = 2
CANCELS_MOST = 6


class Loads(AskingClients):
    """`clients.Clients`."""

    setting = founding((TOPIC,), [(group, (TOPIC,)) for group in reversed(GROUPS)])
    asks_for = "answers about loaded messages"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "loads")
        self._members = (Consumers(wires, CROWDS, self._rng),)
        self._carrier = Carrier(wires, self._rng, TOPIC, self._taken)
        self._jobs = 0
        self._cancelled: set[int] = set()
        """Messages for which a cancel was asked."""

    def _begin(self) -> None:
        self._world.after(0, self._keep, LOAD_EVERY_NS, self._begin_one, False)

    def unfinished(self) -> str:
        for load in self._carrier.open:
            return f"the end of load {load.job}"
        return super().unfinished()

    # -- loads

    async def _begin_one(self) -> None:
        if len(self._carrier.open) >= OPEN_MOST:
            return
        rng = self._rng
        self._jobs += 1
        load = Load(f"load-{self._jobs}", [self._build() for _ in range(rng.choice((1, 1, 2, 3)))])
        dies, load.repeats = rng.random() < 0.25, rng.random() < 0.2
        if dies:
            self._carrier.dies(load)
        self._carrier.begin(load)

    def _build(self) -> Bundle:
        rng = self._rng
        wall_ms = self._world.wall_ms
        rows = []
        for _ in range(rng.choice((3, 12, 40))):
            dice = rng.random()
            due_ms = wall_ms + rng.randrange(3_500)
            if dice < 0.1:
                due_ms = wall_ms - rng.randrange(2 * HOUR_MS)
            elif dice < 0.25:
                due_ms += HOUR_MS * rng.randrange(1, 30)
            elif dice > 0.6:
                due_ms = due_ms // 500 * 500
            rows.append(Row(self._wires.number(), TOPIC, due_ms, None))
        rows.sort(key=lambda row: row.due_ms or 0)
        return Bundle.of(tuple(rows), bundle_data(rows))

    def _taken(self, built: Bundle) -> None:
        if self._rng.random() < 0.3:
            self._later(self._rng.randrange(300 * MS), self._cancel_some, built)

    async def _cancel_some(self, built: Bundle) -> None:
        """Find some loaded messages in the list of pending ones, and cancel each a little later."""
        if self._wires.winding_down:
            return
        request = scheduler_pb2.ListPendingRequest(topic=TOPIC, page_size=100, content=True)
        wanted = {row.uid for row in built.rows}
        answer = await self._asking.served(lambda core: core.parts.pending.page(request))
        # Not the retries among them: these were delivered, and are cancelled for one group.
        first = (message for message in answer.messages if not message.group)
        found = [(UID.unpack_from(message.payload)[0], message.id) for message in first]
        mine = [(uid, id_) for uid, id_ in found if uid in wanted and uid not in self._cancelled]
        for uid, id_ in self._rng.sample(mine, min(len(mine), CANCELS_MOST)):
            self._cancelled.add(uid)
            self._later(self._rng.randrange(3 * SECOND), self._cancel, uid, id_of(id_, 0))
