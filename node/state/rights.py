"""Users, roles and tokens, as part of the replicated state, and what a user may do.

Pure. Changed by apply only, so every node judges a call alike at the same applied index. A token is kept as the
SHA-256 of its secret: secrets are random and 256 bits long, so a plain hash is enough (no salt, no stretching).

Invariants:
- While the setting `rights` is on, some user has the built-in role `administrator` or grants that cover the same: no
  change that would leave none is carried out, so nobody locks the cluster.
- A role that a user has exists.
- Users and roles are kept as messages, which nobody changes: a change puts another one in the place of the old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tickwheel.node.failure import RequestError, invalid, limit_reached, refused
from tickwheel.node.state.name_patterns import EVERYTHING, NamePatterns
from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX, check_topic_name, is_name_pattern
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import access_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.access_pb2 import (
    RIGHT_ADMINISTER,
    RIGHT_CONSUME,
    RIGHT_SCHEDULE,
    AccessCommand,
    AccessRole,
    Grant,
    Right,
    StoredToken,
    StoredUser,
    UserQuotas,
)

USERS_MAX = 10_000
ROLES_MAX = 1_000
"""Together with the next three limits: at most about 50 MB, in practice a few kilobytes."""
ROLES_OF_USER_MAX = 32
GRANTS_MAX = 32
PATTERNS_MAX = 64
TOKENS_OF_USER_MAX = 16
LABEL_LENGTH_MAX = 64
LIFETIME_MS_MAX = 3_650 * 86_400_000
QUOTA_MAX = 1 << 48
COUNT_QUOTA_MAX = 1 << 31
TOKEN_ID_LENGTH = 12

ADMINISTRATOR = "administrator"
"""Built-in role with every right everywhere. It is not stored, and can be neither changed nor deleted."""
ALL_RIGHTS = tuple(number for number in Right.values() if number)
PATTERN_RULE = f"1 to {TOPIC_NAME_LENGTH_MAX} characters of [A-Za-z0-9_-.%*]; * stands for any characters"


QUOTA_BOUNDS = {
    field.name: QUOTA_MAX if field.type == field.TYPE_UINT64 else COUNT_QUOTA_MAX
    for field in UserQuotas.DESCRIPTOR.fields
}
NO_QUOTAS = UserQuotas()


def id_of_token(sha256: bytes) -> str:
    """Name of a token for operators."""
    return sha256.hex()[:TOKEN_ID_LENGTH]


def is_alive(token: access_pb2.Token, now_ms: int) -> bool:
    """Whether a token has not expired."""
    return not token.expires_ms or now_ms < token.expires_ms


def shown(user: StoredUser) -> access_pb2.User:
    """A user as operators see it, without the hashes of its tokens."""
    tokens = [kept.token for kept in user.tokens]
    return access_pb2.User(name=user.name, roles=user.roles, quotas=user.quotas, tokens=tokens)


UNRESTRICTED = (Grant(rights=ALL_RIGHTS, topics=[EVERYTHING], groups=[EVERYTHING]),)


class Rights:
    """The rights of a user with these grants. Its patterns are indexed when a name is asked for first."""

    def __init__(self, grants: Sequence[Grant]) -> None:
        self.grants = grants
        self._indexed: _Indexed | None = None

    def topic(self, right: int, name: str) -> bool:
        """Whether the right holds for a topic."""
        index = self._index()
        return index.topics.bits(name) & index.holding.get(right, 0) != 0

    def group(self, right: int, name: str) -> bool:
        """Whether the right holds for a group."""
        index = self._index()
        return index.groups.bits(name) & index.holding.get(right, 0) != 0

    def topic_without(self, right: int, group: str, topics: Iterable[str]) -> str | None:
        """The first topic for which no grant gives the right together with the group; None: there is none."""
        index = self._index()
        held = index.groups.bits(group) & index.holding.get(right, 0)
        return next((topic for topic in topics if not index.topics.bits(topic) & held), None)

    def somewhere(self, right: int) -> bool:
        """Whether the right holds for at least one name pattern."""
        return any(right in grant.rights for grant in self.grants)

    def all_topics(self, right: int) -> bool:
        """Whether the right holds for every possible topic."""
        return any(right in grant.rights and EVERYTHING in grant.topics for grant in self.grants)

    def everything(self, right: int) -> bool:
        """Whether one grant gives the right for every topic and every group."""
        return any(
            right in grant.rights and EVERYTHING in grant.topics and EVERYTHING in grant.groups for grant in self.grants
        )

    def sees_topic(self, name: str) -> bool:
        """Whether any right holds for the topic."""
        return any(self.topic(right, name) for right in ALL_RIGHTS)

    def sees_group(self, name: str) -> bool:
        """Whether any right holds for the group."""
        return self._index().groups.bits(name) != 0

    def _index(self) -> _Indexed:
        if self._indexed is None:
            self._indexed = _Indexed(self.grants)
        return self._indexed


class _Indexed:
    """The names of grants, indexed; a grant is the bit of its place."""

    def __init__(self, grants: Sequence[Grant]) -> None:
        self.topics = NamePatterns((name, 1 << place) for place, grant in enumerate(grants) for name in grant.topics)
        self.groups = NamePatterns((name, 1 << place) for place, grant in enumerate(grants) for name in grant.groups)
        self.holding: dict[int, int] = {}
        """For each right the grants that give it."""
        for place, grant in enumerate(grants):
            for right in grant.rights:
                self.holding[right] = self.holding.get(right, 0) | 1 << place


class AccessControl:
    """Changed by apply only. `version` rises with each change; it is no part of the state."""

    def __init__(self) -> None:
        self._users: dict[str, StoredUser] = {}
        self._roles: dict[str, AccessRole] = {}
        self._by_hash: dict[bytes, str] = {}
        self._rights: dict[tuple[str, ...], Rights] = {}
        self._message: access_pb2.AccessSnapshot | None = None
        self.version = 0
        self.limits_pending = False
        """Whether some user has a limit on pending messages."""

    def users(self) -> list[StoredUser]:
        """Users by name. Later changes do not change the list."""
        return [self._users[name] for name in sorted(self._users)]

    def roles(self) -> list[AccessRole]:
        """Roles by name, the built-in one first."""
        return [AccessRole(name=ADMINISTRATOR, grants=UNRESTRICTED), *self._named_roles()]

    def _named_roles(self) -> list[AccessRole]:
        return [self._roles[name] for name in sorted(self._roles)]

    def user(self, name: str) -> StoredUser | None:
        """One user."""
        return self._users.get(name)

    def bearer(self, sha256: bytes, now_ms: int) -> StoredUser | None:
        """The user whose token has this hash; None: there is none, or it has expired."""
        user = self._users.get(self._by_hash.get(sha256, ""))
        if user is None:
            return None
        return user if any(kept.sha256 == sha256 and is_alive(kept.token, now_ms) for kept in user.tokens) else None

    def rights_of(self, user: StoredUser) -> Rights:
        """The current rights of a user: one object for all users with the same roles, another after each change."""
        roles = tuple(user.roles)
        known = self._rights.get(roles)
        if known is None:
            known = self._rights[roles] = Rights([grant for role in roles for grant in self._grants(role)])
        return known

    def administrators(self) -> Iterator[StoredUser]:
        """Users who may change everything."""
        return (user for user in self._users.values() if self._administers(user.roles))

    def _grants(self, role: str) -> Sequence[Grant]:
        return UNRESTRICTED if role == ADMINISTRATOR else self._roles[role].grants

    def _administers(self, roles: Iterable[str]) -> bool:
        return any(Rights(self._grants(role)).everything(RIGHT_ADMINISTER) for role in roles)

    # -- apply

    def apply(self, command: AccessCommand, stamped_ms: int, rights_on: bool) -> AdminResult:
        """Apply one command. `rights_on`: refuse a change that would leave no administrator. Raises RequestError."""
        kind = command.WhichOneof("body")
        if kind == "set_user":
            result = self._set_user(command.set_user, rights_on)
        elif kind == "delete_user":
            result = self._delete_user(command.delete_user, rights_on)
        elif kind == "set_role":
            result = self._set_role(command.set_role, rights_on)
        elif kind == "delete_role":
            result = self._delete_role(command.delete_role)
        elif kind == "add_token":
            result = self._add_token(command.add_token, stamped_ms)
        elif kind == "revoke_token":
            result = self._revoke_token(command.revoke_token)
        else:
            raise refused(
                pb.WRONG_STATE, f"access command {kind} is not known to this version", field="body", value=str(kind)
            )
        self.version += 1
        self._rights.clear()
        self._message = None
        self._look_for_limits()
        return result

    def _look_for_limits(self) -> None:
        self.limits_pending = any(user.quotas.pending_max for user in self._users.values())

    def _locks(self, *, without: str = "", role: str = "", grants: Sequence[Grant] = ()) -> bool:
        """Whether no administrator would be left without a user, or with other grants of a role."""
        return not any(
            Rights(grants if name == role else self._grants(name)).everything(RIGHT_ADMINISTER)
            for user in self._users.values()
            if user.name != without
            for name in user.roles
        )

    def _set_user(self, wanted: StoredUser, rights_on: bool) -> AdminResult:
        _check_name(wanted.name)
        roles = tuple(dict.fromkeys(wanted.roles))
        if len(roles) > ROLES_OF_USER_MAX:
            raise invalid("roles", len(roles), f"at most {ROLES_OF_USER_MAX}")
        for role in roles:
            if role != ADMINISTRATOR and role not in self._roles:
                raise refused(pb.UNKNOWN_NAME, f"role {role[:100]} does not exist", field="roles", value=role[:100])
        for name, most in QUOTA_BOUNDS.items():
            value = getattr(wanted.quotas, name)
            if value > most:
                raise invalid(f"quotas.{name}", value, f"0 to {most}")
        known = self._users.get(wanted.name)
        if known is None and len(self._users) >= USERS_MAX:
            raise RequestError(limit_reached("users", USERS_MAX))
        if rights_on and not self._administers(roles) and self._locks(without=wanted.name):
            raise _last_administrator(wanted.name)
        tokens = () if known is None else known.tokens
        return self._put(StoredUser(name=wanted.name, roles=roles, quotas=wanted.quotas, tokens=tokens))

    def _put(self, user: StoredUser) -> AdminResult:
        self._users[user.name] = user
        return AdminResult(user=shown(user))

    def _known(self, name: str) -> StoredUser:
        user = self._users.get(name)
        if user is None:
            raise refused(pb.UNKNOWN_NAME, f"user {name[:100]} does not exist", field="user", value=name[:100])
        return user

    def _delete_user(self, name: str, rights_on: bool) -> AdminResult:
        user = self._known(name)
        if rights_on and self._locks(without=name):
            raise _last_administrator(name)
        del self._users[name]
        for kept in user.tokens:
            del self._by_hash[kept.sha256]
        return AdminResult(user=shown(user))

    def _set_role(self, wanted: AccessRole, rights_on: bool) -> AdminResult:
        _check_name(wanted.name)
        if wanted.name == ADMINISTRATOR:
            raise refused(
                pb.NAME_TAKEN, f"{ADMINISTRATOR} is built in and cannot be changed", field="name", value=ADMINISTRATOR
            )
        if len(wanted.grants) > GRANTS_MAX:
            raise invalid("grants", len(wanted.grants), f"at most {GRANTS_MAX}")
        role = AccessRole(name=wanted.name, grants=[_checked_grant(grant) for grant in wanted.grants])
        if wanted.name not in self._roles and len(self._roles) >= ROLES_MAX:
            raise RequestError(limit_reached("roles", ROLES_MAX))
        if rights_on and self._locks(role=wanted.name, grants=role.grants):
            raise _last_administrator(wanted.name)
        self._roles[wanted.name] = role
        return AdminResult(role=role)

    def _delete_role(self, name: str) -> AdminResult:
        if name not in self._roles:
            raise refused(pb.UNKNOWN_NAME, f"role {name[:100]} does not exist", field="name", value=name[:100])
        holder = next((user.name for user in self._users.values() if name in user.roles), None)
        if holder is not None:
            raise refused(
                pb.WRONG_STATE, f"user {holder} has role {name}: take it away first", field="name", value=name
            )
        return AdminResult(role=self._roles.pop(name))

    def _add_token(self, wanted: access_pb2.AddToken, stamped_ms: int) -> AdminResult:
        user, sha256, token = self._known(wanted.user), wanted.token.sha256, wanted.token.token
        if len(sha256) != 32:
            raise invalid("sha256", f"{len(sha256)} bytes", "32")
        if len(token.label) > LABEL_LENGTH_MAX:
            raise invalid("label", token.label, f"at most {LABEL_LENGTH_MAX} characters")
        if sha256 in self._by_hash:
            raise refused(pb.NAME_TAKEN, "this token exists already", field="sha256", value=id_of_token(sha256))
        kept = [held for held in user.tokens if is_alive(held.token, stamped_ms)]
        if len(kept) >= TOKENS_OF_USER_MAX:
            raise RequestError(limit_reached("tokens", TOKENS_OF_USER_MAX))
        for held in user.tokens:
            if held not in kept:
                del self._by_hash[held.sha256]
        made = StoredToken(sha256=sha256)
        made.token.id, made.token.label = id_of_token(sha256), token.label
        made.token.created_ms, made.token.expires_ms = stamped_ms, max(0, token.expires_ms)
        self._by_hash[sha256] = user.name
        return self._put(_with_tokens(user, [*kept, made]))

    def _revoke_token(self, wanted: access_pb2.RevokeToken) -> AdminResult:
        user = self._known(wanted.user)
        gone = [held.sha256 for held in user.tokens if held.token.id == wanted.token_id]
        if not gone:
            told = wanted.token_id[:100]
            raise refused(pb.UNKNOWN_NAME, f"user {user.name} has no token {told}", field="token_id", value=told)
        for sha256 in gone:
            del self._by_hash[sha256]
        return self._put(_with_tokens(user, [held for held in user.tokens if held.sha256 not in gone]))

    # -- checkpoints

    def message(self) -> access_pb2.AccessSnapshot:
        """The whole content as a message, the same on every node. Do not change it: it is built once after each
        change."""
        if self._message is None:
            self._message = access_pb2.AccessSnapshot(users=self.users(), roles=self._named_roles())
        return self._message

    def restore(self, message: access_pb2.AccessSnapshot) -> None:
        """Fill a fresh object from a checkpoint."""
        own = access_pb2.AccessSnapshot()
        own.CopyFrom(message)  # a part of a message keeps the whole in memory
        self._roles = {role.name: role for role in own.roles}
        self._users = {user.name: user for user in own.users}
        self._by_hash = {kept.sha256: user.name for user in own.users for kept in user.tokens}
        self._look_for_limits()


def _with_tokens(user: StoredUser, tokens: Iterable[StoredToken]) -> StoredUser:
    return StoredUser(name=user.name, roles=user.roles, quotas=user.quotas, tokens=tokens)


def _check_name(name: str) -> None:
    problem = check_topic_name(name)
    if problem:
        raise invalid("name", name, problem)


def _checked_grant(message: Grant) -> Grant:
    """The grant with each right and each pattern once. Raises RequestError."""
    rights = set(message.rights)
    if not rights or not rights <= set(ALL_RIGHTS):
        known = ", ".join(name for name, number in Right.items() if number)
        raise invalid("grants.rights", sorted(rights), f"one or more of {known}")
    for name, patterns in (("topics", message.topics), ("groups", message.groups)):
        if len(patterns) > PATTERNS_MAX:
            raise invalid(f"grants.{name}", len(patterns), f"at most {PATTERNS_MAX}")
        for pattern in patterns:
            if not is_name_pattern(pattern):
                raise invalid(f"grants.{name}", pattern, PATTERN_RULE)
    if not message.topics and not message.groups:
        raise invalid("grants.topics", "none", "a pattern for topics or groups")
    if RIGHT_CONSUME in rights and not (message.topics and message.groups):
        raise invalid("grants", "RIGHT_CONSUME", "patterns for topics and for groups")
    if RIGHT_SCHEDULE in rights and not message.topics:
        raise invalid("grants", "RIGHT_SCHEDULE", "patterns for topics")
    topics, groups = dict.fromkeys(message.topics), dict.fromkeys(message.groups)
    return Grant(rights=sorted(rights), topics=topics, groups=groups)


def _last_administrator(name: str) -> RequestError:
    text = "nobody could administer the cluster any more; give another user the role administrator first"
    return refused(pb.WRONG_STATE, text, field="name", value=name)
