"""The pure parts of the cluster clock: samples, slewing, drift, holdover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.replication.clock_intervals import (
    AGE_NS_MAX,
    PPB,
    RATE_PPB_MAX,
    SAMPLES_MAX,
    ClockSamples,
    DriftEstimate,
    Interval,
)
from tickwheel.replication.cluster_clock import FRESH_MS, HeardTime, Holdover, SlewedTime, TimeState

MS = 1_000_000
SECOND = 1_000 * MS
DRIFT_PPB = 200_000

EXCHANGE = st.tuples(st.integers(1, 3 * SECOND), st.integers(0, 50 * MS), st.integers(0, 50 * MS))
"""(pause before it, way there, way back)"""


@given(st.lists(EXCHANGE, min_size=1, max_size=3 * SAMPLES_MAX), st.integers(-DRIFT_PPB, DRIFT_PPB))
def test_samples_hold_the_clock_however_lopsided_the_way(exchanges: list[tuple[int, int, int]], drift_ppb: int) -> None:
    """The interval holds what the other clock shows: delays may be all on one way, clocks may drift as assumed."""
    samples = ClockSamples()
    now_ns = 10 * SECOND

    def shown_at(at_ns: int) -> int:
        return 5 * SECOND + at_ns + at_ns * drift_ppb // PPB

    for pause_ns, there_ns, back_ns in exchanges:
        asked_ns = now_ns + pause_ns
        now_ns = asked_ns + there_ns + back_ns
        low_ns = shown_at(asked_ns + there_ns) // MS * MS
        samples.add(now_ns, Interval(low_ns, low_ns + MS + there_ns + back_ns + 20 * 1_000), 0, DRIFT_PPB)
        common = samples.at(now_ns, 0, DRIFT_PPB)
        assert common is not None
        assert common.low_ns - 1 <= shown_at(now_ns) <= common.high_ns + 1
    assert samples.at(now_ns + AGE_NS_MAX + 1, 0, DRIFT_PPB) is None


@given(st.integers(-3_600 * SECOND, 3_600 * SECOND).filter(lambda by: abs(by) > 200 * MS))
def test_a_step_is_believed_at_once(by_ns: int) -> None:
    """Samples of before the step of a clock do not keep it where it was."""
    samples = ClockSamples()
    for turn in range(5):
        at_ns = turn * SECOND
        samples.add(at_ns, Interval(at_ns, at_ns + MS), 0, DRIFT_PPB)
    at_ns = 5 * SECOND
    samples.add(at_ns, Interval(at_ns + by_ns, at_ns + by_ns + MS), 0, DRIFT_PPB)
    assert samples.at(at_ns, 0, DRIFT_PPB) == (at_ns + by_ns, at_ns + by_ns + MS)


TURN = st.tuples(
    st.integers(0, 20 * SECOND), st.integers(-3_600 * SECOND, 3_600 * SECOND), st.integers(-RATE_PPB_MAX, RATE_PPB_MAX)
)
"""(time that passes, how far it is off, rate)"""


@given(st.lists(TURN, max_size=12), st.integers(500, 500_000))
def test_slewed_time_never_goes_back(turns: list[tuple[int, int, int]], slew_ppm: int) -> None:
    """However it is steered: not back, and not faster than rate and slew together."""
    time = SlewedTime(0, 10**18)
    now_ns, rate_ppb = 0, 0
    last_ns = time.at(now_ns)
    for passed_ns, off_ns, next_rate_ppb in turns:
        for part in (passed_ns // 3, passed_ns - passed_ns // 3, 1):
            now_ns += part
            reading_ns = time.at(now_ns)
            fastest_ppb = PPB + rate_ppb + slew_ppm * 1_000
            assert 0 <= reading_ns - last_ns <= part * fastest_ppb // PPB + 2
            last_ns = reading_ns
        rate_ppb = next_rate_ppb
        time.steer(now_ns, off_ns, over_ns=2 * SECOND, slew_ppb_max=slew_ppm * 1_000, rate_ppb=rate_ppb)
        assert time.at(now_ns) == last_ns, "it is steered, not set"


@given(st.integers(-100 * SECOND, 100 * SECOND))
def test_what_it_was_off_by_is_made_good(off_ns: int) -> None:
    """Small amounts within two seconds, large ones at the limit: a tenth of a second a second. Then it is done."""
    time = SlewedTime(0, 0)
    time.steer(0, off_ns, over_ns=2 * SECOND, slew_ppb_max=100_000_000, rate_ppb=0)
    done_ns = max(2 * SECOND, abs(off_ns) * 10)
    assert abs(time.at(done_ns) - (done_ns + off_ns)) <= 2
    assert abs(time.at(done_ns // 2) - (done_ns // 2 + off_ns // 2)) <= 4
    assert abs(time.left_ns(done_ns // 2) - off_ns // 2) <= 4
    assert time.left_ns(done_ns) == 0


@given(
    st.integers(-RATE_PPB_MAX * 9 // 10, RATE_PPB_MAX * 9 // 10),
    st.lists(st.tuples(st.integers(450 * MS, 3 * SECOND), st.integers(0, 5 * MS), st.floats(-1, 1)), max_size=40),
)
def test_drift_is_never_overdone(rate_ppb: int, agreements: list[tuple[int, int, float]]) -> None:
    """Agreements that err within what they say: the rate goes the right way, and never further than it should."""
    drift = DriftEstimate()
    at_ns = 0
    for pause_ns, error_ns, part in agreements:
        at_ns += pause_ns
        drift.add(at_ns, at_ns + at_ns * rate_ppb // PPB + int(error_ns * part), error_ns)
        assert abs(drift.rate_ppb) <= abs(rate_ppb) + 2
        assert drift.rate_ppb * rate_ppb >= 0
        if drift.rate_ppb:
            assert abs(rate_ppb - drift.rate_ppb) <= drift.doubt_ppb + 2


def test_two_percent_are_found_in_a_second() -> None:
    """The worst oscillator of the promises: most of it is corrected from the second agreement on."""
    drift = DriftEstimate()
    for turn in range(3):
        at_ns = turn * SECOND // 2
        drift.add(at_ns, at_ns + at_ns * 20_000_000 // PPB, MS)
    assert 17_000_000 < drift.rate_ppb <= 20_000_000


def test_a_step_of_the_agreed_time_is_no_drift() -> None:
    """All clocks are set ahead by ten minutes: that says nothing of the oscillator."""
    drift = DriftEstimate()
    for turn in range(10):
        at_ns = turn * SECOND
        drift.add(at_ns, at_ns + (600 * SECOND if turn >= 5 else 0), MS)
    assert drift.rate_ppb == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 20 * SECOND), st.integers(0, 3 * SECOND), st.integers(0, 5 * SECOND), st.booleans()),
        min_size=1,
        max_size=40,
    ),
    st.integers(-DRIFT_PPB, DRIFT_PPB),
)
def test_what_masters_said_is_carried_on(words: list[tuple[int, int, int, bool]], drift_ppb: int) -> None:
    """However late words arrive: never further than the time really is, and no further behind than the quickest, nor
    than what is told of how late they were."""
    heard = HeardTime()
    assert heard.furthest_ns(0) is None

    def time_at(now_ns: int) -> int:
        return 10**18 + now_ns + now_ns * drift_ppb // PPB

    now_ns = SECOND
    quickest_ns: list[tuple[int, int]] = []
    for pause_ns, late_ns, doubt_ns, asked in words:
        now_ns += pause_ns
        heard.hear(now_ns, time_at(now_ns) - late_ns, late_ns + doubt_ns)
        if asked:
            heard.hear_bound(now_ns, time_at(now_ns) + doubt_ns // 4)
        quickest_ns.append((now_ns, late_ns))
    furthest_ns, doubt_ns = heard.furthest_ns(now_ns), heard.doubt_ns(now_ns, DRIFT_PPB)
    assert furthest_ns is not None
    lately = min(late_ns for at_ns, late_ns in quickest_ns if now_ns - at_ns <= 10 * SECOND)
    drifted_ns = 10 * SECOND * DRIFT_PPB // PPB
    assert time_at(now_ns) - lately - drifted_ns - 2 <= furthest_ns <= time_at(now_ns) + doubt_ns + 2
    assert time_at(now_ns) <= furthest_ns + heard.late_ns(now_ns, DRIFT_PPB) + 2
    assert doubt_ns <= 200 * SECOND * DRIFT_PPB // PPB, "words of hours ago do not count"


def test_what_was_heard_before_a_jump_of_the_own_clock_is_less_far_ahead() -> None:
    """And what was heard since is as it was."""
    heard, jumped_ns = HeardTime(), 20 * SECOND
    heard.hear(SECOND, 100 * SECOND, 0)
    heard.hear_bound(SECOND, 100 * SECOND)
    now_ns = 2 * SECOND + jumped_ns
    assert heard.furthest_ns(now_ns) == 121 * SECOND
    heard.set_back(now_ns, jumped_ns)
    assert heard.furthest_ns(now_ns) == 101 * SECOND and heard.late_ns(now_ns, 0) == 0
    heard.hear(now_ns, 102 * SECOND, 0)
    heard.set_back(now_ns, jumped_ns)
    assert heard.furthest_ns(now_ns) == 102 * SECOND


@pytest.mark.parametrize(
    ("own_allowed", "agreed_ms", "now_ms", "state", "may"),
    [
        (False, None, 10**9, TimeState.UNAGREED, False),
        (True, None, 10**9, TimeState.OWN, True),
        (False, 0, FRESH_MS, TimeState.AGREED, True),
        (True, 0, FRESH_MS, TimeState.AGREED, True),
        (False, 0, FRESH_MS + 1, TimeState.HOLDOVER, True),
        (False, 0, 599_999, TimeState.HOLDOVER, True),
        (False, 0, 600_001, TimeState.EXPIRED, False),
        (True, 0, 600_001, TimeState.EXPIRED, False),
    ],
)
def test_states_of_the_agreement(
    own_allowed: bool, agreed_ms: int | None, now_ms: int, state: TimeState, may: bool
) -> None:
    """The table of the module, and what a master may do in each state. The operator's word is for the start alone."""
    holdover = Holdover(600_000 * MS, own_clock_allowed=own_allowed)
    if agreed_ms is not None:
        holdover.agreed(agreed_ms * MS)
        holdover.agreed(agreed_ms * MS - SECOND)
    assert holdover.state(now_ms * MS) is state
    until_ns = holdover.dispatch_until_ns()
    assert (until_ns is None or now_ms * MS < until_ns) is may
