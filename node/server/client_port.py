"""All that serves the clients of one node: its handlers, its gate and its server, which is not bound to an address.

A node process binds the server. A cluster in the memory of a test calls its handlers without a socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tickwheel.node.config import NodeConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.kernel import not_current
from tickwheel.node.core.world import Ports
from tickwheel.node.failure import Failure
from tickwheel.node.server.access import Access
from tickwheel.node.server.audit import AuditLog
from tickwheel.node.server.backup import Backups
from tickwheel.node.server.callers import Callers
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.connections import ConnectionLimiter
from tickwheel.node.server.consumer_stream import ConsumerStreams
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.handlers import Node
from tickwheel.node.server.health import HealthReporter
from tickwheel.node.server.schedule_stream import ScheduleStreams
from tickwheel.node.server.services import client_server
from tickwheel.node.server.status_stream import StatusStreams


def _admitted(user: str, caller: str, connections_max: int) -> Failure | None:
    """Without connections there are never too many."""
    return None


class ClientPort:
    """One for each node."""

    def __init__(
        self,
        config: NodeConfig,
        current: Callable[[], NodeCore],
        ports: Ports,
        wake: Callable[[], None],
        wake_within: Callable[[int], None],
        failed: Callable[[BaseException], None],
        refusals: Counter[str],
        *,
        tls: bool = False,
        certificate_reason: Callable[[], str] = str,
        limiter: ConnectionLimiter | None = None,
    ) -> None:
        """`current`, `wake`, `wake_within` and `failed`: as of Calls. `refusals`: counts calls refused at the door, by
        kind. `tls`: whether callers have certificates. `certificate_reason`: for the status. `limiter`: counts
        connections and calls; None: nobody does."""
        calls = Calls(current, wake, wake_within, failed)
        callers = Callers(
            Access(tls=tls, admin_names=config.tls.admin_names, client_names=config.tls.client_names),
            lambda: current().state.access,
            lambda: current().state.settings.rights,
            lambda: current().clock.now_ms(),
        )
        self.node = Node(
            calls,
            AuditLog(ports.disk, ports.executor, ports.clock.wall_ms, config.node.id),
            ScheduleStreams(calls, config.limits.stream_batches_max),
            ConsumerStreams(calls, config.delivery.stream_bytes_max),
            StatusStreams(calls, config.limits.status_streams_max, certificate_reason),
            Backups(calls, ports.disk, ports.executor),
            tls=tls,
        )
        gate = Gate(
            callers,
            lambda: current().state,
            self.node.audit,
            _admitted if limiter is None else limiter.admit,
            lambda: not_current(current()),
        )
        self.health = HealthReporter()
        self.server = client_server(config.limits, self.node, gate, self.health, refusals, limiter)
