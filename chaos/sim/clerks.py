"""Operators who set limits for a moment, keep users, roles and tokens, and delete a group and make it again.

Limits refuse what other clients send, and they try again: the general promises judge that a refusal is one. Users have
no rights to anything here, since rights are off. The group comes back under its name, with messages and retries of the
one before still on their way, and dead letters after one to three attempts. Nodes must survive this and agree.
"""

from __future__ import annotations

from tickwheel.chaos.sim.asking import founding
from tickwheel.chaos.sim.clients import Wires, served
from tickwheel.chaos.sim.stewards import LIVES_NS_MOST, Stewards
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.state.rights import id_of_token
from tickwheel.proto import consumer_pb2
from tickwheel.proto.access_pb2 import (
    RIGHT_CONSUME,
    RIGHT_SCHEDULE,
    AccessCommand,
    AccessRole,
    AddToken,
    Grant,
    RevokeToken,
    StoredToken,
    StoredUser,
    UserQuotas,
)
from tickwheel.proto.admin_pb2 import DeleteGroupRequest, ExponentialBackoff, RetryPolicy, Settings, UpdateGroupRequest
from tickwheel.proto.log_pb2 import AdminCommand

EVERY_NS = 700 * MS
TOPIC = "errands"
GROUP = "helpers"
USERS = ("ann", "ben")
ROLES = ("clerk", "porter")
LIMITED_NS_MOST = 1_500 * MS
LIMITS = (
    (Settings(tick_messages_max=20), Settings(tick_messages_max=0)),
    (Settings(pending_max=60), Settings(pending_max=0)),
    (Settings(topic_pending_max="orders=50 *=200"), Settings(topic_pending_max="")),
    (Settings(topic_quotas="*=200"), Settings(topic_quotas="")),
    (Settings(client_quotas="*=200"), Settings(client_quotas="")),
    (Settings(topics_max=1), Settings(topics_max=10_000)),
    (Settings(groups_max=1), Settings(groups_max=10_000)),
    (Settings(topics_auto_create=False), Settings(topics_auto_create=True)),
    (Settings(groups_auto_create=False), Settings(groups_auto_create=True)),
)
"""Each with what lifts it. No batch of any client is larger."""
OUTCOMES = (consumer_pb2.ACK, consumer_pb2.RETRY, consumer_pb2.RETRY, consumer_pb2.DEAD)


class Clerks(Stewards):
    """`clients.Clients`. One limit holds at a time."""

    setting = founding((TOPIC,), [(GROUP, (TOPIC,))])
    asks_for = "answers about limits, users or a group"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "clerks")
        self._limited = False
        self._tokens: list[str] = []
        """Ids of tokens that may exist."""

    def unfinished(self) -> str:
        return super().unfinished() or ("that a limit is lifted" if self._limited else "")

    def _begin(self) -> None:
        self._world.after(SECOND, self._keep, EVERY_NS, self._act)

    async def _act(self) -> None:
        dice = self._rng.random()
        if dice < 0.35:
            await self._ask_admin("access", AdminCommand(access=self._access()))
        elif dice < 0.65:
            await self._limit()
        else:
            await self._again()

    async def _ask_admin(self, what: str, command: AdminCommand) -> None:
        await self._ask(what, served(lambda core: core.parts.requests.admin(command)))

    async def _limit(self) -> None:
        """Set a limit for a while, at most until faults are over."""
        if self._limited:
            return
        self._limited = True
        limit, lifted = self._rng.choice(LIMITS)
        await self._ask_admin("limit", AdminCommand(settings=limit))
        until_ns = self._world.now_ns + self._rng.randrange(LIMITED_NS_MOST)
        while self._world.now_ns < until_ns and not self._wires.winding_down:
            await self._wires.pause(min(until_ns - self._world.now_ns, 100 * MS))
        await self._ask_admin("limit", AdminCommand(settings=lifted))
        self._limited = False

    def _access(self) -> AccessCommand:
        rng = self._rng
        user, role = rng.choice(USERS), rng.choice(ROLES)
        match rng.choice(("set user", "set user", "set role", "delete user", "delete role", "add token", "revoke")):
            case "set user":
                quotas = UserQuotas(pending_max=rng.choice((0, 5)), messages_per_s=rng.choice((0, 10)))
                return AccessCommand(set_user=StoredUser(name=user, roles=[role], quotas=quotas))
            case "set role":
                grant = Grant(rights=[rng.choice((RIGHT_SCHEDULE, RIGHT_CONSUME))], topics=[TOPIC], groups=["*"])
                return AccessCommand(set_role=AccessRole(name=role, grants=[grant]))
            case "delete user":
                return AccessCommand(delete_user=user)
            case "delete role":
                return AccessCommand(delete_role=role)
            case "revoke" if self._tokens:
                return AccessCommand(revoke_token=RevokeToken(user=user, token_id=rng.choice(self._tokens)))
        digest = rng.randbytes(32)
        self._tokens.append(id_of_token(digest))
        return AccessCommand(add_token=AddToken(user=user, token=StoredToken(sha256=digest)))

    async def _again(self) -> None:
        """The group once more, with another policy, until it is deleted."""
        rng = self._rng
        await self._asking.admin(*founding((), [(GROUP, (TOPIC,))]))
        policy = RetryPolicy(attempts_max=rng.randint(1, 3))
        if rng.random() < 0.5:
            policy.exponential.CopyFrom(ExponentialBackoff(initial_ms=100, factor=2, max_ms=1_000))
        update = UpdateGroupRequest(name=GROUP, retry=policy)
        await self._ask_admin("policy", AdminCommand(update_group=update))
        for _ in range(rng.randint(1, 3)):
            self._fill(TOPIC)
            self._world.after(rng.randrange(LIVES_NS_MOST), self._pull, TOPIC, GROUP, rng.choice(OUTCOMES))
        request = DeleteGroupRequest(name=GROUP, discard=rng.random() < 0.7)
        call = served(lambda core: core.parts.deleter.group(request))
        self._later(rng.randrange(LIVES_NS_MOST), self._delete, "group", GROUP, call)
