"""What a newer version wrote is never half understood: by no field, command, value or checkpoint that is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.node.state.driver import admin, publish_command
from tests.node.state.solo import Solo
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.state.schema import (
    EARLIER_SCHEMAS,
    ENTRY_SCHEMA,
    checksum,
    command_problem,
    entry_problem,
    unknown_in,
)
from tickwheel.node.state.snapshot import parts
from tickwheel.proto import admin_pb2
from tickwheel.proto.log_pb2 import SETTLE_ACK, Command, LogEntry, Settle, SettleColumns
from tickwheel.proto.state_pb2 import StateSnapshot
from tickwheel.storage.manifest import read_manifest

FIELD_1000 = b"\xc0\x3e\x07"
"""Field 1000 with the value 7: no message has it."""
NEWER = ENTRY_SCHEMA ^ 1


def entry() -> LogEntry:
    """Of three commands, with messages in messages in messages."""
    topic = admin(create_topic=admin_pb2.CreateTopicRequest(name="t"))
    settle = Command(settle=Settle(batches=[SettleColumns(group_id=1, kind=SETTLE_ACK), SettleColumns(group_id=2)]))
    publish = publish_command([("p", 1, [5, 6])], 1, b"payload")
    return LogEntry(format_version=1, term=1, stamped_ms=5, commands=[topic, settle, publish], schema=NEWER)


PLACES: dict[str, tuple[Callable[[LogEntry], object], str]] = {
    "the entry": (lambda e: e.MergeFromString(FIELD_1000), "field 1000 of LogEntry"),
    "a command": (lambda e: e.commands.add().MergeFromString(FIELD_1000), "field 1000 of Command"),
    "a part of a part": (lambda e: e.commands[1].settle.batches[1].MergeFromString(FIELD_1000), "of SettleColumns"),
    "a request": (lambda e: e.commands[2].publish.requests[0].MergeFromString(FIELD_1000), "of PublishRequest"),
    "a value": (lambda e: e.commands[1].settle.batches[0].MergeFromString(b"\x18\x63"), "value 99 of SettleKind"),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_known_is_found_wherever_it_stands(place: str) -> None:
    """P8: a node that passed over it would differ from the one that acts on it."""
    change, said = PLACES[place]
    newer = entry()
    change(newer)
    assert said in entry_problem(newer)
    data = newer.SerializeToString()
    assert said in command_problem(data)
    assert said in command_problem(b"\x00" + data, 1)


def test_another_version_that_says_nothing_new_is_understood() -> None:
    """Versions serve beside each other as long as none uses what the other does not know; older ones had no schema."""
    for schema in (NEWER, ENTRY_SCHEMA, 0):
        message = entry()
        message.schema = schema
        assert entry_problem(message) == command_problem(message.SerializeToString()) == ""
    assert "no entry" in command_problem(b"\xff\xff\xff")


def test_what_a_client_once_put_into_an_entry_stops_nobody() -> None:
    """Versions before copied what clients sent: a client could stop every node that was upgraded."""
    for schema in EARLIER_SCHEMAS:
        for change, _ in PLACES.values():
            message = entry()
            message.schema = schema
            change(message)
            assert entry_problem(message) == command_problem(message.SerializeToString()) == ""
    assert ENTRY_SCHEMA ^ 1 not in EARLIER_SCHEMAS


def test_an_entry_ends_with_its_schema() -> None:
    """By this a slave tells in no time that its master's version is its own: the field must stay the last."""
    assert max(LogEntry.DESCRIPTOR.fields_by_number) == LogEntry.DESCRIPTOR.fields_by_name["schema"].number
    own = entry()
    own.schema = ENTRY_SCHEMA
    assert own.SerializeToString().endswith(ENTRY_SCHEMA.to_bytes(4, "little"))
    own.MergeFromString(FIELD_1000)
    assert command_problem(own.SerializeToString()) == "", "looked at only if the schema is another"


def test_the_schema_is_that_of_all_that_can_stand_there() -> None:
    """Another message gives another checksum, in whatever order they are named the same."""
    one, two = LogEntry.DESCRIPTOR, StateSnapshot.DESCRIPTOR
    assert checksum(one) == ENTRY_SCHEMA != checksum(two)
    assert checksum(one, two) == checksum(two, one)


def test_apply_stops_before_anything_of_a_newer_entry() -> None:
    """The state is left as it was; an entry with nothing new is applied."""
    solo = Solo()
    solo.create("g")
    before = solo.state.digest().digest
    newer = LogEntry(format_version=1, term=1, stamped_ms=solo.now_ms, schema=NEWER)
    newer.commands.add().CopyFrom(publish_command([("", 0, [solo.now_ms])], 1, b"x"))
    newer.commands.add().MergeFromString(FIELD_1000)
    with pytest.raises(ImpossibleStateError, match=r"field 1000 of Command.*start the version"):
        solo.state.apply(solo.index + 1, 1, newer)
    assert solo.state.digest().digest == before
    del newer.commands[1]
    solo.state.apply(solo.index + 1, 1, newer)
    assert solo.state.digest().digest != before


def test_a_checkpoint_of_a_newer_version_is_refused() -> None:
    """What is not known would be missing in the state from then on; and an older format has been refused all along."""
    solo = Solo()
    solo.create("g")
    solo.checkpoint()
    manifest = read_manifest(solo.disk)
    assert manifest is not None
    snapshot, _, _ = parts(solo.disk, manifest.state)
    assert not unknown_in(snapshot)
    snapshot.groups[0].MergeFromString(FIELD_1000)
    parts(solo.disk, snapshot.SerializeToString())  # by its own version: nothing to look for
    snapshot.schema ^= 1
    with pytest.raises(ImpossibleStateError, match="field 1000 of GroupSnapshot"):
        parts(solo.disk, snapshot.SerializeToString())
    snapshot.format_version -= 1
    with pytest.raises(ImpossibleStateError, match="state format"):
        parts(solo.disk, snapshot.SerializeToString())
