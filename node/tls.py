"""Certificates of a node: those that its two ports present and accept, and the meaning of a caller's certificate.

The common name is the node id or the caller's name; the organisational unit is the role (`tickwheel-node`,
`tickwheel-client`, `tickwheel-admin`). Files are checked whenever they are read, at the start and when they change
(node/server/certificates.py): they must be readable, the key must match its certificate, the certificate must be valid
today, and the peer certificate must name this node.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import ssl
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tickwheel.node.config import ConfigError, NodeConfig, Problem

if TYPE_CHECKING:  # a node without TLS starts without it
    from cryptography import x509

NODE_UNIT = "tickwheel-node"
CLIENT_UNIT = "tickwheel-client"
ADMIN_UNIT = "tickwheel-admin"


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """The holder of a certificate: its names and role."""

    common_name: str
    units: frozenset[str]
    names: frozenset[str]
    """Common name and DNS names."""


def _names_of(certificate: x509.Certificate) -> CertificateIdentity:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def values(oid: x509.ObjectIdentifier) -> list[str]:
        return [str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(oid)]

    common = values(NameOID.COMMON_NAME)
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        dns = extension.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        dns = []
    return CertificateIdentity(
        common_name=common[0] if common else "",
        units=frozenset(values(NameOID.ORGANIZATIONAL_UNIT_NAME)),
        names=frozenset([*common, *dns]),
    )


def identity_of(pem: bytes) -> CertificateIdentity:
    """The identity in a certificate that the handshake has verified."""
    from cryptography import x509

    return _names_of(x509.load_pem_x509_certificate(pem))


def is_member_certificate(auth_context: Mapping[str, Iterable[bytes]], node_id: str) -> bool:
    """Whether the caller on the peer port has the certificate of member `node_id`."""
    pem = next(iter(auth_context.get("x509_pem_cert", ())), b"")
    if not pem:
        return False
    identity = identity_of(pem)
    return NODE_UNIT in identity.units and identity.common_name == node_id


FILE_BYTES_MAX = 1 << 20
"""The largest file of certificates that is read."""


@dataclass(frozen=True, slots=True)
class PortFiles:
    """The contents of the key, certificate and authority files of one port."""

    key: bytes
    certificate: bytes
    authority: bytes


def _content(path: str) -> bytes:
    """The bytes of a file, at most one more than FILE_BYTES_MAX. A running node reads its files again: it must neither
    wait for the writer of a pipe, nor read a device without end. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", path)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)


def _read_port(config: NodeConfig, name: str, problems: list[Problem]) -> PortFiles | None:
    contents: dict[str, bytes] = {}
    found_before = len(problems)
    for part in ("cert", "key", "ca"):
        field = f"{name}_{part}_file"
        path = str(getattr(config.tls, field))
        contents[part] = b""
        if not path:
            continue
        try:
            contents[part] = _content(path)
        except OSError as error:
            problems.append(Problem(f"tls.{field}", path, f"cannot be read: {error.strerror}"))
            continue
        if not contents[part]:  # not the same as no file: that would turn TLS off, or the check of callers
            problems.append(Problem(f"tls.{field}", path, "is empty"))
        elif len(contents[part]) > FILE_BYTES_MAX:
            problems.append(Problem(f"tls.{field}", path, f"is larger than {FILE_BYTES_MAX:,} bytes"))
    if not contents["cert"] or len(problems) > found_before:
        return None
    files = PortFiles(contents["key"], contents["cert"], contents["ca"])
    problems += _check_port(config, name, files)
    if len(problems) == found_before:
        try:
            server_context(files, required=False)
            peer_context(files)
        except (ssl.SSLError, ValueError, TypeError) as error:  # such as a key that is too short for TLS
            path = str(getattr(config.tls, f"{name}_cert_file"))
            problems.append(Problem(f"tls.{name}_cert_file", path, f"cannot be used for TLS: {error}"))
    return files


def _check_port(config: NodeConfig, name: str, files: PortFiles) -> Iterable[Problem]:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    cert_field, key_field = f"tls.{name}_cert_file", f"tls.{name}_key_file"
    cert_path = str(getattr(config.tls, f"{name}_cert_file"))
    key_path = str(getattr(config.tls, f"{name}_key_file"))
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate)
    except ValueError:
        yield Problem(cert_field, cert_path, "is not a PEM certificate")
        return
    try:
        key = load_pem_private_key(files.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        yield Problem(key_field, key_path, "is not an unencrypted PEM private key")
        return
    if files.authority:
        try:
            x509.load_pem_x509_certificates(files.authority)
        except ValueError:
            path = str(getattr(config.tls, f"{name}_ca_file"))
            yield Problem(f"tls.{name}_ca_file", path, "holds no PEM certificate")
    encoding = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*encoding) != certificate.public_key().public_bytes(*encoding):
        yield Problem(key_field, key_path, f"does not belong to the certificate {cert_path}")
    now = datetime.datetime.now(datetime.UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        yield Problem(
            cert_field,
            cert_path,
            f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}",
        )
    if name == "peer":
        identity = _names_of(certificate)
        if identity.common_name != config.node.id:
            yield Problem(cert_field, cert_path, f"is for {identity.common_name}, and this node is {config.node.id}")
        elif NODE_UNIT not in identity.units:
            yield Problem(cert_field, cert_path, f"needs the organisational unit {NODE_UNIT}")


@dataclass(frozen=True, slots=True)
class NodeTls:
    """The certificate files of both ports; None for a port without TLS."""

    client: PortFiles | None
    peer: PortFiles | None
    require_client_cert: bool


def ends_of(files: PortFiles) -> Mapping[str, datetime.datetime]:
    """When the certificate of a port expires, and the last of its authorities if it has any."""
    from cryptography import x509

    ends = {"certificate": x509.load_pem_x509_certificate(files.certificate).not_valid_after_utc}
    if files.authority:
        found = x509.load_pem_x509_certificates(files.authority)
        ends["authority"] = max(one.not_valid_after_utc for one in found)
    return ends


def server_context(files: PortFiles, *, required: bool) -> ssl.SSLContext:
    """TLS of a port. With an authority callers may show a certificate; `required`: they must."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.authority:
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    # No session is resumed: each connection is judged by the certificates of its own handshake. Those of TLS 1.2 that
    # need no ticket cannot be turned off here: the transport ends connections that resume one.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return _completed(context, files)


def peer_context(files: PortFiles) -> ssl.SSLContext:
    """TLS for calls to peers. The caller names the peer's id as the server's name, whatever its address."""
    return _completed(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)


def _completed(context: ssl.SSLContext, files: PortFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    if files.authority:
        context.load_verify_locations(cadata=files.authority.decode("ascii", "ignore"))  # comments may be anything
    # The library reads keys from files alone, and those of the disk may change between check and use.
    with closing_memory_file(files.certificate) as certificate, closing_memory_file(files.key) as key:
        context.load_cert_chain(certificate, key)
    return context


@contextlib.contextmanager
def closing_memory_file(content: bytes) -> Iterator[str]:
    """A file in memory with this content, for as long as the block runs."""
    descriptor = os.memfd_create("tickwheel-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def read_tls(config: NodeConfig) -> NodeTls:
    """Read and check all certificate files. Raises ConfigError, which lists every problem."""
    problems: list[Problem] = []
    client = _read_port(config, "client", problems)
    peer = _read_port(config, "peer", problems)
    if problems:
        raise ConfigError(problems)
    return NodeTls(client, peer, config.tls.require_client_cert)
