"""What is remembered of producers, and who loses it first: by the shares of their owners, from the request on that
states it; before, whoever used it least recently."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.node.state.driver import HOUR_0, Driver, admin, publish_command
from tickwheel.node.state.producers import IDLE_MS, SPARE_ENTRIES, Batch, Producers, Sender, make_batch, share_of
from tickwheel.node.state.settings import Settings
from tickwheel.proto import admin_pb2
from tickwheel.proto.log_pb2 import Command
from tickwheel.proto.state_pb2 import ProducerShares

LIMITS = Settings(producers_max=6, producer_window_ids=20, producer_window_batches=3)
OWNERS = ("", "by/1", "by/2", "cn/a", "cn/b", "cn/c", "cn/d")


def batch_of(count: int) -> Batch:
    """A batch of so many messages."""
    return make_batch(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))


def digest_of(producers: Producers) -> bytes:
    """The digest in one piece."""
    turns = producers.digest_in_turns()
    while True:
        try:
            next(turns)
        except StopIteration as complete:
            digest: bytes = complete.value
            return digest


def restored(producers: Producers) -> Producers:
    """As a node has it that starts from a checkpoint."""
    shares = producers.shares()
    data = None if shares is None else shares.SerializeToString()
    copy = Producers()
    copy.restore(producers.spans(), producers.batches(), None if data is None else ProducerShares.FromString(data))
    return copy


@dataclass
class Use:
    """One accepted batch."""

    producer_id: str
    owner: str
    ids: int
    by_owner: bool = True


class Run:
    """Uses of producers, and what they were told to be remembered by."""

    def __init__(self, limits: Settings = LIMITS) -> None:
        self.producers = Producers()
        self.limits = limits
        self.now_ms = 1_000

    def use(self, producer_id: str, owner: str, ids: int = 1, *, by_owner: bool = True) -> None:
        """Accept the producer's next batch."""
        span = self.producers.span(producer_id)
        sender = Sender(producer_id, 1 if span is None else span.last + 1, None, owner, by_owner)
        self.producers.accept(sender, batch_of(ids), self.limits, self.now_ms)

    def known(self) -> list[str]:
        """Ids of all remembered producers, least recently used first."""
        return [name for name, _ in self.producers.spans()]

    def batches(self) -> list[tuple[str, int]]:
        """All remembered batches, oldest first."""
        return [(name, sequence) for name, sequence, _ in self.producers.batches()]


def test_many_ids_of_one_owner_take_nobody_elses_place() -> None:
    """The flood displaces itself: the others' producers and batches are all there."""
    run = Run()
    run.use("a", "cn/a", 3)
    run.use("b", "cn/b", 3)
    for number in range(50):
        run.use(f"x{number}", "cn/x", 7)
    assert run.known() == ["a", "b", "x46", "x47", "x48", "x49"]
    assert run.batches() == [("a", 1), ("b", 1), ("x47", 1), ("x48", 1), ("x49", 1)], "the newest does not count"


def test_before_a_request_states_it_the_least_recently_used_of_all_goes() -> None:
    """As in versions before: a member of such a version must have the same state."""
    run = Run()
    run.use("a", "cn/a", by_owner=False)
    for number in range(7):
        run.use(f"x{number}", "cn/x", by_owner=False)
    assert run.known() == ["x1", "x2", "x3", "x4", "x5", "x6"] and run.producers.shares() is None
    run.use("a", "cn/a", by_owner=False)
    run.use("y", "cn/y")
    for number in range(7):
        run.use(f"x{number}", "cn/x", by_owner=False)
    assert run.known() == ["a", "y", "x3", "x4", "x5", "x6"], "once stated it holds"


def test_who_is_not_identified_shares_one_part() -> None:
    """A secret of one's own choice costs nothing: fresh ones displace each other, the least recently used first, and
    no share of a user."""
    run = Run()
    run.use("a", "cn/a")
    run.use("b", "cn/b")
    for number in range(20):
        run.use(f"x{number}", f"by/{number}" if number % 2 else "")
    assert run.known() == ["a", "b", "x16", "x17", "x18", "x19"]


def test_of_equal_shares_the_least_recently_used_goes() -> None:
    """Whatever the owners are called, a newcomer gets a place."""
    for names in ("abcdefg", "gfedcba"):
        run = Run()
        for name in names:
            run.use(name, f"cn/{name}")
        assert run.known() == list(names[1:])


def test_owners_that_come_and_go_leave_nothing_behind() -> None:
    """Neither limit's order of shares grows with their number, although that of ids is never asked for the first."""
    run = Run()
    for number in range(1_000):
        run.use(f"p{number}", f"cn/{number}")
    shares = run.producers._shares
    assert shares is not None and len(run.producers) == LIMITS.producers_max
    most = len(run.producers) + SPARE_ENTRIES
    for first in (
        shares._most_producers,
        shares._longest_idle,
        shares._most_ids,
        shares._longest_idle_with_ids,
    ):
        assert len(first._lowered) <= most
        assert len(first._counts) <= len(first._entries) + 1 <= 2 * most


def test_who_was_away_for_a_day_gives_way() -> None:
    """Names of jobs that ran once keep no places; but first they must have been away for so long."""
    for away_ms, known in ((IDLE_MS - 1, "a b c d e x2"), (IDLE_MS, "c d e x0 x1 x2")):
        run = Run()
        for name in "ab":
            run.use(name, f"cn/{name}")
        run.now_ms += away_ms
        for name in "cde":
            run.use(name, f"cn/{name}")
        for number in range(3):
            run.use(f"x{number}", "cn/x")
        assert run.known() == known.split()


def test_a_batch_beyond_all_limits_displaces_nobody() -> None:
    """The newest batch is remembered whatever its size, and goes with the next one."""
    run = Run()
    run.use("a", "cn/a", 5)
    run.use("x", "cn/x", 1_000)
    assert run.batches() == [("a", 1), ("x", 1)]
    run.use("a", "cn/a", 5)
    assert run.batches() == [("a", 1), ("a", 2)]


def test_a_claimed_id_moves_to_its_owners_share() -> None:
    """What was used without an owner, then by a user, counts as the user's."""
    run = Run()
    for name in "abc":
        run.use(name, "")
    for name in "abc":
        run.use(name, "cn/a")
    for name in "uvw":
        run.use(name, "cn/u")
    run.use("n", "")
    assert run.known() == ["b", "c", "u", "v", "w", "n"]
    assert digest_of(restored(run.producers)) == digest_of(run.producers)


def test_it_is_known_whether_anybody_may_have_been_forgotten() -> None:
    """Also after the limit was raised; by the old rule nobody remembers that."""
    run = Run()
    for name in "abcde":
        run.use(name, "cn/a")
    assert not run.producers.may_have_forgotten(run.limits)
    for name in "fg":
        run.use(name, "cn/a")
    assert run.producers.may_have_forgotten(replace(run.limits, producers_max=100))
    assert restored(run.producers).may_have_forgotten(replace(run.limits, producers_max=100))


@dataclass
class Plain:
    """The rules in plain Python: lists that are walked."""

    producers: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    batches: list[tuple[str, int, int]] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    used_ms: dict[str, int] = field(default_factory=dict)
    by_owner: bool = False

    def _share(self, producer_id: str) -> str:
        return share_of(self.owners[producer_id])

    def _use(self, producer_id: str, now_ms: int) -> None:
        if producer_id in self.producers:
            self.producers.remove(producer_id)
        self.producers.append(producer_id)
        share = self._share(producer_id)
        self.uses = [name for name in self.uses if name != share] + [share]
        self.used_ms[share] = now_ms

    def touch(self, producer_id: str, now_ms: int) -> None:
        if producer_id in self.producers:
            self._use(producer_id, now_ms)

    def accept(self, use: Use, limits: Settings, now_ms: int) -> None:
        name = use.producer_id
        if use.by_owner and not self.by_owner:
            self.by_owner = True
            self.uses = sorted({self._share(known) for known in self.producers})
            self.used_ms = dict.fromkeys(self.uses, now_ms)
        before = share_of(self.owners.get(name, ""))
        self.owners[name] = self.owners.get(name) or use.owner
        if self.by_owner and self._share(name) != before:
            mine = [batch for batch in self.batches if batch[0] == name]
            self.batches = [batch for batch in self.batches if batch[0] != name] + mine
        self._use(name, now_ms)
        self.last[name] = self.last.get(name, 0) + 1
        self.batches.append((name, self.last[name], use.ids))
        mine = [batch for batch in self.batches if batch[0] == name]
        for batch in mine[: -limits.producer_window_batches]:
            self.batches.remove(batch)
        self.trim(limits, now_ms)

    def _turn(self, amounts: dict[str, int], now_ms: int) -> str:
        holding = [share for share in self.uses if amounts.get(share)]
        if now_ms - self.used_ms[holding[0]] >= IDLE_MS:
            return holding[0]
        return max(holding, key=lambda share: (amounts[share], -self.uses.index(share)))

    def _next_batch(self, limits: Settings, now_ms: int) -> tuple[str, int, int] | None:
        counted = self.batches[:-1]
        if not self.by_owner:
            too_many = sum(ids for _, _, ids in self.batches) > limits.producer_window_ids
            return counted[0] if too_many and counted else None
        amounts: dict[str, int] = {}
        for name, _, ids in counted:
            amounts[self._share(name)] = amounts.get(self._share(name), 0) + ids
        if sum(amounts.values()) <= limits.producer_window_ids:
            return None
        share = self._turn(amounts, now_ms)
        return next(batch for batch in counted if self._share(batch[0]) == share)

    def trim(self, limits: Settings, now_ms: int) -> None:
        while (batch := self._next_batch(limits, now_ms)) is not None:
            self.batches.remove(batch)
        while len(self.producers) > limits.producers_max:
            name = self.producers[0]
            if self.by_owner:
                amounts: dict[str, int] = {}
                for known in self.producers:
                    amounts[self._share(known)] = amounts.get(self._share(known), 0) + 1
                share = self._turn(amounts, now_ms)
                name = next(known for known in self.producers if self._share(known) == share)
            self.producers.remove(name)
            self.batches = [batch for batch in self.batches if batch[0] != name]
            del self.owners[name], self.last[name]


USES = st.builds(Use, st.sampled_from("abcdefghijklm"), st.sampled_from(OWNERS), st.integers(0, 9), st.booleans())
STEPS = st.one_of(
    USES,
    USES,
    USES,
    st.sampled_from(("touch a", "touch b", "touch k")),
    st.sampled_from((1, 1_000, IDLE_MS - 1, IDLE_MS, -5)),
    st.builds(lambda most, ids, few: Settings(producers_max=most, producer_window_ids=ids, producer_window_batches=few),
              st.integers(1, 8), st.integers(0, 30), st.integers(1, 4)),
)  # fmt: skip


@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=80))
def test_any_history_is_as_the_plain_rules_say_also_after_a_restart(
    steps: list[tuple[Use | str | int | Settings, bool]],
) -> None:
    """P8: at each step one node goes on, another starts from a checkpoint; both have what walking lists would give."""
    node, other, plain = Producers(), Producers(), Plain()
    limits, now_ms = LIMITS, 1_000
    for step, restart in steps:
        if isinstance(step, Use):
            span = node.span(step.producer_id)
            sequence = 1 if span is None else span.last + 1
            owner = "" if span is not None and span.owner else step.owner
            for producers in (node, other):
                sender = Sender(step.producer_id, sequence, None, owner, step.by_owner)
                producers.accept(sender, batch_of(step.ids), limits, now_ms)
            plain.accept(step, limits, now_ms)
        elif isinstance(step, str):
            node.touch(step[-1], now_ms)
            other.touch(step[-1], now_ms)
            plain.touch(step[-1], now_ms)
        elif isinstance(step, int):
            now_ms += step
        else:
            limits = step
            for producers in (node, other):
                producers.trim(limits, now_ms)
            plain.trim(limits, now_ms)
        if restart:
            other = restored(other)
        assert [name for name, _ in node.spans()] == plain.producers
        assert [(name, sequence, len(batch.ids)) for name, sequence, batch in node.batches()] == plain.batches
        assert node.ids_kept == sum(ids for _, _, ids in plain.batches)
        assert digest_of(other) == digest_of(node)


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from("abcdef"), st.integers(1, 60)), max_size=80))
def test_within_its_part_an_owner_loses_nothing(history: list[tuple[str, str, int]]) -> None:
    """Two attackers send what they like under any ids. The victims, each within a quarter of both limits, keep
    everything."""
    limits = Settings(producers_max=8, producer_window_ids=40, producer_window_batches=3)
    run = Run(limits)
    kept: dict[str, list[str]] = {}
    for kind, name, ids in history:
        run.now_ms += 10
        if kind == "p":
            for victim in ("v", "w"):
                producer = f"{victim}-{int(name > 'c')}"
                run.use(producer, f"cn/{victim}", 1)
                kept[producer] = [victim]
        else:
            run.use(f"{kind}-{name}-{ids}", f"cn/{kind}", ids)
        for producer in kept:
            span = run.producers.span(producer)
            assert span is not None and span.last - span.first + 1 == min(span.last, 3), "all that its window holds"


def stated(command: Command, owner: str, *, by_owner: bool) -> Command:
    """The command with an owner of its requests."""
    for request in command.publish.requests:
        request.owner, request.by_owner = owner, by_owner
    return command


def test_a_checkpoint_holds_the_shares() -> None:
    """A node that starts from it forgets what the others forget, and has their digest."""
    drivers = [Driver(), Driver()]
    for driver in drivers:
        driver.create(producers_max=4)
        for number, owner in enumerate(("cn/v", "cn/x", "cn/x", "cn/x")):
            command = publish_command([(f"p{number}", 1, [HOUR_0])])
            driver.apply(stated(command, owner, by_owner=number > 1))
    drivers[1].checkpoint()
    drivers[1].restart()
    for driver in drivers:
        driver.apply(stated(publish_command([("p4", 1, [HOUR_0])]), "cn/x", by_owner=False))
        driver.apply(admin(settings=admin_pb2.Settings(producers_max=3)))
        assert [name for name, _ in driver.state._state.producers.spans()] == ["p0", "p3", "p4"]
        assert driver.state.last_accepted("p1") is None
    assert drivers[0].state.digest().parts == drivers[1].state.digest().parts
