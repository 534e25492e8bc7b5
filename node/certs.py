"""Makes a test authority and certificates of nodes, clients and administrators (`tickwheel certs`).

For tests and to try TLS out. The authority's key lies beside the certificates, so production needs a real authority.
"""

from __future__ import annotations

import datetime
import fcntl
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tickwheel.node.tls import ADMIN_UNIT, CLIENT_UNIT, NODE_UNIT
from tickwheel.storage.plain_file import make_directory, replace_file

CLOCK_SLACK = datetime.timedelta(hours=1)
"""Certificates begin this much in the past, for machines whose clock is behind."""
AUTHORITY = "ca"
"""Name of the authority's files, which no certificate may have."""
KEY_MODE = 0o600
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that can sign."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _known_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The authority's key. Raises ValueError, OSError."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} was not made by tickwheel certs")
    return key


def _known_authority(certificate_path: Path, key_path: Path) -> Authority:
    """The authority of these files. Raises ValueError for one that nobody would believe, OSError."""
    key = _known_key(key_path)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{certificate_path} cannot be read: {error}") from None
    if certificate.public_key() != key.public_key():
        raise ValueError(f"{key_path} does not belong to {certificate_path}: name another directory")
    if certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        ended = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%SZ}"
        raise ValueError(f"{certificate_path} was valid until {ended}: name another directory")
    return Authority(certificate, key)


def open_authority(directory: Path, days: int) -> Authority:
    """The authority in `directory` (ca.crt, ca.key), created if there is none. A key without a certificate, as a killed
    command leaves, gets one. Raises ValueError, OSError."""
    certificate_path, key_path = directory / f"{AUTHORITY}.crt", directory / f"{AUTHORITY}.key"
    has_key = os.path.lexists(key_path)
    if os.path.lexists(certificate_path):
        if not has_key:
            raise ValueError(f"{certificate_path} is there without its key: it is left alone; name another directory")
        return _known_authority(certificate_path, key_path)
    make_directory(directory)
    key = _known_key(key_path) if has_key else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tickwheel test authority")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(subject, key, days)
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    if not has_key:
        replace_file(key_path, _key_pem(key), mode=KEY_MODE)
    replace_file(certificate_path, certificate.public_bytes(Encoding.PEM))
    return Authority(certificate, key)


def _alternative(host: str) -> x509.GeneralName:
    """Raises ValueError for what is neither an address nor the name of a host."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"host: {host!r}: an IP address or a name of letters, digits, - . _") from None
        return x509.DNSName(host)


def issue(
    authority: Authority, directory: Path, common_name: str, unit: str, hosts: Sequence[str], days: int
) -> tuple[Path, Path]:
    """Write `<common name>.key` and then `.crt`; returns (certificate, key). Raises OSError."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
        ]
    )
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if unit == NODE_UNIT:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [_alternative(host) for host in dict.fromkeys([common_name, *hosts])]
    certificate = (
        _builder(subject, key, days)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    certificate_path, key_path = directory / f"{common_name}.crt", directory / f"{common_name}.key"
    replace_file(key_path, _key_pem(key), mode=KEY_MODE)
    replace_file(certificate_path, certificate.public_bytes(Encoding.PEM))
    return certificate_path, key_path


def make_certificates(
    directory: Path,
    nodes: dict[str, list[str]],
    clients: Sequence[str],
    admins: Sequence[str],
    days: int,
    *,
    replace: bool = False,
) -> list[Path]:
    """Write all certificates of a test cluster. `nodes` maps node ids to host names and addresses. Returns the files.

    Raises ValueError, before anything is written, for names that cannot be told apart, for a wrong host, and if one of
    the files is there already and `replace` does not allow it; OSError. A certificate is written after its key, so what
    a killed command left can be made again with `replace`.
    """
    wanted = [
        *((name, NODE_UNIT, hosts) for name, hosts in nodes.items()),
        *((name, CLIENT_UNIT, []) for name in clients),
        *((name, ADMIN_UNIT, []) for name in admins),
    ]
    names = [name for name, _, _ in wanted]
    for number, name in enumerate(names):
        if name == AUTHORITY:
            raise ValueError(f"name: {name!r}: the authority's own; give another")
        if name in names[:number]:
            raise ValueError(f"name: {name!r}: given twice; each certificate needs a name of its own")
    for name, _, hosts in wanted:
        for host in (name, *hosts):
            _alternative(host)
    make_directory(directory)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names:
            for path in (directory / f"{name}.crt", directory / f"{name}.key"):
                if not replace and os.path.lexists(path):
                    raise ValueError(f"{path} is there already and is left alone; --replace makes a new one instead")
        authority = open_authority(directory, days)
        return [issue(authority, directory, name, unit, hosts, days)[0] for name, unit, hosts in wanted]
    finally:
        os.close(lock)
