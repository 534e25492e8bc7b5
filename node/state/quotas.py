"""Quotas as a setting says them: `orders=1000 *=5000`, a number by name, `*` for everybody else. What the number means
(messages a second, messages pending) is the setting's business.

Pure. Kept normalised: by name, each once. They change nothing that apply does; they stand in the replicated settings
so that every master keeps the same ones.
"""

from __future__ import annotations

import re
from functools import lru_cache

QUOTAS_MAX = 1_000
RATE_MAX = 1_000_000_000
RULE = f"up to {QUOTAS_MAX} of NAME=NUMBER (1 to {RATE_MAX}) with blanks, * for all other names; or empty"
OTHERS = "*"

_QUOTA = re.compile(r"([A-Za-z0-9_\-.%]{1,127}|\*)=([1-9][0-9]{0,9})")


@lru_cache(maxsize=64)
def parse_quotas(text: str) -> dict[str, int] | None:
    """The numbers by name; None if the text is none."""
    found: dict[str, int] = {}
    for part in text.split():
        match = _QUOTA.fullmatch(part)
        if match is None or match[1] in found or int(match[2]) > RATE_MAX or len(found) >= QUOTAS_MAX:
            return None
        found[match[1]] = int(match[2])
    return found


def normalised_quotas(text: str) -> str | None:
    """The text as it is kept; None if it is none."""
    found = parse_quotas(text)
    return None if found is None else " ".join(f"{name}={rate}" for name, rate in sorted(found.items()))
