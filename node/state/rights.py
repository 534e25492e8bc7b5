"""Users, roles and tokens, as part of the replicated state, and what a user may do.

Pure. Changed by apply only, so every node judges a call alike at the same applied index. A token is kept as the
SHA-256 of its secret: secrets are random and 256 bits long, so a plain hash is enough (no salt, no stretching).

Invariants:
- While the setting `rights` is on, some user has the built-in role `administrator` or grants that cover the same: no
  change that would leave none is carried out, so nobody locks the cluster.
- A role that a user has exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.node.state.name_patterns import EVERYTHING, NamePatterns
from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX, check_topic_name, is_name_pattern
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import access_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.access_pb2 import RIGHT_ADMINISTER, RIGHT_CONSUME, RIGHT_SCHEDULE, AccessCommand, Right

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


@dataclass(frozen=True, slots=True)
class Grant:
    """`rights` for topics and groups whose names match one of the patterns."""

    rights: frozenset[int]
    topics: tuple[str, ...]
    groups: tuple[str, ...]

    def message(self) -> access_pb2.Grant:
        """The grant as a message."""
        rights = [Right.ValueType(number) for number in sorted(self.rights)]
        return access_pb2.Grant(rights=rights, topics=self.topics, groups=self.groups)


@dataclass(frozen=True, slots=True)
class Quotas:
    """As in access.proto; 0: no limit."""

    messages_per_s: int = 0
    bytes_per_s: int = 0
    pending_max: int = 0
    topics_max: int = 0
    groups_max: int = 0
    streams_max: int = 0
    connections_max: int = 0

    def message(self) -> access_pb2.UserQuotas:
        """The quotas as a message."""
        return access_pb2.UserQuotas(**{name: getattr(self, name) for name in QUOTA_BOUNDS})


QUOTA_BOUNDS = {
    "messages_per_s": QUOTA_MAX,
    "bytes_per_s": QUOTA_MAX,
    "pending_max": QUOTA_MAX,
    "topics_max": COUNT_QUOTA_MAX,
    "groups_max": COUNT_QUOTA_MAX,
    "streams_max": COUNT_QUOTA_MAX,
    "connections_max": COUNT_QUOTA_MAX,
}
NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class Token:
    """One secret of a user, kept as its hash."""

    sha256: bytes
    created_ms: int
    expires_ms: int
    label: str

    @property
    def token_id(self) -> str:
        """Name of the token for operators."""
        return self.sha256.hex()[:TOKEN_ID_LENGTH]

    def alive(self, now_ms: int) -> bool:
        """Whether the token has not expired."""
        return not self.expires_ms or now_ms < self.expires_ms

    def message(self) -> access_pb2.Token:
        """The token as a message, without the hash."""
        return access_pb2.Token(
            id=self.token_id, created_ms=self.created_ms, expires_ms=self.expires_ms, label=self.label
        )


@dataclass(frozen=True, slots=True)
class User:
    """A user; immutable, a change makes a new object."""

    name: str
    roles: tuple[str, ...]
    quotas: Quotas = NO_QUOTAS
    tokens: tuple[Token, ...] = ()

    def message(self) -> access_pb2.User:
        """The user as operators see it."""
        tokens = [token.message() for token in self.tokens]
        return access_pb2.User(name=self.name, roles=self.roles, quotas=self.quotas.message(), tokens=tokens)

    def stored(self) -> access_pb2.StoredUser:
        """The user as a checkpoint stores it."""
        tokens = [access_pb2.StoredToken(token=token.message(), sha256=token.sha256) for token in self.tokens]
        return access_pb2.StoredUser(name=self.name, roles=self.roles, quotas=self.quotas.message(), tokens=tokens)


UNRESTRICTED = (Grant(frozenset(ALL_RIGHTS), (EVERYTHING,), (EVERYTHING,)),)


class Rights:
    """The rights of a user with these grants. Its patterns are indexed when a name is asked for first."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
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

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        self.topics = NamePatterns((name, 1 << place) for place, grant in enumerate(grants) for name in grant.topics)
        self.groups = NamePatterns((name, 1 << place) for place, grant in enumerate(grants) for name in grant.groups)
        self.holding: dict[int, int] = {}
        """For each right the grants that give it."""
        for place, grant in enumerate(grants):
            for right in grant.rights:
                self.holding[right] = self.holding.get(right, 0) | 1 << place


def _refuse(reason: pb.ErrorReason.ValueType, text: str, name: str, value: str) -> AdminResult:
    return AdminResult(Failure(reason, text, {"field": name, "value": value}))


class AccessControl:
    """Changed by apply only. `version` rises with each change; it is no part of the state."""

    def __init__(self) -> None:
        self._users: dict[str, User] = {}
        self._roles: dict[str, tuple[Grant, ...]] = {}
        self._by_hash: dict[bytes, str] = {}
        self._rights: dict[tuple[str, ...], Rights] = {}
        self._message: access_pb2.AccessSnapshot | None = None
        self.version = 0
        self.limits_pending = False
        """Whether some user has a limit on pending messages."""

    def users(self) -> list[User]:
        """Users by name. Later changes do not change the list."""
        return [self._users[name] for name in sorted(self._users)]

    def roles(self) -> list[access_pb2.AccessRole]:
        """Roles by name, the built-in one first."""
        named = [(ADMINISTRATOR, UNRESTRICTED), *sorted(self._roles.items())]
        return [_role_message(name, grants) for name, grants in named]

    def user(self, name: str) -> User | None:
        """One user."""
        return self._users.get(name)

    def bearer(self, sha256: bytes, now_ms: int) -> User | None:
        """The user whose token has this hash; None: there is none, or it has expired."""
        user = self._users.get(self._by_hash.get(sha256, ""))
        if user is None:
            return None
        return user if any(token.sha256 == sha256 and token.alive(now_ms) for token in user.tokens) else None

    def rights_of(self, user: User) -> Rights:
        """The current rights of a user: one object for all users with the same roles, another after each change."""
        known = self._rights.get(user.roles)
        if known is None:
            grants = tuple(grant for role in user.roles for grant in self._grants(role))
            known = self._rights[user.roles] = Rights(grants)
        return known

    def administrators(self) -> Iterator[User]:
        """Users who may change everything."""
        return (user for user in self._users.values() if self._administers(user.roles))

    def _grants(self, role: str) -> tuple[Grant, ...]:
        return UNRESTRICTED if role == ADMINISTRATOR else self._roles.get(role, ())

    def _administers(self, roles: Iterable[str]) -> bool:
        return any(Rights(self._grants(role)).everything(RIGHT_ADMINISTER) for role in roles)

    # -- apply

    def apply(self, command: AccessCommand, stamped_ms: int, rights_on: bool) -> AdminResult:
        """Apply one command. `rights_on`: refuse a change that would leave no administrator."""
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
            return _refuse(pb.WRONG_STATE, f"access command {kind} is not known to this version", "body", str(kind))
        if result.failure is None:
            self.version += 1
            self._rights.clear()
            self._message = None
            self._look_for_limits()
        return result

    def _look_for_limits(self) -> None:
        self.limits_pending = any(user.quotas.pending_max for user in self._users.values())

    def _locks(self, *, without: str = "", role: str = "", grants: tuple[Grant, ...] = ()) -> bool:
        """Whether no administrator would be left without a user, or with other grants of a role."""
        for user in self._users.values():
            if user.name == without:
                continue
            if any(
                Rights(grants if name == role else self._grants(name)).everything(RIGHT_ADMINISTER)
                for name in user.roles
            ):
                return False
        return True

    def _set_user(self, wanted: access_pb2.StoredUser, rights_on: bool) -> AdminResult:
        problem = check_topic_name(wanted.name)
        if problem:
            return AdminResult(invalid("name", wanted.name, problem).failure)
        roles = tuple(dict.fromkeys(wanted.roles))
        if len(roles) > ROLES_OF_USER_MAX:
            return AdminResult(invalid("roles", len(roles), f"at most {ROLES_OF_USER_MAX}").failure)
        for role in roles:
            if role != ADMINISTRATOR and role not in self._roles:
                return _refuse(pb.UNKNOWN_NAME, f"role {role[:100]} does not exist", "roles", role[:100])
        values = {name: getattr(wanted.quotas, name) for name in QUOTA_BOUNDS}
        for name, most in QUOTA_BOUNDS.items():
            if values[name] > most:
                return AdminResult(invalid(f"quotas.{name}", values[name], f"0 to {most}").failure)
        known = self._users.get(wanted.name)
        if known is None and len(self._users) >= USERS_MAX:
            return AdminResult(limit_reached("users", USERS_MAX))
        if rights_on and not self._administers(roles) and self._locks(without=wanted.name):
            return _last_administrator(wanted.name)
        user = User(wanted.name, roles, Quotas(**values), () if known is None else known.tokens)
        self._users[user.name] = user
        return AdminResult(user=user.message())

    def _delete_user(self, name: str, rights_on: bool) -> AdminResult:
        user = self._users.get(name)
        if user is None:
            return _unknown_user(name)
        if rights_on and self._locks(without=name):
            return _last_administrator(name)
        del self._users[name]
        for token in user.tokens:
            del self._by_hash[token.sha256]
        return AdminResult(user=user.message())

    def _set_role(self, wanted: access_pb2.AccessRole, rights_on: bool) -> AdminResult:
        problem = check_topic_name(wanted.name)
        if problem:
            return AdminResult(invalid("name", wanted.name, problem).failure)
        if wanted.name == ADMINISTRATOR:
            return _refuse(pb.NAME_TAKEN, f"{ADMINISTRATOR} is built in and cannot be changed", "name", ADMINISTRATOR)
        if len(wanted.grants) > GRANTS_MAX:
            return AdminResult(invalid("grants", len(wanted.grants), f"at most {GRANTS_MAX}").failure)
        try:
            grants = [_grant_of(message) for message in wanted.grants]
        except RequestError as error:
            return AdminResult(error.failure)
        if wanted.name not in self._roles and len(self._roles) >= ROLES_MAX:
            return AdminResult(limit_reached("roles", ROLES_MAX))
        if rights_on and self._locks(role=wanted.name, grants=tuple(grants)):
            return _last_administrator(wanted.name)
        self._roles[wanted.name] = tuple(grants)
        return AdminResult(role=_role_message(wanted.name, tuple(grants)))

    def _delete_role(self, name: str) -> AdminResult:
        grants = self._roles.get(name)
        if grants is None:
            return _refuse(pb.UNKNOWN_NAME, f"role {name[:100]} does not exist", "name", name[:100])
        holder = next((user.name for user in self._users.values() if name in user.roles), None)
        if holder is not None:
            return _refuse(pb.WRONG_STATE, f"user {holder} has role {name}: take it away first", "name", name)
        del self._roles[name]
        return AdminResult(role=_role_message(name, grants))

    def _add_token(self, wanted: access_pb2.AddToken, stamped_ms: int) -> AdminResult:
        user = self._users.get(wanted.user)
        if user is None:
            return _unknown_user(wanted.user)
        stored = wanted.token
        if len(stored.sha256) != 32:
            return AdminResult(invalid("sha256", f"{len(stored.sha256)} bytes", "32").failure)
        if len(stored.token.label) > LABEL_LENGTH_MAX:
            return AdminResult(invalid("label", stored.token.label, f"at most {LABEL_LENGTH_MAX} characters").failure)
        if stored.sha256 in self._by_hash:
            return _refuse(pb.NAME_TAKEN, "this token exists already", "sha256", stored.sha256.hex()[:TOKEN_ID_LENGTH])
        kept = tuple(token for token in user.tokens if token.alive(stamped_ms))
        if len(kept) >= TOKENS_OF_USER_MAX:
            return AdminResult(limit_reached("tokens", TOKENS_OF_USER_MAX))
        for token in user.tokens:
            if token not in kept:
                del self._by_hash[token.sha256]
        token = Token(stored.sha256, stamped_ms, max(0, stored.token.expires_ms), stored.token.label)
        self._by_hash[token.sha256] = user.name
        self._users[user.name] = replace(user, tokens=(*kept, token))
        return AdminResult(user=self._users[user.name].message())

    def _revoke_token(self, wanted: access_pb2.RevokeToken) -> AdminResult:
        user = self._users.get(wanted.user)
        if user is None:
            return _unknown_user(wanted.user)
        gone = [token for token in user.tokens if token.token_id == wanted.token_id]
        if not gone:
            shown = wanted.token_id[:100]
            return _refuse(pb.UNKNOWN_NAME, f"user {user.name} has no token {shown}", "token_id", shown)
        for token in gone:
            del self._by_hash[token.sha256]
        self._users[user.name] = replace(user, tokens=tuple(token for token in user.tokens if token not in gone))
        return AdminResult(user=self._users[user.name].message())

    # -- checkpoints

    def message(self) -> access_pb2.AccessSnapshot:
        """The whole content as a message, the same on every node. Do not change it: it is built once after each
        change."""
        if self._message is None:
            roles = [_role_message(name, grants) for name, grants in sorted(self._roles.items())]
            self._message = access_pb2.AccessSnapshot(users=[user.stored() for user in self.users()], roles=roles)
        return self._message

    def restore(self, message: access_pb2.AccessSnapshot) -> None:
        """Fill a fresh object from a checkpoint."""
        self._roles = {
            role.name: tuple(
                Grant(frozenset(grant.rights), tuple(grant.topics), tuple(grant.groups)) for grant in role.grants
            )
            for role in message.roles
        }
        for stored in message.users:
            tokens = tuple(
                Token(kept.sha256, kept.token.created_ms, kept.token.expires_ms, kept.token.label)
                for kept in stored.tokens
            )
            quotas = Quotas(**{name: getattr(stored.quotas, name) for name in QUOTA_BOUNDS})
            self._users[stored.name] = User(stored.name, tuple(stored.roles), quotas, tokens)
            self._by_hash.update((token.sha256, stored.name) for token in tokens)
        self._look_for_limits()


def _role_message(name: str, grants: tuple[Grant, ...]) -> access_pb2.AccessRole:
    return access_pb2.AccessRole(name=name, grants=[grant.message() for grant in grants])


def _grant_of(message: access_pb2.Grant) -> Grant:
    """Raises RequestError."""
    rights = frozenset(message.rights)
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
    return Grant(rights, tuple(dict.fromkeys(message.topics)), tuple(dict.fromkeys(message.groups)))


def _unknown_user(name: str) -> AdminResult:
    return _refuse(pb.UNKNOWN_NAME, f"user {name[:100]} does not exist", "user", name[:100])


def _last_administrator(name: str) -> AdminResult:
    text = "nobody could administer the cluster any more; give another user the role administrator first"
    return _refuse(pb.WRONG_STATE, text, "name", name)
