"""Bulk load on a node: receives bundles, has them taken over, and fetches missing ones from its peers.

A client sends a load's bundles to every node that it can reach. The master takes a bundle over once it has checked it
and a majority of the members hold it on stable storage; then the `Ingest` command goes into the log, alone in its
entry. A node that must apply this entry without the bundle fetches the bundle first, and applies nothing further until
then. It will find one: every majority that can elect a master includes a holder. If that holder has removed the bundle
by then, the bundle's messages are over. The node then starts again from the holder's checkpoint, whichever of the two
leads.

Bounded: one takeover at a time, one piece requested at a time, questions end after ASK_MS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import google_crc32c
import numpy as np

from tickwheel.node.core.bulk.bundle_store import BundleStore
from tickwheel.node.core.bulk.cold import ColdRequests
from tickwheel.node.core.checkpoint import Checkpointer
from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.world import Now, SteadyMs
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refuse, refused
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.loads import IngestResult, problem_of, told
from tickwheel.proto import bulk_pb2, common_pb2
from tickwheel.proto.log_pb2 import Command, Ingest
from tickwheel.proto.peer_pb2 import BundleAsk, BundlePiece, PeerFrame
from tickwheel.storage import bundle as bundles
from tickwheel.storage.bundle import BadBundleError, Layout
from tickwheel.storage.disk import DiskError

ASK_MS = 3_000
"""How long the master waits for peers to say that they hold a bundle."""
PIECE_MS = 1_000
"""How long a node waits for a piece before it asks another peer."""
PIECE_BYTES = 512 << 10
AGAIN_MS = 100
"""Pause between two rounds of asking when no peer had the bundle."""
LOADED_UNITS_MAX = 1_000_000
"""While memory holds more due or nearly due messages than this, a bundle waits: late messages must be dispatched
first."""
CHECKED_MAX = 1_024


@dataclass(slots=True, eq=False)
class _TakeOver:
    """The takeover under way."""

    request: bulk_pb2.TakeOverRequest
    begun_ms: int
    """In steady time."""
    ready: Promise[Layout] = field(default_factory=Promise)
    """Kept when the bundle is checked and a majority holds it."""
    holders: set[str] = field(default_factory=set)
    layout: Layout | None = None
    decided: bool = False
    """`ready` is kept, also by a failure."""

    def decide(self, layout: Layout) -> None:
        """Keep the promise `ready`, unless it is decided already."""
        if not self.decided:
            self.decided = True
            self.ready.keep(layout)

    def refuse(self, failure: Failure) -> None:
        """Refuse the promise `ready`, unless it is decided already."""
        if not self.decided:
            self.decided = True
            self.ready.refuse(failure)

    @property
    def until_ms(self) -> int:
        return self.begun_ms + ASK_MS


@dataclass(slots=True)
class _Fetch:
    """A bundle that the log claims and this node lacks."""

    name: str
    total_bytes: int
    peer: int = -1
    """Place of the asked peer in the list of peers; -1: none is asked."""
    asked_until_ms: int = 0
    bytes: int = 0
    failed: int = 0
    """Peers asked in a row without a piece."""
    no_room: bool = False
    """This node's disk has no room for it."""
    past: str = ""
    """A peer that lacks the bundle and has applied more than this node: the bundle's messages have been removed
    there."""


class BulkLoad(Part):
    """Takes bundles in, has them taken over, and fetches those that this node lacks."""

    def __init__(
        self,
        core: Kernel,
        store: BundleStore,
        disk_room: DiskRoom,
        cold: ColdRequests,
        checkpointer: Checkpointer,
        checkpoint_needed: Callable[[str], None],
    ) -> None:
        """`checkpoint_needed` gets a peer's id: this node must start again from that peer's checkpoint."""
        self._core = core
        self._disk = core.disk
        self._disk_room = disk_room
        self._cold = cold
        self._checkpointer = checkpointer
        self._checkpoint_needed = checkpoint_needed
        self.store = store
        self._checked: dict[str, Layout] = {}
        self._checking: set[str] = set()
        self._current: _TakeOver | None = None
        self._fetch: _Fetch | None = None
        self.counts = store.counts

    # -- clients

    def offer(self, name: str, total_bytes: int) -> bulk_pb2.BundleState:
        """As `BundleStore.offer`. A new bundle is refused while this node's disk is above its high-water mark."""
        with self.counts.counting("offer"):
            if not self.store.held(name):
                refuse(self._disk_room.own_refusal())
            return self.store.offer(name, total_bytes)

    def take(
        self, name: str, total_bytes: int, offset: int, data: bytes, crc32c: int, reply: Reply[bulk_pb2.BundleState]
    ) -> None:
        """As `BundleStore.take`. A master checks a whole bundle at once, because a takeover will follow."""

        def taken(held: bulk_pb2.BundleState) -> None:
            if held.held and self._core.leading:
                self._check(name)
            reply.done(held)

        def refused(failure: Failure) -> None:
            self.counts.refused["piece"] += 1
            reply.fail(failure)

        answer = self._core.serving.bound_reply(Reply(taken, refused))
        self.store.take(name, total_bytes, offset, data, crc32c, answer)

    def load(self, job_id: str) -> bulk_pb2.LoadState:
        """How far this node has applied a load."""
        load = self._core.state.loads.get(job_id)
        return bulk_pb2.LoadState(job_id=job_id) if load is None else told(load)

    async def take_over(self, request: bulk_pb2.TakeOverRequest) -> bulk_pb2.LoadState:
        """Take over a bundle of a load; for the master."""
        with self.counts.counting("take_over"):
            taken = self._taken(request)
            if taken is not None:
                return taken
            self._check_room(request.name)
            current = self._current = _TakeOver(request, self._core.steady_ms())
            try:
                self._begin(current)
                command = self._command(request, await current.ready)
                result = await self._core.proposer.propose_alone(Command(ingest=command), IngestResult)
            finally:
                self._current = None
            self.counts.takeover_ms += self._core.steady_ms() - current.begun_ms
            return result.load

    def _begin(self, current: _TakeOver) -> None:
        """Check the bundle and ask who holds it."""
        name = current.request.name
        current.layout = self._checked.get(name)
        if current.layout is None:
            self._check(name)
        for peer_id in self._voters():
            self._core.log.send_beside(peer_id, PeerFrame(bundle_ask=BundleAsk(name=name)))
        self._go_on()

    def _taken(self, request: bulk_pb2.TakeOverRequest) -> bulk_pb2.LoadState | None:
        """The answer for a bundle that was taken over before, or is not wanted; None: it is wanted."""
        self._core.require_master()
        if request.HasField("cold"):
            return self._cold.unwanted(request)
        known = self._core.state.loads.get(request.job_id)
        if (
            known is not None
            and (known.load_sha256, known.bundles) == (request.load_sha256, request.bundles)
            and 1 <= request.sequence <= known.taken
        ):
            return told(known)
        return None

    def _check_room(self, name: str) -> None:
        """Raise RequestError if a takeover of this bundle cannot begin now."""
        if not bundles.is_name(name):
            raise invalid("name", name, "64 digits of [0-9a-f]")
        refuse(self._disk_room.refusal())
        if self._current is not None:
            raise RequestError(limit_reached("bundles_taken_over_at_once", 1, 50))
        if self._core.wheel.window.loaded_units > LOADED_UNITS_MAX:
            raise RequestError(limit_reached("messages_nearly_due", LOADED_UNITS_MAX, 200))
        if not self.store.held(name):
            text = f"the master does not hold bundle {name}; send it to every node, then try again"
            raise refused(common_pb2.WRONG_STATE, text, field="name", retry_after_ms=200)

    def end(self, failure: Failure) -> None:
        """Answer the takeover under way with `failure`."""
        if self._current is not None:
            self._current.refuse(failure)

    def _check(self, name: str) -> None:
        """Check the whole bundle in a worker, once."""
        if name in self._checking or name in self._checked:
            return
        self._checking.add(name)

        def ended(layout: Layout | None, error: BaseException | None) -> None:
            self._checking.discard(name)
            current = self._current if self._current and self._current.request.name == name else None
            if layout is not None:
                while len(self._checked) >= CHECKED_MAX:
                    del self._checked[next(iter(self._checked))]
                self._checked[name] = layout
                if current is not None:
                    current.layout = layout
                    self._go_on()
            elif isinstance(error, BadBundleError | DiskError):
                if current is not None:
                    current.refuse(invalid("name", name, f"a whole bundle ({error})").failure)
            elif error is not None:
                self._core.fatal(f"bundle {name} could not be checked: {error}", error)

        self._core.executor.submit(lambda: bundles.check(self._disk, name), ended)

    def _voters(self) -> list[str]:
        own_id = self._core.identity.node_id
        return [m.node_id for m in self._core.log.members() if not m.learner and m.node_id != own_id]

    def _reachable(self) -> list[str]:
        """Peers to ask for missing bundles: the voters as applied here, and those that peers have shown this node. The
        applied list alone may be too old: none of its members may be left."""
        own_id = self._core.identity.node_id
        shown = [m.node_id for m in self._core.log.introduced().members if m.node_id != own_id]
        return list(dict.fromkeys([*self._voters(), *shown]))

    def _go_on(self) -> None:
        """Let the takeover be proposed if the bundle is checked and a majority holds it."""
        current = self._current
        if current is None or current.layout is None:
            return
        voters = self._voters()
        if 2 * (1 + len(current.holders & set(voters))) > 1 + len(voters):
            current.decide(current.layout)

    def _command(self, request: bulk_pb2.TakeOverRequest, layout: Layout) -> Ingest:
        state = self._core.state
        if len(request.topics) != layout.topics:
            raise invalid("topics", len(request.topics), f"{layout.topics}, as the bundle has")
        topic_ids: list[int] = []
        for name in request.topics:
            topic_id = state.topic_id(name)
            if topic_id is None:
                require_current(self._core)
                text = f"topics: {name}: there is no such topic; create it first"
                raise refused(common_pb2.UNKNOWN_NAME, text, field="topics", value=name)
            topic_ids.append(topic_id)
        command = Ingest(
            job_id=request.job_id,
            hour=int(layout.table["hour"][0]),
            segment_sha256=request.name,
            units=layout.units,
            log_bytes=int(layout.table["log_bytes"].sum(dtype=np.int64)),
            load_sha256=request.load_sha256,
            sequence=request.sequence,
            bundles=request.bundles,
            topic_ids=topic_ids,
            slot_ms=layout.slot_ms,
            chunks=layout.table.tobytes(),
            cold=request.cold if request.HasField("cold") else None,
        )
        refuse(problem_of(command, state.settings.slot_ms))
        return command

    # -- peers

    def ask_in(self, peer_id: str, ask: BundleAsk) -> PeerFrame | None:
        """Answer a peer that asks for a piece, or whether this node has a bundle."""
        held = self.store.held(ask.name)
        if not ask.bytes_max or not held:
            applied_index = 0 if held else self._core.applied.index
            piece = BundlePiece(name=ask.name, held=held, held_only=not ask.bytes_max, applied_index=applied_index)
            return PeerFrame(bundle_piece=piece)
        name, offset, size = ask.name, ask.offset, min(ask.bytes_max, PIECE_BYTES)

        def read() -> tuple[bytes, int]:
            file = self._disk.open(bundles.bundle_path(name))
            try:
                return file.read_at(offset, size), file.size()
            finally:
                file.close()

        def ended(found: tuple[bytes, int] | None, error: BaseException | None) -> None:
            if found is None:
                return  # the asking node asks another
            data, file_bytes = found
            piece = BundlePiece(
                name=name,
                held=True,
                offset=offset,
                data=data,
                crc32c=google_crc32c.value(data),
                file_bytes=file_bytes,
            )
            self._core.log.send_beside(peer_id, PeerFrame(bundle_piece=piece))

        self._core.executor.submit(read, ended)
        return None

    def piece_in(self, peer_id: str, piece: BundlePiece) -> None:
        """Take a peer's answer to such a question."""
        if piece.held_only:
            current = self._current
            if piece.held and current is not None and current.request.name == piece.name:
                current.holders.add(peer_id)
                self._go_on()
            return
        fetch = self._fetch
        if fetch is None or fetch.name != piece.name:
            return
        if not piece.held or not piece.data:
            if piece.applied_index > self._core.applied.index:
                fetch.past = peer_id
            fetch.asked_until_ms = min(fetch.asked_until_ms, self._core.steady_ms() + AGAIN_MS)
            return

        def refused(failure: Failure) -> None:
            if self._fetch is fetch:
                fetch.bytes = 0
                fetch.asked_until_ms = self._core.steady_ms() + PIECE_MS

        def taken(held: bulk_pb2.BundleState) -> None:
            if self._fetch is not fetch:
                return
            fetch.bytes = held.bytes
            fetch.failed = 0
            if held.held:
                self._fetch = None
                self.counts.fetched += 1
            else:
                self._ask(fetch)

        self.store.take(piece.name, fetch.total_bytes, piece.offset, piece.data, piece.crc32c, Reply(taken, refused))

    # -- time

    def metrics(self) -> Mapping[str, MetricValue]:
        counts = self.counts
        return {
            "bulk_received_bytes": float(counts.received_bytes),
            "bulk_bundles_received": float(counts.received),
            "bulk_bundles_fetched": float(counts.fetched),
            "bulk_bundles_removed": float(counts.removed),
            "bulk_bundles_held": float(self.store.held_count),
            "bulk_takeover_seconds": counts.takeover_ms / 1_000,
            "bulk_refusals": {(step,): float(count) for step, count in counts.refused.items()},
        }

    def tick(self, now: Now) -> None:
        """Give up old questions, fetch missing bundles, remove unclaimed ones."""
        core, steady_ms = self._core, now.steady_ms
        current = self._current
        if current is not None and not current.decided and steady_ms >= current.until_ms:
            count, voters = 1 + len(current.holders), 1 + len(self._voters())
            text = f"{count} of {voters} members hold bundle {current.request.name}, a majority must; send it to them"
            facts = {"field": "name", "value": str(count), "retry_after_ms": "500"}
            current.refuse(Failure(common_pb2.WRONG_STATE, text, facts))
        self._fetch_lacking(steady_ms)
        self.store.tick(steady_ms, self._claimed, lambda: core.applied.index >= core.log.status().last_index)

    def _claimed(self) -> set[str]:
        return self._core.wheel.files.bundle_names() | self._checkpointer.bundle_names

    def _fetch_lacking(self, steady_ms: SteadyMs) -> None:
        lacking = self._core.wheel.ingestion.lacking
        if lacking is None:
            self._fetch = None
            return
        fetch = self._fetch
        if fetch is None or fetch.name != lacking[0]:
            fetch = self._fetch = _Fetch(*lacking)
        elif steady_ms < fetch.asked_until_ms:
            return
        try:
            fetch.bytes = self.store.offer(fetch.name, fetch.total_bytes, needed=True).bytes
            fetch.no_room = False
        except RequestError as error:
            fetch.bytes, fetch.no_room = 0, error.failure.reason == common_pb2.DISK_FULL
        if fetch.past and fetch.failed > len(self._reachable()):
            self._copy_instead(fetch)
        fetch.peer += 1
        fetch.failed += 1
        self._ask(fetch)

    def _copy_instead(self, fetch: _Fetch) -> None:
        """No answering peer has the bundle: start again from the checkpoint of a peer that has applied more. A master
        that cannot apply serves nobody, so it steps down at once if that peer holds all of its log."""
        log, past = self._core.log, fetch.past
        fetch.past, fetch.failed = "", 0
        status = log.status()
        progress = status.peers.get(past)
        if progress is not None and progress.match_index >= status.last_index:
            log.step_down()
        self._checkpoint_needed(past)

    def _ask(self, fetch: _Fetch) -> None:
        peers = self._reachable()
        fetch.asked_until_ms = self._core.steady_ms() + PIECE_MS
        if peers:
            ask = BundleAsk(name=fetch.name, offset=fetch.bytes, bytes_max=PIECE_BYTES)
            if not self._core.log.send_beside(peers[fetch.peer % len(peers)], PeerFrame(bundle_ask=ask)):
                fetch.asked_until_ms = self._core.steady_ms() + AGAIN_MS

    def wait_ms(self, now: Now) -> int | None:
        """Until a question is given up."""
        if self._fetch is None and self._current is None:
            return None
        times = [fetch.asked_until_ms for fetch in (self._fetch,) if fetch is not None]
        if self._current is not None and not self._current.decided:
            times.append(self._current.until_ms)
        return min(times) - now.steady_ms if times else None

    @property
    def no_room(self) -> str:
        """The missing bundle for which the disk has no room, in words; empty: none."""
        fetch = self._fetch
        if fetch is None or not fetch.no_room:
            return ""
        return (
            f"bundle {fetch.name} is missing, before which this node applies nothing further, and the disk has no room "
            f"for its {fetch.total_bytes} bytes: free space in the data directory"
        )

    @property
    def waiting(self) -> str:
        """The missing bundle that keeps this node from applying, in words; empty: none."""
        fetch = self._fetch
        if fetch is None or fetch.no_room:
            return self.no_room
        return (
            f"fetching bundle {fetch.name} from its peers before it applies further: "
            f"{fetch.bytes} of {fetch.total_bytes} bytes; if no peer has it, restore one that had it, or let this "
            "node copy the checkpoint of another member"
        )
