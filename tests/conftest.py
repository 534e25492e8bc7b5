"""Settings for every test: hypothesis profiles, and the seed of a failing run in the output."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Shared, slow machines: no deadline, since how long an example takes says nothing about its truth.
settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("TICKWHEEL_HYPOTHESIS_PROFILE", "default"))
