"""Prints what constraints.txt should hold: the exact version of all that an installation brings.

Walks from tickwheel's own requirements (all extras), so that other things that happen to lie in the
environment stay out. To raise a version, install it, `make constraints`, run the tests.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("", "demo", "bench", "spark", "docs", "dev")
HEADER = "# Exact versions for a repeatable installation; written by `make constraints`."
LATER = {"numpy": ("3.15", "2.5.5")}
"""Where what is installed here has no wheel for a newer Python: from which one on, and the version that it gets."""


def wanted(name: str, extras: set[str]) -> list[Requirement]:
    """The requirements of an installed distribution here, with the given extras."""
    requirements = [Requirement(line) for line in distribution(name).requires or []]
    return [
        item
        for item in requirements
        if item.marker is None or any(item.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def closure(root: str, extras: set[str]) -> dict[str, str]:
    """Name and version of everything that `root` leads to, without itself."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, frozenset(extras))]
    while waiting:
        name, chosen = waiting.pop()
        if (name, chosen) in seen:
            continue
        seen.add((name, chosen))
        for item in wanted(name, {"", *chosen}):
            key = canonicalize_name(item.name)
            try:
                found[key] = distribution(key).version
            except PackageNotFoundError:
                sys.exit(f"{key}, which {name} needs, is not installed: run `make install` first")
            waiting.append((key, frozenset(item.extras)))
    return found


def pins(versions: dict[str, str]) -> dict[str, str]:
    """`name==version` -> the marker of the Pythons that it is for; empty: all."""
    found = {}
    for name, version in sorted(versions.items()):
        if name in LATER:
            since, later = LATER[name]
            found[f"{name}=={version}"] = f'python_version < "{since}"'
            found[f"{name}=={later}"] = f'python_version >= "{since}"'
        else:
            found[f"{name}=={version}"] = ""
    return found


def main() -> None:
    """Write to standard output."""
    print(HEADER)
    for pin, marker in pins(closure("tickwheel", set(EXTRAS))).items():
        print(f"{pin} ; {marker}" if marker else pin)


if __name__ == "__main__":
    main()
