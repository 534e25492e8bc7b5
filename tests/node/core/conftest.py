"""What tests of bulk load share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.core.loading import begin
from tests.node.core.trio import World


@pytest.fixture
def world() -> Iterator[World]:
    """Three nodes with a topic `t` and a group `g`; none may have stopped at the end."""
    made = World()
    begin(made)
    yield made
    assert not any(node.fatal for node in made.nodes.values())
