"""Random histories against a plain model of dicts and lists, with restarts and crashes at any point."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.node.state.driver import HOUR_0, Driver, dispatch_command, publish_command, settle_command
from tickwheel.node.state import sequence, subscription
from tickwheel.node.state.results import SettleResult
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.log_pb2 import SETTLE_ACK, SETTLE_DEAD, SETTLE_RETRY, SETTLE_RETURN, SETTLE_SKIP, Cancel, Command

PRODUCER_BATCHES = 3


@dataclass
class Model:
    """What a state machine must say, per message in plain Python. One group on one topic."""

    sequences: dict[str, dict[int, tuple[list[int], list[int]]]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    cursor_ms: int = 0

    def expect(self, producer: str, number: int, count: int) -> tuple[str, int]:
        """What becomes of a request: (kind, expected sequence)."""
        if not producer or producer not in self.last:
            return "new", 0
        last = self.last[producer]
        if number == last + 1:
            return "new", 0
        if number > last + 1:
            return "gap", last + 1
        kept = self.sequences[producer]
        return ("repeat" if number in kept else "forgotten"), last + 1

    def accept(self, producer: str, number: int, ids: list[int], due: list[int]) -> None:
        """A new batch got these ids."""
        self.pending.update(zip(ids, due, strict=True))
        if producer:
            kept = self.sequences.setdefault(producer, {})
            kept[number] = (ids, due)
            self.last[producer] = number

    def forget(self) -> None:
        """Batches beyond the window, once a whole command has been judged."""
        for kept in self.sequences.values():
            while len(kept) > PRODUCER_BATCHES:
                del kept[min(kept)]

    def dispatch(self, due_ms: int) -> None:
        """Below the key (due_ms, 0)."""
        if due_ms <= self.cursor_ms:
            return
        self.cursor_ms = due_ms
        passed = sorted((due, n) for n, due in self.pending.items() if due < due_ms)
        self.ready += [n for _, n in passed]
        for _, number in passed:
            del self.pending[number]

    def settle(self, kind: int, items: list[tuple[int, int]]) -> tuple[int, int, int]:
        """(id, attempt) by place; all judged as things were before."""
        settled = stale = unknown = 0
        acts: set[int] = set()
        for number, attempt in items:
            if number not in self.ready:
                unknown += 1
                continue
            place = self.ready.index(number)
            final = kind == SETTLE_DEAD or (kind in (SETTLE_ACK, SETTLE_SKIP) and number not in self.dead)
            if place in self.settled:
                settled += final
                stale += not final
            elif self.attempts.get(place, 1) == attempt:
                settled += 1
                acts.add(place)
            else:
                stale += 1
        for place in sorted(acts):
            if kind in (SETTLE_RETURN, SETTLE_RETRY):
                self.attempts[place] = self.attempts.get(place, 1) + 1
            else:
                self.settled.add(place)
                if kind == SETTLE_DEAD:
                    self.dead.append(self.ready[place])
        return settled, stale, unknown

    def open(self) -> list[tuple[int, int, int]]:
        """(position, id, attempt) of what is unsettled."""
        return [(p, n, self.attempts.get(p, 1)) for p, n in enumerate(self.ready) if p not in self.settled]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, pieces and chunks of a few records, so that every path is walked."""
    monkeypatch.setattr(sequence, "KEEP_BYTES", 64)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 32)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 2)
    monkeypatch.setattr(subscription, "CAPACITY_LEAST", 2)
    monkeypatch.setattr(subscription, "CHUNK", 3)


KINDS = [SETTLE_ACK, SETTLE_ACK, SETTLE_SKIP, SETTLE_DEAD, SETTLE_RETURN, SETTLE_RETURN, SETTLE_RETRY]
STEPS = ["publish"] * 4 + ["dispatch"] * 3 + ["settle"] * 6 + ["read"] * 2 + ["cancel", "checkpoint", "restart"]


def _requests(rng: Random, model: Model) -> list[tuple[str, int, list[int]]]:
    """Mostly what a sound producer sends; now and then a repeat, a gap or something forgotten."""
    requests = []
    last = dict(model.last)
    sizes: dict[tuple[str, int], int] = {
        (name, number): len(ids) for name, kept in model.sequences.items() for number, (ids, _) in kept.items()
    }
    for _ in range(rng.randint(1, 4)):
        producer = rng.choice(["", "p", "q", "r"])
        number = max(1, last.get(producer, 3) + rng.choice([1, 1, 1, 1, 0, 0, -1, -2, -5, 2]))
        size = rng.randint(1, 4)
        if rng.random() < 0.9:
            size = sizes.get((producer, number), size)
        base = max(model.cursor_ms, HOUR_0 - 4_000)
        requests.append((producer, number, [base + rng.randint(-1_500, 3_000) for _ in range(size)]))
        if producer and (producer not in last or number == last[producer] + 1):
            last[producer] = number
            sizes[producer, number] = size
    return requests


def _picks(rng: Random, model: Model) -> list[tuple[int, int]]:
    """(id, attempt): mostly what is out, mostly the attempt that counts; some settled, pending or unknown."""
    open_now = model.open()
    picks = []
    for _ in range(rng.randint(1, 8)):
        if open_now and rng.random() < 0.75:
            _, number, attempt = rng.choice(open_now[:12])
            picks.append((number, attempt + (rng.random() < 0.15)))
        else:
            picks.append((rng.choice([*model.ready, *model.pending, 5]), rng.randint(1, 2)))
    return picks


def _publish(driver: Driver, model: Model, requests: list[tuple[str, int, list[int]]]) -> None:
    outcomes = driver.apply(publish_command(requests))[0].requests
    for (producer, seq, due), outcome in zip(requests, outcomes, strict=True):
        kind, expected = model.expect(producer, seq, len(due))
        if kind == "new":
            assert outcome.failure is None and not outcome.repeated
            assert outcome.due_ms.tolist() == [max(d, model.cursor_ms) for d in due]
            assert len(set(outcome.ids.tolist())) == len(due)
            assert not set(outcome.ids.tolist()) & set(model.pending)
            model.accept(producer, seq, outcome.ids.tolist(), outcome.due_ms.tolist())
        elif kind == "gap":
            assert outcome.failure.reason == pb.SEQUENCE_GAP
            assert outcome.failure.metadata["expected"] == str(expected)
        elif kind == "repeat":
            ids, stored = model.sequences[producer][seq]
            if len(ids) != len(due):
                assert outcome.failure.reason == pb.INVALID_FIELD
            else:
                assert outcome.repeated
                assert (outcome.ids.tolist(), outcome.due_ms.tolist()) == (ids, stored)
        else:
            assert outcome.failure.reason == pb.SEQUENCE_FORGOTTEN
    model.forget()


def _settle(rng: Random, driver: Driver, model: Model) -> None:
    kind = rng.choice(KINDS)
    picks = _picks(rng, model)
    ids, attempts = [n for n, _ in picks], [attempt for _, attempt in picks]
    positions = None
    if rng.random() < 0.7:
        positions = [model.ready.index(n) if n in model.ready else rng.randint(0, 1 << 40) for n in ids]
    result = driver.apply(settle_command(kind, ids, attempts, positions))[0]
    assert (result.settled, result.stale, result.unknown) == model.settle(kind, picks)


def _check(driver: Driver, model: Model) -> None:
    place = driver.state.subscription(1, 1)
    assert place is not None
    open_now = model.open()
    assert place.floor == (open_now[0][0] if open_now else len(model.ready))
    assert place.backlog == len(open_now)
    assert place.returned_count == sum(attempt > 1 for _, _, attempt in open_now)
    columns = place.returned(100)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == [o for o in open_now if o[2] > 1]
    assert driver.state.dead_letters_kept() == len(model.dead)


def _step(rng: Random, driver: Driver, model: Model) -> None:
    match rng.choice(STEPS):
        case "publish":
            _publish(driver, model, _requests(rng, model))
        case "dispatch":
            due_ms = max(model.cursor_ms, HOUR_0 - 4_000) + rng.randint(-100, 1_200)
            driver.apply(dispatch_command(due_ms))
            model.dispatch(due_ms)
        case "settle":
            _settle(rng, driver, model)
        case "cancel" if model.pending:
            number = rng.choice(list(model.pending))
            assert driver.apply(Command(cancel=Cancel(id=number)))[0].outcome == scheduler_pb2.CANCELLED
            del model.pending[number]
        case "checkpoint":
            driver.checkpoint()
        case "restart":
            before = driver.state.digest()
            driver.restart(rng)
            assert driver.state.digest() == before
        case "read":
            place = driver.state.subscription(1, 1)
            assert place is not None
            first, limit = rng.randint(0, len(model.ready) + 2), rng.randint(1, 20)
            columns = place.deliverable(first, limit)
            wanted = [o for o in model.open() if o[0] >= first][:limit]
            assert list(zip(*(c.tolist() for c in columns), strict=True)) == wanted


@given(st.integers(0, 1 << 32))
def test_any_history_as_the_model_says(seed: int) -> None:
    """Answers, what is deliverable, and digests over crashes; a replay of the whole log gives the same state."""
    rng = Random(seed)
    driver, model = Driver(), Model()
    driver.create(producer_window_batches=PRODUCER_BATCHES)
    driver.group()
    for _ in range(60):
        _step(rng, driver, model)
        _check(driver, model)
    before = driver.state.digest()
    driver.manifest = None
    driver.restart()
    assert driver.state.digest() == before


def _near_order(rng: Random, ready: list[int], floor: int) -> tuple[list[int], list[int], list[int] | None]:
    """Ids, attempts and positions of a batch that names the messages from the floor on, or nearly."""
    first = max(0, floor + rng.choice([0, 0, 0, 0, 1, -1]))
    places = list(range(first, min(len(ready) + 1, first + rng.randint(1, 4))))
    ids = [ready[place] if place < len(ready) else 5 for place in places]
    attempts = [1] * len(places)
    change = rng.choice(["", "", "", "id", "attempt", "position", "order", "none"])
    row = rng.randrange(len(places)) if places else 0
    if places and change == "id":
        ids[row] = rng.choice([5, *ready])
    elif places and change == "attempt":
        attempts[row] = rng.choice([0, 2])
    elif places and change == "position":
        places[row] += rng.choice([-1, 1]) if places[row] else 1
    elif change == "order":
        ids, places = ids[::-1], places[::-1]
    return ids, attempts, None if change == "none" else places


def test_what_settles_in_order_settles_as_any_other_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a consumer that keeps up is applied in a shorter way. Answers and digests are those of the long one,
    also where a batch is nearly such a one, and where retries of the group or of another lie in the topic."""
    in_order = subscription.Subscription.settle_in_order
    short: list[subscription.Subscription] = []
    taken = 0

    def chosen(self: subscription.Subscription, *columns: bytes) -> bool:
        nonlocal taken
        settled = self in short and in_order(self, *columns)
        taken += settled
        return settled

    monkeypatch.setattr(subscription.Subscription, "settle_in_order", chosen)
    for seed in range(40):
        rng = Random(seed)
        drivers = Driver(), Driver()
        for driver in drivers:
            driver.create()
            driver.group()
            driver.group("other")
        places = [driver.state.subscription(1, 1) for driver in drivers]
        assert places[0] is not None and places[1] is not None
        places[0].window_messages_max = places[1].window_messages_max = 3
        short.append(places[0])
        due_ms = HOUR_0
        for _ in range(40):
            log = drivers[0].state.ready_log(1)
            assert log is not None
            ready, due_ms = log.read(0, log.count).tolist(), due_ms + 2
            commands = [
                settle_command(rng.choice([SETTLE_ACK] * 8 + [SETTLE_SKIP]), *_near_order(rng, ready, places[0].floor)),
                publish_command([("", 0, [due_ms] * rng.randint(1, 5))]),
                dispatch_command(due_ms + 1),
            ]
            if ready and rng.random() < 0.2:
                row, group_id = rng.randrange(len(ready)), rng.choice([1, 2])
                kind, again = rng.choice([(SETTLE_RETRY, [due_ms]), (SETTLE_RETURN, None)])
                commands.insert(0, settle_command(kind, [ready[row]], [1], [row], group_id=group_id, due_ms=again))
            if rng.random() < 0.3:
                rest = [column.tolist() for column in places[0].deliverable(0, 100)]
                commands.insert(0, settle_command(SETTLE_ACK, rest[1], rest[2], rest[0]))
            answers = [[driver.apply(command)[0] for command in commands] for driver in drivers]
            settled = [[one for one in some if isinstance(one, SettleResult)] for some in answers]
            assert settled[0] == settled[1]
            assert drivers[0].state.digest() == drivers[1].state.digest()
    assert taken > 300
