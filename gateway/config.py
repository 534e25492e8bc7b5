"""The configuration of a gateway: one TOML file, checked whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from tickwheel.client.errors import RequestRefused
from tickwheel.client.moments import duration_of
from tickwheel.console.certificates import TokenFile
from tickwheel.console.cli import check_authority_file
from tickwheel.console.files import content_of, is_file, opened
from tickwheel.gateway.addresses import is_public, literal
from tickwheel.gateway.breaker import FAILURES_MAX
from tickwheel.gateway.signing import secret_of
from tickwheel.node.config.fields import parse_address
from tickwheel.node.config.read import toml_of
from tickwheel.node.failure import RequestError
from tickwheel.node.state.filtering import checked_filter
from tickwheel.node.state.names import check_group_name, check_topic_name

FILE_BYTES_MAX = 1 << 20
URL_LENGTH_MAX = 2_000
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
DEAD_ON = (400, 405, 410, 413, 415, 422)
"""Answers that will be the same next time: the message or the target is wrong."""


class GatewayConfigError(Exception):
    """A configuration that a gateway must not start with. Its text has one line a problem."""


def _ask(check: Callable[[], object]) -> None:
    """Run a check of the console's. Raises ValueError with what it refuses."""
    try:
        check()
    except RequestRefused as error:
        raise ValueError(error.metadata["limit"]) from None


def _span(value: object) -> object:
    return duration_of(value) if isinstance(value, str) else value


Span = Annotated[timedelta, BeforeValidator(_span)]
"""A duration: text such as `10s` or `1h30m`."""
Flag = Annotated[bool, Strict()]
"""TOML's own true or false; never a text or number that could be meant so."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Listen(_Section):
    """The REST API."""

    bind: str = "127.0.0.1:7780"
    cert_file: Path | None = None
    key_file: Path | None = None
    insecure: Flag = False
    """Allow an address other than loopback without TLS."""
    credentials: Literal["caller", "own"] = "caller"
    """Whose token the cluster sees: the caller's, or the gateway's for everybody."""
    host_names: tuple[str, ...] = ()
    """Further names under which callers come, as behind a proxy. On loopback others are refused."""

    @property
    def host(self) -> str:
        """The host of `bind`."""
        return parse_address(self.bind, port_min=0)[0]

    @property
    def port(self) -> int:
        """The port of `bind`."""
        return parse_address(self.bind, port_min=0)[1]

    @field_validator("bind")
    @classmethod
    def _is_address(cls, bind: str) -> str:
        try:
            parse_address(bind, port_min=0)
        except ValueError:
            raise ValueError("host:port or [ipv6]:port, a port from 0 to 65535") from None
        return bind

    @model_validator(mode="after")
    def _is_safe(self) -> Listen:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        address = literal(self.host)
        loopback = address.is_loopback if address is not None else self.host == "localhost"
        if not (loopback or self.cert_file or self.insecure):
            raise ValueError(
                f"bind {self.bind} needs cert_file and key_file, or insecure = true behind a proxy with TLS"
            )
        return self


class ConsoleSection(_Section):
    """The web console, at the address of the REST API."""

    read_only: Flag = False
    """It shows everything and changes nothing."""
    host_names: tuple[str, ...] = ()
    """Further names under which browsers come, as behind a proxy."""
    reports: Path | None = None
    """A directory of chaos runs, whose reports are shown."""
    client_ca: Path | None = None
    """The authority of browsers' certificates, by which users may log in."""
    tokens: Path | None = None
    """The tokens of those users (console/certificates.py); read again when the file changes."""

    @field_validator("client_ca")
    @classmethod
    def _is_authority(cls, client_ca: Path | None) -> Path | None:
        if client_ca is not None:
            _ask(lambda: check_authority_file("client_ca", client_ca))
        return client_ca

    @field_validator("tokens")
    @classmethod
    def _has_tokens(cls, tokens: Path | None) -> Path | None:
        if tokens is not None:
            _ask(lambda: TokenFile(tokens, "tokens"))
        return tokens

    @model_validator(mode="after")
    def _has_both(self) -> ConsoleSection:
        if (self.client_ca is None) != (self.tokens is None):
            raise ValueError("client_ca and tokens go together")
        return self

    @field_validator("reports")
    @classmethod
    def _is_directory(cls, reports: Path | None) -> Path | None:
        if reports is not None and not (reports.is_dir() and os.access(reports, os.R_OK | os.X_OK)):
            raise ValueError(f"{reports}: a directory that can be read")
        return reports


class Target(_Section):
    """Where the messages of a group are posted."""

    url: str
    group: str
    topics: Annotated[tuple[str, ...], Field(min_length=1)]
    secret_file: Path | None = None
    """One secret a line (signing.py); read again when it changes. Without it posts are not signed."""
    timeout: Span = timedelta(seconds=10)
    """Of one post, from the connection to the end of the answer."""
    concurrency: Annotated[int, Strict(), Field(ge=1, le=1_000)] = 8
    rate: Annotated[float, Strict(), Field(ge=0, le=100_000)] = 0
    """Posts a second; 0: any number."""
    failures_max: Annotated[int, Strict(), Field(ge=1, le=1_000)] = FAILURES_MAX
    """Failures in a row after which posts pause."""
    dead_on: tuple[Annotated[int, Strict(), Field(ge=300, le=599)], ...] = DEAD_ON
    """Answers after which a message becomes a dead letter at once."""
    private_addresses: Flag = False
    """Allow addresses that are not public."""
    event_type: Annotated[str, Field(min_length=1, max_length=200)] = "tickwheel.message"
    """`ce-type` of the posts."""
    filter: str = ""
    """Tags that a new group takes."""

    @field_validator("group")
    @classmethod
    def _is_group(cls, group: str) -> str:
        if rule := check_group_name(group):
            raise ValueError(rule)
        return group

    @field_validator("topics")
    @classmethod
    def _are_topics(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        for topic in topics:
            if rule := check_topic_name(topic):
                raise ValueError(f"{topic[:100]!r}: {rule}")
        return topics

    @field_validator("filter")
    @classmethod
    def _is_filter(cls, filter: str) -> str:
        try:
            checked_filter(filter)
        except RequestError as error:
            raise ValueError(error.failure.metadata["limit"]) from error
        return filter

    @field_validator("timeout")
    @classmethod
    def _is_sane(cls, timeout: timedelta) -> timedelta:
        if not timedelta(milliseconds=100) <= timeout <= timedelta(minutes=10):
            raise ValueError("100ms to 10m")
        return timeout

    @model_validator(mode="after")
    def _may_be_posted_to(self) -> Target:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"url {self.url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not host or len(self.url) > URL_LENGTH_MAX or parts.fragment:
            raise ValueError(f"url {self.url[:100]!r}: http:// or https://, at most {URL_LENGTH_MAX} characters")
        if parts.username is not None or parts.password is not None:
            raise ValueError("url: no user or password in it; sign posts with secret_file instead")
        address = literal(host)
        if address is not None and not is_public(address) and not self.private_addresses:
            raise ValueError(f"url: {host} is not public: private_addresses = true allows it")
        if self.secret_file is not None:
            read_secrets(self.secret_file)
        return self


class GatewayConfig(_Section):
    """The whole file."""

    source: Annotated[str, Field(min_length=1, max_length=200)] = "/tickwheel"
    """`ce-source` of the posts."""
    traces: Flag = False
    """Make spans of OpenTelemetry, and carry traces from callers to targets."""
    listen: Listen | None = None
    """Absent: no REST API."""
    console: ConsoleSection | None = None
    """Absent: no console."""
    targets: dict[str, Target] = Field(default_factory=dict)

    @property
    def listen_secure(self) -> bool:
        """Whether callers reach it by HTTPS."""
        return self.listen is not None and self.listen.cert_file is not None

    @field_validator("traces")
    @classmethod
    def _can_be_traced(cls, traces: bool) -> bool:
        if traces and find_spec("opentelemetry") is None:
            raise ValueError("needs OpenTelemetry: pip install 'tickwheel[otel]'")
        return traces

    @field_validator("targets")
    @classmethod
    def _have_names_and_groups(cls, targets: dict[str, Target]) -> dict[str, Target]:
        groups: dict[str, str] = {}
        for name, target in targets.items():
            if not NAME.match(name):
                raise ValueError(f"{name!r}: a name has 1 to 63 of a-z, 0-9 and -")
            if target.group in groups:
                raise ValueError(f"{name} and {groups[target.group]} have the same group {target.group}")
            groups[target.group] = name
        return targets

    @model_validator(mode="after")
    def _does_something(self) -> GatewayConfig:
        if self.listen is None and not self.targets:
            raise ValueError("neither [listen] nor [targets.NAME]: nothing to do")
        if self.console is not None and self.listen is None:
            raise ValueError("[console] needs [listen]: it has the same address")
        if self.console is not None and self.console.client_ca is not None and not self.listen_secure:
            raise ValueError("console.client_ca needs listen.cert_file: without HTTPS no browser shows a certificate")
        return self


def read_secrets(path: Path) -> list[bytes]:
    """The secrets of a file, the newest first as its lines are. Raises ValueError."""
    try:
        with opened(path) as descriptor:
            content = content_of(descriptor, FILE_BYTES_MAX) if is_file(os.fstat(descriptor)) else None
        if content is None:
            raise ValueError(f"secret_file {path}: a file of at most {FILE_BYTES_MAX:,} bytes")
        lines = content.decode().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"secret_file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not 1 <= len(lines) <= 10:
        raise ValueError(f"secret_file {path}: 1 to 10 secrets, one a line")
    try:
        return [secret_of(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"secret_file {path}: {error}") from None


def read_config(path: Path) -> GatewayConfig:
    """Raises GatewayConfigError with all problems."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise GatewayConfigError(f"{path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise GatewayConfigError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes")
    try:
        tree = toml_of(data)
    except ValueError as error:
        raise GatewayConfigError(f"{path}: {error}") from None
    try:
        return GatewayConfig.model_validate(tree)
    except ValidationError as error:
        raise GatewayConfigError("\n".join(_lines(path, error))) from None


def _lines(path: Path, error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        where = ".".join(map(str, problem["loc"]))
        value: Any = problem["input"]
        shown = f" = {value!r}"[:120] if isinstance(value, str | int | float | bool) else ""
        yield f"{path}: {where}{shown}: {problem['msg'].removeprefix('Value error, ')}".replace(": :", ":")
