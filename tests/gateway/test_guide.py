"""The commands of docs/HTTP.md and of README.md do what they say, with curl."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.gateways import SOON_S, running
from tickwheel.node.local_cluster import LocalCluster

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/HTTP.md"
HERE = "localhost:7780"
CHRISTMAS = "2026-12-24"
"""It passes, and the guide does not change then."""


def examples() -> list[list[tuple[str, str]]]:
    """For each block the commands, and what it says they answer; empty if it says nothing."""
    blocks = []
    for block in re.findall(r"```sh\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        found = re.findall(r"^(curl .*)\n(?:# (.*)\n)?", block.replace("\\\n", ""), re.MULTILINE)
        if found:
            blocks.append(found)
    return blocks


def fits(said: Any, answer: Any) -> bool:
    """Whether an answer has the names of the guide's; the guide may leave some out, as `"..."`."""
    if isinstance(said, dict):
        names = set(said) - {"..."}
        return isinstance(answer, dict) and (
            (names <= set(answer) if "..." in said else names == set(answer))
            and all(fits(said[name], answer[name]) for name in names)
        )
    if isinstance(said, list) and said and answer:
        return isinstance(answer, list) and fits(said[0], answer[0])
    return type(said) is type(answer)


async def curl(command: str) -> Any:
    """The JSON that a command prints. It fails for any error of HTTP."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command.replace("curl ", "curl -sS --fail-with-body ", 1),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), SOON_S)
    assert process.returncode == 0, (command, out, err)
    return json.loads(out)


async def test_commands_answer_as_the_guide_says(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each succeeds, and its answer has the shape that the guide shows."""
    blocks = examples()
    assert [len(block) for block in blocks] == [4, 9]
    next_christmas = f"{datetime.now(UTC).year + 1}-12-24"
    async with running(cluster, tmp_path / "g.toml", "[listen]\nbind = '127.0.0.1:0'") as gateway:
        host, port = await asyncio.wait_for(gateway.listening(), SOON_S)
        for block in blocks:
            ids: dict[str, str] = {}
            for command, said in block:
                for shown, given in ids.items():
                    command = command.replace(shown, given)
                command = command.replace(HERE, f"{host}:{port}").replace(CHRISTMAS, next_christmas)
                answer = await curl(command)
                if not said:
                    continue
                shape = json.loads(re.sub(r"(?<=[{,\[])\.\.\.(?=[,}])", '"...":0', said).replace(",...]", "]"))
                assert fits(shape, answer), (command, answer)
                if "id" in shape:
                    ids[shape["id"]] = answer["id"]


async def test_the_first_commands_of_the_readme(cluster: LocalCluster, tmp_path: Path) -> None:
    """Schedule, look, cancel."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    schedule, look, cancel = re.findall(r"^(curl .*?)(?: +#.*)?$", text, re.MULTILINE)
    async with running(cluster, tmp_path / "g.toml", "[listen]\nbind = '127.0.0.1:0'") as gateway:
        host, port = await asyncio.wait_for(gateway.listening(), SOON_S)

        async def run(command: str) -> Any:
            return await curl(command.replace(HERE, f"{host}:{port}"))

        made = await run(schedule)
        assert made["id"] in {message["id"] for message in (await run(look))["messages"]}
        assert (await run(cancel.replace("ID", made["id"])))["outcome"] == "CANCELLED"
