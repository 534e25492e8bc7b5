"""Retry policy of a group: after which pauses a message comes again (delay levels or exponential backoff), and how
often.

The policy is replicated. Only the master turns it into times (and draws the jitter); the command holds the times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import invalid
from tickwheel.proto import admin_pb2

FIRST_LEVEL = 3
"""Delay level of the first retry; each further retry is one level higher."""
ATTEMPTS_MOST = 255
"""Most deliveries of a message: a unit keeps the count in one byte."""
FACTOR_MOST = 100.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses and attempts of a group's retries, with the fields of RetryPolicy in admin.proto.

    `initial_ms` 0: the delay levels. `attempts_max` 0: the setting.
    """

    initial_ms: int = 0
    factor: float = 0.0
    max_ms: int = 0
    jitter: float = 0.0
    attempts_max: int = 0

    def message(self) -> admin_pb2.RetryPolicy:
        """The policy as a message."""
        message = admin_pb2.RetryPolicy(attempts_max=self.attempts_max)
        if self.initial_ms:
            backoff = message.exponential
            backoff.initial_ms, backoff.factor = self.initial_ms, self.factor
            backoff.max_ms, backoff.jitter = self.max_ms, self.jitter
        return message

    def pauses_ms(
        self, attempts: NDArray[np.uint32], levels_ms: NDArray[np.int64], draw: Callable[[], float]
    ) -> NDArray[np.int64]:
        """The pause of each message after it failed in this attempt (1: the first). `draw` returns a number from 0 to
        below 1."""
        failed = np.maximum(attempts.astype(np.int64), 1)
        if not self.initial_ms:
            pauses: NDArray[np.int64] = levels_ms[np.minimum(FIRST_LEVEL + failed - 1, len(levels_ms)) - 1]
            return pauses
        grown = self.initial_ms * np.power(self.factor, np.minimum(failed - 1, ATTEMPTS_MOST).astype(np.float64))
        capped = np.minimum(grown, float(self.max_ms))
        if self.jitter:
            capped *= 1 + self.jitter * (2 * np.array([draw() for _ in range(len(failed))]) - 1)
        drawn: NDArray[np.int64] = capped.astype(np.int64)
        return drawn


def policy_of(message: admin_pb2.RetryPolicy, delay_ms_max: int) -> RetryPolicy:
    """A requested policy, checked. Raises RequestError."""
    if message.attempts_max > ATTEMPTS_MOST:
        raise invalid("retry.attempts_max", message.attempts_max, f"0 to {ATTEMPTS_MOST}")
    if not message.HasField("exponential"):
        return RetryPolicy(attempts_max=message.attempts_max)
    backoff = message.exponential
    if not 1 <= backoff.initial_ms <= delay_ms_max:
        raise invalid("retry.exponential.initial_ms", backoff.initial_ms, f"1 to {delay_ms_max}")
    if not backoff.initial_ms <= backoff.max_ms <= delay_ms_max:
        raise invalid("retry.exponential.max_ms", backoff.max_ms, f"initial_ms to {delay_ms_max}")
    if not 1.0 <= backoff.factor <= FACTOR_MOST:
        raise invalid("retry.exponential.factor", backoff.factor, f"1 to {FACTOR_MOST:g}")
    if not 0.0 <= backoff.jitter <= 1.0:
        raise invalid("retry.exponential.jitter", backoff.jitter, "0 to 1")
    return RetryPolicy(backoff.initial_ms, backoff.factor, backoff.max_ms, backoff.jitter, message.attempts_max)
