"""Values of arguments that are taken without pydantic.

typer has pydantic check every value, also one that was not given. To import that takes 0.15 s of processor: a third of
a short command, half of a node that is a fork. So a value that plainly is what its parameter wants is taken here, and
becomes what typer would make of it. typer takes all others, and words what is wrong with them.
"""

from __future__ import annotations

import math
import os
import re
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,14})")
FRACTION = re.compile(rf"{WHOLE.pattern}(?:\.[0-9]{{1,9}})?")
NOT_PLAIN = object()


def take_plain_values(command: Any) -> None:
    """Have a command, and those below it, take plain values themselves. Idempotent."""
    if not isinstance(command.get_params, partial):  # it does not yet
        command.get_params = partial(_parameters, command.get_params)
    for below in getattr(command, "commands", {}).values():
        take_plain_values(below)


def _parameters(all_of: Any, context: Any) -> Any:
    """Those of a command, with that for its help, which typer adds when it is asked."""
    parameters = all_of(context)
    for parameter in parameters:
        typers = getattr(parameter, "get_runtime_param", None)  # None: a typer that takes values in another way
        if typers is not None and not isinstance(typers, partial):
            parameter.get_runtime_param = partial(_Taking, typers)
    return parameters


class _Taking:
    """Takes the values of a parameter, in the place of what typer makes for it."""

    def __init__(self, typers: Any) -> None:
        self._typers = typers

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Called by typer."""
        try:
            taken = plain(param, value)
        except AttributeError:  # a later typer keeps the wanted type elsewhere
            taken = NOT_PLAIN
        return self._typers().coerce(value, param=param, ctx=ctx) if taken is NOT_PLAIN else taken


def plain(parameter: Any, given: Any) -> Any:
    """What typer makes of a text or a default; NOT_PLAIN: only typer knows."""
    kind, rules = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if given is None:
        return () if parameter.multiple or parameter.nargs == -1 else None
    if rules.parser is not None:
        return NOT_PLAIN
    if kind == list[str]:
        return list(given) if isinstance(given, list | tuple) and {*map(type, given)} <= {str} else NOT_PLAIN
    if kind is str:
        return given if type(given) is str else NOT_PLAIN
    if kind is int or kind is float:
        return _number(kind, rules, given)
    if kind is Path:
        return _path(rules, given)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return given if isinstance(given, kind) else NOT_PLAIN
    return NOT_PLAIN


def _number(kind: type[int] | type[float], rules: Any, given: Any) -> Any:
    text = WHOLE if kind is int else FRACTION
    if type(given) not in (int, kind) and not (type(given) is str and text.fullmatch(given)):
        return NOT_PLAIN
    number = kind(given)
    above = rules.min is None or number >= rules.min
    below = rules.max is None or number <= rules.max
    return number if above and below and math.isfinite(number) else NOT_PLAIN


def _path(rules: Any, given: Any) -> Any:
    special = rules.path_type is not None or rules.allow_dash or rules.resolve_path or rules.writable
    if special or not (rules.file_okay and rules.dir_okay) or not (type(given) is str or isinstance(given, Path)):
        return NOT_PLAIN
    path = Path(given)
    try:
        path.stat()
    except OSError:
        return NOT_PLAIN if rules.exists else path
    return path if os.access(path, os.R_OK) else NOT_PLAIN
