"""Administrative commands that are longer than they can be are refused by the master: no node gets to read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.core.trio import Node, World
from tickwheel.node.core.requests import FILTER_LENGTH_MAX
from tickwheel.node.core.schedule.creations import TOPICS_PER_GROUP_MAX
from tickwheel.node.failure import Failure
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.settings import LEVELS_LENGTH_MAX, LEVELS_MAX, QUOTAS_LENGTH_MAX, QUOTAS_MAX, RATE_MAX
from tickwheel.proto import admin_pb2
from tickwheel.proto.consumer_pb2 import EARLIEST
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.wheel.filters import TAG_LENGTH_MAX, TAGS_MAX


@pytest.fixture(scope="module")
def master() -> Node:
    """A master with a group of two topics."""
    world = World(7)
    node = world.elect()
    group = admin_pb2.CreateGroupRequest(name="g", topics=["t", "u"])
    assert isinstance(asked(node, create_group=group), AdminResult)
    return node


def asked(node: Node, **body: Any) -> AdminResult | Failure:
    """The answer to an administrative command."""
    assert node.host is not None
    answers: list[Any] = []
    core = node.host.core
    core.serving.start(core.parts.requests.admin(AdminCommand(**body)), answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    answer: AdminResult | Failure = answers[0]
    return answer


def settings(name: str, length: int) -> dict[str, Any]:
    """A change of one setting to a text of blanks."""
    return {"settings": admin_pb2.Settings(**{name: " " * length})}  # type: ignore[arg-type]


MANY = 2_000_000
TOO_LONG: list[tuple[dict[str, Any], str, int, int, str]] = [
    (settings("delay_levels", MANY), "delay_levels", MANY, LEVELS_LENGTH_MAX, " characters"),
    (settings("topic_quotas", MANY), "topic_quotas", MANY, QUOTAS_LENGTH_MAX, " characters"),
    (settings("client_quotas", MANY), "client_quotas", MANY, QUOTAS_LENGTH_MAX, " characters"),
    (settings("topic_pending_max", MANY), "topic_pending_max", MANY, QUOTAS_LENGTH_MAX, " characters"),
    (
        {"create_group": admin_pb2.CreateGroupRequest(name="h", topics=["t"], filter="a" * MANY)},
        "filter", MANY, FILTER_LENGTH_MAX, " characters",
    ),
    (
        {"set_group_filter": admin_pb2.SetGroupFilterRequest(name="g", filter="a" * MANY)},
        "filter", MANY, FILTER_LENGTH_MAX, " characters",
    ),
    (
        {"reset_group": admin_pb2.ResetGroupRequest(name="g", topics=[""] * MANY)},
        "topics", MANY, TOPICS_PER_GROUP_MAX, "",
    ),
    (
        {"create_group": admin_pb2.CreateGroupRequest(name="h", topics=[""] * MANY)},
        "topics", MANY, TOPICS_PER_GROUP_MAX, "",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field", "length", "limit", "unit"), TOO_LONG, ids=[f"{next(iter(b))} {f}" for b, f, *_ in TOO_LONG]
)
def test_what_is_too_long_is_not_proposed(
    master: Node, body: dict[str, Any], field: str, length: int, limit: int, unit: str
) -> None:
    """The refusal names field, value and limit; the log has nothing of it."""
    assert master.host is not None
    before = master.host.core.log.status().last_index
    refused = asked(master, **body)
    assert isinstance(refused, Failure) and refused.grpc_code_name == "INVALID_ARGUMENT"
    assert (refused.metadata["field"], refused.metadata["value"]) == (field, f"{length}{unit}")
    assert refused.metadata["limit"].startswith(f"at most {limit}")
    assert master.host.core.log.status().last_index == before


def test_what_can_be_is_carried_out(master: Node) -> None:
    """The longest settings and filter, and a reset of each topic of a group."""
    quotas = " ".join(f"{number:0127}={RATE_MAX}" for number in range(QUOTAS_MAX))
    levels = " ".join(["999999999s"] * 63 + ["1s"])
    tags = " || ".join(f"{number:0{TAG_LENGTH_MAX}}" for number in range(TAGS_MAX))
    assert len(quotas) < QUOTAS_LENGTH_MAX and len(levels.split()) == LEVELS_MAX and len(tags) < FILTER_LENGTH_MAX
    bodies: list[dict[str, Any]] = [
        {"settings": admin_pb2.Settings(topic_quotas=quotas, client_quotas=quotas, topic_pending_max=quotas)},
        {"settings": admin_pb2.Settings(delay_levels=" ".join(["99999s"] * LEVELS_MAX))},
        {"set_group_filter": admin_pb2.SetGroupFilterRequest(name="g", filter=tags)},
        {"reset_group": admin_pb2.ResetGroupRequest(name="g", topics=["t", "u"], start_from=EARLIEST)},
    ]
    for body in bodies:
        answer = asked(master, **body)
        assert isinstance(answer, AdminResult) and answer.failure is None, answer
