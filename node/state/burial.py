"""Applies replays and purges of dead letters.

A replay copies from the letters themselves, bounded like a retry (retrying.py): a unit for this group alone, with
attempts from 1 and the first id. A letter stays if its topic is gone, or no longer one of the group's, or if its
payload is lost.
"""

from __future__ import annotations

import numpy as np

from tickwheel.node.failure import invalid, refused
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.dead_letters import LETTER, Letters
from tickwheel.node.state.groups import Group
from tickwheel.node.state.publishing import DUE_MS_MAX
from tickwheel.node.state.results import DeadResult
from tickwheel.node.state.retrying import COPIES_MAX, COPY_BYTES_MAX, Retrying
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import PAYLOAD_LOST, PurgeDead, ReplayDead
from tickwheel.wheel.units import LACKING, REPLAYED, UNIT, Units, hours_of, indexes_of


class Burial:
    def __init__(self, state: ClusterState, retrying: Retrying) -> None:
        self._state = state
        self._retrying = retrying

    def replay(self, command: ReplayDead) -> DeadResult:
        """Make letters messages of the group again. Raises RequestError."""
        group = self._group(command.group_id, command.numbers)
        self._state.marks_replays |= command.marked
        if not 0 <= command.due_ms <= DUE_MS_MAX:
            raise invalid("due_ms", command.due_ms, f"0 to {DUE_MS_MAX}")
        numbers: list[int] = []
        rows: list[Letters] = []
        records: list[bytes] = []
        missing = kept = taken = size = 0
        for number in np.frombuffer(command.numbers, "<u8").tolist():
            if len(numbers) >= COPIES_MAX:
                break
            if number in numbers or not group.dead.has(number):
                missing += 1
            else:
                row = group.dead.row(number)
                if int(row["topic_id"]) not in group.subscriptions or int(row["cause"]) == PAYLOAD_LOST:
                    kept += 1
                elif numbers and size + int(row["size"]) > COPY_BYTES_MAX:
                    break
                else:
                    numbers.append(number)
                    rows.append(row)
                    records.append(group.dead.content(row)[1])
                    size += len(records[-1])
            taken += 1
        if numbers:
            units = _units_of(np.array(rows, LETTER), group)
            units["flags"] |= np.array([LACKING * group.dead.lacks(number) for number in numbers], np.uint8)
            if command.marked:
                units["flags"] |= REPLAYED
            self._retrying.revive(group, units, records, command.due_ms)
            group.dead.remove(numbers)
        return DeadResult(len(numbers), missing, kept, taken)

    def purge(self, command: PurgeDead) -> DeadResult:
        """Remove letters for good. Raises RequestError."""
        group = self._group(command.group_id, command.numbers)
        numbers = np.frombuffer(command.numbers, "<u8").tolist()
        changed = group.dead.remove(numbers)
        missing = len(numbers) - changed
        changed += group.dead.remove_below(command.below)
        if changed:
            for subscription in group.subscriptions.values():
                subscription.forget_how()  # purged messages now look like acknowledged ones
        return DeadResult(changed, missing, taken=len(numbers))

    def _group(self, group_id: int, numbers: bytes) -> Group:
        if len(numbers) % 8:
            raise invalid("numbers", f"{len(numbers)} bytes", "elements of 8 bytes")
        group = self._state.groups.get(group_id)
        if group is None:
            raise refused(pb.UNKNOWN_NAME, f"group {group_id} does not exist", field="group", value=group_id)
        return group


def _units_of(letters: Letters, group: Group) -> Units:
    units: Units = np.zeros(len(letters), UNIT)
    for name in ("topic_id", "tag_hash", "tag_mask", "key_hash", "size", "meta_size", "flags"):
        units[name] = letters[name]
    units["scheduled_ms"] = letters["first_due_ms"]
    units["target_group"] = group.group_id
    units["origin_hour"] = hours_of(letters["origin"])
    units["origin_index"] = indexes_of(letters["origin"])
    return units
