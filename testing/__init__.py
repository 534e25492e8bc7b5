"""A cluster in memory, with a clock that tests move, for programs that use tickwheel. The public names of this folder.

Nothing is imported before it is used: a test session that only names the fixtures pays for no node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.testing.clock import Clock, SyncClock
    from tickwheel.testing.cluster import FakeCluster, SyncFakeCluster

__all__ = ["Clock", "FakeCluster", "SyncClock", "SyncFakeCluster"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from tickwheel.testing import clock, cluster

        return getattr(clock if name.endswith("Clock") else cluster, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
