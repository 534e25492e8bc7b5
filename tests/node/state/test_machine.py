"""What each command does, and what is refused, one thing at a time."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from tests.node.state.driver import HOUR_0, Driver, admin, dispatch_command, publish_command, settle_command
from tickwheel.node.state.machine import StateConfig, StateMachine
from tickwheel.node.state.results import Ignored, ImpossibleStateError, Refused
from tickwheel.proto import admin_pb2, scheduler_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.consumer_pb2 import LATEST, TIME
from tickwheel.proto.log_pb2 import (
    SETTLE_ACK,
    SETTLE_DEAD,
    SETTLE_RETURN,
    Command,
    CreateCluster,
    DeadRange,
    Ingest,
    Lead,
    LogEntry,
    Publish,
    PublishRequest,
    RemoveHours,
    Reschedule,
    SweepCommand,
    SweepStep,
)
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, Sweep
from tickwheel.wheel.units import HOUR_MS, UNIT


@pytest.fixture
def driver() -> Driver:
    """A created cluster with the topic `orders` (id 1)."""
    made = Driver()
    made.create()
    return made


def reason(result: Any) -> int:
    """Why a result refuses."""
    assert result.failure is not None
    return int(result.failure.reason)


def test_entries_of_an_earlier_term_do_nothing(driver: Driver) -> None:
    """After lead{5} an entry of term 4 is ignored whole, whatever is in it."""
    driver.apply(Command(lead=Lead(term=5, node_id="b")), term=5)
    before = dict(driver.state.digest().parts)
    results = driver.apply(publish_command([("p", 1, [HOUR_0])]), dispatch_command(HOUR_0), term=4)
    assert results == [Ignored(4, 5), Ignored(4, 5)]
    assert dict(driver.state.digest().parts) == before


def test_two_requests_of_a_producer_in_one_entry(driver: Driver) -> None:
    """They follow each other; a repeat among them is answered as the first; a gap is refused with what is expected."""
    command = publish_command([("p", 1, [HOUR_0 + 9]), ("p", 2, [HOUR_0]), ("p", 1, [3]), ("p", 4, [4])])
    first, second, repeat, gap = driver.apply(command)[0].requests
    assert repeat.repeated and repeat.ids.tolist() == first.ids.tolist() != second.ids.tolist()
    assert reason(gap) == pb.SEQUENCE_GAP and gap.failure.metadata["expected"] == "3"
    assert len(driver.wheel.units) == 2


def test_request_for_an_unknown_topic_is_refused_alone(driver: Driver) -> None:
    """Others of the same publish are appended; the producer's sequence does not advance."""
    command = publish_command([("p", 1, [HOUR_0, HOUR_0 + 1]), ("", 0, [HOUR_0])], topics=[1, 9, 1])
    refused, accepted = driver.apply(command)[0].requests
    assert reason(refused) == pb.UNKNOWN_NAME
    assert len(accepted.ids) == len(driver.wheel.units) == 1
    assert not driver.apply(publish_command([("p", 1, [HOUR_0])]))[0].requests[0].repeated


@pytest.mark.parametrize(
    "publish",
    [
        Publish(requests=[PublishRequest(count=2)], due_ms=b"1234567"),
        Publish(requests=[PublishRequest(count=1)], due_ms=bytes(8), sizes=b"\1\0\0\0", topic_ids=b"\1\0\0\0"),
        Publish(
            requests=[PublishRequest(count=2)],
            due_ms=np.array([2, 1], "<i8").tobytes(),
            sizes=bytes(8),
            topic_ids=b"\1\0\0\0",
        ),
        Publish(
            requests=[PublishRequest(count=2)], due_ms=bytes(16), sizes=bytes(8), topic_ids=b"\1\0\0\0", rows=bytes(8)
        ),
        Publish(requests=[PublishRequest(count=1)], due_ms=b"\xff" * 7 + b"\x7f", sizes=bytes(4), topic_ids=bytes(4)),
    ],
)
def test_columns_that_do_not_fit_are_refused(driver: Driver, publish: Publish) -> None:
    """Apply never raises on content: length, sum of sizes, order, rows and range are checked."""
    outcome = driver.apply(Command(publish=publish))[0].requests[0]
    assert reason(outcome) == pb.INVALID_FIELD
    assert not driver.wheel.units


def test_unknown_commands_are_refused_and_newer_formats_stop(driver: Driver) -> None:
    """A command without a body or of the pipeline gets a result; an entry of a newer format raises."""
    results = driver.apply(Command(), Command(ingest=Ingest(job_id="j")))
    assert all(isinstance(result, Refused) for result in results)
    with pytest.raises(ImpossibleStateError):
        driver.state.apply(99, 1, LogEntry(format_version=2))
    with pytest.raises(ImpossibleStateError):
        driver.state.apply(1, 1, LogEntry(format_version=1))


def test_producers_beyond_their_number_are_forgotten_in_order_of_use() -> None:
    """With room for two, using the first again lets the second go; then its sequence may start anywhere."""
    driver = Driver()
    driver.create(producers_max=2)
    for producer, number in (("p", 1), ("q", 1), ("p", 1), ("r", 1)):
        driver.apply(publish_command([(producer, number, [HOUR_0])]))
    assert driver.apply(publish_command([("p", 1, [HOUR_0])]))[0].requests[0].repeated
    assert driver.apply(publish_command([("q", 40, [HOUR_0])]))[0].requests[0].failure is None


def test_ids_of_all_producers_together_are_bounded() -> None:
    """The oldest batch goes first; its repeat is SEQUENCE_FORGOTTEN."""
    driver = Driver()
    driver.create(producer_window_ids=1_000)
    for producer in ("p", "q"):
        driver.apply(publish_command([(producer, 1, [HOUR_0] * 600)]))
    assert reason(driver.apply(publish_command([("p", 1, [HOUR_0] * 600)]))[0].requests[0]) == pb.SEQUENCE_FORGOTTEN
    assert driver.apply(publish_command([("q", 1, [HOUR_0] * 600)]))[0].requests[0].repeated


def test_dispatch_splits_by_topic_and_tells() -> None:
    """Each topic gets its units in order, with its first position; what is of no topic any more is discarded."""
    driver = Driver()
    driver.create()
    for name in ("b", "c"):
        driver.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name=name)))
    driver.apply(publish_command([("", 0, [HOUR_0 + i for i in range(6)])], topics=[2, 1, 3, 1, 2, 3]))
    driver.apply(admin(delete_topic=admin_pb2.DeleteTopicRequest(name="c")))
    result = driver.apply(dispatch_command(HOUR_0 + 9))[0]
    assert (result.dispatched, result.discarded) == (4, 2)
    told = [(part.topic, part.first_position, part.units["due_ms"].tolist()) for part in result.ready]
    assert told == [("orders", 0, [HOUR_0 + 1, HOUR_0 + 3]), ("b", 0, [HOUR_0, HOUR_0 + 4])]


def test_where_a_group_starts(driver: Driver) -> None:
    """Earliest, latest, a past time (at its tick) and a time to come (exactly)."""
    driver.ready([HOUR_0, HOUR_0 + 1_000, HOUR_0 + 2_500])
    driver.group("early")
    driver.group("late", start_from=LATEST)
    driver.group("past", start_from=TIME, start_ms=HOUR_0 + 2_501)
    driver.group("later", start_from=TIME, start_ms=HOUR_0 + 4_000)
    driver.ready([HOUR_0 + 3_000, HOUR_0 + 3_999, HOUR_0 + 4_000])
    floors = [subscription.floor for subscription in driver.state.groups.subscriptions()]
    assert floors == [0, 3, 2, 5]


def test_retries_are_for_their_group_alone(driver: Driver) -> None:
    """A unit with a target group counts as settled for every other group, before and after a restart."""
    driver.group("a")
    driver.group("b")
    units = np.zeros(4, UNIT)
    units["due_requested_ms"] = HOUR_0 + np.arange(4)
    units["size"], units["topic_id"], units["target_group"] = 1, 1, [0, 2, 1, 2]
    driver.wheel.append(units, b"xxxx")
    driver.apply(dispatch_command(HOUR_0 + 9))
    driver.checkpoint()
    for _ in range(2):
        a, b = (driver.state.subscription(group, 1) for group in (1, 2))
        assert a is not None and b is not None
        assert a.deliverable(0, 9)[0].tolist() == [0, 2]
        assert b.deliverable(0, 9)[0].tolist() == [0, 1, 3]
        driver.restart()
    place = driver.state.subscription(1, 1)
    assert place is not None
    ids = place.ids_of(np.array([0, 1, 2, 3], np.uint64)).tolist()
    driver.apply(settle_command(SETTLE_ACK, [ids[0]], [1], [0]))
    assert place.floor == 2, "stepped over the other group's"
    driver.apply(settle_command(SETTLE_ACK, [ids[2]], [1], [2]))
    assert place.floor == 4


def test_positions_are_checked_never_trusted(driver: Driver) -> None:
    """A right id with a wrong position, a position not yet dispatched or absurd: unknown, nothing settled."""
    driver.group()
    ids = driver.ready([HOUR_0, HOUR_0 + 1])
    result = driver.apply(settle_command(SETTLE_ACK, [ids[0]] * 4, [1] * 4, [1, 2, 1 << 63, (1 << 64) - 1]))[0]
    assert (result.settled, result.unknown) == (0, 4)


def test_nothing_beyond_the_window(driver: Driver) -> None:
    """Handing out and settling end window_messages_max above the floor and go on as the floor rises."""
    driver.apply(admin(settings=admin_pb2.Settings(window_messages_max=1_000)))
    driver.group()
    ids = driver.ready([HOUR_0 + i for i in range(1_500)])
    place = driver.state.subscription(1, 1)
    assert place is not None
    assert len(place.deliverable(0, 9_999)[0]) == 1_000
    assert place.scanned_to(1_000) == 1_000
    assert driver.apply(settle_command(SETTLE_ACK, [ids[1_200]], [1], [1_200]))[0].unknown == 1
    driver.apply(settle_command(SETTLE_ACK, ids[:400], [1] * 400, range(400)))
    assert place.deliverable(1_000, 9_999)[0].tolist() == list(range(1_000, 1_400))


def test_dead_letters_are_kept_and_hold_no_hours(driver: Driver) -> None:
    """Counted over restarts; their payloads are with them, so the hour they lay in can go."""
    driver.group()
    ids = driver.ready([HOUR_0, HOUR_0 + HOUR_MS, HOUR_0 + 2 * HOUR_MS])
    driver.apply(settle_command(SETTLE_DEAD, [ids[1], ids[1]], [1, 1], [1, 1]))
    driver.apply(settle_command(SETTLE_ACK, [ids[0], ids[2]], [1, 1], None))
    driver.checkpoint()
    driver.restart(Random(1))
    assert driver.state.dead_letters_kept() == 1
    assert driver.state.removable_hours() == HOUR_0 // HOUR_MS + 2


def test_removing_hours_raises_floors_and_counts(driver: Driver) -> None:
    """What retention takes although it was not settled is counted; hours not over are refused."""
    driver.group()
    ids = driver.ready([HOUR_0, HOUR_0 + 5, HOUR_0 + HOUR_MS])
    driver.apply(settle_command(SETTLE_ACK, [ids[1]], [1], [1]))
    driver.apply(settle_command(SETTLE_RETURN, [ids[0]], [1], [0]))
    hour = HOUR_0 // HOUR_MS
    assert driver.state.removable_hours() == hour
    assert reason(driver.apply(admin(remove_hours=RemoveHours(hour_min_kept=hour + 2)))[0]) == pb.WRONG_STATE
    result = driver.apply(admin(remove_hours=RemoveHours(hour_min_kept=hour + 1)))[0]
    assert (result.hour_min_kept, result.unsettled_removed) == (hour + 1, 1)
    place = driver.state.subscription(1, 1)
    assert place is not None
    assert (place.floor, place.returned_count, driver.state.removed_unsettled) == (2, 0, 1)
    driver.group("new")
    place = driver.state.subscription(2, 1)
    assert place is not None and place.floor == 2, "earliest is what is retained"


@pytest.mark.parametrize("together", [True, False])
def test_returns_at_the_last_attempt_that_is_counted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """However often a message comes back, and twice at once: it is still out, once, and can be settled."""
    monkeypatch.setattr("tickwheel.node.state.subscription.ATTEMPT_MAX", 3)
    driver.group()
    number = driver.ready([HOUR_0])[0]
    place = driver.state.subscription(1, 1)
    assert place is not None
    for attempt in (1, 2, 3, 3):
        if together:
            driver.apply(settle_command(SETTLE_RETURN, [number, number], [attempt] * 2, [0, 0]))
        else:
            once = settle_command(SETTLE_RETURN, [number], [attempt], [0])
            driver.apply(once, once)
        positions, _, attempts = place.returned(9)
        assert (positions.tolist(), attempts.tolist(), place.returned_count) == ([0], [min(attempt + 1, 3)], 1)
    driver.apply(settle_command(SETTLE_ACK, [number], [3], [0]))
    assert (place.floor, place.returned_count) == (1, 0)


def test_a_topic_without_groups_retains(driver: Driver) -> None:
    """Nothing of it is removable until a group has settled it."""
    driver.ready([HOUR_0, HOUR_0 + 3 * HOUR_MS])
    assert driver.state.removable_hours() == HOUR_0 // HOUR_MS


def test_reschedule_and_cancel(driver: Driver) -> None:
    """Moved once, cancelled by its first id, then neither."""
    number = int(driver.apply(publish_command([("", 0, [HOUR_0])]))[0].requests[0].ids[0])
    command = Reschedule(id=number, due_ms=HOUR_0, new_due_ms=HOUR_0 + 50, topic_id=1, record=b"x")
    moved = driver.apply(Command(reschedule=command))[0]
    assert (moved.outcome, moved.due_ms) == (scheduler_pb2.RESCHEDULED, HOUR_0 + 50)
    assert moved.new_id != number
    command.meta_size = 9
    assert reason(driver.apply(Command(reschedule=command))[0]) == pb.INVALID_FIELD


def test_topics_and_groups_are_created_once(driver: Driver) -> None:
    """The same again answers the same; other settings are NAME_TAKEN; more topics are added; names are checked."""
    again = driver.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name="orders")))[0]
    assert again.topic.topic_id == 1
    assert reason(driver.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name="orders", fifo=True)))[0]) == (
        pb.NAME_TAKEN
    )
    assert reason(driver.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name=".x")))[0]) == pb.INVALID_FIELD
    assert driver.group().group.group_id == 1
    assert list(driver.group(topics=["orders", "more"]).group.topics) == ["orders", "more"]
    other = admin_pb2.CreateGroupRequest(name="g", topics=["orders"], filter="a")
    assert reason(driver.apply(admin(create_group=other))[0]) == pb.FILTER_DIFFERS
    driver.apply(admin(delete_group=admin_pb2.DeleteGroupRequest(name="g")))
    assert driver.group().group.group_id == 2, "ids are never used again"


def test_limits_of_topics_and_groups() -> None:
    """At the limit a typed refusal, and nothing was half made."""
    driver = Driver()
    driver.create(topics_max=1, groups_max=1)
    assert reason(driver.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name="b")))[0]) == pb.LIMIT_REACHED
    assert reason(driver.group(topics=["orders", "b"])) == pb.LIMIT_REACHED
    assert driver.state.group_id("g") is None
    driver.group()
    assert reason(driver.group("h")) == pb.LIMIT_REACHED


def test_files_of_a_deleted_topic_outlive_the_checkpoint_that_names_them(driver: Driver) -> None:
    """A crash after the deletion starts from the older manifest; the next durable one lets them go."""
    driver.ready([HOUR_0])
    driver.checkpoint()
    driver.apply(admin(delete_topic=admin_pb2.DeleteTopicRequest(name="orders")))
    before = driver.state.digest()
    driver.restart(Random(2))
    assert driver.state.digest() == before
    driver.checkpoint()
    assert not driver.disk.exists("state/ready/1")


def test_a_failed_checkpoint_changes_nothing(driver: Driver) -> None:
    """The disk was full: the next one is written, and a restart from it gives the same state."""
    driver.group()
    driver.ready([HOUR_0 + i for i in range(100)])
    job = driver.state.begin_checkpoint()
    driver.ready([HOUR_0 + 200])
    driver.state.abandon_checkpoint(job)
    driver.checkpoint()
    before = driver.state.digest()
    driver.restart(Random(3))
    assert driver.state.digest() == before


def test_second_create_cluster_and_commands_before_it_are_refused() -> None:
    """Nothing is administered before the cluster exists, and it is created once."""
    driver = Driver()
    create = admin(create_topic=admin_pb2.CreateTopicRequest(name="a"))
    assert reason(driver.apply(create)[0]) == pb.WRONG_STATE
    driver.create()
    again = admin(create_cluster=CreateCluster(cluster_id="d", members=[admin_pb2.Member(node_id="x")]))
    assert reason(driver.apply(again)[0]) == pb.WRONG_STATE
    assert driver.state.cluster_id == "c"


def test_another_slot_width_than_the_wheels_stops_the_node() -> None:
    """Heads on disk depend on it."""
    driver = Driver()
    driver.state = StateMachine(driver.disk, "state", driver.wheel, config=StateConfig(slot_ms=100))
    with pytest.raises(ImpossibleStateError, match="slot_ms"):
        driver.create()


def test_settings_are_checked_and_slot_is_fixed(driver: Driver) -> None:
    """Out of bounds names field, value and limit; absent fields stay."""
    for update in (
        admin_pb2.Settings(attempts_max=256),
        admin_pb2.Settings(delay_levels="1x"),
        admin_pb2.Settings(slot_ms=500),
        admin_pb2.Settings(window_messages_max=0),
    ):
        failure = driver.apply(admin(settings=update))[0].failure
        assert failure.reason == pb.INVALID_FIELD and failure.metadata["limit"]
    driver.apply(admin(settings=admin_pb2.Settings(delay_levels="1s  2d", attempts_max=3)))
    assert driver.state.delay_levels_ms.tolist() == [1_000, 172_800_000]
    assert driver.state.settings.batch_messages_max == 10_000


def test_members(driver: Driver) -> None:
    """Added, filled in, refused with another disk or after removal; the last one stays."""

    def add(node_id: str, disk_uuid: str, port: int = 1) -> Any:
        member = admin_pb2.Member(
            node_id=node_id, peer_address=f"{node_id}:{port}", client_address=f"{node_id}:2", disk_uuid=disk_uuid
        )
        return driver.apply(admin(add_member=member))[0]

    known = add("a", "u1").members
    assert [m.disk_uuid for m in known] == ["u1"], "the uuid becomes known"
    assert add("a", "u1").members == known
    assert reason(add("a", "u2")) == pb.WRONG_STATE
    assert reason(add("b", "u1")) == pb.WRONG_STATE
    assert [m.node_id for m in add("b", "u2").members] == ["a", "b"]
    assert reason(add("b", "u2", port=7)) == pb.NAME_TAKEN
    assert [m.node_id for m in driver.state.members()] == ["a", "b"]
    remove = admin(remove_member=admin_pb2.RemoveMemberRequest(node_id="b"))
    assert [m.node_id for m in driver.apply(remove)[0].members] == ["a"]
    assert reason(add("b", "u3")) == pb.WRONG_STATE
    assert reason(driver.apply(admin(remove_member=admin_pb2.RemoveMemberRequest(node_id="a")))[0]) == pb.WRONG_STATE


def test_the_last_sequence_of_all_fits_a_checkpoint() -> None:
    """An earlier version accepted it; once it was forgotten, no checkpoint could be written any more."""
    driver = Driver()
    driver.create(producer_window_ids=1_000)
    last = (1 << 64) - 1
    driver.apply(publish_command([("evil", last, [HOUR_0])]))
    driver.apply(publish_command([("good", 1, [HOUR_0] * 1_000)]))
    driver.apply(publish_command([("good", 2, [HOUR_0])]))
    before = driver.state.digest()
    driver.checkpoint()
    driver.restart()
    assert driver.state.digest() == before
    again = driver.apply(publish_command([("evil", last, [HOUR_0])]))[0].requests[0]
    assert again.failure is not None and again.failure.reason == pb.SEQUENCE_FORGOTTEN


def test_letters_that_come_before_the_last_step_of_a_deletion_is_applied_go_with_the_topic(driver: Driver) -> None:
    """The master looked before it proposed the step. Those of other topics stay."""
    driver.apply(admin(create_topic=admin_pb2.CreateTopicRequest(name="other")))
    driver.group("g", ("orders", "other"))
    driver.group("h", ("orders",))
    first, second = driver.ready([HOUR_0 + 10, HOUR_0 + 20])
    [other] = driver.ready([HOUR_0 + 30], topic_id=2)

    def left() -> list[int]:
        return [group.dead.count for group in driver.state.groups]

    def begin(**fields: Any) -> None:
        begun = Sweep(job_id="j", delete_topic="orders", target_id=1, **fields)
        assert driver.apply(Command(sweep=SweepCommand(begin=begun)))[0].failure is None

    def step(*ranges: tuple[int, int, int], **fields: Any) -> Any:
        dead = [DeadRange(group_id=group, first=first, below=below) for group, first, below in ranges]
        return driver.apply(Command(sweep=SweepCommand(step=SweepStep(job_id="j", dead=dead, **fields))))[0]

    driver.apply(settle_command(SETTLE_DEAD, [other], [1], [0], topic_id=2))
    driver.apply(settle_command(SETTLE_DEAD, [first], [1], [0]))
    begin(with_dead=True)
    assert step((1, 0, 1), (9, 0, 1 << 63)).sweep.dead == 0, "not of the topic; no such group"
    assert step((1, 0, 2)).stale and left() == [2, 0], "a step for another number has no effect"
    assert step((1, 1, 2), number=1).sweep.dead == 1
    assert driver.state.removed_unsettled == 1
    driver.apply(settle_command(SETTLE_DEAD, [second], [1], [1]))
    driver.apply(settle_command(SETTLE_DEAD, [first, second], [1, 1], [0, 1], group_id=2))
    assert left() == [2, 2]
    ended = step((1, 2, 2), number=2, last=True).sweep
    assert (ended.state, ended.dead, ended.undelivered) == (SWEEP_FINISHED, 4, 0)
    assert left() == [1, 0] and driver.state.removed_unsettled == 4


def test_no_count_of_a_sweep_outgrows_its_field(driver: Driver) -> None:
    """Else every node would end at the step, and again at each start."""
    driver.apply(Command(sweep=SweepCommand(begin=Sweep(job_id="j", shift_ms=1))))
    for number, most in enumerate(((1 << 64) - 1, 1)):
        step = SweepStep(job_id="j", number=number, examined=most, too_far=most)
        job = driver.apply(Command(sweep=SweepCommand(step=step)))[0].sweep
    assert (job.steps, job.examined, job.too_far) == (2, (1 << 64) - 1, (1 << 64) - 1)


def test_a_deletion_of_an_earlier_version_leaves_the_dead_letters_of_its_topic(driver: Driver) -> None:
    """Its log is applied as it was, for nodes of both versions to be equal."""
    driver.group("g", ("orders",))
    [number] = driver.ready([HOUR_0 + 10])
    driver.apply(settle_command(SETTLE_DEAD, [number], [1], [0]))
    driver.apply(Command(sweep=SweepCommand(begin=Sweep(job_id="j", delete_topic="orders", target_id=1))))
    ended = driver.apply(Command(sweep=SweepCommand(step=SweepStep(job_id="j", last=True))))[0].sweep
    assert (ended.state, ended.dead) == (SWEEP_FINISHED, 0)
    assert (driver.state.dead_letters_kept(), driver.state.removed_unsettled) == (1, 0)
