"""A time that is corrected only by running faster or slower, as a function of the monotonic clock.

Between two calls of `steer` it is the monotonic clock at a rate, plus a correction that is spread over a while. It
never goes back, except by `put`. Pure; all readings are of one monotonic clock and never go back.
"""

from __future__ import annotations

PPB = 1_000_000_000


class SlewedTime:
    """Nanoseconds since the Unix epoch as a function of monotonic_ns."""

    __slots__ = ("_rate_ppb", "_since_ns", "_slew_for_ns", "_slew_ppb", "_time_ns")

    def __init__(self, at_ns: int, time_ns: int) -> None:
        self._since_ns = at_ns
        self._time_ns = time_ns
        self._rate_ppb = 0
        self._slew_ppb = 0
        self._slew_for_ns = 0

    def at(self, now_ns: int) -> int:
        """The time at a reading of the monotonic clock, not before the last `steer` or `put`."""
        passed_ns = now_ns - self._since_ns
        slewed_ns = passed_ns if passed_ns < self._slew_for_ns else self._slew_for_ns
        # One division for both terms, so that rounding cannot make the time go back.
        return self._time_ns + passed_ns + (passed_ns * self._rate_ppb + slewed_ns * self._slew_ppb) // PPB

    def left_ns(self, now_ns: int) -> int:
        """The correction that is still to come; above 0 the time is behind."""
        return max(0, self._slew_for_ns - (now_ns - self._since_ns)) * self._slew_ppb // PPB

    def steer(self, now_ns: int, off_ns: int, *, over_ns: int, slew_ppb_max: int, rate_ppb: int) -> None:
        """From now on run at `rate_ppb`, and add `off_ns` spread over `over_ns`, or longer to stay within the limit."""
        self._time_ns = self.at(now_ns)
        self._since_ns = now_ns
        self._rate_ppb = rate_ppb
        wanted_ppb = -(-abs(off_ns) * PPB // over_ns)
        speed_ppb = min(wanted_ppb, slew_ppb_max)
        self._slew_for_ns = abs(off_ns) * PPB // speed_ppb if speed_ppb else 0
        self._slew_ppb = speed_ppb if off_ns > 0 else -speed_ppb

    def put(self, now_ns: int, time_ns: int) -> None:
        """Set the time, backwards too: only for a time by which nobody has acted yet."""
        self._since_ns = now_ns
        self._time_ns = time_ns
        self._slew_for_ns = self._slew_ppb = 0
