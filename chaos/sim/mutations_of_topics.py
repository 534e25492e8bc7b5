"""Old bugs of deliveries and settlements that hold several topics; mutations.py knows them all."""

from __future__ import annotations

from typing import Any

import numpy as np

from tickwheel.chaos.sim.aims import aimed
from tickwheel.chaos.sim.mutation_table import mutation
from tickwheel.node.core.delivery import delivery, settlements
from tickwheel.node.core.delivery.settlements import Settlements
from tickwheel.node.core.promise import Reply
from tickwheel.node.state.results import SettleResult

MANY_TOPICS = aimed("kill", couriers=1, mixing=2)


@mutation(delivery, "batch_of", aim=MANY_TOPICS)
def rows_under_the_next_topic(original: Any, shares: Any, *args: Any) -> Any:
    """A row at the border of two topics is delivered under the next one."""
    batch = original(shares, *args)
    counts = np.frombuffer(batch.topic_counts, "<u4").copy()
    if len(counts) > 1 and counts[0] > 1:
        counts[0], counts[1] = counts[0] - 1, counts[1] + 1
        batch.topic_counts = counts.tobytes()
    return batch


@mutation(Settlements, "propose", aim=MANY_TOPICS)
def first_topic_settled_only(original: Any, self: Settlements, columns: list[Any], reply: Reply[Any]) -> None:
    """A settlement of several topics settles the rows of the first one only."""
    others = [SettleResult(settled=len(some.ids) // 8) for some in columns[1:]]
    original(self, columns[:1], Reply(lambda result: reply.done(SettleResult.of((*result.parts, *others))), reply.fail))


@mutation(settlements, "by_topic", aim=aimed("kill", couriers=1, mixing=2, settle_grid_ms=1_500, seconds=10))
def resets_of_one_topic_ignored(original: Any, batch: Any) -> Any:
    """A settlement of several topics counts though one of them was reset since the delivery."""
    return [rows._replace(epoch=None) for rows in original(batch)]
