"""Recurring schedules on three nodes: each planned time makes its run once, through changes of master and restarts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.node.core.schedule.test_pending import ask, core_of
from tests.node.core.trio import Client, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.metas import meta_of
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.core.requests import everybody
from tickwheel.node.core.schedule import planner, recurring
from tickwheel.node.core.schedule.calendar import Calendar
from tickwheel.node.core.schedule.planner import calendar_of_spec
from tickwheel.node.failure import Failure, invalid
from tickwheel.node.state.recurring import Recurring
from tickwheel.node.state.results import AdminResult, ScheduleResult
from tickwheel.node.state.schedules import Run
from tickwheel.node.state.schema import SCHEDULES_LEVEL
from tickwheel.proto import admin_pb2, consumer_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto import schedules_pb2 as s
from tickwheel.proto.access_pb2 import RIGHT_SCHEDULE, AccessCommand, AccessRole, Grant, StoredUser, UserQuotas
from tickwheel.proto.log_pb2 import AdminCommand, Command, MakeRuns, ScheduleCommand, ScheduleRuns


def trio(seed: int = 1) -> World:
    """Three nodes with a master that knows the time."""
    world = World(seed, config=replace(CoreConfig(), segment_bytes=1 << 20))
    world.elect()
    world.run(2_000)
    return world


def definition(name: str = "tick", payload: bytes = b"p", **fields: Any) -> s.ScheduleDefinition:
    """A schedule for topic t; every second unless `spec` says otherwise."""
    fields.setdefault("spec", s.ScheduleSpec(interval_ms=1_000))
    return s.ScheduleDefinition(name=name, topic="t", payload=payload, **fields)


def call(world: World, method: str, request: Any) -> Any:
    """The answer of the master's part, or its Failure."""
    part = core_of(world).parts.schedules
    if method == "put":
        return ask(world, part.put(request, "", everybody))
    if method == "preview":
        return ask(world, part.preview(request))
    return ask(world, getattr(part, method)(request, everybody))


def put(world: World, made: s.ScheduleDefinition, **fields: Any) -> Any:
    return call(world, "put", s.PutScheduleRequest(definition=made, **fields))


def shown(world: World, name: str = "tick") -> s.Schedule:
    """As the master shows it."""
    found: s.Schedule = call(world, "get", s.GetScheduleRequest(name=name)).schedule
    return found


def planned(client: Client, name: str = "tick") -> list[int]:
    """Planned times of the runs of a schedule that were delivered, in order; one that came twice is there twice."""
    times: list[int] = []
    for record, seen in client.got.items():
        meta = meta_of(record[:-1])  # payloads have one byte
        if meta.headers.get("tickwheel-schedule") == name:
            times += [int(meta.headers["tickwheel-planned"])] * len(seen)
    return sorted(times)


def lateness(client: Client) -> list[int]:
    """How long after its planned time each run was delivered first."""
    found = []
    for record, seen in client.got.items():
        headers = meta_of(record[:-1]).headers
        found.append(seen[0][0] - int(headers["tickwheel-planned"]))
    return found


def consume(world: World) -> Client:
    client = Client(world)
    client.consume()
    return client


def field_of(answer: Any) -> str:
    assert isinstance(answer, Failure), answer
    return answer.metadata["field"]


def test_every_planned_time_comes_once_and_not_early() -> None:
    """Each second, at the millisecond, with the headers and the payload; all nodes agree, and the course is shown."""
    world = trio()
    client = consume(world)
    put(world, definition(meta=pb.MessageMeta(key="k", tags=["a"], headers={"x": "y"})))
    begun_ms = world.now_ms
    world.run(5_200)
    times = planned(client)
    assert times == list(range(times[0], times[0] + 5_000, 1_000)) and len(times) == 5
    assert begun_ms < times[0] <= begun_ms + 1_000 and times[0] % 1_000 == 0
    assert all(0 <= late <= 50 for late in lateness(client))
    meta = meta_of(next(iter(client.got))[:-1])
    assert (meta.key, list(meta.tags), meta.headers["x"]) == ("k", ["a"], "y")
    schedule = shown(world)
    assert schedule.state == s.SCHEDULE_ACTIVE and schedule.made == len(schedule.runs) >= 5
    assert [run.planned_ms for run in schedule.runs][:5] == times
    assert all(run.outcome == s.RUN_MADE and run.id.hour for run in schedule.runs)
    upcoming = call(world, "get", s.GetScheduleRequest(name="tick")).upcoming_ms
    assert list(upcoming) == [times[-1] + 1_000 * n for n in range(1, 11)]
    world.run_until(lambda: len(digests(world)) == 1, 1_000)


def test_no_run_is_lost_or_doubled_when_masters_die() -> None:
    """SIGKILL of one master after the other, then of all nodes at once: every second in between has its run, once."""
    world = trio(2)
    client = consume(world)
    put(world, definition(late_ms_max=86_400_000))
    for _ in range(3):
        world.run(1_700)
        master = world.master()
        assert master is not None
        master.kill()
        world.run(300)
        master.start()
        world.elect()
    world.run(1_000)
    for node in world.nodes.values():
        node.kill()
    world.run(2_500)
    for node in world.nodes.values():
        node.start()
    world.elect()
    world.run(6_000)
    times = sorted(set(planned(client)))
    assert times == list(range(times[0], times[-1] + 1, 1_000)) and len(times) > 10
    made = [run.id for run in shown(world).runs]
    assert len({(i.hour, i.index) for i in made}) == len(made)
    assert min(lateness(client)) >= 0
    # Deliveries may repeat when a master dies; messages do not.
    schedule = core_of(world).state.schedules.get("tick")
    assert schedule is not None and schedule.counts[s.RUN_MADE] == (schedule.next_ms - times[0]) // 1_000
    world.run_until(lambda: len(digests(world)) == 1, 1_000)


def test_a_command_that_comes_again_does_nothing() -> None:
    """The same rows once more, and rows of a revision or planned time that no longer hold."""
    world = trio()
    put(world, definition())
    schedule = core_of(world).state.schedules.get("tick")
    assert schedule is not None
    world.run(1_500)
    before = core_of(world).state.schedules.get("tick")
    row = ScheduleRuns(
        name="tick",
        revision=schedule.revision,
        expected_ms=schedule.next_ms,
        planned_ms=np.array([schedule.next_ms], "<i8").tobytes(),
        due_ms=np.array([schedule.next_ms], "<i8").tobytes(),
        next_ms=schedule.next_ms + 1_000,
    )
    pending = core_of(world).wheel.pending
    core = core_of(world)
    results: list[Any] = []
    core.proposer.submit(
        Command(schedule=ScheduleCommand(make=MakeRuns(rows=[row, row]))), Reply.either(results.append)
    )
    master = world.master()
    assert master is not None
    master.wake()
    world.run_until(lambda: bool(results), 500)
    assert results[0].stale_rows == 2 and not results[0].notes
    assert core_of(world).wheel.pending <= pending
    after = core_of(world).state.schedules.get("tick")
    assert before is not None and after is not None and after.revision == before.revision


def test_a_pause_cancels_what_was_made_ahead_and_a_resume_goes_on() -> None:
    """Nothing planned behind the pause comes; what was planned before does; after the resume the plan goes on from now,
    and nothing of the meantime comes."""
    world = trio()
    client = consume(world)
    put(world, definition())
    world.run(3_300)
    paused = call(world, "pause", s.PauseScheduleRequest(name="tick"))
    paused_ms = world.now_ms
    assert paused.state == s.SCHEDULE_PAUSED and paused.cancelled >= 1 and paused.next_ms == 0
    again = call(world, "pause", s.PauseScheduleRequest(name="tick"))
    assert again.revision == paused.revision
    world.run(4_000)
    before = planned(client)
    assert before[-1] <= paused_ms and paused.made == len(before)
    call(world, "resume", s.ResumeScheduleRequest(name="tick"))
    resumed_ms = world.now_ms
    world.run(2_200)
    later = [at for at in planned(client) if at > paused_ms]
    assert later and later[0] > resumed_ms - 20 and len(later) == len(set(later))
    world.run_until(lambda: len(digests(world)) == 1, 1_000)


def test_a_replacement_takes_over_at_one_moment() -> None:
    """The payload changes from one planned time to the next: none is missing, none comes with both."""
    world = trio()
    client = consume(world)
    put(world, definition(payload=b"1"))
    world.run(3_400)
    answer = put(world, definition(payload=b"2"))
    assert answer.changed and not answer.created
    world.run(3_000)
    times = planned(client)
    assert times == list(range(times[0], times[0] + 1_000 * len(times), 1_000)) and len(times) >= 6
    by_payload: dict[bytes, list[int]] = {record[-1:]: [] for record in client.got}
    for record in client.got:
        by_payload[record[-1:]].append(int(meta_of(record[:-1]).headers["tickwheel-planned"]))
    assert max(by_payload[b"1"]) < min(by_payload[b"2"])


@pytest.mark.parametrize("change", ["pause", "put", "delete"])
@pytest.mark.parametrize("room", [True, False], ids=["made", "missed"])
def test_planned_times_before_a_change_have_their_runs(
    change: str, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change comes before the master has looked, as after an election: what was planned before it is made first; or
    noted, every one of them, if there is no room. Only the first was noted, and the others were lost."""
    world = trio()
    put(world, definition())
    world.run(3_000)
    core = core_of(world)
    notes: list[Run] = []
    apply = Recurring.apply

    def noting(self: Recurring, command: ScheduleCommand, stamped_ms: int) -> ScheduleResult:
        result = apply(self, command, stamped_ms)
        if self is core.state._recurring:
            notes.extend(note.run for note in result.notes)
        return result

    monkeypatch.setattr(Recurring, "apply", noting)
    monkeypatch.setattr(core.parts.planner, "tick", lambda now: None)
    monkeypatch.setattr(core.parts.planner, "wait_ms", lambda now: None)
    if not room:
        monkeypatch.setattr(core.parts.planner, "_full", lambda: Failure(pb.LIMIT_REACHED, "full"))
    next_ms = shown(world).next_ms
    world.run(5_500)
    if change == "put":
        put(world, definition(payload=b"q"))
    else:
        asked = s.PauseScheduleRequest if change == "pause" else s.DeleteScheduleRequest
        call(world, change, asked(name="tick"))
    passed = [
        at_ms
        for run in notes
        if run.outcome in (s.RUN_MADE, s.RUN_MISSED) and run.planned_ms <= core.clock.now_ms()
        for at_ms in range(run.planned_ms, (run.planned_ms if room else run.at_ms) + 1, 1_000)
    ]
    assert len(passed) >= 3 and passed == list(range(next_ms, next_ms + 1_000 * len(passed), 1_000))
    assert passed[-1] > core.clock.now_ms() - 1_200
    outcomes = {run.outcome for run in notes} - {s.RUN_CANCELLED}
    assert outcomes == {s.RUN_MADE if room else s.RUN_MISSED}


def test_a_put_that_is_repeated_changes_nothing() -> None:
    """Same content: same revision, even if it has to be absent; other content: refused, or replaced if the revision is
    the expected one."""
    world = trio()
    first = put(world, definition(), if_absent=True)
    assert first.created and first.changed
    again = put(world, definition(), if_absent=True, expected_revision=0)
    assert not again.changed and again.schedule.revision == first.schedule.revision
    assert put(world, definition(payload=b"2"), if_absent=True).reason == pb.NAME_TAKEN
    wrong = put(world, definition(payload=b"2"), expected_revision=999)
    assert wrong.reason == pb.WRONG_STATE and field_of(wrong) == "expected_revision"
    done = put(world, definition(payload=b"2"), expected_revision=first.schedule.revision)
    assert done.changed and done.schedule.revision > first.schedule.revision


def test_triggers_and_backfills_count_once_for_their_request() -> None:
    """A repeat gets the first answer; another range under the same id is refused; paused schedules too."""
    world = trio()
    client = consume(world)
    spec = s.ScheduleSpec(cron="0 0 1 1 *")
    put(world, definition(spec=spec), paused=True)
    asked = s.TriggerScheduleRequest(name="tick", request_id="one")
    first, again = call(world, "trigger", asked), call(world, "trigger", asked)
    assert first.run == again.run and again.repeated and not first.repeated
    world.run(500)
    assert planned(client) == [first.run.planned_ms]
    range_ = {"from_ms": 1_600_000_000_000, "until_ms": world.now_ms - 100}
    filled = call(world, "backfill", s.BackfillScheduleRequest(name="tick", request_id="two", **range_))
    assert filled.made == 7 and not filled.next_from_ms  # 2021 to 2027
    assert len(np.frombuffer(filled.ids, "<u8")) == 7
    repeat = call(world, "backfill", s.BackfillScheduleRequest(name="tick", request_id="two", **range_))
    assert repeat.repeated and repeat.made == 7
    range_["from_ms"] += 1
    other = call(world, "backfill", s.BackfillScheduleRequest(name="tick", request_id="two", **range_))
    assert other.reason == pb.NAME_TAKEN
    world.run(500)
    assert len(planned(client)) == 8
    schedule = shown(world)
    assert (schedule.triggered, schedule.backfilled, schedule.made) == (1, 7, 0)


def test_a_backfill_of_many_is_made_in_pieces() -> None:
    """The answer says where to go on; together the pieces make each planned time once."""
    world = trio()
    client = consume(world)
    put(world, definition(), paused=True)
    from_ms, until_ms = world.now_ms - 700_100, world.now_ms - 100
    count = 0
    for number in range(3):
        request = s.BackfillScheduleRequest(name="tick", request_id=f"r{number}", from_ms=from_ms, until_ms=until_ms)
        answer = call(world, "backfill", request)
        count += answer.made
        from_ms = answer.next_from_ms
        if not from_ms:
            break
    assert count == 700 and number == 1
    world.run(2_000)
    times = planned(client)
    assert len(times) == len(set(times)) == 700


@pytest.mark.parametrize(
    ("policy", "window_ms", "makes"),
    [(s.MISSED_SKIP, 0, False), (s.MISSED_LAST, 0, False), (s.MISSED_ALL, 4_000, True)],
    ids=["skip", "last", "all"],
)
def test_missed_runs_follow_the_policy(policy: Any, window_ms: int, makes: bool) -> None:
    """All nodes are away for 20 seconds. Planned times within `late_ms_max` are made, the older ones by the policy, and
    what is passed over stands among the runs."""
    world = trio()
    client = consume(world)
    put(world, definition(missed=policy, missed_window_ms=window_ms, late_ms_max=1_000))
    world.run(3_000)
    for node in world.nodes.values():
        node.kill()
    world.run(20_000)
    for node in world.nodes.values():
        node.start()
    world.elect()
    led_ms = world.now_ms
    world.run(1_500)
    times = sorted(set(planned(client)))
    gaps = [b - a for a, b in itertools.pairwise(times) if b - a != 1_000]
    schedule = shown(world)
    missed = [run for run in schedule.runs if run.outcome == s.RUN_MISSED]
    assert len(missed) == 1 and missed[0].count == schedule.missed > 10
    assert missed[0].planned_ms <= missed[0].last_planned_ms
    assert len(gaps) == 1 or (policy == s.MISSED_LAST and len(gaps) <= 2)
    whole = (times[-1] - times[0]) // 1_000 + 1
    assert len(times) + schedule.missed == whole, "each planned time was made or is counted as missed"
    # The last one missed is at most a second older than what counts as late.
    assert any(led_ms - 3_500 < at < led_ms - 2_000 for at in times) == makes


def test_an_overlapping_run_is_skipped_until_the_last_is_settled() -> None:
    """While a consumer holds the last run no other is made; once it settles they come again."""
    world = trio()
    client = Client(world)
    client.settle = False
    client.consume(lease_ms=60_000)
    put(world, definition(overlap=s.OVERLAP_SKIP))
    world.run(4_500)
    held = planned(client)
    schedule = shown(world)
    assert len(held) == 1 and schedule.made == 1 and schedule.skipped >= 3
    client.settle = True
    session = client.session
    assert session is not None
    number = next(run.id for run in schedule.runs if run.outcome == s.RUN_MADE)
    answers: list[Any] = []
    ids = np.array([number.hour << 32 | number.index], "<u8").tobytes()
    session.settle(
        consumer_pb2.SettleBatch(
            group="g", topic="t", outcome=consumer_pb2.ACK, ids=ids, attempts=np.array([1], "<u4").tobytes()
        ),
        Reply.either(answers.append),
    )
    world.run(3_500)
    assert len(planned(client)) >= 3
    world.run_until(lambda: len(digests(world)) == 1, 1_000)


@pytest.mark.parametrize("paused", [False, True])
def test_a_plan_changed_to_skip_waits_for_the_newest_run_that_stays(paused: bool) -> None:
    """The change, or a pause before it, cancels the run that was made ahead; those before it are unsettled still."""
    world = trio(12)
    client = Client(world)
    client.settle = False
    client.consume(lease_ms=60_000)
    put(world, definition())
    world.run(3_500)
    before = planned(client)
    if paused:
        call(world, "pause", s.PauseScheduleRequest(name="tick"))
    put(world, definition(overlap=s.OVERLAP_SKIP))
    if paused:
        call(world, "resume", s.ResumeScheduleRequest(name="tick"))
    world.run(3_000)
    assert len(before) >= 3 and planned(client) == before
    assert {run.outcome for run in list(shown(world).runs)[-2:]} == {s.RUN_SKIPPED_OVERLAP}


def test_a_change_respects_runs_that_are_dispatched_ahead_of_their_time() -> None:
    """P12: the dispatch comes 400 ms ahead here. A change within that time takes effect after the run, which would
    otherwise come beside one of the new plan. Also if another run was made since the dispatch."""
    world = World(13, config=replace(CoreConfig(), segment_bytes=1 << 20, dispatch_ahead_ms=400))
    world.elect()
    world.run(2_000)
    client = consume(world)
    for number in range(60):
        put(world, definition(payload=b"xy"[number % 2 :][:1]))
        world.run(137)
    world.run(3_000)
    times = planned(client)
    assert times == list(range(times[0], times[0] + 1_000 * len(times), 1_000))


def test_a_schedule_ends_with_its_count_and_its_end() -> None:
    """After so many runs, or behind its last time, no run comes; it is still shown. Put again it counts anew."""
    world = trio()
    client = consume(world)
    put(world, definition("counted", spec=s.ScheduleSpec(interval_ms=1_000, count=3)))
    put(world, definition("ended", spec=s.ScheduleSpec(interval_ms=1_000, end_ms=world.now_ms + 2_500)))
    world.run(6_000)
    assert len(planned(client, "counted")) == 3 and len(planned(client, "ended")) in (2, 3)
    assert {shown(world, name).state for name in ("counted", "ended")} == {s.SCHEDULE_ENDED}
    put(world, definition("counted", payload=b"2", spec=s.ScheduleSpec(interval_ms=1_000, count=3)))
    world.run(5_000)
    assert len(planned(client, "counted")) == 6


def test_a_deleted_schedule_and_a_new_one_of_its_name_do_not_meet() -> None:
    """What was made ahead goes with it; deleting what is not there is no error; revisions never come again."""
    world = trio()
    client = consume(world)
    old = put(world, definition()).schedule
    world.run(1_400)
    answer = call(world, "delete", s.DeleteScheduleRequest(name="tick"))
    deleted_ms = world.now_ms
    assert answer.deleted and answer.cancelled >= 1
    assert not call(world, "delete", s.DeleteScheduleRequest(name="tick")).deleted
    world.run(3_000)
    assert all(at <= deleted_ms for at in planned(client))
    assert put(world, definition()).schedule.revision > old.revision + 0
    assert call(world, "get", s.GetScheduleRequest(name="gone")).reason == pb.UNKNOWN_NAME


def test_runs_of_a_deleted_topic_are_noted() -> None:
    """The schedule goes on and says for each planned time that there was no topic."""
    world = trio()
    put(world, definition())
    world.run(1_000)
    core = core_of(world)
    job = ask(world, core.parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t", cancel_pending=True)))
    assert not isinstance(job, Failure), job
    world.run(4_000)
    assert shown(world).no_topic >= 2


def test_limits_hold_a_run_up_and_then_it_is_missed() -> None:
    """While pending_max is reached nothing is made; once there is room again, what is not too late is."""
    world = trio()
    client = consume(world)
    core = core_of(world)
    ask(world, core.parts.requests.admin(AdminCommand(settings=admin_pb2.Settings(pending_max=1))))
    far = Client(world)
    far.schedule([3_600_000])
    world.run(500)
    put(world, definition())
    world.run(3_000)
    assert not planned(client) and shown(world).made == 0 and core.parts.planner.held_up > 2
    ask(world, core_of(world).parts.requests.admin(AdminCommand(settings=admin_pb2.Settings(pending_max=0))))
    world.run(3_000)
    times = planned(client)
    assert len(times) >= 5 and times == list(range(times[0], times[0] + 1_000 * len(times), 1_000))


def test_runs_count_against_the_quotas_of_who_put_the_schedule() -> None:
    """While a user's quota is full, that user's schedules are held up, and nobody else's. Then they go on."""
    world = trio()
    core = core_of(world)

    def change(**command: Any) -> None:
        """Users and roles."""
        made = AdminCommand(access=AccessCommand(**command))
        assert isinstance(ask(world, core.parts.requests.admin(made)), AdminResult)

    roles = {"ann": "t", "bob": "u"}
    for user, topic in roles.items():
        change(set_role=AccessRole(name=user, grants=[Grant(rights=[RIGHT_SCHEDULE], topics=[topic])]))
    change(set_user=StoredUser(name="root", roles=["administrator"]))
    change(set_user=StoredUser(name="ann", roles=["ann"], quotas=UserQuotas(pending_max=1)))
    change(set_user=StoredUser(name="bob", roles=["bob"], quotas=UserQuotas(pending_max=100)))
    Client(world).schedule([3_600_000])
    world.run(500)
    settings = admin_pb2.Settings(rights=True)
    assert isinstance(ask(world, core.parts.requests.admin(AdminCommand(settings=settings))), AdminResult)
    for user, topic in roles.items():
        made = definition(user)
        made.topic = topic
        request = s.PutScheduleRequest(definition=made)
        assert not isinstance(ask(world, core.parts.schedules.put(request, user, everybody)), Failure)
    world.run(4_000)
    assert shown(world, "ann").made == 0 and shown(world, "bob").made >= 3
    change(set_user=StoredUser(name="ann", roles=["ann"]))
    world.run(3_000)
    assert shown(world, "ann").made >= 5


def test_what_a_limit_refuses_at_once_comes_one_by_one() -> None:
    """Many runs of an outage, and a backfill, under a limit on what one request may add: in parts. What finds no room
    at all is refused by the limit, and nothing of it is made."""
    world = trio()
    client = consume(world)
    limited = admin_pb2.Settings(topic_pending_max="t=3")
    ask(world, core_of(world).parts.requests.admin(AdminCommand(settings=limited)))
    put(world, definition())
    world.run(1_000)
    for node in world.nodes.values():
        node.kill()
    world.run(6_000)
    for node in world.nodes.values():
        node.start()
    world.elect()
    world.run(8_000)
    times = planned(client)
    assert len(times) >= 12 and times == list(range(times[0], times[0] + 1_000 * len(times), 1_000))
    call(world, "pause", s.PauseScheduleRequest(name="tick"))
    world.run(3_000)
    now_ms = times[0]
    asked = s.BackfillScheduleRequest(name="tick", request_id="b", from_ms=now_ms - 9_000, until_ms=now_ms)
    answer = call(world, "backfill", asked)
    assert 1 <= answer.made <= 3 and answer.next_from_ms == now_ms - 9_000 + 1_000 * answer.made
    far = Client(world)
    ask(world, core_of(world).parts.requests.admin(AdminCommand(settings=admin_pb2.Settings(topic_pending_max="t=1"))))
    world.run(1_000)
    far.schedule([3_600_000])
    world.run(500)
    refused = call(world, "trigger", s.TriggerScheduleRequest(name="tick", request_id="c"))
    assert field_of(refused) == "topic_pending_max" and refused.reason == pb.LIMIT_REACHED
    assert call(world, "backfill", asked).repeated, "a repeat needs no room"
    assert shown(world).triggered == 0


def test_a_zone_that_the_master_does_not_know_holds_up_its_schedule_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is told once a minute, with what to do; once a node knows it, the runs go on."""
    world = trio()
    client = consume(world)
    put(world, definition("odd", spec=s.ScheduleSpec(cron="* * * * * *", zone="Europe/Berlin")))
    put(world, definition("tick"))

    def unknown(spec: bytes) -> Calendar:
        found = calendar_of_spec(s.ScheduleSpec.FromString(spec))
        if b"Berlin" in spec:
            raise invalid("zone", "Europe/Berlin", "a time zone")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(planner, "_calendar", unknown)
        world.run(12_000)
        before = len(planned(client, "odd"))
        assert shown(world, "odd").made == before and len(planned(client)) >= 11
        (line,) = [line for node in world.nodes.values() for line in node.reported]
        assert line.fields["schedule"] == "odd" and line.fields["value"] == "Europe/Berlin" and line.fields["do"]
    world.run(10_000)
    times = planned(client, "odd")
    assert len(times) >= before + 20 and len(times) == len(set(times)), "less than a minute late: each is made"


def test_many_at_the_same_second_come_in_several_commands() -> None:
    """600 schedules for the same planned time: all come at it, once each."""
    world = trio()
    client = consume(world)
    put(world, definition("first", spec=s.ScheduleSpec(cron="0 0 1 1 *")))
    for number in range(600):
        part = core_of(world).parts.schedules
        request = s.PutScheduleRequest(definition=definition(f"s{number:03}", spec=s.ScheduleSpec(interval_ms=10_000)))
        core_of(world).serving.start(part.put(request, "", everybody), lambda answer: None)
    world.run(12_000)
    seen = {name: planned(client, name) for name in (f"s{n:03}" for n in range(600))}
    assert all(len(times) in (1, 2) and len(set(times)) == len(times) for times in seen.values())
    assert max(lateness(client)) <= 60 and min(lateness(client)) >= 0


def test_pages_by_prefix() -> None:
    """By name, only those of the prefix, each once, with what the caller may see."""
    world = trio()
    names = [f"a{n}" for n in range(7)] + ["b1", "Ä"]
    for name in names:
        put(world, definition(name), paused=True)
    found, token = [], ""
    while True:
        page = call(world, "page", s.ListSchedulesRequest(prefix="a", page_size=3, page_token=token))
        found += [schedule.definition.name for schedule in page.schedules]
        token = page.next_page_token
        if not token:
            break
    assert found == names[:7]
    with pytest.MonkeyPatch.context() as patch:  # as many as the core's thread may decode, one in any case
        size = call(world, "page", s.ListSchedulesRequest(prefix="a1", content=True)).ByteSize()
        for bytes_max, count in ((2 * size + size // 2, 2), (1, 1)):
            patch.setattr(recurring, "DECODED_BYTES_MAX", bytes_max)
            page = call(world, "page", s.ListSchedulesRequest(content=True, page_token="a3"))
            assert [item.definition.name for item in page.schedules] == names[4 : 4 + count]
            assert page.next_page_token == names[3 + count]
    part = core_of(world).parts.schedules
    refused = Failure(pb.RIGHT_REQUIRED, "no")
    assert not ask(world, part.page(s.ListSchedulesRequest(), lambda topic: refused)).schedules


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (definition(""), "definition.name"),
        (definition("n" * 201), "definition.name"),
        (definition("a\nb"), "definition.name"),
        (definition(spec=s.ScheduleSpec()), "definition.spec.cron"),
        (definition(spec=s.ScheduleSpec(cron="61 * * * *")), "definition.spec.cron"),
        (definition(spec=s.ScheduleSpec(cron="* * * * *", zone="Nowhere")), "definition.spec.zone"),
        (definition(spec=s.ScheduleSpec(interval_ms=999)), "definition.spec.interval_ms"),
        (definition(spec=s.ScheduleSpec(interval_ms=1_000, jitter_ms=86_400_001)), "definition.spec.jitter_ms"),
        (definition(spec=s.ScheduleSpec(interval_ms=1_000, start_ms=9_000, end_ms=1)), "definition.spec.end_ms"),
        (definition(spec=s.ScheduleSpec(interval_ms=1_000, start_ms=1, end_ms=5_000)), "definition.spec"),
        (definition(payload=b""), "definition.payload"),
        (definition(payload=b"x" * 65_537), "definition.payload"),
        (definition(missed=s.MISSED_ALL), "definition.missed_window_ms"),
        (definition(missed_window_ms=1), "definition.missed_window_ms"),
        (definition(late_ms_max=999), "definition.late_ms_max"),
        (definition(meta=pb.MessageMeta(headers={"Tickwheel-x": "1"})), "definition.meta.headers"),
        (definition(meta=pb.MessageMeta(key="k" * 65_500)), "definition.meta"),
        (definition(meta=pb.MessageMeta(tags=["a||b"])), "tags[0]"),
        (s.ScheduleDefinition(name="x", topic=".x", payload=b"p"), "definition.topic"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_definition_is_refused_by_field(made: s.ScheduleDefinition, field: str) -> None:
    """With the field, its value and what is allowed; nothing changes."""
    world = _shared()
    answer = put(world, made)
    assert field_of(answer) == field
    assert answer.reason == pb.INVALID_FIELD and answer.metadata["limit"]
    assert not len(core_of(world).state.schedules)


_WORLD: list[World] = []


def _shared() -> World:
    """One trio for tests that change nothing."""
    if not _WORLD:
        _WORLD.append(trio())
    return _WORLD[0]


def test_a_preview_needs_no_schedule() -> None:
    """Times after a moment, as many as asked for; wrong specs and numbers are refused."""
    world = _shared()
    spec = s.ScheduleSpec(cron="0 9 * * MON", zone="Europe/Berlin")
    found = call(world, "preview", s.PreviewScheduleRequest(spec=spec, after_ms=1_780_000_000_000, times=3))
    assert len(found.planned_ms) == 3 and found.planned_ms[1] - found.planned_ms[0] == 7 * 86_400_000
    assert field_of(call(world, "preview", s.PreviewScheduleRequest(spec=spec, times=1_001))) == "times"
    wrong = s.PreviewScheduleRequest(spec=s.ScheduleSpec(cron="x"))
    assert field_of(call(world, "preview", wrong)) == "spec.cron"


def test_a_worker_computes_a_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's thread does not wait for a thousand times of a slow plan; a mistake fails the request alone."""
    world = _shared()
    core = core_of(world)
    works: list[tuple[Any, Any]] = []
    monkeypatch.setattr(core.background, "submit", lambda work, answer: works.append((work, answer)))
    computed: list[int] = []
    original = Calendar.next_after

    def counting(self: Calendar, ms: int) -> int | None:
        computed.append(ms)
        return original(self, ms)

    monkeypatch.setattr(Calendar, "next_after", counting)
    request = s.PreviewScheduleRequest(spec=s.ScheduleSpec(cron="0 9 29 2 MON"), after_ms=1_780_000_000_000, times=9)
    answers: list[Any] = []
    core.serving.start(core.parts.schedules.preview(request), answers.append)
    assert not computed and not answers and len(works) == 1
    work, answer = works.pop()
    answer(work(), None)
    assert len(computed) >= 9 and len(answers[0].planned_ms) == 9


def test_nobody_puts_a_schedule_that_a_member_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of an earlier version would stop at such an entry; so it is refused until all read them."""
    world = trio()
    core = core_of(world)
    monkeypatch.setattr(core.parts.schedules, "_all_understand", lambda level: level < SCHEDULES_LEVEL)
    assert put(world, definition()).reason == pb.RECOVERING
    monkeypatch.undo()
    assert put(world, definition()).created


def test_a_restart_from_a_checkpoint_knows_all() -> None:
    """A node that starts from its checkpoint has the schedules, their course and their answers, and can lead."""
    world = trio()
    client = consume(world)
    put(world, definition(meta=pb.MessageMeta(key="k")))
    put(world, definition("gone"))
    call(world, "trigger", s.TriggerScheduleRequest(name="tick", request_id="one"))
    call(world, "delete", s.DeleteScheduleRequest(name="gone"))
    world.run(2_000)
    before = core_of(world).state.schedules.get("tick")
    for node in world.nodes.values():
        assert node.host is not None
        node.host.core.checkpointer.request(UNHEARD)
        node.wake()
    world.run(1_000)
    for node in world.nodes.values():
        node.kill()
    for node in world.nodes.values():
        node.start()
        assert node.host is not None
        restored = node.host.core.state.schedules.get("tick")
        assert restored is not None and before is not None and restored.answers == before.answers
    world.elect()
    world.run(4_000)
    times = sorted(set(planned(client)))
    repeat = call(world, "trigger", s.TriggerScheduleRequest(name="tick", request_id="one"))
    assert repeat.repeated
    plan = [at for at in times if at != repeat.run.planned_ms]
    assert plan == list(range(plan[0], plan[-1] + 1, 1_000))
    world.run_until(lambda: len(digests(world)) == 1, 1_000)


def test_a_mistake_over_one_schedule_holds_up_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs come once the mistake is gone; those of others come on time, and no node ends."""
    world = trio()
    client = consume(world)
    reported: list[BaseException] = []
    for node in world.nodes.values():
        assert node.host is not None
        node.host.core.serving.contain(lambda _, error: reported.append(error))
    put(world, definition())
    put(world, definition("bad", spec=s.ScheduleSpec(interval_ms=1_500)))
    known, mistaken = planner.calendar_of_schedule, [True]

    def calendar(plan: s.ScheduleDefinition) -> Calendar:
        if mistaken and plan.name == "bad":
            raise ValueError("what nobody thought of")
        return known(plan)

    monkeypatch.setattr(planner, "calendar_of_schedule", calendar)
    world.run(5_000)
    before = len(planned(client, "bad"))
    assert len(planned(client)) >= 4 and before <= 2  # made ahead, before the mistake
    assert {type(error) for error in reported} == {ValueError} and len(reported) <= 2
    mistaken.clear()
    world.run_until(lambda: len(planned(client, "bad")) > before, 2 * planner.UNKNOWN_RETRY_MS)
    assert not any(node.fatal for node in world.nodes.values())
