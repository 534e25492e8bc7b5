"""The consumers attached to this master, their credits and limits.

Owns which consumer is attached to which group. A session only says how many messages its consumer takes: handing out,
leases and settlements are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.proto import consumer_pb2

Deliver = Callable[[consumer_pb2.DeliverBatch], None]
Closed = Callable[[Failure], None]
RanOut = Callable[[], None]

CREDITS_MAX = 1_000_000


def lease_ms_of(config: CoreConfig, wanted: int) -> int:
    """The length of a lease that a consumer asks for; 0: the default. Raises RequestError."""
    lease_ms = wanted or config.lease_default_ms
    if not config.lease_min_ms <= lease_ms <= config.lease_max_ms:
        raise invalid("lease_ms", lease_ms, f"{config.lease_min_ms} to {config.lease_max_ms}")
    return lease_ms


@dataclass(slots=True, eq=False)
class Session:
    """One consumer. Its stream or pull gives credit; the delivery calls `deliver` with batches."""

    session_id: int
    group: str
    group_id: int
    lease_ms: int
    batch_messages_max: int
    deliver: Deliver
    closed: Closed
    topic: str = ""
    """Takes messages of this topic only; empty: of all topics of the group."""
    filter: str = ""
    """Filter that the consumer expects its group to have; empty: any."""
    name: str = ""
    """Name that the consumer gave itself, for people to read."""
    mixes: bool = False
    """Takes batches of several topics."""
    ran_out: RanOut | None = None
    """Called when a lease of unsettled messages ran out, before anything else is handed out."""
    credits: int = 0
    suspended: bool = False
    credits_kept: int = 0
    """Of a suspended consumer: it gets them back when it is resumed."""
    open: bool = True
    delivered: int = 0
    unanswered: int = 0
    """Its settlements that have no answer yet."""
    _sent: int = 0
    """Settlements since it last had all its answers."""

    def settles(self) -> bool:
        """The consumer sends a settlement. Returns whether it may be waiting for the answer: not if it went on without
        one now, or before it last had all its answers."""
        went_on = self._sent > 1
        if not self.unanswered:
            self._sent = 0
        self._sent += 1
        self.unanswered += 1
        return self._sent == 1 and not went_on

    def heard(self) -> None:
        """A settlement has its answer."""
        self.unanswered = max(0, self.unanswered - 1)


class Sessions:
    """Empty unless the node leads. `wanted` is called with the id of each group whose consumers have new credit."""

    def __init__(self, config: CoreConfig, wanted: Callable[[int], None]) -> None:
        self._config = config
        self._wanted = wanted
        self._by_id: dict[int, Session] = {}
        self._by_group: dict[int, list[Session]] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def ran_out(self, session_id: int) -> None:
        """A lease of this consumer ran out, if it is still attached."""
        session = self._by_id.get(session_id)
        if session is not None and session.ran_out is not None and not session.suspended:
            session.ran_out()

    def groups(self) -> Iterable[int]:
        """Ids of the groups that have a consumer."""
        return self._by_group.keys()

    def of_group(self, group_id: int, topic: str | None = None) -> list[Session]:
        """Consumers of a group; with `topic` only those that take this topic."""
        found = self._by_group.get(group_id, [])
        return found if topic is None else [s for s in found if not s.topic or s.topic == topic]

    def open(
        self,
        group: str,
        group_id: int,
        *,
        lease_ms: int,
        batch_messages_max: int,
        credits: int,
        deliver: Deliver,
        closed: Closed,
        topic: str = "",
        filter: str = "",
        ran_out: RanOut | None = None,
    ) -> Session:
        """Attach a consumer to an existing group, for one of its topics or all. Raises RequestError."""
        config = self._config
        lease_ms = lease_ms_of(config, lease_ms)
        if len(self._by_id) >= config.sessions_max:
            raise RequestError(limit_reached("consumers", config.sessions_max, 1_000))
        session = Session(
            session_id=self._next_id,
            group=group,
            group_id=group_id,
            lease_ms=lease_ms,
            batch_messages_max=min(batch_messages_max or 1_024, config.batch_messages_max),
            deliver=deliver,
            closed=closed,
            topic=topic,
            filter=filter,
            ran_out=ran_out,
        )
        self.credit(session, credits)
        self._next_id += 1
        self._by_id[session.session_id] = session
        self._by_group.setdefault(group_id, []).append(session)
        return session

    def credit(self, session: Session, credits: int) -> bool:
        """The consumer takes `credits` more messages. Returns whether it had none. Raises RequestError if its credits
        would exceed CREDITS_MAX."""
        outstanding = session.credits + session.credits_kept + credits
        if outstanding > CREDITS_MAX:
            raise invalid("credits", outstanding, f"at most {CREDITS_MAX} outstanding")
        if session.suspended:
            session.credits_kept += credits
            return False
        session.credits += credits
        self._wanted(session.group_id)
        return session.credits == credits

    def suspend(self, session: Session) -> None:
        """Hand a consumer nothing until `resume`: it has no credits meanwhile. Idempotent."""
        if not session.suspended:
            session.suspended = True
            session.credits_kept, session.credits = session.credits, 0

    def resume(self, session: Session) -> bool:
        """Give a suspended consumer its credits back. Returns whether it has some now. Idempotent."""
        if not session.suspended:
            return False
        session.suspended = False
        credits, session.credits_kept = session.credits_kept, 0
        if session.open:
            self.credit(session, credits)
        return session.credits > 0

    def close(self, session: Session) -> bool:
        """Detach a consumer; returns whether it was attached."""
        if not session.open:
            return False
        session.open = False
        self._by_id.pop(session.session_id, None)
        sessions = self._by_group.get(session.group_id, [])
        sessions.remove(session)
        if not sessions:
            self._by_group.pop(session.group_id, None)
        return True

    def close_all(self, failure: Failure) -> None:
        """Detach all consumers and call each one's `closed` with `failure`."""
        sessions, self._by_id = self._by_id, {}
        self._by_group.clear()
        for session in sessions.values():
            session.open = False
            session.closed(failure)
