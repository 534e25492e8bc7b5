"""Flow control: limits of ticks, quotas, pending and in-flight limits, on three simulated nodes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.node.core.test_when import change, one, schedule
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.flow import BUCKETS_MAX, USER_SUM_MS, Buckets
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.core.schedule.publisher import REFUSALS_MAX, BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.rights import Rights
from tickwheel.node.state.settings import normalised_quotas
from tickwheel.proto import admin_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.access_pb2 import RIGHT_SCHEDULE, AccessCommand, AccessRole, Grant, StoredUser, UserQuotas
from tickwheel.proto.log_pb2 import AdminCommand


def batch(count: int, due_ms: int, topic: str = "t", **fields: object) -> scheduler_pb2.ScheduleBatch:
    """So many messages for one time."""
    columns = scheduler_pb2.ColumnBatch(
        topic=topic, due_ms=np.full(count, due_ms, "<i8").tobytes(), payload_sizes=np.ones(count, "<u4").tobytes(),
        payloads=b"x" * count,
    )  # fmt: skip
    return scheduler_pb2.ScheduleBatch(columns=columns, **fields)  # type: ignore[arg-type]


def tick_of(world: World) -> int:
    """Start of a tick a minute ahead."""
    return (world.now_ms // 1_000 + 60) * 1_000


def refusal(answer: BatchOutcome | Failure, field: str) -> Failure:
    """The answer is a refusal for this limit that says when to try again."""
    assert isinstance(answer, Failure), answer
    assert (answer.reason, answer.metadata["field"]) == (common_pb2.LIMIT_REACHED, field)
    assert int(answer.metadata["retry_after_ms"]) > 0 and answer.metadata["limit"]
    return answer


def test_a_full_tick_takes_fewer_and_fewer() -> None:
    """Limit 100, 500 sends for one time: all of the first 100, none above 200, some in between; others unharmed."""
    world = World(61)
    master = world.elect()
    change(master, tick_messages_max=100)
    due_ms = tick_of(world)
    answers = [schedule(master, one(due_ms=due_ms + n % 1_000)) for n in range(500)]
    accepted = [isinstance(answer, BatchOutcome) for answer in answers]
    assert all(accepted[:100])
    assert 120 < sum(accepted) <= 200
    assert sum(accepted[400:]) < sum(accepted[100:200])
    for answer in answers:
        if not isinstance(answer, BatchOutcome):
            assert refusal(answer, "tick_messages_max").metadata["value"] == str(due_ms)
    assert isinstance(schedule(master, one(due_ms=due_ms + 1_000)), BatchOutcome)
    assert master.host is not None
    assert master.host.core.wheel.pending == sum(accepted) + 1


def test_the_next_master_counts_what_was_there() -> None:
    """After a failover a tick does not begin anew: no more than twice the limit, and a few while it is counted."""
    world = World(62)
    master = world.elect()
    change(master, tick_messages_max=100)
    due_ms = tick_of(world)
    for _ in range(19):
        schedule(master, batch(10, due_ms))
    assert master.host is not None
    before = master.host.core.wheel.pending
    assert before > 100
    master.kill()
    world.run_until(lambda: world.master() is not None, 3_000)
    successor = world.master()
    assert successor is not None
    accepted = sum(isinstance(schedule(successor, one(due_ms=due_ms)), BatchOutcome) for _ in range(200))
    assert before + accepted <= 200 + 25


def test_a_batch_is_taken_or_refused_whole() -> None:
    """One that no tick could ever take is an error of the caller; one that is refused leaves nothing behind."""
    world = World(63)
    master = world.elect()
    change(master, tick_messages_max=100)
    due_ms = tick_of(world)
    never = schedule(master, batch(201, due_ms))
    assert isinstance(never, Failure) and never.reason == common_pb2.INVALID_FIELD
    assert isinstance(schedule(master, batch(100, due_ms, producer_id="p", sequence=1)), BatchOutcome)
    full = batch(101, due_ms, producer_id="p", sequence=2)
    refusal(schedule(master, full), "tick_messages_max")
    assert master.host is not None
    assert master.host.core.wheel.pending == 100
    change(master, tick_messages_max=0)
    again = schedule(master, full)
    assert isinstance(again, BatchOutcome) and not again.repeated
    # What was accepted is answered again, however full the tick is.
    change(master, tick_messages_max=1)
    repeat = schedule(master, full)
    assert isinstance(repeat, BatchOutcome) and repeat.repeated
    assert repeat.ids.tolist() == again.ids.tolist()


@pytest.mark.parametrize(
    ("setting", "text", "mine", "others"),
    [("topic_quotas", "t=100", {"topic": "t"}, {"topic": "u"}),
     ("client_quotas", "*=100", {"client_name": "a"}, {"client_name": "b"})],
)  # fmt: skip
def test_quotas(setting: str, text: str, mine: dict[str, str], others: dict[str, str]) -> None:
    """100 a second: a batch may overdraw, then nothing passes until it is paid back; others are not touched."""
    world = World(64)
    master = world.elect()
    change(master, **{setting: text})
    due_ms = tick_of(world)
    assert isinstance(schedule(master, batch(300, due_ms, **mine)), BatchOutcome)
    refused = refusal(schedule(master, batch(1, due_ms, **mine)), setting)
    assert refused.metadata["limit"] == "100"
    assert isinstance(schedule(master, batch(1, due_ms, **others)), BatchOutcome)
    wait_ms = int(refused.metadata["retry_after_ms"])
    assert 1_900 < wait_ms <= 2_001
    world.run(wait_ms)
    assert isinstance(schedule(master, batch(1, due_ms, **mine)), BatchOutcome)
    assert master.host is not None
    assert master.host.core.parts.flow.refused == {setting: 1}


def as_user(node: Node, name: str, message: scheduler_pb2.ScheduleBatch) -> BatchOutcome | Failure:
    """Schedule on behalf of a user."""
    assert node.host is not None
    incoming = from_batch(message, node.host.core.state.settings)
    incoming.actor = name
    answers: list[BatchOutcome | Failure] = []
    node.host.core.parts.publisher.schedule(incoming, Reply.either(answers.append))
    node.wake()
    node.world.run_until(lambda: bool(answers))
    return answers[0]


def access(node: Node, **command: object) -> None:
    """Change users or roles."""
    assert node.host is not None
    answers: list[AdminResult | Failure] = []
    made = AccessCommand(**command)  # type: ignore[arg-type]
    node.host.core.serving.start(node.host.core.parts.requests.admin(AdminCommand(access=made)), answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], AdminResult), answers


@pytest.mark.parametrize(
    ("quota", "limit", "size"), [("messages_per_s", 100, 300), ("bytes_per_s", 100, 300), ("pending_max", 50, 50)]
)
def test_quotas_of_a_user(quota: str, limit: int, size: int) -> None:
    """They hold for what the user sends, to any of its topics, until time or room has come; for nobody else."""
    world = World(69)
    master = world.elect()
    quotas = UserQuotas(**{quota: limit})
    grant = Grant(rights=[RIGHT_SCHEDULE], topics=["mine-*"])
    access(master, set_role=AccessRole(name="some", grants=[grant]))
    access(master, set_user=StoredUser(name="root", roles=["administrator"]))
    access(master, set_user=StoredUser(name="ann", roles=["some"], quotas=quotas))
    change(master, rights=True)
    assert isinstance(as_user(master, "root", batch(1_000, tick_of(world), "other")), BatchOutcome)
    soon_ms = world.now_ms + 1_000
    assert isinstance(as_user(master, "ann", batch(size, soon_ms, "mine-1")), BatchOutcome)
    refused = refusal(as_user(master, "ann", batch(1, soon_ms, "mine-2")), f"quotas.{quota}")
    assert refused.metadata["limit"] == str(limit) and refused.metadata["value"] == "ann"
    assert isinstance(as_user(master, "root", batch(10, soon_ms, "mine-1")), BatchOutcome)
    world.run(int(refused.metadata["retry_after_ms"]) + 3_000)
    assert isinstance(as_user(master, "ann", batch(1, tick_of(world), "mine-2")), BatchOutcome)
    assert master.host is not None
    assert master.host.core.parts.flow.refused == {f"quotas.{quota}": 1}


def test_a_users_quota_follows_topics_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rights that change. Only what is new is compared with the rights: there may be thousands of topics."""
    world = World(70)
    master = world.elect()
    assert master.host is not None
    core = master.host.core

    def admin(**command: object) -> None:
        done: list[object] = []
        core.serving.start(core.parts.requests.admin(AdminCommand(**command)), done.append)  # type: ignore[arg-type]
        master.wake()
        world.run_until(lambda: bool(done))
        assert isinstance(done[0], AdminResult), done

    def sent(topic: str, count: int) -> bool:
        """Whether ann may send so many for later, once the last sum is forgotten."""
        world.run(USER_SUM_MS + 10)
        answer = as_user(master, "ann", batch(count, tick_of(world), topic))
        if isinstance(answer, BatchOutcome):
            return True
        refusal(answer, "quotas.pending_max")
        return False

    role = AccessRole(name="some", grants=[Grant(rights=[RIGHT_SCHEDULE], topics=["mine-*"])])
    access(master, set_role=role)
    access(master, set_user=StoredUser(name="root", roles=["administrator"]))
    access(master, set_user=StoredUser(name="ann", roles=["some"], quotas=UserQuotas(pending_max=50)))
    topics = [f"{kind}-{number}" for kind in ("mine", "other") for number in range(100)]
    admin(create_group=admin_pb2.CreateGroupRequest(name="g", topics=topics))
    change(master, rights=True)
    world.run(1_000)  # the names that were created count against names_created
    assert sent("mine-1", 30) and sent("mine-new", 20) and not sent("mine-2", 1)
    looks = Counter[str]()
    asked = Rights.topic

    def counted(self: Rights, right: int, name: str) -> bool:
        looks[name] += 1
        return asked(self, right, name)

    monkeypatch.setattr(Rights, "topic", counted)
    assert not any(sent("mine-2", 1) for _ in range(3))
    assert looks.total() < 20
    admin(delete_topic=admin_pb2.DeleteTopicRequest(name="mine-new"))
    assert sent("mine-2", 20) and not sent("mine-2", 1)
    role.grants[0].topics[:] = ["other-*"]
    access(master, set_role=role)
    assert sent("other-1", 50) and not sent("other-2", 1)


def test_a_flood_of_refusals_is_cut_into_slices() -> None:
    """P11: thousands of waiting requests that are all refused do not hold the loop; each still gets its answer."""
    world = World(68)
    master = world.elect()
    change(master, pending_max=1)
    assert isinstance(schedule(master, batch(1, tick_of(world))), BatchOutcome)
    assert master.host is not None
    settings = master.host.core.state.settings
    answers: list[BatchOutcome | Failure] = []
    incoming = from_batch(batch(1, tick_of(world)), settings)
    for _ in range(3 * REFUSALS_MAX):
        master.host.core.parts.publisher.schedule(incoming, Reply.either(answers.append))
    assert master.host.core.parts.publisher.take(1 << 20) is None
    assert len(answers) == REFUSALS_MAX
    master.wake()
    world.run_until(lambda: len(answers) == 3 * REFUSALS_MAX, 100)
    assert all(isinstance(answer, Failure) for answer in answers)


def test_no_more_than_so_many_are_pending() -> None:
    """At pending_max schedules are refused until something leaves."""
    world = World(65)
    client = Client(world)
    master = world.elect()
    client.consume()
    change(master, pending_max=10)
    assert isinstance(schedule(master, batch(10, world.now_ms + 500)), BatchOutcome)
    refusal(schedule(master, batch(1, world.now_ms + 500)), "pending_max")
    world.run(1_000)
    assert isinstance(schedule(master, batch(10, world.now_ms + 500)), BatchOutcome)


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 50)), max_size=60), st.integers(1, 100))
def test_a_bucket_keeps_its_rate(requests: list[tuple[int, int]], rate: int) -> None:
    """Over any stretch no more passes than the rate, one second's depth and one overdraft."""
    buckets = Buckets()
    now_ms = passed = 0
    for pause_ms, count in requests:
        now_ms += pause_ms
        if buckets.wait_ms("a", rate, now_ms) == 0:
            buckets.take("a", rate, count, now_ms)
            passed += count
    assert passed <= rate * (1 + now_ms / 1_000) + 50


def test_buckets_are_bounded() -> None:
    """P11: names that come once do not stay."""
    buckets = Buckets()
    for number in range(BUCKETS_MAX + 100):
        buckets.take(str(number), 1, 5, 0)
    assert buckets.wait_ms("0", 1, 0) == 0
    assert buckets.wait_ms(str(BUCKETS_MAX + 99), 1, 0) > 0


@pytest.mark.parametrize(
    ("text", "kept"),
    [("b=2 a=1", "a=1 b=2"), ("*=5", "*=5"), ("", ""), ("a", None), ("a=0", None), ("a=1 a=2", None), ("a=-1", None)],
)
def test_quotas_are_checked_when_they_are_set(text: str, kept: str | None) -> None:
    """Half a quota is refused, not guessed at."""
    assert normalised_quotas(text) == kept


def settings_refusal(node: Node, settings: admin_pb2.Settings) -> Failure:
    """The failure of a change of settings."""
    assert node.host is not None
    answers: list[object] = []
    node.host.core.serving.start(node.host.core.parts.requests.admin(AdminCommand(settings=settings)), answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], Failure)
    return answers[0]


def test_a_wrong_setting_is_refused_with_its_name() -> None:
    """Field, value and limit, and nothing has changed."""
    world = World(66)
    master = world.elect()
    failure = settings_refusal(master, admin_pb2.Settings(topic_quotas="t"))
    assert (failure.metadata["field"], failure.metadata["value"]) == ("topic_quotas", "t")
    assert settings_refusal(master, admin_pb2.Settings(group_in_flight_max=1 << 30)).metadata["limit"] == "0 to 1000000"


def test_a_group_has_no_more_out_than_its_limit() -> None:
    """50 out at a time though the consumer would take 10,000; leases that run out make room for the next."""
    world = World(67)
    client = Client(world)
    client.settle = False
    master = world.elect()
    change(master, group_in_flight_max=50)
    client.consume(lease_ms=1_000)
    client.schedule([50] * 300)
    for seconds in range(1, 5):
        world.run(950)
        assert len(client.got) == 50 * seconds
        world.run(60)
    client.settle = True
    world.run_until(lambda: len(client.got) == 300, 10_000)
    world.run(15_000)
    assert master.host is not None
    assert master.host.core.state.backlog.total == 0
    assert max(Counter(seen[0][0] for seen in client.got.values()).values()) <= 50
