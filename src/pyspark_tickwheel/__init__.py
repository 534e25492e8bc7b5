"""Lets Spark find the data source `tickwheel` by itself: it imports every top-level package named `pyspark_*`.

Nothing is imported before Spark asks for `DefaultSource`, and an installation without the extra says it has none: one
package that raises here would switch the discovery off for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.pipeline.source import TickwheelSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tickwheel.pipeline.source import TickwheelSource
    except ImportError as error:
        raise AttributeError(f"the data source tickwheel needs the extra tickwheel[spark]: {error}") from error
    return TickwheelSource
