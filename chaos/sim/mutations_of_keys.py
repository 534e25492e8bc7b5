"""Bugs of unique keys; mutations.py knows them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tickwheel.chaos.sim.mutation_table import Patches, aimed, mutation
from tickwheel.node.core.schedule.by_key import KeyRequests
from tickwheel.node.core.schedule.senders import Senders
from tickwheel.node.state.key_holders import Holder, Holders, KeyHolders
from tickwheel.node.state.keyed_append import KeyedAppend
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.producers import Batch, Producers
from tickwheel.node.state.publishing import Publishing
from tickwheel.node.state.results import CancelResult
from tickwheel.node.state.unique_keys import KeyColumns, KeyOf, UniqueKeys
from tickwheel.proto.scheduler_pb2 import CANCELLED
from tickwheel.wheel.engine import Wheel

KEYS = aimed("kill", keys=1)
SLOW = aimed("slow-disk", "delay", keys=1)
CUTS = aimed("kill", "freeze", "handover", keys=1)


def _change_holders(patches: Patches, change: Callable[[KeyHolders, KeyOf, Holder | None], Holder | None]) -> None:
    def holder(original: Any, self: KeyHolders, key: KeyOf) -> Holder | None:
        return change(self, key, original(self, key))

    def holders(original: Any, self: KeyHolders, keys: KeyColumns) -> Holders:
        columns = (column.tolist() for column in keys)
        mixed = [KeyOf(*row) for row in zip(*columns, strict=True)]
        found = [self.holder(key._replace(high=key.mixed)) for key in mixed]
        rows = [(0, 0, False) if holder is None else holder for holder in found]
        return Holders(
            np.array([holder is not None for holder in found]),
            np.array([row[0] for row in rows], np.uint64),
            np.array([row[1] for row in rows], np.int64),
            np.array([row[2] for row in rows]),
        )

    patches.replace(KeyHolders, "holder", holder)
    patches.replace(KeyHolders, "holders", holders)


@mutation(aim=KEYS)
def keys_released_early(patches: Patches) -> None:
    """A key is free a second before its message is dispatched."""

    def change(holders: KeyHolders, key: KeyOf, found: Holder | None) -> Holder | None:
        soon_ms = holders._wheel.cursor.due_ms + 1_000
        return None if found is not None and not found.dispatched and found.due_ms < soon_ms else found

    _change_holders(patches, change)


@mutation(aim=KEYS)
def keys_kept_after_cancel(patches: Patches) -> None:
    """A key is kept when its message is cancelled."""

    def change(holders: KeyHolders, key: KeyOf, found: Holder | None) -> Holder | None:
        held = holders._keys.get(key)
        if found is not None or held is None:
            return found
        id_, due_ms, outcome = holders._wheel.standing(held.id, held.due_ms)
        cancelled = outcome is not None and outcome.name == "CANCELLED"
        return Holder(id_, due_ms, dispatched=True) if cancelled else None

    _change_holders(patches, change)


@mutation(KeyedAppend, "_cancel", aim=KEYS)
def replaced_ones_left_pending(original: Any, self: KeyedAppend, ids: Any, due_ms: Any) -> Any:
    """A message that replaces another leaves it pending."""
    return self.replaced.extend(ids.tolist())


@mutation(aim=CUTS)
def refusals_not_remembered(patches: Patches) -> None:
    """A repeat of a batch in which a message was refused is decided anew."""

    def found(original: Any, *args: Any) -> Any:
        batch = original(*args)
        return None if isinstance(batch, Batch) and batch.keys is not None else batch

    patches.replace(Senders, "known", found)
    patches.replace(Publishing, "_sequence", found)


@mutation(Producers, "accept", aim=CUTS)
def key_outcomes_not_remembered(
    original: Any, self: Producers, sender: Any, batch: Any, settings: Any, at_ms: int
) -> None:
    """What became of the unique keys of a batch is not remembered."""
    original(self, sender, replace(batch, keys=None), settings, at_ms)


@mutation(KeyedAppend, "append", aim=KEYS)
def keys_of_own_batch_unseen(original: Any, self: KeyedAppend, rows: Any) -> None:
    """A batch does not see the keys that its own messages take."""
    digests, seen = self._keys.digests.copy(), set()
    units = range(len(digests)) if rows is None else np.argsort(rows, kind="stable").tolist()
    for unit in units:
        key = (int(self._units["topic_id"][unit]), digests[unit].tobytes())
        if key in seen:
            digests[unit] = 0
        seen.add(key)
    self._keys = self._keys._replace(digests=digests)
    original(self, rows)


@mutation(KeyRequests, "cancel", aim=SLOW)
def cancel_by_key_decided_when_read(original: Any, self: KeyRequests, key: Any, permitted: Any, sender: Any) -> Any:
    """A cancel by key means the message that held it when the master read the request."""
    return _cancelled_as_read(original, self, key, permitted, sender)


async def _cancelled_as_read(original: Any, requests: KeyRequests, key: Any, permitted: Any, sender: Any) -> Any:
    holder = requests._core.state.key_holder(key.topic, key.unique_key)
    if holder is None or holder.dispatched:
        return await original(requests, key, permitted, sender)
    return CancelResult(await requests._requests.cancel(holder.id, permitted), holder.id)


@mutation(UniqueKeys, "restore", aim=KEYS)
def keys_not_checkpointed(original: Any, self: UniqueKeys, shards: Any, next_shard: int) -> None:
    """Unique keys are not in the checkpoint."""
    original(self, [], next_shard)


@mutation(aim=KEYS)
def keys_free_when_dispatched(patches: Patches) -> None:
    """A key that is held until its message is settled is free when that is dispatched."""
    _change_holders(patches, lambda holders, key, found: None if found is not None and found.dispatched else found)


@mutation(StateMachine, "_cancel_once", aim=CUTS)
def cancels_by_key_not_remembered(original: Any, self: StateMachine, cancel: Any, stamped_ms: int) -> Any:
    """A repeat of a cancel by key cancels again."""
    named = cancel.HasField("request")
    cancel.ClearField("request")
    result = original(self, cancel, stamped_ms)
    return replace(result, remembered=named and result.outcome == CANCELLED)


@mutation(KeyedAppend, "append", aim=KEYS)
def keys_in_order_of_due_times(original: Any, self: KeyedAppend, rows: Any) -> None:
    """Rules of unique keys are decided in the order of due times."""
    original(self, None)


@mutation(aim=KEYS)
def keys_pruned_before_ready(patches: Patches) -> None:
    """The table of keys is pruned before dispatched messages are in the ready queues."""
    holders: dict[Any, KeyHolders] = {}
    prune = KeyHolders.prune

    def __init__(original: Any, self: KeyHolders, keys: Any, groups: Any, wheel: Any) -> None:
        original(self, keys, groups, wheel)
        holders[wheel] = self

    def dispatch(original: Any, self: Wheel, to: Any) -> Any:
        dispatched = original(self, to)
        prune(holders[self])
        return dispatched

    patches.replace(KeyHolders, "__init__", __init__)
    patches.replace(KeyHolders, "prune", lambda original, self: None)
    patches.replace(Wheel, "dispatch", dispatch)
