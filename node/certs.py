"""Makes a test authority and certificates of nodes, clients and administrators (`tickwheel certs`).

For tests and to try TLS out. The authority's key lies beside the certificates, so production needs a real authority.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tickwheel.node.tls import ADMIN_UNIT, CLIENT_UNIT, NODE_UNIT

CLOCK_SLACK = datetime.timedelta(hours=1)
"""Certificates begin this much in the past, for machines whose clock is behind."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that can sign."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, *, secret: bool = False) -> None:
    path.touch(mode=0o600 if secret else 0o644)
    path.chmod(0o600 if secret else 0o644)
    path.write_bytes(data)


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


def open_authority(directory: Path, days: int) -> Authority:
    """The authority in `directory` (ca.crt, ca.key), created if there is none."""
    certificate_path, key_path = directory / "ca.crt", directory / "ca.key"
    if certificate_path.exists() and key_path.exists():
        key = load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_path} was not made by tickwheel certs")
        return Authority(x509.load_pem_x509_certificate(certificate_path.read_bytes()), key)
    for path in (certificate_path, key_path):
        if os.path.lexists(path):
            raise ValueError(f"{path} is there without its other half: it is left alone; name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
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
    _write(key_path, _key_pem(key), secret=True)
    _write(certificate_path, certificate.public_bytes(Encoding.PEM))
    return Authority(certificate, key)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def issue(
    authority: Authority, directory: Path, common_name: str, unit: str, hosts: Sequence[str], days: int
) -> tuple[Path, Path]:
    """Write `<common name>.crt` and `.key`; returns both paths."""
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
    _write(key_path, _key_pem(key), secret=True)
    _write(certificate_path, certificate.public_bytes(Encoding.PEM))
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

    Raises ValueError, before anything is written, if one of them is there already and `replace` does not allow it.
    """
    wanted = [
        *((name, NODE_UNIT, hosts) for name, hosts in nodes.items()),
        *((name, CLIENT_UNIT, []) for name in clients),
        *((name, ADMIN_UNIT, []) for name in admins),
    ]
    for name, _, _ in wanted:
        for path in (directory / f"{name}.crt", directory / f"{name}.key"):
            if not replace and os.path.lexists(path):
                raise ValueError(f"{path} is there already and is left alone; --replace makes a new one in its place")
    authority = open_authority(directory, days)
    return [issue(authority, directory, name, unit, hosts, days)[0] for name, unit, hosts in wanted]
