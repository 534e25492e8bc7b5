"""What tests of whole processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.commands import Commands


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Of today's version."""
    with Commands() as made:
        yield made
