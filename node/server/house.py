"""What a running node looks at by itself, beside its ticks, and what it tells its operator of that.

Each look runs until it is cancelled; an error in one of them is the node's own mistake. A change of role is told at
once, everything else once a second, and soon after the node's standing has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tickwheel.node.config import NodeConfig
from tickwheel.node.core.host import NodeHost
from tickwheel.node.core.watch.status import node_vitals, standing
from tickwheel.node.core.world import Reported
from tickwheel.node.logs import logger
from tickwheel.node.server import collector
from tickwheel.node.server.certificates import Certificates
from tickwheel.node.server.client_port import ClientPort
from tickwheel.node.server.clock_watch import ClockWatch
from tickwheel.node.server.cold_watch import ColdWatch
from tickwheel.node.server.connections import ConnectionLimiter
from tickwheel.node.server.consumer_stream import ConsumerStreams
from tickwheel.node.server.driver import LoopDriver
from tickwheel.node.server.identity import IDENTITY_PATH, why_gone
from tickwheel.node.server.resolving import in_worker
from tickwheel.replication.log import LogStatus, Role
from tickwheel.replication.ports import Clock, Executor
from tickwheel.storage.disk import DiskError
from tickwheel.storage.errors import ADVICE

LOOK_S = 0.2
LOOK_NS_MAX = 1_000_000_000
"""The house is kept this often even if the node stands as before."""
FILES_S = 1.0
"""Pause between two looks whether the data directory is still there."""
CONNECTIONS_S = 1.0
"""A connection on the peers' port is closed after this long without a stream; a member always has a stream."""
MINUTE_MS = 60_000
STALL_TOLD_MS = 2_000
"""A node that leads no more says that its loop stalled, if that was at most so long ago."""

log = logger("node")


def report(line: Reported) -> None:
    """Write a line for the operator."""
    getattr(log, line.level)(line.event, **line.fields)


class House:
    """Tells what has changed in a node since the last look."""

    def __init__(
        self,
        config: NodeConfig,
        host: NodeHost,
        clock: Clock,
        driver: LoopDriver,
        port: ClientPort,
        tls: Certificates,
    ) -> None:
        self._config = config
        self._host = host
        self._clock = clock
        self._driver = driver
        self._port = port
        self._tls = tls
        self._stood: tuple[int, int, object] = (0, 0, None)
        self._role = ""
        self._role_term = 0
        """The term in which it took this role."""
        self._phase = ""
        self._halted = self._no_room = self._held_up = ""
        self._unfounded = ""
        self._addresses_known = False
        self._unsound = 0

    def ticked(self) -> None:
        """Tell a change of role or phase at once: these lines show how long each step of a failover took."""
        core = self._host.core
        stands = (core.term, core.parts.mastership.changes, core.parts.dispatcher.phase)
        if stands != self._stood:
            self._stood = stands
            self._tell_role()

    def _tell_role(self) -> None:
        self._port.node.status.look()
        core = self._host.core
        status = core.log.status()
        role, phase = status.role.name, core.parts.dispatcher.phase.value
        if role != self._role:
            facts = {"before": self._role or "none", "now": role, "master": status.master_id or ""}
            if self._role == Role.MASTER.name:
                facts["reason"] = why_it_leads_no_more(status, self._role_term, self._driver.stall_ms(STALL_TOLD_MS))
            log.info("role changed", **facts)
            self._role, self._role_term = role, status.term
        if phase != self._phase:
            log.info("wheel", before=self._phase or "none", now=phase)
            self._phase = phase

    async def keep(self) -> None:
        """Keep health in step, collect garbage while another node leads, and tell what has changed."""
        clocks, cold = ClockWatch(self._config.clock.skew_warn_ms), ColdWatch()
        stands: tuple[object, ...] = ()
        look_ns = 0
        while True:
            core = self._host.core
            if core.log.status().master_id not in (None, self._config.node.id):
                collector.look()
            before, stands, now_ns = stands, standing(core), self._clock.monotonic_ns()
            if stands != before or now_ns >= look_ns:
                look_ns = now_ns + LOOK_NS_MAX
                status = node_vitals(core)
                await self._port.health.update(status)
                self._tell_role()
                self._tell_addresses()
                core = self._host.core
                clock = core.clock
                unconfirmed = clock.unconfirmed_ms > 0
                lines = clocks.look(now_ns, status, clock.jumps_refused, clock.cursors_ahead, unconfirmed=unconfirmed)
                for line in (*lines, *cold.look(now_ns, status), *self._tls.look(now_ns)):
                    report(line)
                self._tell_problems()
            await asyncio.sleep(LOOK_S)

    def _tell_problems(self) -> None:
        core = self._host.core
        while core.applied.passed_over:
            log.error(
                "log entry cannot be decoded by any node and was passed over; its sender got no answer",
                index=core.applied.passed_over.popleft(),
            )
        if core.proposer.unsound_commands != self._unsound:
            self._unsound = core.proposer.unsound_commands
            log.error("commands were refused that could not be read back from the log", commands=self._unsound)
        unfounded, halted = core.parts.founding.reason, core.log.status().halted
        if unfounded and unfounded != self._unfounded:
            log.warning("this node does not vote yet", reason=unfounded)
        if halted and halted != self._halted:
            log.warning("this node takes no part", reason=halted)
        no_room = core.parts.bulk.no_room
        if no_room and no_room != self._no_room:
            log.warning("this node applies nothing further", reason=no_room)
        self._no_room = no_room
        held_up = core.background.held_up
        if held_up and not self._held_up:  # each try may name another file
            log.warning("the wheel's work is held up", reason=held_up)
        self._held_up = held_up
        self._unfounded, self._halted = unfounded, halted

    def _tell_addresses(self) -> None:
        """Say once that others look for this node elsewhere."""
        own = next((m for m in self._host.core.state.members() if m.node_id == self._config.node.id), None)
        if own is None or self._addresses_known:
            return
        self._addresses_known = True
        for field, value, known in (
            ("listen.peer_advertised", self._config.peer_address, own.peer_address),
            ("listen.client_advertised", self._config.client_address, own.client_address),
        ):
            if value != known:
                log.warning(
                    "the cluster knows this node under another address, where nodes and clients look for it: correct "
                    "the field, or remove the member and add it anew under a new id",
                    field=field,
                    value=value,
                    known=known,
                )


async def watch_files(host: NodeHost, root: Path, reads: Executor) -> None:
    """End the node if the files that it writes were removed: its disk would keep nothing of them. A worker looks, since
    a remote disk may take minutes to answer. `root`: the data directory."""
    while True:
        journal = host.journal_path
        path, gone = await in_worker(reads, partial(_missing, [root / IDENTITY_PATH, root / journal]))
        if gone and journal == host.journal_path:  # else the journal has gone on to another file
            break
        await asyncio.sleep(FILES_S)
    reason = (
        f"{path}: {gone}: this node's files were removed, or something was mounted over them, while it writes "
        f"to them. If they still exist, put them back in place and start the node again. If not: {ADVICE}"
    )
    host.core.fatal(reason, DiskError(reason))


def _missing(paths: Iterable[Path]) -> tuple[Path, str]:
    """The first of the files that is gone, and why; no reason: none is."""
    path, gone = Path(), ""
    for path in paths:
        gone = why_gone(path)
        if gone:
            break
    return path, gone


async def watch_rights(host: NodeHost, consumers: ConsumerStreams) -> None:
    """End streams of users that lost a right. A change while the streams are looked at has them looked at again."""
    rights: tuple[bool, int, int] = (False, 0, 0)
    while True:
        # Tokens expire without a change of the state, so open streams are also checked once a minute.
        state, now_ms = host.core.state, host.core.clock.now_ms()
        stands = (state.settings.rights, state.access.version, now_ms // MINUTE_MS)
        if stands[0] and stands != rights:
            await consumers.look()
        rights = stands
        await asyncio.sleep(LOOK_S)


async def limit_connections(limiter: ConnectionLimiter, descriptors_max: int) -> None:
    """End surplus connections."""
    while True:
        await asyncio.sleep(CONNECTIONS_S)
        ended = limiter.look()
        if ended:
            log.warning(
                "too many connections: some were ended; find out who opens them, or raise limits.connections_max "
                "and the limit of open files (LimitNOFILE)",
                ended=ended,
                open=limiter.open,
                most=limiter.most,
                descriptors=limiter.descriptors_open,
                descriptors_max=descriptors_max,
            )


def why_it_leads_no_more(status: LogStatus, term: int, stall_ms: int) -> str:
    """For the log of a node that led in `term`. `stall_ms`: how long its loop was held up just before, or 0."""
    if status.halted:
        return status.halted
    if status.term > term:
        return f"{status.master_id or 'another member'} stood for election in term {status.term}"
    if status.hangs_ms:
        return f"its disk has not ended an fsync of the log within {status.hangs_ms} ms"
    held_up = f", and this node was held up for {stall_ms} ms just before" if stall_ms else ""
    return f"no majority of the members answered in time{held_up}"
