"""The body of a request as JSON, and the fields of a request from a browser, checked one by one.

A wrong field is a RequestRefused with field, value and limit, as a node would answer it. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tickwheel.client.errors import printable, refused
from tickwheel.client.messages import KEY_LENGTH_MAX

TEXT_MAX = KEY_LENGTH_MAX
"""Characters of any text: a key is the longest. What is shorter in the cluster, the cluster refuses."""
MS_MAX = 253_402_300_799_999
"""The end of the year 9999."""


def json_of(content: bytes) -> Any:
    """A body as JSON that says each field once, in UTF-8, all of whose texts are characters. Raises ValueError."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_said_once)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text has half of a pair of surrogates, which is no character") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    return value


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{printable(twice[:100])} is given more than once")
    return found


class Asked:
    """Fields by name: of a query (all texts) or of a JSON object."""

    def __init__(self, values: Mapping[str, Any], known: Sequence[str]) -> None:
        """Raises RequestRefused for a field that is not among the known ones."""
        self._values = values
        for name in values:
            if name not in known:
                raise refused(str(name)[:100], "given", f"one of {', '.join(known)}" if known else "no field")

    def has(self, name: str) -> bool:
        """Whether the field is given."""
        return self._values.get(name) is not None

    def text(self, name: str, default: str | None = None, *, length_max: int = TEXT_MAX) -> str:
        """A text; without a default it must be given and not be empty."""
        value = self._values.get(name)
        if value is None or (value == "" and default is not None):
            if default is None:
                raise refused(name, "absent", "a text")
            return default
        if not isinstance(value, str):
            raise refused(name, value, "a text")
        if not value or len(value) > length_max:
            raise refused(name, value, f"1 to {length_max:,} characters")
        return value

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from low to high; in a query as decimal digits."""
        value = self._values.get(name)
        if value is None or value == "":
            if default is None:
                raise refused(name, "absent", f"a whole number from {low} to {high}")
            return default
        if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isascii():
            digits = value.removeprefix("-")
            value = int(value) if digits.isdecimal() else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refused(name, value, f"a whole number from {low} to {high}")
        return value

    def moment_ms(self, name: str, default: int | None = None) -> int:
        """Milliseconds since 1970."""
        return self.whole(name, 0, MS_MAX, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._values.get(name, default)
        if value in ("true", "false"):
            return bool(value == "true")
        if not isinstance(value, bool):
            raise refused(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of the allowed texts."""
        value = self._values.get(name) or default
        if not isinstance(value, str) or value not in allowed:
            raise refused(name, "absent" if value is None else value, f"one of {', '.join(allowed)}")
        return value

    def numbers(self, name: str, count_max: int) -> list[int] | None:
        """A list of whole numbers, 1 to count_max of them; None if it is not given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not 0 < len(value) <= count_max:
            raise refused(name, f"{len(value)} items" if isinstance(value, list) else value, f"1 to {count_max} items")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 63:
                raise refused(name, item, "a whole number from 0 on")
        return list(value)
