"""Logged-in users and the client of each.

A session is a random id in a cookie. The token of its user stays here; a browser never gets it back. A session that a
certificate began is worth nothing without that certificate, and only as long as the token file has the token that it
began with. Without a login a session is its id alone, so strangers take no memory. The token against forged requests
(CSRF) is a keyed hash of the id: nothing is kept for it either. Everything here ends with the process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tickwheel.client import AsyncClient
from tickwheel.client.errors import LimitReached, PermissionRefused
from tickwheel.console.certificates import Certificate, TokenFile
from tickwheel.console.watch import Watch

SESSIONS_MAX = 10_000
"""Logins that are kept; the one unused for the longest goes first."""
SESSION_S = 12 * 3_600.0
"""A login ends this long after it began."""
VIEWS_MAX = 200
"""Users at once: each has connections to every node."""
VIEW_IDLE_S = 600.0

STRANGER = "nobody-is-logged-in"
"""The token of visitors who are not logged in, and of callers of the REST API without one: a cluster with rights knows
no such token. Without any token it would take each of them for the holder of the console's or gateway's certificate."""

OpenClient = Callable[[str], AsyncClient]
"""Makes a client of the cluster from a token."""


class View:
    """The cluster as one user sees it: a client with the user's token, and one watch for all pages of that user."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.watch = Watch(client)
        self.used_s = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether its connections can be closed."""
        return self.watch.idle and time.monotonic() - self.used_s > VIEW_IDLE_S

    async def close(self) -> None:
        """Stop watching and close the connections."""
        await self.watch.close()
        await self.client.close()


@dataclass(frozen=True, slots=True)
class Visitor:
    """What a browser shows with a request."""

    session_id: str
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Login:
    """A session with a token."""

    token: str = field(repr=False)
    certificate: Certificate | None
    """The one that began it; None: somebody typed the token."""
    began_s: float


class Sessions:
    """Logins by the id of their session, and views by token."""

    def __init__(self, open_client: OpenClient, tokens: TokenFile | None = None) -> None:
        """`tokens`: of those who log in by certificate; None: nobody does."""
        self._open = open_client
        self._tokens = tokens
        self._key = secrets.token_bytes(32)
        self._logins: OrderedDict[str, Login] = OrderedDict()
        self._views: dict[str, View] = {}

    def new_id(self) -> str:
        """The id of a new session."""
        return secrets.token_urlsafe(32)

    def csrf(self, session_id: str) -> str:
        """What each change in this session has to show."""
        return hmac.new(self._key, session_id.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def shows(self, session_id: str, csrf: str) -> bool:
        """Whether a change comes from a page of this session."""
        return bool(session_id) and hmac.compare_digest(self.csrf(session_id).encode(), csrf.encode())

    def open_as(self, token: str) -> AsyncClient:
        """A client of its own, to try a token."""
        return self._open(token)

    def certified(self, certificate: Certificate) -> str:
        """The token of the user whom a certificate names, for a login. Raises PermissionRefused."""
        fault = certificate.trouble()
        token = "" if self._tokens is None or fault else self._tokens.token(certificate.name)
        if token:
            return token
        name, limit = certificate.name[:100], fault or "a name that the console's token file has (--tokens)"
        metadata = {"field": "certificate", "value": name, "limit": limit}
        raise PermissionRefused(f"certificate: {name or 'without a name'}: {limit}", "UNAUTHENTICATED", metadata)

    def log_in(self, token: str, certificate: Certificate | None = None) -> str:
        """Keep a token that the cluster has accepted; the id of the new session."""
        session_id = self.new_id()
        self._logins[session_id] = Login(token, certificate, time.monotonic())
        while len(self._logins) > SESSIONS_MAX:
            self._logins.popitem(last=False)
        return session_id

    def log_out(self, session_id: str) -> None:
        """Forget the token. Idempotent."""
        self._logins.pop(session_id, None)

    def token(self, visitor: Visitor) -> str:
        """The token of a session; empty if nobody is logged in."""
        login = self._logins.get(visitor.session_id)
        if login is None:
            return ""
        began, shown = login.certificate, visitor.certificate
        if began is not None and (shown is None or shown.fingerprint != began.fingerprint):
            return ""  # somebody else has its cookie: that must not end it
        if time.monotonic() - login.began_s > SESSION_S or not self._certifies(login):
            del self._logins[visitor.session_id]
            return ""
        self._logins.move_to_end(visitor.session_id)
        return login.token

    def _certifies(self, login: Login) -> bool:
        """Whether the certificate of a login is valid and has the same token as then; true of a login without one."""
        if login.certificate is None:
            return True
        known = self._tokens is not None and self._tokens.token(login.certificate.name) == login.token
        return known and not login.certificate.trouble()

    async def view(self, visitor: Visitor) -> View:
        """The view of whoever this session belongs to. Raises LimitReached if too many users are here at once."""
        token = self.token(visitor)
        if token not in self._views:
            await self._close_idle()
        found = self._views.get(token)  # looked up after the wait: another page may have made it
        if found is None:
            if len(self._views) >= VIEWS_MAX:
                raise LimitReached(
                    f"this console serves {VIEWS_MAX} users at once",
                    "LIMIT_REACHED",
                    {"field": "users", "value": str(len(self._views)), "limit": str(VIEWS_MAX)},
                )
            found = self._views[token] = View(self._open(token or STRANGER))
        found.used_s = time.monotonic()
        return found

    async def _close_idle(self) -> None:
        for token in [token for token, view in self._views.items() if view.idle]:
            await self._views.pop(token).close()

    async def close(self) -> None:
        """Close every view."""
        views, self._views = list(self._views.values()), {}
        for view in views:
            await view.close()
