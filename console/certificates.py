"""Browsers' certificates: whom each one names, and the file with the tokens of those users.

The console has no rights of its own: a certificate names a user by its common name, as at a node's client port, and the
token file has the token of that user. Browsers send a certificate with every request, also with one that a foreign page
makes them send. So a certificate by itself opens nothing: it can begin a session (sessions.py), which then needs both
its cookie and that same certificate.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography import x509

from tickwheel.client.errors import RequestRefused, refused
from tickwheel.console.files import content_of, is_file, opened
from tickwheel.node.tls import NODE_UNIT, identity_of

_log = logging.getLogger("tickwheel.console")

FILE_BYTES_MAX = 1 << 20
LOOK_S = 1.0
"""A change of the token file takes effect after this long at most."""
TOLD_MAX = 20
"""Bad lines that one refusal or log entry names."""
TOKEN_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that a browser has shown. The handshake has verified its chain and, at that time, its validity."""

    name: str
    """Its common name; empty: it names nobody."""
    fingerprint: bytes
    until_s: float
    """When it expires, in seconds since 1970."""
    fault: str = ""
    """Why it is no user's, whatever its name."""

    def trouble(self) -> str:
        """Why it is of no use now; empty if it can be used. A connection may outlive its certificate."""
        if self.fault or time.time() <= self.until_s:
            return self.fault
        return f"a certificate that is valid; this one was until {datetime.fromtimestamp(self.until_s, UTC):%F %T} UTC"


def certificate_of(der: bytes) -> Certificate:
    """What a verified certificate says. One that cannot be read to the end names nobody."""
    fingerprint = sha256(der).digest()
    try:
        until_s = x509.load_der_x509_certificate(der).not_valid_after_utc.timestamp()
        identity = identity_of(ssl.DER_cert_to_PEM_cert(der).encode())
    except (ValueError, x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType):
        return Certificate("", fingerprint, 0.0, "a certificate that can be read")
    fault = ""
    if NODE_UNIT in identity.units:
        fault = f"a user's certificate; the organisational unit {NODE_UNIT} makes it a node's"
    elif not identity.common_name:
        fault = "a certificate with a common name"
    return Certificate(identity.common_name, fingerprint, until_s, fault)


class TokenFile:
    """Lines of a user's name and its token. Only its owner may have a right to it. It is read again when it changes.

    A bad file at the start is refused whole. Later, its good lines count and each bad one is logged; a file that cannot
    be read, or that others may read, lets nobody in.
    """

    def __init__(self, path: Path, field: str = "--tokens") -> None:
        """`field`: what errors call the file. Raises RequestRefused with the place of every bad line."""
        self._path = path
        self._field = field
        self._content = self._read()
        self._tokens, wrong = parsed(self._content, path)
        if wrong:
            raise refused(field, path, f"lines of a name and its token; {_told(wrong)}")
        self._looked_s = time.monotonic()
        self._fault = ""

    def token(self, name: str) -> str:
        """The token of the user whom a certificate names; empty: none."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._look()
            self._looked_s = time.monotonic()
        return self._tokens.get(name, "")

    def _look(self) -> None:
        try:
            content = self._read()
        except RequestRefused as error:
            if str(error) != self._fault:
                _log.error("nobody can log in by certificate: %s", error)
            self._content, self._tokens, self._fault = b"", {}, str(error)
            return
        if content == self._content and not self._fault:
            return
        self._content, self._fault = content, ""
        self._tokens, wrong = parsed(content, self._path)
        _log.info("read %s again: %d users", self._path, len(self._tokens))
        if wrong:
            _log.error("left out: %s", _told(wrong))

    def _read(self) -> bytes:
        try:
            with opened(self._path) as descriptor:
                self._check(os.fstat(descriptor))
                content = content_of(descriptor, FILE_BYTES_MAX)
        except OSError as error:
            raise refused(self._field, self._path, f"cannot be read: {error.strerror}") from error
        if content is None:
            raise refused(self._field, self._path, f"at most {FILE_BYTES_MAX:,} bytes")
        return content

    def _check(self, found: os.stat_result) -> None:
        if not is_file(found):
            raise refused(self._field, self._path, "a file")
        if found.st_uid not in (0, os.geteuid()):
            owner = f"a file of the console's user or of root; user {found.st_uid} owns it"
            raise refused(self._field, self._path, owner)
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise refused(self._field, self._path, f"for its owner alone (chmod 600); its mode is {mode:03o}")


def parsed(content: bytes, path: Path) -> tuple[Mapping[str, str], list[str]]:
    """The tokens by name, and what is wrong: `file:line: reason`, never with what might be a token."""
    tokens: dict[str, str] = {}
    places: dict[str, int] = {}
    wrong: list[str] = []
    for number, line in enumerate(content.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith(b"#"):
            continue
        place = f"{path}:{number}"
        try:
            name, token = (part.decode("ascii") for part in parts)
        except UnicodeDecodeError:
            wrong.append(f"{place}: only ASCII characters")
            continue
        except ValueError:
            wrong.append(f"{place}: {len(parts)} words, not a name and its token")
            continue
        if not (name + token).isprintable() or len(token) > TOKEN_CHARACTERS_MAX:
            wrong.append(f"{place}: printable characters, and at most {TOKEN_CHARACTERS_MAX} of a token")
        elif name in tokens:
            wrong.append(f"{place}: this name has a token in line {places[name]}")
        else:
            tokens[name], places[name] = token, number
    return tokens, wrong


def _told(wrong: list[str]) -> str:
    more = len(wrong) - TOLD_MAX
    return "; ".join(wrong[:TOLD_MAX]) + (f"; and {more} more" if more > 0 else "")
