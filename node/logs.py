"""The log of a node on standard error: one event a line, with node id, term and role.

Owns format, level and the rate limit of warnings. Libraries that use `logging` get the same format.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from tickwheel.replication.ports import Clock

WARNING_PERIOD_NS = 5_000_000_000
"""The same warning is written once in this time; the next one states how many were left out."""

EVENTS_MAX = 1_024
"""Different warnings whose times are kept."""


class RateLimit:
    """Leaves out repeats of warnings; errors always pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_ns: dict[tuple[str, str], int] = {}
        self._left_out: dict[tuple[str, str], int] = {}
        self.suppressed = 0

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor."""
        if method != "warning":
            return event
        left_out = self._admit((str(event.get("event")), str(event.get("peer", ""))))
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            event["repeated"] = left_out
        return event

    def filter(self, record: logging.LogRecord) -> bool:
        """A filter for `logging`, for warnings of libraries: DropEvent would cause a traceback there."""
        if record.levelno != logging.WARNING or isinstance(record.msg, dict):  # a dict is an event from structlog
            return True
        left_out = self._admit((f"{record.name}: {record.msg}", ""))
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (repeated {left_out} times)", ()
        return left_out is not None

    def _admit(self, key: tuple[str, str]) -> int | None:
        """The number of repeats left out since the last one; None: leave this one out."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_ns.get(key, 0):
            self._left_out[key] = self._left_out.get(key, 0) + 1
            self.suppressed += 1
            return None
        if len(self._next_ns) >= EVENTS_MAX:
            self._next_ns.clear()
            self._left_out.clear()
        self._next_ns[key] = now_ns + WARNING_PERIOD_NS
        return self._left_out.pop(key, 0)


class NodeContext:
    """Adds the node id to each event, and term and role once the core has set them."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self.read: Callable[[], Mapping[str, object]] = dict

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor."""
        event["node"] = self._node_id
        for key, value in self.read().items():
            event.setdefault(key, value)
        return event


def set_up_logs(
    level: str, log_format: str, node_id: str, clock: Clock, stream: TextIO | None = None
) -> tuple[NodeContext, RateLimit]:
    """Configure structlog and logging of this process."""
    target = stream or sys.stderr
    context, limit = NodeContext(node_id), RateLimit(clock)
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        context,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(default=str)
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=target.isatty())
    )
    structlog.configure(
        processors=[limit, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    handler.addFilter(limit)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(getattr(logging, level.upper()))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return context, limit


def logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger; events are short sentences, values go into fields."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger(name)
    return bound
