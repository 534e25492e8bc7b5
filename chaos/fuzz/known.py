"""What a fuzzed cluster has, and requests that go with it: deliveries, unique keys, recurring schedules.

Chance alone finds no id, attempt and position that belong together, nor the revision of a schedule. Here are messages
whose fields do: so that requests come past the checks, with as many rows as a caller may send, and more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.chaos.fuzz.messages import Fits, Hints, pick
from tickwheel.proto import common_pb2, consumer_pb2

TOPIC, GROUP = "given", "takers"
"""Of the fuzzer's own consumer. No other name of a call is one of these, so they last."""
TOPICS = ("t", "t2", "fifo", TOPIC)
ROWS = (1, 100, 1_000, 10_000, 10_001, 100_000, 100_000, 100_001)
"""Rows of an extension or a settlement: around its limits, and what one may be."""
LEASES_MS = (0, 100, 1_000, 43_200_000, 43_200_001)
UNIQUE_KEYS = ("u1", "u1", "u2", "u3", "ü" * 127, "u" * 255, "u" * 256)
"""Few, so that they are held; the last is too long."""
KEYED_ROWS = (1, 10, 500, 2_000, 2_001)
SCHEDULES = ("every second", "every hour", "paused")
"""Recurring schedules that are put before each batch."""
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch that the fuzzer's consumer got, and has not settled."""

    epoch: int
    ids: NDArray[np.uint64]
    attempts: NDArray[np.uint32]
    positions: NDArray[np.uint64]


@dataclass(slots=True)
class Known:
    """What there is. `ids`: of messages; `revisions`: of recurring schedules, by name."""

    ids: Sequence[int] = ()
    deliveries: Sequence[Delivery] = ()
    revisions: Mapping[str, int] = field(default_factory=dict)


def delivery(batch: consumer_pb2.DeliverBatch) -> Delivery:
    """From a batch of one topic."""
    return Delivery(
        batch.epoch,
        np.frombuffer(batch.ids, "<u8"),
        np.frombuffer(batch.attempts, "<u4"),
        np.frombuffer(batch.positions, "<u8"),
    )


def hints_of(known: Known) -> Hints:
    """Values of single fields."""
    ids = known.ids
    return {
        "hour": lambda rng: pick(rng, [number >> 32 for number in ids], 0),
        "index": lambda rng: pick(rng, [number & 0xFFFF_FFFF for number in ids], 0),
        "topic": lambda rng: rng.choice(TOPICS),
        "unique_key": lambda rng: rng.choice(UNIQUE_KEYS),
        "group": lambda rng: rng.choice(("g", "g2")),
        "wait_ms": lambda rng: rng.choice((0, 1, 50)),
        "lease_ms": lambda rng: rng.choice(LEASES_MS),
        "expected_revision": lambda rng: _revision(rng, known, rng.choice(SCHEDULES)),
        "target_id": lambda rng: rng.choice(("", "n1", "n2")),
        "path": lambda rng: rng.choice(("manifest", "state/windows/1", "wheel/runs/1.run")),
    }


def fits_of(known: Known, now_ms: int) -> Fits:
    """Values of fields that must go together."""

    def extend(rng: Random, made: Any) -> None:
        _give_rows(rng, made, known.deliveries)

    def settle(rng: Random, made: Any) -> None:
        rows = _give_rows(rng, made, known.deliveries)
        if not rows or rng.random() < 0.8:
            return
        topics = min(rows, rng.choice((1, 3, 4_096, 4_097)))
        counts = np.ones(topics, "<u4")
        counts[-1] = rows - topics + 1
        made.topics.extend([TOPIC] * topics)
        made.topic_counts, made.epochs = counts.tobytes(), np.full(topics, made.epoch, "<u4").tobytes()
        made.ClearField("topic")
        made.ClearField("epoch")

    def columns(rng: Random, made: Any) -> None:
        rows, kind = rng.choice(KEYED_ROWS), rng.choice(("one", "few", "many"))
        keys = {
            "one": ["u1"] * rows,
            "few": [f"u{1 + number % 3}" for number in range(rows)],
            "many": [f"many {number}" for number in range(rows)],
        }[kind]
        metas = [common_pb2.MessageMeta(unique_key=key).SerializeToString() for key in keys]
        made.topic = rng.choice(TOPICS)
        made.due_ms = np.full(rows, now_ms + rng.choice((0, 500, HOUR_MS)), "<i8").tobytes()
        made.payload_sizes, made.payloads = np.ones(rows, "<u4").tobytes(), b"k" * rows
        made.meta_sizes = np.array([len(meta) for meta in metas], "<u4").tobytes()
        made.metas = b"".join(metas)
        made.jitter_ms = 0
        made.ClearField("delay_ms")
        made.ClearField("delay_levels")

    def definition(rng: Random, made: Any) -> None:
        made.name, made.topic = rng.choice(SCHEDULES), rng.choice(TOPICS)
        made.payload = b"run"
        made.meta.Clear()
        made.spec.Clear()
        if rng.random() < 0.5:
            made.spec.interval_ms = rng.choice((1_000, HOUR_MS))
        else:
            made.spec.cron = rng.choice(("* * * * *", "*/2 * * * * *", "0 0 29 2 *"))
        made.missed_window_ms, made.late_ms_max = 1_000, 0

    def named(rng: Random, made: Any) -> None:
        made.name = rng.choice(SCHEDULES)
        fields = made.DESCRIPTOR.fields_by_name
        if "expected_revision" in fields:
            made.expected_revision = _revision(rng, known, made.name)
        if "request_id" in fields:
            made.request_id = rng.choice(("r1", "r2", f"r{rng.randrange(1_000)}"))
        if "from_ms" in fields:
            made.until_ms = now_ms - rng.choice((0, 1_000))
            made.from_ms = made.until_ms - rng.choice((1_000, HOUR_MS, 24 * HOUR_MS))

    def put(rng: Random, made: Any) -> None:
        definition(rng, made.definition)
        made.expected_revision = _revision(rng, known, made.definition.name)

    return {
        "tickwheel.v1.ExtendBatch": extend,
        "tickwheel.v1.SettleBatch": settle,
        "tickwheel.v1.ColumnBatch": columns,
        "tickwheel.v1.ScheduleDefinition": definition,
        "tickwheel.v1.PutScheduleRequest": put,
        **{
            f"tickwheel.v1.{call}ScheduleRequest": named
            for call in ("Get", "Pause", "Resume", "Trigger", "Backfill", "Delete")
        },
    }


def _revision(rng: Random, known: Known, name: str) -> int:
    """The one it has, none, or another."""
    return rng.choice((0, known.revisions.get(name, 1), known.revisions.get(name, 1), 1))


def _give_rows(rng: Random, made: Any, deliveries: Sequence[Delivery]) -> int:
    """Rows of deliveries into an extension or a settlement: in order, scattered, or one again and again. Returns how
    many."""
    rows, order, draw = rng.choice(ROWS), rng.choice(("in order", "scattered", "one")), rng.randrange(1 << 32)
    lease_ms, with_positions = rng.choice(LEASES_MS), rng.random() < 0.7
    if not deliveries:
        return 0
    ids, attempts, positions = (
        np.concatenate([getattr(one, name) for one in deliveries]) for name in ("ids", "attempts", "positions")
    )
    if order == "one":
        at = np.full(rows, draw % len(ids))
    else:
        at = np.arange(rows) % len(ids)
        if order == "scattered":
            at = np.random.default_rng(draw).permutation(at)
    made.group, made.topic, made.epoch = GROUP, TOPIC, deliveries[-1].epoch
    made.ids, made.attempts = ids[at].tobytes(), attempts[at].tobytes()
    made.positions = positions[at].tobytes() if with_positions else b""
    if made.DESCRIPTOR.name == "ExtendBatch":
        made.lease_ms = lease_ms
    else:
        made.delay_ms = made.delay_level = 0
        for name in ("topics", "topic_counts", "epochs"):
            made.ClearField(name)
    return rows
