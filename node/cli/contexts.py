"""Contexts of the command line: addresses, TLS files and token of a cluster under a name, and which of them holds.

Owns the file `contexts.json` below $XDG_CONFIG_HOME/tickwheel, readable by its user alone, since it may hold tokens.
Each value is that of the flag, else of the environment, else of the context, else the default. A context's TLS files
and token go only to addresses of that context: whoever names others gets neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from tickwheel.storage.plain_file import make_directory, replace_file

ADDRESSES_FALLBACK = "127.0.0.1:7700"
VARIABLE = "TICKWHEEL_CONTEXT"
TOKEN_VARIABLE = "TICKWHEEL_TOKEN"
ADDRESS_VARIABLES = ("TICKWHEEL_ADDRESSES", "TICKWHEEL_ADDRESS")
VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FILE_BYTES_MAX = 1 << 20


class ContextError(Exception):
    """A context is unknown, or the file with the contexts is not as it must be; the text is for people."""


@dataclass(frozen=True, slots=True)
class Context:
    """What one name stands for; an empty text: not stated."""

    addresses: str
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""
    token: str = ""


TLS_VARIABLES = {f"tls_{part.lower()}": f"TICKWHEEL_TLS_{part}" for part in ("CA", "CERT", "KEY", "NAME")}
NO_CONTEXT = Context("")


@dataclass
class Contexts:
    """The contexts by name, and the one in use; empty: none."""

    known: dict[str, Context] = field(default_factory=dict)
    current: str = ""

    def get(self, name: str) -> Context:
        """One context. Raises ContextError for an unknown one."""
        found = self.known.get(name)
        if found is None:
            names = f"known are {', '.join(sorted(self.known))}" if self.known else "there is none yet"
            raise ContextError(f"context {name}: unknown; {names} (tickwheel context add)")
        return found


def file() -> Path:
    """Where they lie. A relative $XDG_CONFIG_HOME does not count, as its specification says. Raises ContextError for a
    user without a home, as in many containers."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(home) if Path(home).is_absolute() else Path.home() / ".config"
    except RuntimeError:
        raise ContextError(
            "contexts.json has no place: this user has no home; HOME or XDG_CONFIG_HOME names one"
        ) from None
    return base / "tickwheel" / "contexts.json"


def read() -> Contexts:
    """All of them; none for a user without a home. Raises ContextError for a file that does not hold contexts."""
    try:
        path = file()
    except ContextError:
        return Contexts()
    try:
        with path.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ContextError(f"{path}: {error.strerror}") from None
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX:,} bytes")
        tree = json.loads(data)
        if tree["version"] != VERSION:
            raise ValueError(f"version {tree['version']}; this program reads {VERSION}")
        found = Contexts({str(name): _context(values) for name, values in tree["contexts"].items()}, tree["current"])
        if not isinstance(found.current, str):
            raise ValueError("current is no text")
    except KeyError as error:
        raise ContextError(f"{path} is not a file of contexts: {error.args[0]} is missing") from None
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise ContextError(f"{path} is not a file of contexts: {error}") from None
    return found


def _context(values: Mapping[str, object]) -> Context:
    known = {item.name for item in fields(Context)}
    if not set(values) <= known or "addresses" not in values:
        raise ValueError(f"a context has {', '.join(sorted(known))}")
    if not all(isinstance(value, str) for value in values.values()):
        raise ValueError("a context's values are texts")
    return Context(**{name: str(value) for name, value in values.items()})


def known_names(incomplete: str) -> list[str]:
    """For completion."""
    try:
        return [name for name in read().known if name.startswith(incomplete)]
    except ContextError:
        return []


@contextlib.contextmanager
def changing() -> Iterator[Contexts]:
    """The contexts, to be changed inside and written at the end. Two commands do so one after the other."""
    path = file()
    try:
        make_directory(path.parent, 0o700)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ContextError(f"{path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        found = read()
        yield found
        _write(path, found)
    except OSError as error:
        raise ContextError(f"{path}: {error.strerror}") from None
    finally:
        os.close(folder)


def _write(path: Path, contexts: Contexts) -> None:
    known = {name: {key: value for key, value in asdict(one).items() if value} for name, one in contexts.known.items()}
    text = json.dumps({"version": VERSION, "current": contexts.current, "contexts": known}, indent=2) + "\n"
    data = text.encode()
    if len(data) > FILE_BYTES_MAX:
        raise ContextError(f"{path} would have {len(data):,} bytes; at most {FILE_BYTES_MAX:,}: remove a context first")
    replace_file(path, data, mode=0o600)


class _Chosen:
    name: str | None = None


def choose(name: str | None) -> None:
    """Use this context for the rest of the process, whatever the environment and the file say; None: as they say."""
    _Chosen.name = name


def in_use() -> tuple[str, Context, str]:
    """Name of the context that holds, the context, and what chose it: `--context`, the variable, or the file. Without
    a context an empty name. Raises ContextError."""
    if _Chosen.name is not None:
        return _Chosen.name, read().get(_Chosen.name), "--context"
    if name := os.environ.get(VARIABLE, ""):
        return name, read().get(name), VARIABLE
    found = read()
    return (found.current, found.get(found.current), "tickwheel context use") if found.current else ("", NO_CONTEXT, "")


def exposed() -> str:
    """A warning if others can read the file, which may hold tokens; empty: they cannot."""
    path = file()
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return f"{path} has a token, and others can read it: chmod 600 {path}" if mode & 0o077 else ""


def addresses_or(given: str) -> str:
    """The addresses that hold if flag or environment gave these; empty: neither gave any. Raises ContextError."""
    return given or in_use()[1].addresses or ADDRESSES_FALLBACK


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach addresses: TLS files and token, each with where it comes from."""

    values: Mapping[str, str]
    """By field of Context, without those that are not stated."""
    sources: Mapping[str, str]
    """The same fields; where each value comes from."""
    unused: str = ""
    """The context that holds and is not used, because the addresses are not among its own; empty: none."""


def access_for(addresses: str) -> Access:
    """TLS files and token for these addresses. The TLS values come from one place, environment or context, never
    mixed. Raises ContextError."""
    name, context, _ = in_use()
    own = set(split(addresses)) <= set(split(context.addresses))
    environment = {key: os.environ.get(variable, "") for key, variable in TLS_VARIABLES.items()}
    stray = next((key for key, value in environment.items() if value), "")
    if stray and not environment["tls_ca"]:
        told = f"{TLS_VARIABLES[stray]}={environment[stray]}"
        raise ContextError(f"{told}: only with {TLS_VARIABLES['tls_ca']}, the authority of the nodes' certificates")
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    if environment["tls_ca"]:
        values |= environment
        sources |= TLS_VARIABLES
    elif own:
        values |= {key: getattr(context, key) for key in TLS_VARIABLES}
        sources |= dict.fromkeys(TLS_VARIABLES, f"context {name}")
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        values["token"], sources["token"] = token, TOKEN_VARIABLE
    elif own:
        values["token"], sources["token"] = context.token, f"context {name}"
    stated = {key: value for key, value in values.items() if value}
    return Access(stated, {key: sources[key] for key in stated}, name if name and not own else "")


def split(addresses: str) -> list[str]:
    """The single addresses of a list separated by commas."""
    return [part.strip() for part in addresses.split(",") if part.strip()]
