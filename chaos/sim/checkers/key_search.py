"""Whether what clients were told of one unique key can have happened in some order.

An operation takes effect at one moment between its call and its answer, or not at all if it has none. Beside operations
the holder may be dispatched and settled by itself. `explain` goes through calls and answers by time and keeps every
state that the key may be in. Once none is left, what was just told cannot be true. Pure: no clock, no chance, no
record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

STEPS_MAX = 30_000
"""States looked at for one key. Beyond, nothing is said of it."""
NOBODY: frozenset[int] = frozenset()


class State(NamedTuple):
    """What holds the key. Messages are named by uid."""

    holder: int = 0
    """0: nothing does."""
    id: int = 0
    """Its id now; 0: not known."""
    due_ms: int = 0
    """It is not dispatched before this time."""
    exact: bool = False
    """`due_ms` is its due time."""
    dispatched: bool = False
    """It holds its key until it is settled."""
    settled: int = 0
    """Of `Facts.returning`: the last holder, which was settled; nobody has taken the key since."""
    cancelled: frozenset[int] = NOBODY
    """Of `Facts.asked`: those that were cancelled or replaced."""

    def freed(self) -> State:
        """The same with nobody."""
        return State(cancelled=self.cancelled)


class Kind(Enum):
    """What an operation does."""

    SCHEDULE = "schedule"
    CANCEL = "cancel"
    MOVE = "move"
    GET = "get"
    LOOK = "look"
    """Report of a message by its id."""
    SWEEP = "sweep"
    """Cancels or moves at most one holder, if that has the tag; or none."""
    DELETE = "delete"
    """Cancels any holder, at least at one moment."""


class Put(NamedTuple):
    """One message of a batch."""

    uid: int
    rule: str
    """Name of a KeyConflict."""
    due_ms: int
    """As the receipt says; without one, not before this."""
    outcome: str = ""
    """Name of a KeyOutcome; empty: no receipt."""
    id: int = 0
    """By the receipt: of this message, or of the one that holds the key."""


@dataclass(slots=True, eq=False)
class Operation:
    """One call. Without an outcome it may have had any effect, or none."""

    kind: Kind
    outcome: str = ""
    puts: tuple[Put, ...] = ()
    uid: int = 0
    """By the id of this message; 0: by key. Of a GET: what was found."""
    id: int = 0
    """By the answer."""
    due_ms: int = 0
    """The time to move to, or by; 0 in a sweep: it cancels."""
    hour_gone: bool = False
    """What the id names may have been removed."""

    @property
    def must(self) -> bool:
        """It has taken effect when it ends."""
        return bool(self.outcome) or self.kind is Kind.DELETE


class What(Enum):
    """What happens at a moment of a key's history."""

    BEGINS = "begins"
    ENDS = "ends"
    DELIVERED = "delivered"
    """The message was dispatched by now."""
    SETTLED = "settled"
    """By now every group has settled the message."""


class Event(NamedTuple):
    at_ns: int
    what: What
    operation: Operation | None = None
    uid: int = 0


@dataclass(slots=True)
class Facts:
    """What is known of the messages with this key from other sources."""

    names: dict[int, int] = field(default_factory=dict)
    """The message of each id."""
    delivered: set[int] = field(default_factory=set)
    """Messages that came: nobody cancelled or replaced them."""
    cancelled: set[int] = field(default_factory=set)
    """Messages that were cancelled or replaced: they were not dispatched."""
    returning: set[int] = field(default_factory=set)
    """Messages that a reset of a group may make unsettled again."""
    until_settled: set[int] = field(default_factory=set)
    tagged: set[int] = field(default_factory=set)
    """Messages that sweeps mean."""
    asked: set[int] = field(default_factory=set)
    """Messages asked about by id."""
    settled_from_ns: dict[int, int] = field(default_factory=dict)
    """When each message may have been settled by all groups at the earliest; none: it never was."""
    start_wall_ms: int = 0
    ahead_ms: int = 0
    """A dispatch comes this much before the due time at most."""

    def dispatchable(self, state: State, at_ns: int) -> bool:
        """Whether the holder may be dispatched by now."""
        early_ns = (state.due_ms - self.ahead_ms - self.start_wall_ms) * 1_000_000
        return bool(state.holder) and not state.dispatched and early_ns <= at_ns and state.holder not in self.cancelled


Config = tuple[State, frozenset[Operation]]
"""A state that the key may be in, and the open operations that have taken effect by then."""


class Doubtful(Exception):
    """Too much is open to tell."""


def explain(events: Sequence[Event], facts: Facts) -> str:
    """Empty if the history can have happened; otherwise the event that cannot, in words. Raises Doubtful."""
    return _Search(facts).run(events)


class _Search:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._open: list[Operation] = []
        self._scheduling: dict[int, Operation] = {}
        """By message: the operation that schedules it, while that is open."""
        self._configs: set[Config] = {(State(), frozenset())}
        self._steps = 0

    def run(self, events: Sequence[Event]) -> str:
        for event in events:
            before = self._configs
            match event.what:
                case What.BEGINS:
                    assert event.operation is not None
                    self._open.append(event.operation)
                    self._scheduling.update((put.uid, event.operation) for put in event.operation.puts)
                case What.ENDS:
                    assert event.operation is not None
                    self._end(event.operation, event.at_ns)
                case _:
                    self._force(event)
            if not self._configs:
                return f"{_words(event)}; before that {_holders(before)}"
        return ""

    def _end(self, ended: Operation, at_ns: int) -> None:
        """Keep what is possible if it has taken effect by now (or, of one that need not, if it has or never will)."""
        reached = self._until(lambda config: ended in config[1], at_ns)
        if not ended.must:
            reached |= {config for config in self._configs if ended not in config[1]}
        self._open.remove(ended)
        for put in ended.puts:
            self._scheduling.pop(put.uid, None)
        self._configs = {(state, taken - {ended}) for state, taken in reached}

    def _force(self, event: Event) -> None:
        """Keep what is possible if the message has left by now."""
        uid = event.uid
        scheduling = self._scheduling.get(uid)
        held = event.what is What.DELIVERED

        def left(config: Config) -> bool:
            state, taken = config
            if scheduling is not None and scheduling not in taken:
                return False
            return state.holder != uid or (held and state.dispatched)

        self._configs = self._until(left, event.at_ns)

    def _until(self, fits: Callable[[Config], bool], at_ns: int) -> set[Config]:
        """The first states that fit on every way that the key may have gone on from those of before."""
        found: set[Config] = set()
        seen = set(self._configs)
        waiting = list(self._configs)
        while waiting:
            config = waiting.pop()
            self._steps += 1
            if self._steps > STEPS_MAX:
                raise Doubtful
            if fits(config):
                found.add(config)
                continue
            for following in self._following(config, at_ns):
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return found

    def _following(self, config: Config, at_ns: int) -> Iterator[Config]:
        state, taken = config
        facts = self._facts
        if facts.dispatchable(state, at_ns):
            holds = state.holder in facts.until_settled
            yield (state._replace(dispatched=True) if holds else state.freed()), taken
        if state.dispatched and facts.settled_from_ns.get(state.holder, at_ns + 1) <= at_ns:
            again = state.holder if state.holder in facts.returning else 0
            yield state.freed()._replace(settled=again), taken
        if state.settled:
            held = State(state.settled, due_ms=state.due_ms, dispatched=True, cancelled=state.cancelled)
            yield held, taken
        for operation in self._open:
            if operation in taken:
                continue
            if operation.kind is Kind.DELETE:
                after = _cancelled(state, facts) if state.holder and not state.dispatched else None
                if after is not None:
                    yield after, taken  # more may come while it goes on
                if not state.holder:
                    yield state, taken | {operation}
                continue
            after = apply(state, operation, facts)
            if after is not None and (operation.must or after != state):
                yield after, taken | {operation}


def apply(state: State, operation: Operation, facts: Facts) -> State | None:
    """The state after an operation; None: it cannot have taken effect in this state."""
    match operation.kind:
        case Kind.SCHEDULE:
            return _scheduled(state, operation, facts)
        case Kind.GET:
            return state if operation.uid == state.holder else None
        case Kind.LOOK:
            return _looked(state, operation)
        case Kind.SWEEP:
            if not state.holder or state.dispatched or state.holder not in facts.tagged:
                return None
            if not operation.due_ms:
                return _cancelled(state, facts)
            return state._replace(id=0, due_ms=state.due_ms + operation.due_ms, exact=False)
        case Kind.CANCEL:
            return _changed(state, operation, facts, "CANCELLED", "ALREADY_DISPATCHED", "NOT_FOUND", "CANCELLED")
        case _:
            prefix = "RESCHEDULE_"
            texts = [prefix + text for text in ("ALREADY_DISPATCHED", "NOT_FOUND", "CANCELLED")]
            return _changed(state, operation, facts, "RESCHEDULED", *texts)


def _scheduled(state: State, operation: Operation, facts: Facts) -> State | None:
    for put in operation.puts:
        after = _put(state, put, facts)
        if after is None:
            return None
        state = after
    return state


def _put(state: State, put: Put, facts: Facts) -> State | None:
    if not state.holder:
        outcome = "KEY_FREE"
    elif put.rule == "KEY_CONFLICT_USE_EXISTING":
        outcome = "KEY_USED_EXISTING"
    elif put.rule == "KEY_CONFLICT_REPLACE" and not state.dispatched:
        outcome = "KEY_REPLACED"
    else:
        outcome = "KEY_REFUSED"
    if put.outcome not in ("", outcome):
        return None
    if outcome in ("KEY_REFUSED", "KEY_USED_EXISTING"):
        if put.uid in facts.delivered:
            return None
        return _named(state, put.id, put.due_ms, facts) if put.outcome else state
    before = _cancelled(state, facts) if outcome == "KEY_REPLACED" else state
    if before is None:
        return None
    return State(put.uid, put.id, put.due_ms, bool(put.outcome), cancelled=before.cancelled)


def _named(state: State, id_: int, due_ms: int, facts: Facts) -> State | None:
    """The state if an answer may name its holder by this id and due time."""
    uid = facts.names.get(id_)
    if uid is not None:
        if uid != state.holder:
            return None
    elif state.id not in (0, id_):
        return None
    if due_ms and (due_ms < state.due_ms or (state.exact and due_ms != state.due_ms)):
        return None
    return state if uid is not None else state._replace(id=id_)


def _cancelled(state: State, facts: Facts) -> State | None:
    if state.holder in facts.delivered:
        return None
    return State(cancelled=state.cancelled | (facts.asked & {state.holder}))


def _changed(
    state: State, operation: Operation, facts: Facts, done: str, too_late: str, nothing: str, cancelled: str
) -> State | None:
    """A cancel or move, by key or by id."""
    outcome, uid = operation.outcome, operation.uid
    if uid and uid != state.holder:
        known = cancelled if uid in state.cancelled else too_late
        return state if outcome in ("", known) or (outcome == nothing and operation.hour_gone) else None
    if not state.holder:
        return state if outcome in ("", nothing) else None
    if state.dispatched:
        named = _named(state, operation.id, 0, facts) if operation.id else state
        return named if outcome in ("", too_late) or (uid and outcome == nothing and operation.hour_gone) else None
    if outcome not in ("", done):
        return None
    if done == "CANCELLED":
        named = _named(state, operation.id, 0, facts) if operation.id else state
        return None if named is None else _cancelled(named, facts)
    if operation.id in facts.names and facts.names[operation.id] != state.holder:
        return None
    return state._replace(id=operation.id, due_ms=operation.due_ms, exact=bool(outcome))


def _looked(state: State, operation: Operation) -> State | None:
    """`outcome` is the name of a MessageState."""
    uid = operation.uid
    if uid == state.holder:
        fits = operation.outcome == ("DISPATCHED" if state.dispatched else "PENDING")
    elif uid in state.cancelled:
        fits = operation.outcome == "MESSAGE_CANCELLED"
    else:
        fits = operation.outcome == "DISPATCHED"
    return state if fits or (operation.outcome == "NOT_FOUND" and operation.hour_gone) else None


def _words(event: Event) -> str:
    operation = event.operation
    if operation is None:
        return f"message {event.uid} is {event.what.value}"
    if operation.puts:
        puts = ", ".join(f"{put.uid} {put.rule[13:]}: {put.outcome} {put.id:#x}" for put in operation.puts)
        return f"schedule {puts}"
    by = f" by message {operation.uid}" if operation.uid else ""
    return f"{operation.kind.value}{by}: {operation.outcome} {operation.id:#x}"


def _holders(configs: set[Config]) -> str:
    found = sorted({(state.holder, state.dispatched) for state, _ in configs})
    words = [f"{holder}{' (dispatched)' * dispatched}" if holder else "nothing" for holder, dispatched in found]
    return "the key was held by " + " or ".join(words)
