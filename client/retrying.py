"""How the messages of a group come again after a nack, an error of their handler, or a lease that ran out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from tickwheel.client.answers import reader
from tickwheel.client.moments import span_ms_of, span_of
from tickwheel.client.requests import request_of
from tickwheel.proto import admin_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialBackoff:
    """Pauses that grow: `initial` after the first attempt, each further one `factor` times as long, none above
    `maximum`."""

    initial: timedelta
    """At least a millisecond."""
    factor: float = 2.0
    """1 to 100."""
    maximum: timedelta
    jitter: float = 0.0
    """A pause is longer or shorter by up to this share of it, by chance: 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """A group's own policy. Without `backoff` the pauses are the delay levels from level 3 on."""

    backoff: ExponentialBackoff | None = None
    attempts_max: int = 0
    """Deliveries of a message before it is a dead letter, 1 to 255; 0: the cluster's setting, 16 at first."""


def policy_message(policy: RetryPolicy | None) -> admin_pb2.RetryPolicy | None:
    """The policy for a node; None stays None."""
    if policy is None:
        return None
    wire = request_of(admin_pb2.RetryPolicy, attempts_max=policy.attempts_max)
    if policy.backoff is not None:
        backoff = request_of(
            admin_pb2.ExponentialBackoff,
            initial_ms=span_ms_of("initial", policy.backoff.initial),
            factor=policy.backoff.factor,
            max_ms=span_ms_of("maximum", policy.backoff.maximum),
            jitter=policy.backoff.jitter,
        )
        wire.exponential.CopyFrom(backoff)
    return wire


_backoff_of = reader(ExponentialBackoff, admin_pb2.ExponentialBackoff, maximum=lambda wire: span_of(wire.max_ms))
policy_of = reader(
    RetryPolicy,
    admin_pb2.RetryPolicy,
    backoff=lambda wire: _backoff_of(wire.exponential) if wire.HasField("exponential") else None,
)
