"""Which frames want a tick: a heartbeat and its answer that say nothing new leave the node asleep."""

from __future__ import annotations

from tests.replication.lone import MS, STEP_MS, Lone
from tickwheel.proto.peer_pb2 import AppendEntries, PeerFrame, Sync, SyncReply
from tickwheel.replication.log import Role


def test_a_slave_is_woken_by_entries_and_commits_alone() -> None:
    """A heartbeat or sync of its master wants no tick; entries, a higher commit index and another term do."""
    lone = Lone()
    b = lone.peers["b"]
    assert b.append(1, (0, 0), [(1, 1, b"\x00one")])
    lone.run(STEP_MS)
    assert not b.append(1, (1, 1), [])
    assert b.append(1, (1, 1), [], commit=1)
    lone.run(STEP_MS)
    assert not b.append(1, (1, 1), [], commit=1)
    assert not b.send(PeerFrame(sync=Sync(number=1)), 1)
    assert b.append(2, (1, 1), [], commit=1)
    assert b.send(PeerFrame(sync=Sync(number=1)), 3)


def test_a_master_is_woken_by_news_of_its_slaves_alone() -> None:
    """An answer that acknowledges nothing new wants no tick, unless the master had lost its lease."""
    lone = Lone()
    term = lone.lead()
    last = lone.log.status().last_index
    b = lone.peers["b"]
    assert not b.answer(term, last + 1)
    lone.propose(b"more")
    lone.executor.run()
    assert b.answer(term, last + 2)
    assert not b.answer(term, last + 2)
    assert not b.send(PeerFrame(sync_reply=SyncReply(number=1)), term, lone.connection_of("b"))
    lone.clock.now_ns += lone.config.lease_ms * MS
    assert not lone.log.lease_held()
    assert b.answer(term, last + 2)


def test_a_master_in_handover_is_woken_by_every_answer() -> None:
    """The next master may have become ready."""
    lone = Lone()
    term = lone.lead()
    lone.log.transfer("b", lambda problem: None)
    assert lone.peers["b"].send(PeerFrame(sync_reply=SyncReply(number=1)), term, lone.connection_of("b"))


def test_a_slave_that_nobody_woke_stands_on_time() -> None:
    """A long sleep that the log asked for is no stall: the slave asks for an election with the tick that it wanted,
    and not a round later."""
    lone = Lone()
    lone.follow("b", 1, 1)
    lone.drain()
    wanted_ns = lone.log.tick()
    while wanted_ns < lone.engine.election_deadline_ns:
        lone.clock.now_ns = wanted_ns
        wanted_ns = lone.log.tick()
    asleep_ms = (wanted_ns - lone.clock.now_ns) // MS
    assert asleep_ms > lone.config.stall_ms, "long enough to be taken for a stall"
    lone.clock.now_ns = wanted_ns + MS
    lone.log.tick()
    assert lone.sent_of("ping") and lone.log.status().role is Role.SLAVE


def test_a_slave_that_stood_still_reads_first_whatever_the_log_wanted() -> None:
    """Its own time comes just after the log's, but its caller has wanted a tick for long: heartbeats may be unread."""
    lone = Lone()
    lone.follow("b", 1, 1)
    lone.drain()
    asked_ns = lone.clock.now_ns
    while (wanted_ns := lone.log.tick()) < lone.engine.election_deadline_ns:
        lone.clock.now_ns = wanted_ns
    lone.clock.now_ns = wanted_ns + MS
    lone.log.tick(asked_ns)
    assert not lone.sent_of("ping")
    lone.run(2 * lone.config.campaign_round_ms)
    assert lone.sent_of("ping")


def test_a_heartbeat_without_a_tick_puts_the_election_off() -> None:
    """The slave asks at the old deadline for its next tick, and finds there that its master lives."""
    lone = Lone()
    lone.follow("b", 1, 1)
    lone.drain()
    wanted_ns = lone.log.tick()
    lone.clock.now_ns = wanted_ns - 10 * MS
    body = AppendEntries(previous_index=1, previous_term=1, sent_ns=lone.clock.now_ns, lease_ms=lone.config.lease_ms)
    assert not lone.peers["b"].send(PeerFrame(append_entries=body), 1)
    lone.clock.now_ns = wanted_ns + MS
    assert lone.log.tick() > wanted_ns + MS
    assert not lone.sent_of("ping")


def test_a_slave_looks_in_time_however_short_its_next_timeout_is() -> None:
    """Each heartbeat draws the timeout anew, which may end before the one for which the slave sleeps. A master that
    falls silent then must not be missed for longer."""
    lone = Lone()
    lone.follow("b", 1, 1)
    for _ in range(200):
        lone.clock.now_ns += lone.config.append_period_ms * MS
        assert not lone.peers["b"].append(1, (1, 1), [])
        assert lone.log.tick() <= lone.engine.election_deadline_ns


def test_a_sync_and_a_heartbeat_leave_together() -> None:
    """As one message, answered by one. The heartbeat's timer began a little later, when it was sent, and so it took a
    tick, a message and an answer of its own."""
    lone = Lone()
    term = lone.lead()
    lone.run(100)
    last = lone.log.status().last_index
    wanted_ns, together = lone.log.tick(), list[set[str | None]]()
    read = lone.clock.monotonic_ns

    def passing() -> int:
        lone.clock.now_ns += MS // 100
        return read()

    lone.clock.monotonic_ns = passing  # type: ignore[method-assign]
    for _ in range(20):
        lone.drain()
        lone.clock.now_ns = max(wanted_ns, lone.clock.now_ns)
        wanted_ns = lone.log.tick()
        if lone.sent:
            together.append({frame.WhichOneof("body") for _, frame in lone.sent})
            for name in ("b", "c"):
                lone.peers[name].answer(term, last + 1)
    assert len(together) > 5 and all(kinds == {"append_entries", "sync"} for kinds in together), together
