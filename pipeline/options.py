"""The options of the data source: one place that reads, checks and documents them.

Every option has a name in lower case, since Spark passes all keys in lower case. A unit ends the name, and each has a
default. An unknown option is refused by name, so that a typing error does not go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tickwheel.client import Client
from tickwheel.client.cluster import TlsFiles

NO_TABLE = (
    "Spark's catalog does not pass on the options of a table, so messages cannot be a table. To read: CREATE TEMPORARY "
    "VIEW ... USING tickwheel OPTIONS (...). To write: df.write.format('tickwheel').options(...).mode('append').save()"
)
SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname", "outputmode"})
"""Options that Spark adds by itself."""
ADDRESSES_BEFORE = "endpoints"
"""What version 0.1 calls the option `addresses`; accepted for one more version."""
CONNECTION = frozenset({"addresses", "ca_file", "cert_file", "key_file", "server_name", "token", "timeout_s"})
NAME = re.compile(r"[A-Za-z0-9_\-.]{1,64}")
TOPIC = re.compile(r"[A-Za-z0-9_\-%][A-Za-z0-9_\-.%]{0,126}")
TOPIC_RULE = "1 to 127 characters of [A-Za-z0-9_-.%], not starting with a dot"

N = TypeVar("N", int, float)


class OptionError(ValueError):
    """An option has a value that is not allowed; the text names option, value and what is allowed."""

    def __init__(self, name: str, value: object, limit: str) -> None:
        super().__init__(f"option {name}: {value!r}: {limit}")


class Options:
    """Typed access to the options that a reader or writer was given."""

    def __init__(self, given: Mapping[str, str], known: frozenset[str]) -> None:
        """Raises OptionError for an unknown option, and for those of a table in Spark's catalog."""
        self._given = {name.lower(): value for name, value in given.items()}
        if ADDRESSES_BEFORE in self._given:
            self._given.setdefault("addresses", self._given.pop(ADDRESSES_BEFORE))
        if "provider" in self._given:  # added by CREATE TABLE
            raise OptionError("provider", self._given["provider"], NO_TABLE)
        self.empty = not self._given
        """Whether no option was given, as for a table in Spark's catalog."""
        allowed = known | CONNECTION | SPARKS_OWN
        for name in self._given:
            if name not in allowed:
                raise OptionError(
                    name, self._given[name], f"unknown option; known are {', '.join(sorted(known | CONNECTION))}"
                )

    def text(self, name: str, default: str = "") -> str:
        """The text of an option, unchecked."""
        return self._given.get(name, default)

    def topics(self) -> tuple[str, ...]:
        """The names in the option `topic`, separated by commas; empty: it was not given.

        Raises OptionError, also if the option holds no name, such as a variable that is empty.
        """
        names = tuple(part.strip() for part in self.text("topic").split(",") if part.strip())
        if not names and "topic" in self._given:
            raise OptionError("topic", self.text("topic"), "one or more names, separated by commas; or leave it out")
        for name in names:
            if TOPIC.fullmatch(name) is None:
                raise OptionError("topic", name, TOPIC_RULE)
        return names

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        """An option that must be one of the allowed words. Raises OptionError."""
        value = self._given.get(name, default).lower()
        if value not in allowed:
            raise OptionError(name, value, f"one of {', '.join(allowed)}")
        return value

    def number(self, name: str, default: N, least: N, most: N) -> N:
        """A number of the default's type, within bounds. Raises OptionError."""
        value = self._given.get(name)
        if value is None:
            return default
        kind = type(default)
        try:
            number = kind(value)
        except ValueError:
            raise OptionError(name, value, f"a number from {least} to {most}") from None
        if not least <= number <= most:
            raise OptionError(name, value, f"{least} to {most}")
        return number

    def matching(self, name: str, pattern: re.Pattern[str], default: str, limit: str) -> str:
        """Text that matches the pattern, or the default. Raises OptionError with `limit` as the allowed form."""
        value = self._given.get(name, default)
        if value and pattern.fullmatch(value) is None:
            raise OptionError(name, value, limit)
        return value


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the cluster. Open it where it is used: a channel survives no fork and no pickle."""

    addresses: tuple[str, ...]
    tls: TlsFiles | None
    timeout_s: float
    token: str = field(default="", repr=False)
    """Says who the caller is, on a cluster with rights; empty: the certificate does, or there are none."""

    def open(self) -> Client:
        """A client with its own loop; close it in the same function."""
        return Client(self.addresses, tls=self.tls, token=self.token, timeout_s=self.timeout_s)


def connection_of(options: Options, timeout_s: float) -> Connection:
    """The connection by the options addresses, ca_file, cert_file, key_file, server_name, token and timeout_s."""
    addresses = tuple(part.strip() for part in options.text("addresses").split(",") if part.strip())
    if not addresses:
        limit = "host:port of one or more nodes, separated by commas"
        raise OptionError("addresses", "", f"{limit}. {NO_TABLE}" if options.empty else limit)
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit() and 0 < int(port) < 65_536):
            raise OptionError("addresses", address, "host:port")
    tls = None
    if options.text("ca_file"):
        tls = TlsFiles(
            options.text("ca_file"),
            options.text("cert_file") or None,
            options.text("key_file") or None,
            options.text("server_name") or None,
        )
    elif options.text("cert_file") or options.text("key_file"):
        raise OptionError("ca_file", "", "needed with cert_file and key_file")
    return Connection(addresses, tls, options.number("timeout_s", timeout_s, 0.1, 86_400.0), options.text("token"))
