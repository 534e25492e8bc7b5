"""Certificates: made, read, checked, and refused in handshakes when the name is wrong."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.transport.served import dialled, started
from tickwheel.node.certs import make_certificates, open_authority
from tickwheel.node.config import ConfigError, NodeConfig, read_config
from tickwheel.node.server.certificates import Certificates
from tickwheel.node.tls import ADMIN_UNIT, identity_of, peer_context, read_tls
from tickwheel.transport.client import CallError
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Server


def configured(directory: Path, node_id: str, cert: str, key: str | None = None, **other: str) -> NodeConfig:
    """A node with the certificate `cert` on both ports; `other`: settings of tls in place of these."""
    files = {
        f"tls.{port}_{part}_file": str(directory / name)
        for port in ("client", "peer")
        for part, name in (("cert", f"{cert}.crt"), ("key", f"{key or cert}.key"), ("ca", "ca.crt"))
    }
    files |= {f"tls.{field}": path for field, path in other.items()}
    return read_config(None, {}, {"cluster.id": "c", "node.id": node_id, "node.data_dir": "d", **files})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two nodes, a client and an administrator."""
    path = tmp_path_factory.mktemp("certs")
    make_certificates(path, {"n1": ["127.0.0.1"], "n2": ["127.0.0.1"]}, ["app"], ["ops"], 30)
    return path


def test_keys_are_private(directory: Path) -> None:
    """Nobody else reads a key."""
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.glob("*.key"))
    assert identity_of((directory / "ops.crt").read_bytes()).units == {ADMIN_UNIT}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({"ca": []}, [], []), "name: 'ca': the authority's own"),
        (({"n1": []}, ["n1"], []), "name: 'n1': given twice"),
        (({}, ["a"], ["a"]), "name: 'a': given twice"),
        (({"n1": ["zür.ch"]}, [], []), "host: 'zür.ch': an IP address or a name"),
        (({"n1": ["a b"]}, [], []), "host: 'a b': an IP address or a name"),
    ],
)
def test_what_would_overwrite_another_file_is_refused(
    arguments: tuple[dict[str, list[str]], list[str], list[str]], said: str, tmp_path: Path
) -> None:
    """A certificate named ca took the place of the authority, and the second of a name that of the first."""
    with pytest.raises(ValueError, match=said):
        make_certificates(tmp_path / "new", *arguments, 1, replace=True)
    assert not (tmp_path / "new").exists()


def test_an_authority_that_nobody_would_believe_is_refused(directory: Path, tmp_path: Path) -> None:
    """Its key is another's, encrypted or spoilt, or its time is over."""
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    (other / "ca.key").write_bytes((directory / "n1.key").read_bytes())
    with pytest.raises(ValueError, match=r"ca\.key does not belong to .*ca\.crt"):
        make_certificates(other, {}, ["new"], [], 1)
    key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    for data in (secret, b"spoilt"):
        (other / "ca.key").write_bytes(data)
        with pytest.raises(ValueError, match=r"ca\.key cannot be read"):
            make_certificates(other, {}, ["new"], [], 1)
    open_authority(tmp_path / "old", 0)
    with pytest.raises(ValueError, match=r"ca\.crt was valid until"):
        make_certificates(tmp_path / "old", {}, ["new"], [], 1)
    assert not (other / "new.key").exists() and not (tmp_path / "old" / "new.key").exists()


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """What it leads to is somebody's."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "app.key").symlink_to(tmp_path / "precious")
    make_certificates(tmp_path / "certs", {}, ["app"], [], 1, replace=True)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "certs" / "app.key").is_symlink()


def test_wrong_files_are_named(directory: Path) -> None:
    """Another node's certificate, a key that does not fit, a missing file: each a clear refusal at start."""
    with pytest.raises(ConfigError, match="is for n2, and this node is n1"):
        read_tls(configured(directory, "n1", "n2"))
    with pytest.raises(ConfigError, match="does not belong to the certificate"):
        read_tls(configured(directory, "n1", "n1", "n2"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tls(configured(directory, "n1", "missing"))


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_an_empty_file_does_not_turn_tls_off(directory: Path, tmp_path: Path, part: str) -> None:
    """A disk that was full, or a secret that is not there yet, leaves one: no port may be open to everybody then."""
    empty = tmp_path / "empty"
    empty.touch()
    for port in ("client", "peer"):
        field = f"{port}_{part}_file"
        with pytest.raises(ConfigError, match=f"tls.{field} = {empty}: is empty"):
            read_tls(configured(directory, "n1", "n1", **{field: str(empty)}))


def test_files_that_tls_refuses_are_named(directory: Path, tmp_path: Path) -> None:
    """They are refused when they are read, not at each handshake. Comments in them may be in any language."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    authority = tmp_path / "ca.crt"
    authority.write_bytes("# Zürich ☃\n".encode() + authority.read_bytes())
    assert read_tls(configured(tmp_path, "n1", "n1")).peer is not None
    certificate = tmp_path / "n1.crt"
    broken = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
    certificate.write_bytes(certificate.read_bytes() + broken)
    with pytest.raises(ConfigError, match="cannot be used for TLS"):
        read_tls(configured(tmp_path, "n1", "n1"))


@pytest.mark.parametrize(("dialled_as", "works"), [("n1", True), ("n2", False)])
async def test_the_dialled_peer_must_have_its_members_name(directory: Path, dialled_as: str, works: bool) -> None:
    """A peer reached under n2's address with n1's certificate fails in the handshake."""
    server_tls = Certificates(configured(directory, "n1", "n1"))
    dialler_tls = read_tls(configured(directory, "n2", "n2"))
    assert dialler_tls.peer is not None
    server, secured = Server(), peer_context(dialler_tls.peer)
    port = await started(server, server_tls.server_context("peer"))
    dial = dialled(f"127.0.0.1:{port}", Limits(), secured=secured, server_name=dialled_as)
    if works:
        async with await dial as connection:
            call = connection.call("/no/Method", bytes, bytes)
            call.end()
            with pytest.raises(CallError, match="UNIMPLEMENTED"):
                await call.read()
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            await dial
    await server.stop()
