"""Relations between configuration fields, checked at start.

Owns every relation between two fields. Pure: paths are not opened here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import NamedTuple

from tickwheel.node.config.fields import parse_address
from tickwheel.node.config.sections import NodeConfig
from tickwheel.node.state.settings import SLOT_MS_ALLOWED

LEVEL = re.compile(r"[1-9][0-9]{0,9}[smhd]\Z")
GRPC_FRAME_BYTES = 256 << 10
"""Room for a message's envelope beside the payload bytes that a limit counts."""


class Problem(NamedTuple):
    """One thing wrong with a configuration."""

    field: str
    value: object
    allowed: str

    def __str__(self) -> str:
        shown = '""' if self.value == "" else repr(self.value) if isinstance(self.value, bool) else str(self.value)
        return f"{self.field} = {shown}: {self.allowed}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _required(config: NodeConfig) -> Iterator[Problem]:
    if not config.cluster.id:
        yield Problem("cluster.id", "", "required: the name of the cluster")
    if not config.node.id:
        yield Problem("node.id", "", "required: the name of this node")
    if not config.node.data_dir:
        yield Problem("node.data_dir", "", "required: a directory for this node's data")
    elif config.node.data_dir[0] in "~$":
        yield Problem("node.data_dir", config.node.data_dir, "~ and variables are not replaced: give the whole path")


def _times(config: NodeConfig) -> Iterator[Problem]:
    raft = config.raft
    if raft.election_timeout_max_ms <= raft.election_timeout_min_ms:
        yield Problem(
            "raft.election_timeout_max_ms",
            raft.election_timeout_max_ms,
            f"must be above raft.election_timeout_min_ms ({raft.election_timeout_min_ms})",
        )
    if raft.lease_ms >= raft.election_timeout_min_ms:
        yield Problem(
            "raft.lease_ms",
            raft.lease_ms,
            f"must be below raft.election_timeout_min_ms ({raft.election_timeout_min_ms}), "
            "or two masters could act at once",
        )
    if raft.sync_period_ms * 2 > raft.lease_ms:
        yield Problem(
            "raft.sync_period_ms", raft.sync_period_ms, f"must be at most half of raft.lease_ms ({raft.lease_ms})"
        )
    elif raft.sync_period_ms * 3 >= raft.election_timeout_min_ms:
        yield Problem(
            "raft.sync_period_ms",
            raft.sync_period_ms,
            f"must be below a third of raft.election_timeout_min_ms ({raft.election_timeout_min_ms})",
        )


def _clock(config: NodeConfig) -> Iterator[Problem]:
    clock = config.clock
    if clock.skew_warn_ms > clock.tolerance_ms:
        yield Problem(
            "clock.skew_warn_ms",
            clock.skew_warn_ms,
            f"must be at most clock.tolerance_ms ({clock.tolerance_ms}), so that the warning comes before the stop",
        )


def _sizes(config: NodeConfig) -> Iterator[Problem]:
    request_bytes_max = config.limits.request_bytes_max
    for field, value in (
        ("delivery.batch_bytes_max", config.delivery.batch_bytes_max),
        ("raft.entry_bytes_target", config.raft.entry_bytes_target),
    ):
        if value + GRPC_FRAME_BYTES > request_bytes_max:
            yield Problem(
                field,
                value,
                f"must be at least {GRPC_FRAME_BYTES:,} below limits.request_bytes_max ({request_bytes_max:,})",
            )
    if config.delivery.stream_bytes_max < config.delivery.batch_bytes_max:
        yield Problem(
            "delivery.stream_bytes_max",
            config.delivery.stream_bytes_max,
            f"must be at least delivery.batch_bytes_max ({config.delivery.batch_bytes_max:,})",
        )
    if config.storage.checkpoint_log_bytes < config.storage.journal_segment_bytes:
        yield Problem(
            "storage.checkpoint_log_bytes",
            config.storage.checkpoint_log_bytes,
            f"must be at least storage.journal_segment_bytes ({config.storage.journal_segment_bytes:,})",
        )


def _members(config: NodeConfig) -> Iterator[Problem]:
    members = config.cluster.members
    if config.cluster.join == "existing":
        if members:
            yield Problem(
                "cluster.members", len(members), 'must be empty with cluster.join = "existing": the cluster tells'
            )
        return
    seen: dict[str, str] = {}
    for member in members:
        for value in (member.node_id, member.peer_address, member.client_address):
            if value in seen:
                yield Problem("cluster.members", value, f"stands there twice ({seen[value]} and {member.node_id})")
            seen[value] = member.node_id
    if not members:
        return
    own = next((member for member in members if member.node_id == config.node.id), None)
    if own is None:
        if config.node.id:
            yield Problem(
                "node.id", config.node.id, "must be one of cluster.members: " + ", ".join(m.node_id for m in members)
            )
        return
    for field, ours, theirs in (
        ("listen.peer_advertised", config.peer_address, own.peer_address),
        ("listen.client_advertised", config.client_address, own.client_address),
    ):
        if ours != theirs:
            yield Problem(field, ours, f"cluster.members has {theirs} for this node; they must be equal")


def _addresses(config: NodeConfig) -> Iterator[Problem]:
    listen, tls = config.listen, config.tls
    ports: dict[tuple[str, int], str] = {}
    for name, bind, advertised, has_tls in (
        ("client", listen.client_bind, listen.client_advertised, bool(tls.client_cert_file)),
        ("peer", listen.peer_bind, listen.peer_advertised, bool(tls.peer_cert_file)),
        ("metrics", listen.metrics_bind, "", True),
    ):
        if not bind:
            continue
        field = f"listen.{name}_bind"
        host, port = parse_address(bind, port_min=0)
        if name != "metrics" and not advertised and (port == 0 or _is_wildcard(host)):
            yield Problem(
                f"listen.{name}_advertised", "", f"required with {field} = {bind}: others cannot dial that address"
            )
        if not is_loopback(host) and not has_tls and not listen.insecure:
            yield Problem(
                field,
                bind,
                f"without TLS on this port (tls.{name}_cert_file) only loopback addresses are allowed, "
                "unless --insecure is given",
            )
        if port and (host, port) in ports:
            yield Problem(field, bind, f"is also {ports[host, port]}; each needs a port of its own")
        ports[host, port] = field


def _tls(config: NodeConfig) -> Iterator[Problem]:
    tls = config.tls
    for name in ("client", "peer"):
        cert = str(getattr(tls, f"{name}_cert_file"))
        key = str(getattr(tls, f"{name}_key_file"))
        authority = str(getattr(tls, f"{name}_ca_file"))
        if bool(cert) != bool(key):
            missing = f"tls.{name}_key_file" if cert else f"tls.{name}_cert_file"
            yield Problem(missing, "", "certificate and key go together: give both or none")
        needs_authority = name == "peer" or tls.require_client_cert
        if cert and needs_authority and not authority:
            yield Problem(f"tls.{name}_ca_file", "", "required, to check the certificates of those who connect")


def _seed(config: NodeConfig) -> Iterator[Problem]:
    seed = config.seed
    if seed.slot_ms is not None and seed.slot_ms not in SLOT_MS_ALLOWED:
        yield Problem("seed.slot_ms", seed.slot_ms, "must be 1000, 500, 200 or 100")
    if seed.delay_levels is not None:
        levels = seed.delay_levels.split()
        bad = [level for level in levels if not LEVEL.match(level)]
        if not 1 <= len(levels) <= 64 or bad:
            shown = bad[0] if bad else seed.delay_levels
            yield Problem("seed.delay_levels", shown, "1 to 64 levels, each a number and s, m, h or d: 1s 30s 5m 2h")


def problems_of(config: NodeConfig) -> list[Problem]:
    """All relations that do not hold, in the order of the sections."""
    checks = (_required, _members, _addresses, _times, _clock, _sizes, _tls, _seed)
    return [problem for check in checks for problem in check(config)]
