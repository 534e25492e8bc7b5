"""Users, roles and tokens as replicated state: what a role allows, what is refused, what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from tests.node.state.solo import Solo
from tickwheel.node.failure import RequestError
from tickwheel.node.state.name_patterns import matches
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.rights import (
    ADMINISTRATOR,
    ALL_RIGHTS,
    GRANTS_MAX,
    PATTERNS_MAX,
    ROLES_OF_USER_MAX,
    TOKENS_OF_USER_MAX,
    AccessControl,
    Rights,
)
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.access_pb2 import (
    RIGHT_CONSUME,
    RIGHT_READ,
    RIGHT_SCHEDULE,
    AccessCommand,
    AccessRole,
    AddToken,
    Grant,
    RevokeToken,
    StoredToken,
    StoredUser,
    Token,
    UserQuotas,
)
from tickwheel.proto.consumer_pb2 import EARLIEST
from tickwheel.proto.log_pb2 import AdminCommand, Command


def role(name: str, *grants: tuple[Collection[int], list[str], list[str]]) -> AccessCommand:
    """A command that sets a role."""
    made = [Grant(rights=sorted(rights), topics=topics, groups=groups) for rights, topics, groups in grants]  # type: ignore[arg-type]
    return AccessCommand(set_role=AccessRole(name=name, grants=made))


def user(name: str, *roles: str, **quotas: int) -> AccessCommand:
    """A command that sets a user."""
    return AccessCommand(set_user=StoredUser(name=name, roles=roles, quotas=UserQuotas(**quotas)))


def token(name: str, number: int, expires_ms: int = 0) -> AccessCommand:
    """A command that adds a token."""
    stored = StoredToken(token=Token(expires_ms=expires_ms), sha256=number.to_bytes(32, "big"))
    return AccessCommand(add_token=AddToken(user=name, token=stored))


def applied(control: AccessControl, command: AccessCommand, now_ms: int = 1_000, *, rights_on: bool = False) -> str:
    """Apply a command; the reason it was refused for, or nothing."""
    try:
        control.apply(command, now_ms, rights_on)
    except RequestError as error:
        return pb.ErrorReason.Name(error.failure.reason)
    return ""


def test_rights_hold_for_the_names_of_a_grant_alone() -> None:
    """Topic and group must come from one grant; two grants do not add up to a third."""
    rights = Rights(
        (
            Grant(rights=[RIGHT_CONSUME], topics=["pay-*"], groups=["billing"]),
            Grant(rights=[RIGHT_CONSUME, RIGHT_READ], topics=["mail"], groups=["sender-*"]),
        )
    )
    assert rights.topic_without(RIGHT_CONSUME, "billing", ["pay-late", "pay-soon"]) is None
    assert rights.topic_without(RIGHT_CONSUME, "billing", ["pay-late", "mail", "other"]) == "mail"
    assert rights.topic(RIGHT_READ, "mail") and not rights.topic(RIGHT_READ, "pay-late")
    assert not rights.everything(RIGHT_CONSUME) and not rights.all_topics(RIGHT_CONSUME)
    assert not rights.topic(RIGHT_SCHEDULE, "mail")


PATTERNS = st.lists(st.text("ab*", min_size=1, max_size=3), max_size=4)
RIGHTS = st.lists(st.sampled_from([RIGHT_CONSUME, RIGHT_READ]), min_size=1, unique=True)
GRANTS = st.builds(Grant, rights=RIGHTS, topics=PATTERNS, groups=PATTERNS)
NAMES = st.text("ab", min_size=1, max_size=3)


@given(st.lists(GRANTS, max_size=6), NAMES, st.lists(NAMES, max_size=6))
def test_rights_say_what_going_through_the_grants_would(grants: list[Grant], group: str, topics: list[str]) -> None:
    """Each question, for a right that grants give and one that none gives."""

    def held(patterns: Collection[str], name: str) -> bool:
        return any(matches(pattern, name) for pattern in patterns)

    rights = Rights(grants)
    for right in (RIGHT_CONSUME, RIGHT_READ, RIGHT_SCHEDULE):
        giving = [grant for grant in grants if right in grant.rights]
        both = [grant for grant in giving if held(grant.groups, group)]
        assert rights.group(right, group) == bool(both)
        for topic in topics:
            assert rights.topic(right, topic) == any(held(grant.topics, topic) for grant in giving)
        refused = [topic for topic in topics if not any(held(grant.topics, topic) for grant in both)]
        assert rights.topic_without(right, group, topics) == (refused[0] if refused else None)
    assert rights.sees_group(group) == any(held(grant.groups, group) for grant in grants)
    for topic in topics:
        assert rights.sees_topic(topic) == any(held(grant.topics, topic) for grant in grants)


def test_users_with_the_same_roles_share_their_rights_until_something_changes() -> None:
    """The names of a role are indexed once, and never outlive a change."""
    control = AccessControl()
    applied(control, role("r", ({RIGHT_READ}, ["a"], [])))
    for name in ("ann", "bob"):
        applied(control, user(name, "r"))
    ann, bob = control.users()
    before = control.rights_of(ann)
    assert before is control.rights_of(bob) and before.topic(RIGHT_READ, "a")
    applied(control, role("r", ({RIGHT_READ}, ["b"], [])))
    assert not control.rights_of(ann).topic(RIGHT_READ, "a") and control.rights_of(bob).topic(RIGHT_READ, "b")


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    """Names, patterns, rights, counts, unknown roles and users."""
    control = AccessControl()
    many = [({RIGHT_READ}, ["a"], ["a"])] * (GRANTS_MAX + 1)
    wrong = [
        user("", ADMINISTRATOR),
        user("a b", ADMINISTRATOR),
        user("ann", "nobody-knows-it"),
        user("ann", *[f"r{number}" for number in range(ROLES_OF_USER_MAX + 1)]),
        user("ann", messages_per_s=1 << 60),
        role("r", ({9}, ["a"], [])),
        role("r", (set(), ["a"], [])),
        role("r", ({RIGHT_READ}, ["a b"], [])),
        role("r", ({RIGHT_READ}, [], [])),
        role("r", ({RIGHT_CONSUME}, ["a"], [])),
        role("r", ({RIGHT_SCHEDULE}, [], ["a"])),
        role("r", ({RIGHT_READ}, ["a"] * (PATTERNS_MAX + 1), [])),
        role("r", *many),
        role(ADMINISTRATOR, ({RIGHT_READ}, ["a"], [])),
        AccessCommand(delete_user="nobody"),
        AccessCommand(delete_role="none"),
        AccessCommand(delete_role=ADMINISTRATOR),
        token("nobody", 1),
        AccessCommand(revoke_token=RevokeToken(user="nobody", token_id="x")),
        AccessCommand(),
    ]
    for command in wrong:
        assert applied(control, command), command
    assert control.version == 0 and not list(control.users()) and len(control.roles()) == 1


def test_the_last_administrator_cannot_go_while_rights_are_on() -> None:
    """Not by deleting the user, nor by taking the role, nor by emptying a role that gives the same."""
    control = AccessControl()
    everything = (set(ALL_RIGHTS), ["*"], ["*"])
    assert not applied(control, role("root", everything)) and not applied(control, user("ann", "root"))
    nothing = role("root", ({RIGHT_READ}, ["*"], []))
    for command in (AccessCommand(delete_user="ann"), user("ann"), nothing):
        assert applied(control, command, rights_on=True) == "WRONG_STATE"
    assert not applied(control, user("bob", ADMINISTRATOR), rights_on=True)
    assert not applied(control, nothing, rights_on=True)
    assert not applied(control, AccessCommand(delete_user="ann"), rights_on=True)
    assert applied(control, AccessCommand(delete_user="bob"), rights_on=True) == "WRONG_STATE"
    assert not applied(control, AccessCommand(delete_user="bob"), rights_on=False)


def test_tokens_name_their_user_until_they_expire_or_end() -> None:
    """Bounded for each user; an expired one makes room; a hash is somebody's once."""
    control = AccessControl()
    applied(control, user("ann", ADMINISTRATOR))
    assert not applied(control, token("ann", 0, expires_ms=5_000))
    for number in range(1, TOKENS_OF_USER_MAX):
        assert not applied(control, token("ann", number))
    assert applied(control, token("ann", 99)) == "LIMIT_REACHED"
    assert applied(control, token("ann", 1), 6_000) == "NAME_TAKEN"
    first, second = (number.to_bytes(32, "big") for number in (0, 1))
    found = control.bearer(first, 4_999)
    assert found is not None and found.name == "ann"
    assert control.bearer(first, 5_000) is None and control.bearer(b"", 0) is None
    assert not applied(control, token("ann", 99), 6_000)
    ann = control.user("ann")
    assert ann is not None and first not in [kept.sha256 for kept in ann.tokens]
    token_id = next(kept.token.id for kept in ann.tokens if kept.sha256 == second)
    applied(control, AccessCommand(revoke_token=RevokeToken(user="ann", token_id=token_id)))
    assert control.bearer(second, 0) is None
    applied(control, AccessCommand(delete_user="ann"))
    assert control.bearer((99).to_bytes(32, "big"), 0) is None


COMMANDS = st.one_of(
    st.builds(user, st.sampled_from("ab"), st.sampled_from([ADMINISTRATOR, "r", "s"])),
    st.builds(user, st.sampled_from("ab")),
    st.builds(
        lambda name, rights: role(name, (rights, ["*"], ["*"])),
        st.sampled_from("rs"),
        st.sets(st.sampled_from(ALL_RIGHTS), min_size=1),
    ),
    st.builds(lambda name: AccessCommand(delete_user=name), st.sampled_from("ab")),
    st.builds(lambda name: AccessCommand(delete_role=name), st.sampled_from("rs")),
    st.builds(token, st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 3)),
)


@given(st.lists(COMMANDS, max_size=30))
def test_invariants_hold_whatever_is_applied(commands: list[AccessCommand]) -> None:
    """With rights on an administrator stays; roles of users exist; what is restored from a checkpoint is the same."""
    control = AccessControl()
    control.apply(user("a", ADMINISTRATOR), 0, False)
    for now_ms, command in enumerate(commands):
        applied(control, command, now_ms, rights_on=True)
        assert next(control.administrators(), None) is not None
        known = {one.name for one in control.roles()}
        assert all(set(one.roles) <= known for one in control.users())
    again = AccessControl()
    again.restore(control.message())
    assert again.message() == control.message()
    for number in range(6):
        sha256 = number.to_bytes(32, "big")
        assert again.bearer(sha256, 0) == control.bearer(sha256, 0)


def change(solo: Solo, actor: str = "", **body: object) -> AdminResult:
    """An admin command, on behalf of a user."""
    result = solo.apply(Command(admin=AdminCommand(actor=actor, **body)))[0]  # type: ignore[arg-type]
    assert isinstance(result, AdminResult)
    return result


def test_rights_need_an_administrator_and_survive_a_restart() -> None:
    """They cannot be turned on while nobody could administer; users, owners and the setting are in the checkpoint."""
    solo = Solo()
    solo.create("g")
    on = admin_pb2.Settings(rights=True)
    refused = change(solo, settings=on)
    assert refused.failure is not None and refused.failure.metadata["field"] == "rights"
    assert change(solo, access=user("ann", ADMINISTRATOR, topics_max=2, groups_max=1)).user is not None
    assert change(solo, settings=on).failure is None
    for name in ("t1", "t2"):
        assert change(solo, "ann", create_topic=admin_pb2.CreateTopicRequest(name=name)).failure is None
    third = admin_pb2.CreateTopicRequest(name="t3")
    grouped = admin_pb2.CreateGroupRequest(name="h", topics=["t1"], start_from=EARLIEST)
    assert change(solo, "ann", create_group=grouped).failure is None
    before = solo.state.digest()
    solo.checkpoint()
    solo.restart()
    assert solo.state.digest() == before
    assert solo.state.settings.rights and solo.state.access.user("ann") is not None
    full = change(solo, "ann", create_topic=third).failure
    assert full is not None and full.metadata["field"] == "quotas.topics_max"
    more = admin_pb2.CreateGroupRequest(name="i", topics=["t1"], start_from=EARLIEST)
    full = change(solo, "ann", create_group=more).failure
    assert full is not None and full.metadata["field"] == "quotas.groups_max"
    assert change(solo, delete_topic=admin_pb2.DeleteTopicRequest(name="t1")).failure is None
    assert change(solo, "ann", create_topic=third).failure is None


def test_the_built_in_role_gives_everything() -> None:
    """Every right for every name."""
    control = AccessControl()
    applied(control, user("ann", ADMINISTRATOR))
    ann = control.user("ann")
    assert ann is not None
    assert all(control.rights_of(ann).everything(number) for number in ALL_RIGHTS)


def test_a_list_of_users_outlasts_a_deletion() -> None:
    """A listing pauses between users; deleting one meanwhile is no error."""
    control = AccessControl()
    for name in ("ann", "bob", "cid"):
        applied(control, user(name))
    listed = iter(control.users())
    assert next(listed).name == "ann"
    applied(control, AccessCommand(delete_user="bob"))
    assert [one.name for one in listed] == ["bob", "cid"]
