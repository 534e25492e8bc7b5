"""The certificates of a running node: read again when their files change, and watched for expiry.

Owns the certificates that both ports and calls to peers use now. New files take effect for every later handshake; open
connections stay. All files are checked together, as at the start. If anything is wrong, the old certificates stay in
use, and the log and the status state the problem. After a change the files are read once two looks in a row have found
the same, since a certificate and its key are replaced one after the other. SIGHUP reads them at once.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Mapping
from pathlib import Path

from tickwheel.node.config import ConfigError, NodeConfig
from tickwheel.node.core.world import Reported
from tickwheel.node.tls import NodeTls, PortFiles, ends_of, peer_context, read_tls, server_context

LOOK_NS = 5_000_000_000
"""Pause between two looks at the files; a new file takes effect after two looks."""
WARN_DAYS = 30
REMIND_NS = 24 * 3_600_000_000_000
PARTS = ("cert", "key", "ca")
PORTS = ("client", "peer")

_Stamps = tuple[tuple[int, int, int] | None, ...]


class Certificates:
    """The certificates of one process. The constructor raises ConfigError, like `read_tls`."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._read_at = self._stamps()
        self.current: NodeTls = read_tls(config)
        self._seen = self._read_at
        self._look_ns = 0
        self._problem = ""
        self._warned_ns: dict[str, int] = {}
        self._ends: dict[tuple[str, str], datetime.datetime] = {}
        self._note_ends()

    # -- what ports and calls show

    def server_context(self, port: str) -> ssl.SSLContext | None:
        """TLS of the client or the peer port, which uses the newest files at every handshake. None: no TLS."""
        files = self._files(port)
        if files is None:
            return None
        # On the peer port both sides show a certificate.
        required = port == "peer" or self.current.require_client_cert
        made: dict[PortFiles, ssl.SSLContext] = {files: server_context(files, required=required)}
        first = made[files]

        def newest(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            now = self._files(port)
            if now is not None and now is not files:
                if now not in made:
                    made.clear()
                    made[now] = server_context(now, required=required)
                handshake.context = made[now]

        first.sni_callback = newest
        return first

    def peer_context(self) -> ssl.SSLContext | None:
        """TLS for the next call to a peer; None: no TLS."""
        return None if self.current.peer is None else peer_context(self.current.peer)

    def _files(self, port: str) -> PortFiles | None:
        return self.current.peer if port == "peer" else self.current.client

    # -- files that change

    def look(self, now_ns: int) -> list[Reported]:
        """Called a few times a second. Returns the lines for the log."""
        if now_ns < self._look_ns:
            return []
        self._look_ns = now_ns + LOOK_NS
        before, self._seen = self._seen, self._stamps()
        lines: list[Reported] = []
        if self._seen != self._read_at and self._seen == before:
            lines += self.reload()
        return lines + self._endings(now_ns)

    def reload(self) -> list[Reported]:
        """Read the files now. Returns the lines for the log."""
        self._read_at = self._seen = self._stamps()
        try:
            read = read_tls(self._config)
        except ConfigError as error:
            self._problem = f"new certificates are refused, the old ones stay: {error}"
            return [Reported("error", "new certificates are refused, the old ones stay", {"reason": str(error)})]
        if (read.client is None) != (self.current.client is None) or (read.peer is None) != (self.current.peer is None):
            self._problem = "TLS cannot be turned on or off at a port while the node runs: restart it"
            return [Reported("error", self._problem)]
        self._problem = ""
        if read == self.current:
            return [Reported("info", "certificates were read again: they are the same")]
        self.current = read
        self._note_ends()
        self._warned_ns.clear()
        fields: dict[str, object] = {f"{port}_{what}": f"{end:%Y-%m-%d}" for (port, what), end in self._ends.items()}
        return [Reported("info", "certificates were read again and count from now on; they end", fields)]

    def _stamps(self) -> _Stamps:
        paths = [str(getattr(self._config.tls, f"{port}_{part}_file")) for port in PORTS for part in PARTS]
        return tuple(_stamp(path) for path in paths)

    # -- their end

    def _note_ends(self) -> None:
        self._ends = {}
        for port in PORTS:
            files = self._files(port)
            if files is not None:
                self._ends |= {(port, kind): end for kind, end in ends_of(files).items()}

    def ends(self) -> Mapping[tuple[str, ...], float]:
        """When each certificate expires, in seconds since 1970, by port and kind."""
        return {key: end.timestamp() for key, end in self._ends.items()}

    def reason(self) -> str:
        """Problems and certificates that expire soon, in words for an operator; empty for none."""
        return "; ".join([*([self._problem] if self._problem else []), *self._soon().values()])

    def _soon(self) -> dict[str, str]:
        now = datetime.datetime.now(datetime.UTC)
        found: dict[str, str] = {}
        for (port, what), end in self._ends.items():
            days = (end - now).total_seconds() / 86_400
            if days < WARN_DAYS:
                how = f"ends in {days:.0f} days" if days >= 0 else "has ended"
                found[f"{port}_{what}"] = f"the {what} of the {port} port {how} ({end:%Y-%m-%d %H:%M} UTC)"
        return found

    def _endings(self, now_ns: int) -> list[Reported]:
        lines = []
        for key, text in self._soon().items():
            told_ns = self._warned_ns.get(key)
            if told_ns is None or now_ns - told_ns >= REMIND_NS:
                self._warned_ns[key] = now_ns
                lines.append(Reported("warning", "a certificate ends soon", {"what": text}))
        return lines


def _stamp(path: str) -> tuple[int, int, int] | None:
    """A value that changes when the file is replaced, also behind a link, as with a mounted secret."""
    if not path:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
