"""Certificates of a running node: who is let in, new files without a restart, and warnings before their end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from tests.transport.served import started
from tickwheel.client.cluster import TLS_LOOK_S, Cluster, TlsFiles
from tickwheel.node.certs import issue, make_certificates, open_authority
from tickwheel.node.config import NodeConfig, read_config
from tickwheel.node.server import certificates
from tickwheel.node.server.access import Access, Permission
from tickwheel.node.server.certificates import LOOK_NS, Certificates
from tickwheel.proto import common_pb2
from tickwheel.transport.server import Server


def configured(directory: Path) -> NodeConfig:
    """Node n1 with its certificate on both ports."""
    files = {
        f"tls.{port}_{part}_file": str(directory / name)
        for port in ("client", "peer")
        for part, name in (("cert", "n1.crt"), ("key", "n1.key"), ("ca", "ca.crt"))
    }
    return read_config(None, {}, {"cluster.id": "c", "node.id": "n1", "node.data_dir": "d", **files})


def made(directory: Path, days: int = 90) -> Path:
    """Of a node, a client and an administrator, by an authority of their own."""
    make_certificates(directory, {"n1": ["127.0.0.1"]}, ["app"], ["ops"], days)
    return directory


@pytest.fixture
def renewed(tmp_path: Path) -> tuple[Path, Path]:
    """The files in use, and others of another authority."""
    return made(tmp_path / "used"), made(tmp_path / "new")


def replace(used: Path, new: Path, *names: str) -> None:
    """As an operator does: aside, then in place."""
    for name in names or [path.name for path in new.iterdir()]:
        shutil.copy(new / name, used / f"{name}.new")
        (used / f"{name}.new").replace(used / name)


class Caller:
    """Shows a certificate."""

    def __init__(self, pem: bytes) -> None:
        self._pem = pem

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {"x509_pem_cert": [self._pem]} if self._pem else {}


@pytest.mark.parametrize(
    ("unit", "name", "client", "admin"),
    [
        ("tickwheel-client", "app", True, False),
        ("tickwheel-admin", "ops", True, True),
        ("tickwheel-node", "n2", False, False),
        ("accounting", "intruder", False, False),
        ("", "intruder", False, False),
        ("", "named", True, False),
        ("", "chief", True, True),
    ],
)
def test_a_certificate_must_say_what_it_may_do(tmp_path: Path, unit: str, name: str, client: bool, admin: bool) -> None:
    """An authority signs for much else: what states no role, by its unit or the node's settings, has none."""
    authority = open_authority(tmp_path, 10)
    certificate, _ = issue(authority, tmp_path, name, unit or "x", [], 10)
    pem = certificate.read_bytes()
    if not unit:
        pem = _without_unit(tmp_path, name)
    access = Access(tls=True, admin_names=["chief"], client_names=["named"])
    for needed, allowed in ((Permission.CLIENT, client), (Permission.ADMIN, admin)):
        refusal = access.refusal(Caller(pem), needed)
        assert (refusal is None) == allowed
        assert refusal is None or refusal.reason == common_pb2.ROLE_REQUIRED
    anybody = Access(tls=True, admin_names=[], client_names=["*"])
    assert (anybody.refusal(Caller(pem), Permission.CLIENT) is None) == (unit != "tickwheel-node")
    if name == "intruder":
        refusal = access.refusal(Caller(pem), Permission.CLIENT)
        assert refusal is not None
        assert "tickwheel-client" in refusal.message and "tls.client_names" in refusal.message
        assert (unit or "none") in refusal.message


def _without_unit(directory: Path, name: str) -> bytes:
    """A certificate that says a name and nothing else."""
    import datetime

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


async def handshake(port: int, shown: Path) -> bool:
    """Whether a caller with the client certificate of a directory is let in, and trusts who answers."""
    credentials = grpc.ssl_channel_credentials(
        *((shown / name).read_bytes() for name in ("ca.crt", "app.key", "app.crt"))
    )
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        try:
            call = channel.unary_unary("/none/None")  # type: ignore[call-arg]  # bytes as they are
            await call(b"", timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return True


@pytest.mark.parametrize("port_name", ["client", "peer"])
async def test_new_files_count_for_the_next_handshake_and_need_no_restart(
    renewed: tuple[Path, Path], tmp_path: Path, port_name: str
) -> None:
    used, new = renewed
    old = shutil.copytree(used, tmp_path / "old")
    tls = Certificates(configured(used))
    server = Server()
    port = await started(server, tls.server_context(port_name))
    assert await handshake(port, old) and not await handshake(port, new)
    replace(used, new)
    tls.reload()
    assert await handshake(port, new) and not await handshake(port, old)
    await server.stop()


def test_files_are_taken_once_two_looks_have_found_the_same(renewed: tuple[Path, Path]) -> None:
    used, new = renewed
    tls = Certificates(configured(used))
    before, now_ns = tls.current, 0

    def look() -> list[str]:
        nonlocal now_ns
        now_ns += LOOK_NS
        return [line.level for line in tls.look(now_ns)]

    assert look() == []
    replace(used, new, "n1.crt")  # its key is not there yet
    assert look() == [] and tls.current is before
    replace(used, new, "n1.key", "ca.crt")
    assert look() == [] and tls.current is before
    assert look() == ["info"] and tls.current is not before
    assert tls.current.peer is not None and tls.current.peer.certificate == (new / "n1.crt").read_bytes()
    assert look() == [] and not tls.reason()


def test_bad_new_files_leave_the_old_ones_and_are_told(renewed: tuple[Path, Path]) -> None:
    used, new = renewed
    tls = Certificates(configured(used))
    before = tls.current
    replace(used, new, "n1.crt")
    (line,) = tls.reload()
    assert line.level == "error" and "does not belong to the certificate" in str(line.fields["reason"])
    assert tls.current is before and "the old ones stay" in tls.reason()
    (used / "n1.key").unlink()
    (line,) = tls.reload()
    assert tls.current is before and "cannot be read" in tls.reason()
    replace(used, new)
    (line,) = tls.reload()
    assert line.level == "info" and tls.current is not before and not tls.reason()


@pytest.mark.parametrize("what", ["pipe", "device", "large"])
def test_a_file_without_end_is_not_waited_for(renewed: tuple[Path, Path], what: str) -> None:
    """The loop reads the files again: the node stood still, or took all memory."""
    used, _ = renewed
    tls = Certificates(configured(used))
    before, path = tls.current, used / "n1.crt"
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 30)
    tls.reload()
    reason = "is larger than 1,048,576 bytes" if what == "large" else "cannot be read: no regular file"
    assert tls.current is before and reason in tls.reason()


def test_the_end_of_a_certificate_is_a_metric_and_a_warning_a_month_ahead(tmp_path: Path) -> None:
    tls = Certificates(configured(made(tmp_path, days=certificates.WARN_DAYS - 1)))
    ends = tls.ends()
    assert set(ends) == {(port, what) for port in ("client", "peer") for what in ("certificate", "authority")}
    pem = x509.load_pem_x509_certificate((tmp_path / "n1.crt").read_bytes())
    assert ends["peer", "certificate"] == pem.not_valid_after_utc.timestamp()
    assert "the certificate of the peer port ends in" in tls.reason()
    lines = tls.look(LOOK_NS)
    assert [line.level for line in lines] == ["warning"] * 4
    assert tls.look(2 * LOOK_NS) == []  # told once a day
    assert len(tls.look(certificates.REMIND_NS + 2 * LOOK_NS)) == 4
    far = Certificates(configured(made(tmp_path / "far", days=certificates.WARN_DAYS + 2)))
    assert not far.reason() and not far.look(LOOK_NS)


async def test_a_client_shows_new_files_for_its_next_calls(
    renewed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, new = renewed
    clock = [0.0]
    monkeypatch.setattr("tickwheel.client.cluster.time.monotonic", lambda: clock[0])
    cluster = Cluster(["127.0.0.1:1"], TlsFiles(used / "ca.crt", used / "app.crt", used / "app.key"))
    first = cluster.channel("127.0.0.1:1")
    replace(used, new)
    for _ in range(2):
        clock[0] += TLS_LOOK_S
        assert cluster.channel("127.0.0.1:1") is first or _ == 1
    assert cluster.channel("127.0.0.1:1") is not first
    (used / "app.key").unlink()
    last = cluster.channel("127.0.0.1:1")
    for _ in range(3):
        clock[0] += TLS_LOOK_S
        assert cluster.channel("127.0.0.1:1") is last
    await cluster.close()
