"""Quotas in a setting: `orders=1000 *=5000`, a number by name, `*` for everybody else. The setting defines what the
number counts (messages a second, messages pending).

Pure. A text is kept normalised: by name, each once. Quotas change nothing that apply does; they are replicated so that
every master enforces the same ones.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX

QUOTAS_MAX = 1_000
RATE_MAX = 1_000_000_000
QUOTAS_LENGTH_MAX = QUOTAS_MAX * len(f"{'n' * TOPIC_NAME_LENGTH_MAX}={RATE_MAX} ")
"""Characters of a normalised text at most. Masters refuse longer ones."""
RULE = f"up to {QUOTAS_MAX} of NAME=NUMBER (1 to {RATE_MAX}) with blanks, * for all other names; or empty"
OTHERS = "*"

_QUOTA = re.compile(r"([A-Za-z0-9_\-.%]{1,127}|\*)=([1-9][0-9]{0,9})")


@lru_cache(maxsize=64)
def parse_quotas(text: str) -> dict[str, int] | None:
    """Name -> number; None if the text is invalid."""
    found: dict[str, int] = {}
    for part in text.split():
        match = _QUOTA.fullmatch(part)
        if match is None or match[1] in found or int(match[2]) > RATE_MAX or len(found) >= QUOTAS_MAX:
            return None
        found[match[1]] = int(match[2])
    return found


def normalised_quotas(text: str) -> str | None:
    """The normalised text; None if it is invalid."""
    found = parse_quotas(text)
    return None if found is None else " ".join(f"{name}={rate}" for name, rate in sorted(found.items()))
