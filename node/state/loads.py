"""Bulk loads: applies takeovers of bundles, and remembers how far each load has got.

A load is a list of bundles, named by the checksum of that list. Its bundles are taken over in order, each exactly once.
So one number per load is enough to recognise a repeat at any time.

Invariants: `taken` of a load only grows, by one. At most LOADS_MAX loads are remembered. For a new one beyond that, the
least recently used load is forgotten, complete ones first; the choice follows from the log alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.failure import Failure, invalid, limit_reached, refuse, refused
from tickwheel.node.state.cold import ColdTier
from tickwheel.node.state.names import check_topic_name
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.results import NO_IDS
from tickwheel.node.state.topics import Topics
from tickwheel.proto import bulk_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import Ingest
from tickwheel.proto.state_pb2 import LoadSnapshot
from tickwheel.storage.bundle import TABLE, Layout, is_name, problem_of_table
from tickwheel.wheel.bundles import Ingested
from tickwheel.wheel.units import Ids

LOADS_MAX = 1_000
"""Remembered loads: 150 bytes each."""
BUNDLES_MAX = 1_000_000
"""Bundles of one load."""
CHUNKS_MAX = 400_000
"""Chunks of hours in bundles, over all loads: 48 bytes each. They go with their hours."""


def told(load: LoadSnapshot) -> bulk_pb2.LoadState:
    """A load as clients see it."""
    return bulk_pb2.LoadState(
        job_id=load.job_id, load_sha256=load.load_sha256, bundles=load.bundles, taken=load.taken, units=load.units
    )


@dataclass(frozen=True, slots=True, eq=False)
class IngestResult:
    """`units`: messages taken over; 0 if they had been taken over before."""

    load: bulk_pb2.LoadState
    units: int = 0
    ingested: Ingested | None = None
    """Their indexes and times; None: nothing was taken over now."""
    withheld: Ids = field(default_factory=lambda: NO_IDS)
    """Units that the command itself cancelled (cold tier); not counted in `units`."""


class Loads:
    """The remembered loads, as checkpoints have them."""

    def __init__(self) -> None:
        self._loads: OrderedDict[str, LoadSnapshot] = OrderedDict()

    def get(self, job_id: str) -> LoadSnapshot | None:
        return self._loads.get(job_id)

    def __iter__(self) -> Iterator[LoadSnapshot]:
        """Loads, least recently used first."""
        return iter(self._loads.values())

    def used(self, load: LoadSnapshot) -> None:
        """Note a use of a load; others may have to be forgotten for it."""
        self._loads[load.job_id] = load
        self._loads.move_to_end(load.job_id)
        while len(self._loads) > LOADS_MAX:
            complete = (known.job_id for known in self._loads.values() if known.taken == known.bundles)
            del self._loads[next(complete, next(iter(self._loads)))]

    def restore(self, loads: Iterable[LoadSnapshot]) -> None:
        """Fill from a checkpoint."""
        for load in loads:
            own = self._loads[load.job_id] = LoadSnapshot()
            own.CopyFrom(load)

    def facts(self) -> list[tuple[object, ...]]:
        """Content for the digest."""
        return [(load.job_id, load.load_sha256, load.bundles, load.taken, load.units) for load in self]


class Ingesting:
    """Applies `Ingest` commands."""

    def __init__(self, wheel: WheelPort, topics: Topics, loads: Loads, cold: ColdTier) -> None:
        self._wheel = wheel
        self._cold = cold
        self._topics = topics
        self._loads = loads

    def apply(self, ingest: Ingest, stamped_ms: int, slot_ms: int, *, alone: bool) -> IngestResult:
        """Take a bundle over unless that was done before. `alone`: the command is alone in its entry.
        Raises RequestError."""
        if not alone:
            # Further commands of the entry would meet a wheel that has not read the bundle's due units yet.
            raise refused(pb.WRONG_STATE, "a bundle is taken over in an entry of the log of its own")
        refuse(problem_of(ingest, slot_ms))
        if ingest.HasField("cold"):
            return self._cold_apply(ingest, stamped_ms)
        known = self._loads.get(ingest.job_id)
        refuse(self._order(ingest, known))
        if known is not None and ingest.sequence <= known.taken:
            self._loads.used(known)
            return IngestResult(told(known))
        refuse(self._room(ingest))
        layout = layout_of(ingest)
        load = known or _load_of(ingest)
        ingested = self._wheel.ingest(ingest.segment_sha256, layout, tuple(ingest.topic_ids), stamped_ms)
        load.taken = ingest.sequence
        load.units += layout.units
        self._loads.used(load)
        return IngestResult(told(load), layout.units, ingested)

    def _cold_apply(self, ingest: Ingest, stamped_ms: int) -> IngestResult:
        """Take over a bundle of the cold tier, which remembers for ever what was loaded and withholds cancelled and
        moved messages."""
        refuse(self._cold.problem_of(ingest.cold, ingest.units))
        load = _load_of(ingest, ingest.sequence)
        if not self._cold.wants(ingest.cold):
            return IngestResult(told(load))
        refuse(self._room(ingest))
        layout = layout_of(ingest)
        ingested = self._wheel.ingest(ingest.segment_sha256, layout, tuple(ingest.topic_ids), stamped_ms)
        withheld = self._cold.took(ingest.cold, ingested, stamped_ms, self._wheel)
        load.units = layout.units - len(withheld)
        return IngestResult(told(load), load.units, ingested, withheld)

    def _order(self, ingest: Ingest, known: LoadSnapshot | None) -> Failure | None:
        if known is not None and (known.load_sha256, known.bundles) != (ingest.load_sha256, ingest.bundles):
            text = f"job_id: {ingest.job_id}: it has loaded something else; name this load otherwise"
            return Failure(pb.NAME_TAKEN, text, {"field": "job_id", "value": ingest.job_id})
        taken = 0 if known is None else known.taken
        if ingest.sequence > taken + 1:
            text = f"sequence {ingest.sequence} of load {ingest.job_id}: expected {taken + 1}"
            facts = {"field": "sequence", "value": str(ingest.sequence), "expected": str(taken + 1)}
            return Failure(pb.SEQUENCE_GAP, text, facts)
        return None

    def _room(self, ingest: Ingest) -> Failure | None:
        table = np.frombuffer(ingest.chunks, TABLE)
        for topic_id in ingest.topic_ids:
            if not self._topics.takes(topic_id):
                facts = {"field": "topic_ids", "value": str(topic_id)}
                return Failure(pb.UNKNOWN_NAME, f"no topic has the id {topic_id}", facts)
        if self._wheel.bundle_chunks + len(table) > CHUNKS_MAX:
            return limit_reached("chunks_of_bundles", CHUNKS_MAX, 60_000)
        if not self._wheel.covers(int(table["hour"].max())):
            hour = int(table["hour"].max())
            return invalid("chunks", f"hour {hour}", "within the hours that a wheel can span").failure
        return None


def _load_of(ingest: Ingest, taken: int = 0) -> LoadSnapshot:
    return LoadSnapshot(job_id=ingest.job_id, load_sha256=ingest.load_sha256, bundles=ingest.bundles, taken=taken)


def layout_of(ingest: Ingest) -> Layout:
    """The bundle's layout as the command gives it."""
    return Layout(ingest.slot_ms, len(ingest.topic_ids), np.frombuffer(ingest.chunks, TABLE))


def problem_of(ingest: Ingest, slot_ms: int) -> Failure | None:
    """The fault of a command that is wrong in any state; None if it has none."""
    rule = check_topic_name(ingest.job_id)
    if rule:
        return invalid("job_id", ingest.job_id, rule).failure
    for name, value in (("load_sha256", ingest.load_sha256), ("segment_sha256", ingest.segment_sha256)):
        if not is_name(value):
            return invalid(name, value, "64 digits of [0-9a-f]").failure
    if not 1 <= ingest.bundles <= BUNDLES_MAX:
        return invalid("bundles", ingest.bundles, f"1 to {BUNDLES_MAX}").failure
    if not 1 <= ingest.sequence <= ingest.bundles:
        return invalid("sequence", ingest.sequence, f"1 to {ingest.bundles}").failure
    if ingest.slot_ms != slot_ms:
        return invalid("slot_ms", ingest.slot_ms, f"{slot_ms}, as this cluster was created").failure
    if len(ingest.chunks) % TABLE.itemsize:
        return invalid("chunks", f"{len(ingest.chunks)} bytes", f"rows of {TABLE.itemsize} bytes").failure
    layout = layout_of(ingest)
    problem = problem_of_table(layout.table, layout.topics)
    if problem:
        return invalid("chunks", ingest.segment_sha256, problem).failure
    if layout.units != ingest.units:
        return invalid("units", ingest.units, f"{layout.units}, as its chunks say").failure
    return None
