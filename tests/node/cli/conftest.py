"""A node and its command line for every test that asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.cli.commands import Run, one_node, running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real node."""
    with one_node(tmp_path_factory.mktemp("cluster")) as address:
        yield address


@pytest.fixture
def run(address: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against the node."""
    monkeypatch.setenv("TICKWHEEL_ADDRESS", address)
    monkeypatch.setenv("COLUMNS", "160")
    return running(capfd)
