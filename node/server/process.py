"""One node as a process: builds everything from the configuration, runs it, and stops it in order.

Order of start: certificates, a look at the ports if the node is new, lock of the data directory, identity, core, ports,
servers. Order of stop (SIGTERM, SIGINT): hand the master role over, refuse new calls, end streams, stop the core, sync,
release the lock. A second signal forces the exit. A fatal fault ends the process with the reason as the last line: an
impossible state at once, a disk that cannot be relied on after a master has handed over. Nothing is lost by that: only
entries on stable storage were acknowledged.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy.ma  # noqa: F401  # np.unique imports it when it is first called: the first message would wait for it
import uvloop

from tickwheel.node.config import ConfigError, NodeConfig
from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.host import CheckpointSource, NodeHost, raft_config
from tickwheel.node.core.watch.status import node_metrics, node_vitals
from tickwheel.node.core.world import NodeIdentity, Ports
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.logs import logger, set_up_logs
from tickwheel.node.metrics import MetricValue, registry_of
from tickwheel.node.server import collector
from tickwheel.node.server.backup import files_to_copy
from tickwheel.node.server.certificates import Certificates
from tickwheel.node.server.client_port import ClientPort
from tickwheel.node.server.connections import ConnectionLimiter
from tickwheel.node.server.door import KINDS as REFUSED_KINDS
from tickwheel.node.server.door import Door
from tickwheel.node.server.driver import LoopDriver
from tickwheel.node.server.fault_log import MEMORY_ADVICE, FaultLog, LoopFaults
from tickwheel.node.server.handlers import Node
from tickwheel.node.server.house import House, limit_connections, report, watch_files, watch_rights
from tickwheel.node.server.identity import IDENTITY_PATH, IdentityError, open_identity
from tickwheel.node.server.metrics_server import MetricsServer
from tickwheel.node.server.ports import BootClock, ThreadExecutor, system_random
from tickwheel.node.server.probes import Answer, Seen, health_page, live_page, ready_page
from tickwheel.node.server.resolving import resolve
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.tls import is_member_certificate
from tickwheel.proto import peer_pb2_grpc
from tickwheel.proto.parsing import wants_memory
from tickwheel.replication.frames import Refusal
from tickwheel.replication.grpc_network import PEER_LIMITS, GrpcNetwork, PeerService
from tickwheel.replication.log import Introduction
from tickwheel.replication.ports import Clock
from tickwheel.storage.descriptors import DescriptorReserve, limit_max
from tickwheel.storage.disk import DiskError, DiskFullError, NoDescriptorError
from tickwheel.storage.local import LocalDisk
from tickwheel.transport.server import Server, bind, check_free
from tickwheel.transport.server import ServerStream as Context

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_REMOVED = 4
EXIT_INTERRUPTED = 130
RESERVED_DESCRIPTORS = 64
DESCRIPTORS_MIN = 192
"""Descriptors that a node needs to run at all: the reserve, its files and peers, and a few clients."""
ADDRESS_SPACE_MIN = 4 << 30
"""Below this limit of its address space a node warns: threads, maps and arenas of the allocator take much more of that
than of memory."""
READ_THREADS = 4
SYNC_THREADS = 2
LOOKUP_THREADS = 4
"""Threads that libuv starts for look-ups of names."""
_STAT = Path("/proc/self/stat")
_START_FIELD = 19
"""Of it, behind the name, which is in brackets and may hold anything: clock ticks from the boot on."""

T = TypeVar("T")

log = logger("node")


class StartError(Exception):
    """The process cannot start; the text says what to do. Holds the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NodeProcess:
    """One node from start to stop; `run` it once."""

    def __init__(self, config: NodeConfig, clock: Clock | None = None) -> None:
        """Raises StartError."""
        try:
            self._process_metrics = ProcessMetrics()
        except OSError as error:
            text = f"{error.filename}: {error.strerror}: a node looks at its own process in /proc; mount it"
            raise StartError(text, EXIT_CONFIG) from None
        self._config = config
        self._clock = clock or BootClock()
        context, self._rate_limit = set_up_logs(config.log.level, config.log.format, config.node.id, self._clock)
        context.read = self._log_context
        self._host: NodeHost | None = None
        self._stopping = asyncio.Event()
        self._signals = 0
        self._on_terminal = os.isatty(0)
        self._faults = FaultLog(self._clock)
        self._descriptors = DescriptorReserve()
        self._refused_calls: Counter[str] = Counter()
        self._links_dropped = 0
        self._loop_faults = LoopFaults()

    def _log_context(self) -> Mapping[str, object]:
        if self._host is None:
            return {}
        status = self._host.core.log.status()
        return {"term": status.term, "role": status.role.value}

    # -- life

    async def run(self) -> None:
        """Start, serve until a signal, stop. Raises StartError."""
        config = self._config
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_faults)
        tls = self._certificates()
        self._take_descriptors()
        await self._take_threads(loop)
        self._check_ports()
        disk = self._open_disk()
        disk_uuid = self._disk_uuid(disk)

        def wake() -> None:
            driver.wake()

        def wake_log() -> None:
            driver.wake_log()

        def tick(woken: bool) -> int:
            wants_ns = host.tick(woken=woken)
            house.ticked()
            return wants_ns

        reads = self._executor("read", READ_THREADS, loop, wake)
        syncs = self._executor("sync", SYNC_THREADS, loop, wake_log)
        network = GrpcNetwork(
            config.node.id,
            config.cluster.id,
            disk_uuid,
            config.peer_address,
            secured=tls.peer_context,
            warn=lambda peer, text: log.warning("peer cannot be reached", peer=peer, reason=text),
            unforeseen=lambda peer, error: log.error("calling a peer failed", peer=peer, exc_info=error),
            refused=self._refused,
            failed=self._failed,
        )
        ports = Ports(disk, self._clock, reads, syncs, network, system_random())
        host = self._host = self._make_host(ports, disk_uuid, network)
        limiter = ConnectionLimiter(self._descriptors, config.limits.connections_max, config.limits.caller_calls_max)
        driver = LoopDriver(loop, self._clock, tick, self._failed)
        port = ClientPort(
            config,
            lambda: host.core,
            ports,
            driver.wake,
            driver.wake_within,
            self._failed,
            self._refused_calls,
            tls=tls.current.client is not None,
            certificate_reason=tls.reason,
            limiter=limiter,
        )
        node, clients = port.node, port.server
        house = House(config, host, self._clock, driver, port, tls)
        client_port = self._bind(clients, "client_bind", config.listen.client_bind, tls.server_context("client"))
        peers, peer_port = self._peer_server(tls, host, network, disk, driver, limiter)
        limiter.watch(client_port, peer_port)
        pools = {"read": reads, "sync": syncs}
        page = registry_of(lambda: self._metrics(host, tls, driver, node, pools, limiter))
        probed: dict[str, Callable[[], Answer]] = {
            "/livez": lambda: live_page(driver.overdue_ns() / 1e9),
            "/readyz": lambda: ready_page(self._seen(host, tls, driver)),
            "/healthz": lambda: health_page(self._seen(host, tls, driver)),
        }
        metrics = MetricsServer(page, probed, lambda error: self._faults("metrics", error))
        await self._listen_for_metrics(metrics)
        await peers.start()
        await clients.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        network.attach(host, driver.wake, lambda: host.core.parts.members.introduction())
        host.start()
        driver.start()
        self._warn_of_memory()
        log.info(
            "node is up",
            cluster=config.cluster.id,
            clients=config.client_address,
            peers=config.peer_address,
            data=config.node.data_dir,
        )
        loop.add_signal_handler(signal.SIGHUP, self._hung_up, tls)
        keeping = [
            loop.create_task(house.keep()),
            loop.create_task(watch_files(host, config.data_path, reads)),
            loop.create_task(watch_rights(host, node.consumers)),
            loop.create_task(limit_connections(limiter, self._descriptors.limit)),
        ]
        for task in keeping:
            task.add_done_callback(self._house_left)
        await self._stopping.wait()
        await self._hand_over(host, driver)
        for task in keeping:
            task.cancel()
        await port.health.stop()
        node.status.stop()
        host.core.stop()
        driver.wake()
        await clients.stop(1.0)
        driver.stop()
        await network.stop()
        await peers.stop(0.2)
        await metrics.stop()
        reads.stop()
        syncs.stop()
        host.stop()
        log.info("node has stopped")

    def _certificates(self) -> Certificates:
        try:
            return Certificates(self._config)
        except ConfigError as error:
            raise StartError(str(error), EXIT_CONFIG) from None

    def _disk_uuid(self, disk: LocalDisk) -> str:
        config = self._config
        try:
            return open_identity(disk, config.cluster.id, config.node.id, config.node.data_dir).disk_uuid
        except IdentityError as error:
            raise StartError(str(error), EXIT_DATA) from None
        except DiskError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: DiskError | ImpossibleStateError) -> StartError:
        """Why the data directory cannot be used. A restart helps once a full disk has room."""
        where = self._config.node.data_dir
        if isinstance(error, NoDescriptorError):
            return StartError(f"node.data_dir: {where}: {error}", EXIT_FAILED)
        if isinstance(error, DiskFullError):
            text = f"{error}; free space there and start the node again"
            return StartError(f"node.data_dir: {where}: {text}", EXIT_FAILED)
        return StartError(f"the data in {where} cannot be used: {error}", EXIT_DATA)

    def _executor(
        self, name: str, threads: int, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]
    ) -> ThreadExecutor:
        with _needing_threads():
            return ThreadExecutor(name, threads, loop, self._failed, wake)

    async def _take_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        """See whether the system gives the threads that a node needs, then start the loop's own for look-ups of names.
        The first look-up would start these, and libuv ends the process without a word if it gets none."""
        asked = threading.Event()
        started: list[threading.Thread] = []
        try:
            for _ in range(LOOKUP_THREADS + READ_THREADS + SYNC_THREADS):
                probe = threading.Thread(target=asked.wait, daemon=True)
                with _needing_threads():
                    probe.start()
                started.append(probe)
        finally:
            asked.set()
            for probe in started:
                probe.join()
        await loop.getaddrinfo("127.0.0.1", 0)

    def _make_host(self, ports: Ports, disk_uuid: str, source: CheckpointSource) -> NodeHost:
        config = self._config
        try:
            return NodeHost(
                config.core,
                raft_config(config.core),
                NodeIdentity(config.cluster.id, config.node.id, 0, disk_uuid),
                ports,
                seed=config.seed_settings,
                members=config.members,
                joining=config.cluster.join == "existing",
                on_fatal=self._fatal,
                source=source,
                report=report,
                faults=self._faults,
                on_no_room=self._no_room,
            )
        except (DiskError, ImpossibleStateError) as error:
            raise self._unusable(error) from None
        except ValueError as error:
            raise StartError(str(error), EXIT_CONFIG) from None

    async def _listen_for_metrics(self, metrics: MetricsServer) -> None:
        bind = self._config.listen.metrics_bind
        if bind:
            try:
                await metrics.start(bind)
            except (OSError, UnicodeError) as error:
                raise StartError(_cannot_listen("metrics_bind", bind, error), EXIT_CONFIG) from None

    def _warn_of_memory(self) -> None:
        limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit_bytes != resource.RLIM_INFINITY and limit_bytes < ADDRESS_SPACE_MIN:
            log.warning(
                "the address space is limited (ulimit -v): libraries abort the process when they get no more of it; "
                "limit its memory instead (MemoryMax of the service, or the container), or raise the limit",
                limit_mib=limit_bytes >> 20,
                better_mib=ADDRESS_SPACE_MIN >> 20,
            )

    def _take_descriptors(self) -> None:
        # Before the reserve is taken: the rest might not suffice to end the process in order.
        most = limit_max()
        if most < DESCRIPTORS_MIN:
            least = f"at least {DESCRIPTORS_MIN}, better 65536 (ulimit -n, or LimitNOFILE of the service)"
            raise StartError(f"the limit of open files is {most}: {least}", EXIT_CONFIG)
        self._descriptors.take(RESERVED_DESCRIPTORS)

    def _open_disk(self) -> LocalDisk:
        path = self._config.data_path
        try:
            reserve_bytes = self._config.storage.space_reserve_bytes
            disk = LocalDisk(str(path), space_reserve=reserve_bytes, descriptors=self._descriptors)
            disk.lock()
            disk.stay()
        except DiskFullError as error:
            raise self._unusable(error) from None
        except DiskError as error:
            why = "it is not a directory" if isinstance(error.__cause__, FileExistsError) else error
            raise StartError(f"node.data_dir: {path}: {why}", EXIT_DATA) from None
        return disk

    def _check_ports(self) -> None:
        """Raise StartError if a new node could not listen, before it writes its first file."""
        with suppress(OSError):
            (self._config.data_path / IDENTITY_PATH).stat()
            return
        listen = self._config.listen
        self._ask("client_bind", listen.client_bind, check_free)
        self._ask("peer_bind", listen.peer_bind, check_free)
        if listen.metrics_bind:
            self._ask("metrics_bind", listen.metrics_bind, partial(check_free, dual=False))

    def _ask(self, name: str, address: str, what: Callable[[str, int], T]) -> T:
        host, _, port = address.rpartition(":")
        try:
            return what(host.strip("[]"), int(port))
        except (OSError, UnicodeError) as error:  # UnicodeError: of a host that cannot be a name
            raise StartError(_cannot_listen(name, address, error), EXIT_CONFIG) from None

    def _bind(self, server: Server, name: str, address: str, tls: ssl.SSLContext | None) -> int:
        bound = self._ask(name, address, bind)
        server.listen(bound, tls)
        return int(bound.getsockname()[1])

    def _peer_server(
        self,
        tls: Certificates,
        host: NodeHost,
        network: GrpcNetwork,
        disk: LocalDisk,
        driver: LoopDriver,
        limiter: ConnectionLimiter,
    ) -> tuple[Server, int]:
        server = Server(PEER_LIMITS)

        def greeted(peer_id: str, address: str) -> None:
            if not host.core.log.members():
                network.learn(peer_id, address)

        def refusal(sender_id: str, disk_uuid: str, shown: Introduction, context: Context) -> Refusal | None:
            if tls.current.peer is not None and not is_member_certificate(context.auth_context(), sender_id):
                return Refusal(f"the certificate is not that of node {sender_id}")
            before = host.core.log.introduced()
            refused = host.core.parts.members.refuses(sender_id, disk_uuid, shown)
            if host.core.log.introduced() != before:
                names = [member.node_id for member in shown.members]
                log.info("this node is behind: a peer has shown who the members are", peer=sender_id, members=names)
            return refused

        async def checkpoint() -> Sequence[BackupFile] | str:
            try:
                return await files_to_copy(host.core.checkpointer, driver.wake)
            except RequestError as error:
                return error.failure.message

        service = PeerService(
            (self._config.node.id, self._config.cluster.id),
            host,
            driver.wake_log,
            disk=disk,
            refusal=refusal,
            removed=lambda peer: peer in host.core.state.removed_ids,
            greeted=greeted,
            checkpoint=checkpoint,
            progressed=lambda files: host.core.checkpointer.progressed(files),
            copied=lambda files: host.core.checkpointer.copied(files),
            dropped=self._link_dropped,
            failed=self._failed,
        )
        door = Door(server, self._refused_calls, limiter=limiter, exact=False)
        door.serve(peer_pb2_grpc.add_PeerServicer_to_server, service)
        door.shut()
        port = self._bind(server, "peer_bind", self._config.listen.peer_bind, tls.server_context("peer"))
        return server, port

    def _link_dropped(self, peer: str, reason: str) -> None:
        self._links_dropped += 1
        log.error("the link of a peer is dropped", peer=peer, reason=reason)

    def _signalled(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal: stopping at once", signal=signal.Signals(number).name)
            _exit_now(EXIT_FAILED)
        log.info("stopping", signal=signal.Signals(number).name)
        self._stopping.set()
        asyncio.get_running_loop().call_later(self._config.limits.stop_ms / 1_000, self._stop_took_too_long)

    def _hung_up(self, tls: Certificates) -> None:
        if tls.current.client is not None or tls.current.peer is not None:
            for line in tls.reload():
                report(line)
        elif self._on_terminal:
            self._signalled(signal.SIGHUP)  # the terminal is gone
        else:
            log.warning("nothing to read again: this node has no certificates", signal=signal.SIGHUP.name)

    def _stop_took_too_long(self) -> None:
        log.error("the stop took too long and is forced", stop_ms=self._config.limits.stop_ms)
        _exit_now(EXIT_FAILED)

    def _refused(self, why: Refusal) -> None:
        if not why.removed:
            self._fatal(why.reason)
        log.error("this node is no member any more", reason=why.reason)
        _exit_now(EXIT_REMOVED)

    def _fatal(self, reason: str) -> None:
        log.error("fatal", reason=reason, exc_info=sys.exception())
        _exit_now(EXIT_DATA)

    def _no_room(self, error: DiskFullError) -> None:
        unusable = self._unusable(error)
        log.error("fatal", reason=str(unusable), exc_info=error)
        _exit_now(unusable.code)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, DiskError) and not isinstance(error, DiskFullError):
            # A restart would read the same bytes again: an operator must look.
            log.error("fatal: the disk cannot be relied on", reason=str(error), exc_info=error)
            _exit_now(EXIT_DATA)
        if wants_memory(error) or wants_memory(error.__cause__):
            log.error("fatal: no memory is left", reason=MEMORY_ADVICE)
            _exit_now(EXIT_FAILED)
        log.error("fatal: an impossible state", exc_info=error)
        _exit_now(EXIT_FAILED)

    async def _hand_over(self, host: NodeHost, driver: LoopDriver) -> None:
        """Hand the master role to another member, if this node leads and there is one."""
        if not host.core.leading or len(host.core.log.members()) < 2:
            return
        future: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()

        def transferred(failure: Failure | None) -> None:
            resolve(future, failure)

        host.core.parts.mastership.start_transfer(None, transferred)
        driver.wake()
        try:
            async with asyncio.timeout(self._config.limits.stop_ms / 2_000):
                failure = await future
        except TimeoutError:
            log.warning("nobody took the master role over in time; the others will elect")
            return
        if failure is not None:
            log.warning("the master role was not handed over; the others will elect", reason=failure.message)

    def _house_left(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _seen(self, host: NodeHost, tls: Certificates, driver: LoopDriver) -> Seen:
        core = host.core
        log_status = core.log.status()
        return Seen(
            node_vitals(core),
            max(0, max(log_status.commit_index, log_status.heard_commit_index) - core.applied.index),
            driver.overdue_ns() / 1e9,
            self._stopping.is_set(),
            tls.reason(),
        )

    def _metrics(
        self,
        host: NodeHost,
        tls: Certificates,
        driver: LoopDriver,
        node: Node,
        pools: Mapping[str, ThreadExecutor],
        limiter: ConnectionLimiter,
    ) -> Mapping[str, MetricValue]:
        status = node_vitals(host.core)
        own: dict[str, MetricValue] = {
            "node": {(status.version, status.cluster_id, status.node_id): 1.0},
            "certificate_end_timestamp_seconds": tls.ends(),
            "schedule_streams": float(node.schedule_streams.open_streams),
            "stream_backlog_bytes": float(node.consumers.backlog_bytes),
            "loop_lag_seconds": driver.lag.value(),
            "tick_duration_seconds": driver.took.value(),
            "fdatasync_duration_seconds": pools["sync"].took.value(),
            "loop_stalls": float(driver.stalls),
            "executor_waiting_works": {(name,): float(pool.waiting) for name, pool in pools.items()},
            "client_connections": float(limiter.open),
            "client_connections_max": float(limiter.most),
            "connections_shut": float(limiter.shut),
            "descriptors_open": float(limiter.descriptors_open),
            "descriptors_max": float(self._descriptors.limit),
            "descriptor_reserve_uses": float(self._descriptors.uses),
            "request_faults": float(host.core.serving.faults),
            "loop_faults": float(self._loop_faults.count),
            "refused_calls": {(kind,): float(self._refused_calls[kind]) for kind in REFUSED_KINDS},
            "peer_links_dropped": float(self._links_dropped),
            "suppressed_log_lines": float(self._rate_limit.suppressed),
            **self._process_metrics.values(limiter.descriptors_open),
        }
        return {**node_metrics(host.core), **own}


def _started_s() -> float:
    fields = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    after_boot_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot_s


class ProcessMetrics:
    """Numbers of the process itself, under the names that every Prometheus client uses (`process_*`).

    Read on request from /proc/self, which the service's unit leaves visible (ProcSubset=pid), in some 0.1 ms; the
    library's own collector needs /proc/stat for the start, and lists all descriptors on each request.
    """

    def __init__(self) -> None:
        """Raises OSError if /proc is not there."""
        self._started_s = _started_s()
        """Read once: what the wall clock does later does not change when the process started."""
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def values(self, descriptors_open: int) -> Mapping[str, MetricValue]:
        """Name -> value (names of node/metrics.py)."""
        virtual, resident, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return {
            "process_cpu_seconds": time.process_time(),
            "process_start_time_seconds": self._started_s,
            "process_resident_memory_bytes": float(int(resident) * self._page_bytes),
            "process_virtual_memory_bytes": float(int(virtual) * self._page_bytes),
            "process_open_fds": float(descriptors_open),
            "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        }


@contextmanager
def _needing_threads() -> Iterator[None]:
    """Raises StartError if the system gives no thread in this context."""
    try:
        yield
    except RuntimeError as error:  # so Python tells it
        limits = "of processes of the service (TasksMax), the container (pids) or the user (ulimit -u)"
        memory = resource.getrlimit(resource.RLIMIT_AS)[0]
        if memory != resource.RLIM_INFINITY:  # each thread has a stack of its own
            limits = f"of the address space (ulimit -v), now {memory >> 20} MiB, or that {limits}"
        raise StartError(f"{error}: raise the limit {limits}", EXIT_FAILED) from None


def _cannot_listen(name: str, address: str, error: OSError | UnicodeError) -> str:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    # Beside the number asyncio's errors have a sentence of their own.
    why = os.strerror(number) if number else getattr(error, "strerror", None) or error
    advice = {
        errno.EADDRINUSE: "; is another process using the port?",
        errno.EADDRNOTAVAIL: "; it must be an address of this machine",
        errno.EACCES: "; ports below 1024 need a right that this user lacks",
    }.get(number or 0, "")
    return f"listen.{name}: {address}: cannot listen there: {why}{advice}"


def _exit_now(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)


def run_node(config: NodeConfig, clock: Clock | None = None) -> int:
    """Run a node until it stops; returns the exit code. Prints the reason if it cannot start.

    `clock`: for tests of a node with a wrong clock; no configuration sets it.
    """
    os.umask(0o077)  # only this user may read the messages in the files, whatever the caller's umask
    sys.setswitchinterval(0.001)
    faulthandler.enable(2)  # a library that gets no memory aborts the process: then its threads are told at least
    collector.set_up()

    # Until the node is up there is nothing to stop in order, and its journal may take long to read: exit at once. The
    # first process of a container gets only signals that it has handlers for.
    signal.signal(signal.SIGINT, lambda *_: _exit_now(EXIT_INTERRUPTED))
    signal.signal(signal.SIGTERM, lambda *_: _exit_now(0))
    if not os.isatty(0):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # new certificates are found without it

    async def main() -> None:
        await NodeProcess(config, clock).run()

    try:
        uvloop.run(main())
    except StartError as error:
        print(f"tickwheel node {config.node.id}: {error}", file=sys.stderr)
        return error.code
    return 0
