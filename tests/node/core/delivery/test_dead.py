"""Dead letters on three simulated nodes: looked at, replayed, purged, through a loss of the master."""

from __future__ import annotations

from typing import TypeVar

import pytest

from tests.node.core.delivery.test_retries import ACK, Picky, admin, attempts_of, settlement
from tests.node.core.trio import World, digests
from tickwheel.node.core.delivery import dead as dead_module
from tickwheel.node.core.metas import FIELD_BYTES
from tickwheel.node.core.watch.status import node_metrics
from tickwheel.node.failure import Failure
from tickwheel.node.state import burial
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, dead_pb2
from tickwheel.proto.log_pb2 import DECLARED_DEAD, REFUSED

A = TypeVar("A")
POLICY = admin_pb2.RetryPolicy(
    exponential=admin_pb2.ExponentialBackoff(initial_ms=100, factor=1.0, max_ms=100), attempts_max=2
)


def ask(world: World, kind: type[A], name: str, request: object) -> A:
    """One request at the master; its answer must be of this kind."""
    master = world.elect()
    assert master.host is not None
    answers: list[object] = []
    core = master.host.core
    core.serving.start(getattr(core.parts.dead, name.removesuffix("_dead"))(request), answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], kind), answers[0]
    return answers[0]


def cluster(seed: int) -> World:
    """A topic and a group that gives up after the second attempt."""
    world = World(seed)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t"))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], retry=POLICY))
    return world


def numbers_of(world: World, **named: object) -> list[int]:
    """Numbers of a page of letters."""
    page = ask(world, dead_pb2.ListDeadResponse, "list_dead", dead_pb2.ListDeadRequest(group="g", **named))  # type: ignore[arg-type]
    return [letter.number for letter in page.letters]


def test_listed_inspected_replayed_and_purged() -> None:
    """Pages, one with its payload, replay of one (attempts from 1, same id, its group alone), purge of the rest."""
    world = cluster(1)
    client = Picky(world, lambda record, attempt: settlement(consumer_pb2.RETRY, reason=f"no {attempt}"))
    other = Picky(world, lambda record, attempt: ACK, group="other")
    client.consume()
    other.consume()
    client.schedule([50] * 5)
    due_ms = world.now_ms + 50
    world.run(2_000)
    page = ask(world, dead_pb2.ListDeadResponse, "list_dead", dead_pb2.ListDeadRequest(group="g", page_size=2))
    assert (page.queue, page.total, len(page.letters)) == ("%DLQ%g", 5, 2)
    master = world.elect()
    assert master.host is not None
    values = node_metrics(master.host.core)
    counted = [values[name] for name in ("retried_messages", "buried_messages", "dead_letters")]
    assert counted == [5.0, 5.0, 5.0]
    letter = page.letters[0]
    assert (letter.cause, letter.error, letter.attempts, letter.topic) == (REFUSED, "no 2", 2, "t")
    assert letter.first_due_ms == due_ms and due_ms < letter.died_ms <= world.now_ms
    assert numbers_of(world, page_size=3, page_token=page.next_page_token) == [2, 3, 4]
    with pytest.MonkeyPatch.context() as patch:  # as many as the core's thread may decode, one in any case
        for bytes_max, count in ((2 * (len("no 2") + FIELD_BYTES), 2), (1, 1)):
            patch.setattr(dead_module, "DECODED_BYTES_MAX", bytes_max)
            assert numbers_of(world) == [0, 1][:count]
            assert numbers_of(world, page_token=str(count)) == [1, 2, 3][count - 1 :][:count]
    full = ask(world, dead_pb2.DeadLetter, "get_dead", dead_pb2.GetDeadRequest(group="g", number=3))
    assert client.ids[full.payload] == {full.id.hour << 32 | full.id.index}
    client.judge = lambda record, attempt: ACK
    client.got.clear()
    other_before = dict(attempts_of(other))
    request = dead_pb2.ReplayDeadRequest(group="g", numbers=[3, 3, 77])
    replayed = ask(world, dead_pb2.ChangeDeadResponse, "replay_dead", request)
    assert (replayed.changed, replayed.missing) == (1, 1)
    world.run(500)
    assert attempts_of(client) == {full.payload: [1]} and len(client.ids[full.payload]) == 1
    assert attempts_of(other) == other_before
    assert numbers_of(world) == [0, 1, 2, 4]
    gone = ask(world, Failure, "get_dead", dead_pb2.GetDeadRequest(group="g", number=3))
    assert gone.reason == common_pb2.UNKNOWN_NAME
    purged = ask(world, dead_pb2.ChangeDeadResponse, "purge_dead", dead_pb2.PurgeDeadRequest(group="g", numbers=[0]))
    assert purged.changed == 1
    for name, asking in (
        ("replay_dead", dead_pb2.ReplayDeadRequest(group="g", ask=True)),
        ("purge_dead", dead_pb2.PurgeDeadRequest(group="g", ask=True)),
    ):
        assert ask(world, dead_pb2.ChangeDeadResponse, name, asking) == dead_pb2.ChangeDeadResponse(below=5)
    purged = ask(world, dead_pb2.ChangeDeadResponse, "purge_dead", dead_pb2.PurgeDeadRequest(group="g", below=2))
    assert purged.changed == 1 and numbers_of(world) == [2, 4]
    purged = ask(world, dead_pb2.ChangeDeadResponse, "purge_dead", dead_pb2.PurgeDeadRequest(group="g", below=99))
    assert purged.changed == 2 and numbers_of(world) == []
    world.run(500)
    assert len(digests(world)) == 1


def test_all_are_replayed_in_bounded_pieces_through_a_failover(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: the master dies in the middle of a replay of all; asked again, each letter was delivered once more."""
    monkeypatch.setattr(dead_module, "COPIES_MAX", 16)
    monkeypatch.setattr(burial, "COPIES_MAX", 16)
    monkeypatch.setattr(dead_module, "COMMANDS_MAX", 3)
    world = cluster(2)
    client = Picky(world, lambda record, attempt: settlement(consumer_pb2.DEAD, reason="broken"))
    client.consume()
    client.schedule([50] * 150)
    world.run(1_000)
    page = ask(world, dead_pb2.ListDeadResponse, "list_dead", dead_pb2.ListDeadRequest(group="g", page_size=1))
    assert page.total == 150 and page.letters[0].cause == DECLARED_DEAD
    client.judge = lambda record, attempt: ACK
    client.got.clear()
    first = ask(world, dead_pb2.ChangeDeadResponse, "replay_dead", dead_pb2.ReplayDeadRequest(group="g"))
    assert (first.changed, first.more, first.below) == (48, True, 150)
    master = world.elect()
    assert master.host is not None
    answers: list[object] = []
    request = dead_pb2.ReplayDeadRequest(group="g", first=first.next, below=first.below)
    master.host.core.serving.start(master.host.core.parts.dead.replay(request), answers.append)
    master.wake()
    world.run(3)
    master.kill()
    world.elect()
    master.start()
    replayed, request = first, dead_pb2.ReplayDeadRequest(group="g", below=150)
    while replayed.more:
        replayed = ask(world, dead_pb2.ChangeDeadResponse, "replay_dead", request)
        request.first = replayed.next
    world.run(6_000)
    assert {tuple(seen) for seen in attempts_of(client).values()} == {(1,)} and len(client.got) == 150
    assert numbers_of(world) == []
    assert len(digests(world)) == 1


def test_letters_of_a_deleted_topic_stay_and_questions_are_checked() -> None:
    """A replay that cannot be delivered throws nothing away; unknown names and bad pages are refused."""
    world = cluster(3)
    client = Picky(world, lambda record, attempt: settlement(consumer_pb2.DEAD))
    client.consume()
    client.schedule([50] * 3)
    world.run(500)
    admin(world, delete_topic=admin_pb2.DeleteTopicRequest(name="t"))
    replayed = ask(world, dead_pb2.ChangeDeadResponse, "replay_dead", dead_pb2.ReplayDeadRequest(group="g"))
    assert (replayed.changed, replayed.kept, replayed.more) == (0, 3, False)
    full = ask(world, dead_pb2.DeadLetter, "get_dead", dead_pb2.GetDeadRequest(group="g", number=0))
    assert full.topic == "" and full.payload
    for request in (
        dead_pb2.ListDeadRequest(group="nobody"),
        dead_pb2.ListDeadRequest(group="g", page_size=9_999),
        dead_pb2.ListDeadRequest(group="g", page_token="x"),
    ):
        ask(world, Failure, "list_dead", request)
    ask(world, Failure, "replay_dead", dead_pb2.ReplayDeadRequest(group="g", numbers=range(2_000)))
