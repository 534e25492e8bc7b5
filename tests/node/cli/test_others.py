"""Commands that other packages add by the entry point group."""

from __future__ import annotations

import pytest

from tickwheel.node.cli.program import run


@pytest.mark.parametrize(
    ("name", "option"), [("bench", "--seconds"), ("console", "--read-only"), ("gateway", "--check")]
)
def test_a_single_command_takes_its_options_at_once(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`tickwheel bench --seconds 5`, as the documents have it: the name is not said twice."""
    assert run([name, "--help"]) == 0
    assert option in capsys.readouterr().out
