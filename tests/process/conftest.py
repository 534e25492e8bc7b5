"""What tests of whole processes share."""

from __future__ import annotations

import pytest

from tests.process.commands import Commands, commands_here


@pytest.fixture(scope="session")
def commands() -> Commands:
    """Of today's version."""
    return commands_here()
