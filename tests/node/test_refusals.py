"""What a refusal says: field, value and limit, and times in words beside their milliseconds."""

from __future__ import annotations

import pytest

from tickwheel.client.moments import duration_of
from tickwheel.node.failure import invalid
from tickwheel.node.state.settings import BOUNDS, Settings, changed
from tickwheel.node.times import span_text
from tickwheel.proto import admin_pb2

DAY_MS = 86_400_000
NOW_MS = 1_795_000_000_000
NOW = "2026-11-18T11:06:40Z"


@pytest.mark.parametrize(
    ("field", "value", "limit", "told"),
    [
        ("lease_ms", 500, "1000 to 600000", "lease_ms: 500: 1000 (1s) to 600000 (10m)"),
        ("delay_ms[3]", 2_000 * DAY_MS, "at most 95040000000", "172800000000 (2000d): at most 95040000000 (1100d)"),
        ("shift_ms", -5 * DAY_MS, "at most 86400000 either way", "-432000000 (-5d): at most 86400000 (1d) either way"),
        ("late_ms_max", 3, "1000 to 86400000, or 0", "late_ms_max: 3: 1000 (1s) to 86400000 (1d), or 0"),
        ("bucket_ms", 7, "1000, 60000 or 3600000", "bucket_ms: 7: 1000 (1s), 60000 (1m) or 3600000 (1h)"),
        ("retry.exponential.max_ms", 5, "initial_ms to 60000", "max_ms: 5: initial_ms to 60000 (1m)"),
        ("from_ms", NOW_MS, f"below until_ms ({NOW_MS})", f"{NOW_MS} ({NOW}): below until_ms ({NOW_MS}, {NOW})"),
        (
            "due_ms",
            NOW_MS + 2,
            f"at most 86400000 ms ahead of now ({NOW_MS})",
            f"({NOW[:-1]}.002Z): at most 86400000 ms (1d) ahead of now ({NOW_MS}, {NOW})",
        ),
        ("due_ms", 1 << 62, "0 to 9000", "due_ms: 4611686018427387904: 0 to 9000 (9s)"),
        # Numbers that are no times
        ("bucket_ms", 7, "at most 10000 buckets an answer", "bucket_ms: 7: at most 10000 buckets an answer"),
        ("due_ms", "16 bytes", "10000 elements of 8 bytes", "due_ms: 16 bytes: 10000 elements of 8 bytes"),
        ("due_ms_min", 2_000, "milliseconds since 1970, or 0", ": milliseconds since 1970, or 0"),
        ("sequence", 5_000, "1 to 9000", "sequence: 5000: 1 to 9000"),
        ("name", "1000", "1000 to 2000", "name: 1000: 1000 to 2000"),
    ],
)
def test_times_have_words_beside_their_milliseconds(field: str, value: object, limit: str, told: str) -> None:
    """For people. Programs get the numbers alone."""
    failure = invalid(field, value, limit).failure
    assert failure.message.startswith(f"{field}: ") and failure.message.endswith(told)
    assert failure.metadata == {"field": field, "value": str(value), "limit": limit}


@pytest.mark.parametrize("name", [name for name in BOUNDS if "_ms" in name])
def test_every_setting_that_is_a_time_is_refused_in_words(name: str) -> None:
    """As `settings set retention=7d` takes it: the words read back are the bound."""
    most = BOUNDS[name][1]
    with pytest.raises(Exception, match=name) as caught:
        changed(Settings(), admin_pb2.Settings(**{name: most + 1_000}))  # type: ignore[arg-type]
    assert f"{most} ({span_text(most)})" in str(caught.value)
    assert duration_of(span_text(most)).total_seconds() * 1_000 == most
