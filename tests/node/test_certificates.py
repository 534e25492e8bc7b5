"""Certificates: made, read, checked, and refused in handshakes when the name is wrong."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tickwheel.node.certs import make_certificates
from tickwheel.node.config import ConfigError, NodeConfig, read_config
from tickwheel.node.server.certificates import Certificates
from tickwheel.node.tls import ADMIN_UNIT, identity_of, read_tls


def configured(directory: Path, node_id: str, cert: str, key: str | None = None) -> NodeConfig:
    """A node with the certificate `cert` on both ports."""
    files = {
        f"tls.{port}_{part}_file": str(directory / name)
        for port in ("client", "peer")
        for part, name in (("cert", f"{cert}.crt"), ("key", f"{key or cert}.key"), ("ca", "ca.crt"))
    }
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


def test_wrong_files_are_named(directory: Path) -> None:
    """Another node's certificate, a key that does not fit, a missing file: each a clear refusal at start."""
    with pytest.raises(ConfigError, match="is for n2, and this node is n1"):
        read_tls(configured(directory, "n1", "n2"))
    with pytest.raises(ConfigError, match="does not belong to the certificate"):
        read_tls(configured(directory, "n1", "n1", "n2"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tls(configured(directory, "n1", "missing"))


@pytest.mark.parametrize(("dialled_as", "works"), [("n1", True), ("n2", False)])
async def test_the_dialled_peer_must_have_its_members_name(directory: Path, dialled_as: str, works: bool) -> None:
    """A peer reached under n2's address with n1's certificate fails in the handshake."""
    server_tls = Certificates(configured(directory, "n1", "n1"))
    dialler_tls = read_tls(configured(directory, "n2", "n2"))
    server = grpc.aio.server()
    credentials, channel_credentials = server_tls.server_credentials("peer"), dialler_tls.peer_channel_credentials()
    assert credentials is not None and channel_credentials is not None
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    options = dialler_tls.peer_channel_options(dialled_as)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/no/method", None, None)(b"", timeout=10)
    expected = grpc.StatusCode.UNIMPLEMENTED if works else grpc.StatusCode.UNAVAILABLE
    assert caught.value.code() is expected
    await server.stop(None)
