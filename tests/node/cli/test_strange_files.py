"""Files whose parser fails with another error than its own: each is refused by name, by every command that reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tickwheel.gateway.config import GatewayConfigError
from tickwheel.gateway.config import read_config as read_gateway_config
from tickwheel.node.cli import contexts
from tickwheel.node.config import ConfigError, read_config
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.node.made_files import LocalClusterError

STRANGE = {"digits": "9" * 5_000, "nested": "[" * 20_000}
"""Python refuses to read such a number, and ends such a recursion."""


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_a_strange_file_is_refused_by_name(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration of a node, of a gateway, of a local cluster, and contexts."""
    file = tmp_path / "n1" / "node.toml"
    file.parent.mkdir()
    file.write_text(f"x = {value}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"node\.toml: is not TOML"):
        read_config(file, environment={})
    with pytest.raises(GatewayConfigError, match=r"node\.toml: is not TOML"):
        read_gateway_config(file)
    with pytest.raises(LocalClusterError, match="n1 is there already"):  # not a node of its own: passed over
        LocalCluster(tmp_path, 1)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    contexts.file().parent.mkdir()
    contexts.file().write_text(f'{{"version": {value}', encoding="utf-8")
    with pytest.raises(contexts.ContextError, match=r"contexts\.json is not a file of contexts"):
        contexts.read()


def test_a_cluster_in_a_directory_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    """Its nodes ended with a configuration that is not TOML, which `up` itself had written."""
    place = tmp_path / os.fsdecode(b"of \xff") / "cluster"
    with pytest.raises(LocalClusterError, match="is no UTF-8"):
        LocalCluster(place, 1)
    assert not place.exists()
