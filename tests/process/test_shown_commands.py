"""The commands of README.md, docs/CLIENT.md, SCHEDULES.md, WATCHING.md and MONITORING.md do what the text says, in
their order, on three nodes and through a SIGKILL of the master. test_documents.py knows only that they exist.
"""

from __future__ import annotations

import itertools
import re
import shlex
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.process.commands import Commands
from tests.process.terminal import Terminal
from tickwheel.node.cli import program as cli

LOOK_S = 0.05
DOCS = Path(__file__).parents[2] / "docs"
COMMAND = re.compile(r"`(tickwheel [a-z][^`]*)`|^(tickwheel [a-z].*?)(?:  .*)?$", re.MULTILINE)
TYPED = re.compile(r"^()\$ (tickwheel .*)$", re.MULTILINE)
"""Where a page also shows what a command says."""
ELSEWHERE = {
    "tickwheel member add": "tests/process/test_recovery.py",
    "tickwheel pipeline promote": "tests/pipeline/test_tls.py",
}
"""What needs more than three nodes, by the test that runs it."""


def alternatives(line: str) -> list[str]:
    """`topic pause|resume` shows two commands."""
    words = [word if "'" in word or '"' in word else word.split("|") for word in line.split(" ")]
    return [" ".join(one) for one in itertools.product(*(word if isinstance(word, list) else [word] for word in words))]


class Page:
    """A document whose commands are typed one after the other; none may be left out."""

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str], begin: str = "", end: str = "\0") -> None:
        """`begin`, `end`: of the part of the document that counts."""
        self.text = (DOCS / name).read_text(encoding="utf-8").partition(begin or "\n")[2].partition(end)[0]
        pattern = TYPED if "\n$ tickwheel" in self.text else COMMAND
        self._left = [prose or block for prose, block in pattern.findall(self.text)]
        self._left = [line for line in self._left if line not in ELSEWHERE]
        self._capsys = capsys

    def next(self, line: str, *more: str, said: tuple[str, ...] = (), **names: str) -> str:
        """Types the next command of the page, with what the text leaves open: words at its end, and names.

        `more` and `said` may have one item for each alternative that the line shows.
        """
        assert self._left and self._left[0] == line, f"{line!r} is not next on the page: {self._left[:1]}"
        self._left.pop(0)
        told = ""
        for number, one in enumerate(alternatives(line)):
            words = more[min(number, len(more) - 1)] if more else ""
            expected = said[min(number, len(said) - 1)] if said else ""
            told = self.type(f"{one} {words}", said=expected, **names)
        return told

    def type(self, line: str, *, said: str = "", **names: str) -> str:
        """A command with these names; what it says, in which this expression is found."""
        for name, value in names.items():
            line = re.sub(rf"\b{name}\b", value, line)
        words = shlex.split(line.replace(" ... ", " ").removesuffix(" ..."))
        code = cli.run(words[1:])
        told = self._capsys.readouterr()
        assert code == 0, f"{line}: {told.out}{told.err}"
        assert re.search(said, told.out), f"{line}: {told.out}"
        return told.out

    def ends(self) -> None:
        """Nothing is left to type."""
        assert self._left == []


@pytest.mark.timeout(180)
def test_clients_schedules_and_monitoring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    terminal = Terminal(tmp_path, commands)
    with terminal.up("tickwheel up --quiet", "--port", "0"):
        terminal.environment["TICKWHEEL_ADDRESSES"] = terminal.addresses
        monkeypatch.setenv("TICKWHEEL_ADDRESSES", terminal.addresses)
        clients(Page("CLIENT.md", capsys))
        schedules = Page("SCHEDULES.md", capsys)
        put_schedules(schedules)
        dead = terminal.master()
        terminal.kill(dead)
        see_schedules(schedules)
        use(Page("../README.md", capsys, "\ntickwheel up ", "```"))
        watch(Page("WATCHING.md", capsys))
        monitor(Page("MONITORING.md", capsys), terminal, dead)


def clients(page: Page) -> None:
    """CLIENT.md, with messages for each command to meet."""
    page.next('tickwheel settings set delay_levels="1s 1m 1h"')
    page.type("tickwheel settings get", said=r"delay_levels +1s 1m 1h")
    page.type("tickwheel schedule reminders pay --level 3 --unique-key order-7")
    page.next("tickwheel list", "reminders", said=("order-7",))
    page.type("tickwheel group create screen reminders")
    page.next("tickwheel group filter NAME EXPRESSION", NAME="screen", EXPRESSION="a")
    page.type("tickwheel group list", said=r"screen .* a\b")
    page.next(
        "tickwheel group create|update NAME ... --retry-initial 500ms --retry-factor 2 --retry-max 1m"
        " --retry-jitter 0.2 --attempts-max 8",
        "reminders",
        "",
        NAME="billing",
    )
    page.type("tickwheel schedule reminders bad --level 0")
    page.type("tickwheel consume reminders --group billing -n 1 --dead --reason unreadable")
    page.next(
        "tickwheel dead list|show|replay|purge",
        "billing",
        "billing 0",
        "billing --all",
        "billing --all",
        said=("unreadable", "unreadable", "1", ""),
    )
    number = page.type("tickwheel consume reminders --group billing -n 1", said="bad").split()[3]
    page.next("tickwheel topic pause|resume", "reminders")
    page.next("tickwheel group pause|resume", "billing")
    page.next("tickwheel group reset NAME --to earliest|latest|TIME", NAME="billing", TIME="2026-01-01")
    page.next("tickwheel trace", number, said=("ACK: done, by billing",))
    rows = re.findall(r"^\| `(\w+)=(.*?)` \|", page.text.partition("## Flow control")[2], re.MULTILINE)
    assert len(rows) == 6
    page.next("tickwheel settings set NAME=VALUE", NAME="retention", VALUE="6d")
    for name, value in rows:
        page.type(f"tickwheel settings set {name}={value}", N="100000")
    page.next("tickwheel topic list", said=("reminders",))
    page.ends()


def put_schedules(page: Page) -> None:
    """The beginning of SCHEDULES.md, and its recipes."""
    page.next('tickwheel schedules put report reports "send it" --cron "0 9 * * MON-FRI" --zone Europe/Berlin')
    page.next("tickwheel schedules get report", said=("Europe/Berlin",))
    recipes = re.findall(r"`(--(?:cron|every) [^`]*)`", page.text)
    assert len(recipes) == 5
    for number, options in enumerate(recipes):
        page.type(f"tickwheel schedules put customer-17/{number} others go {options}")


def see_schedules(page: Page) -> None:
    """The rest of it, under another master: what was put before is there."""
    page.type("tickwheel schedules trigger report")
    page.next("tickwheel consume reports --group mailers", "-n 1", said=("send it",))
    page.next(
        'tickwheel schedules preview --cron "30 2 * * *" --zone Europe/Berlin --after 2026-03-27',
        said=("2026-03-29 03:00",),
    )
    page.next("tickwheel schedules list customer-17/", said=("customer-17/4",))
    commands = re.findall(r"`(schedules [^`]*)`", page.text.partition("| | CLI |")[2].partition("\n\n")[0])
    assert len(commands) == 9
    named = {"NAME": "nightly", "TOPIC": "reports", "PAYLOAD": "go"}
    for command in commands:
        line = command.replace("--cron ...", '--cron "0 3 * * *"').replace("[PREFIX]", "nig")
        line = line.replace("--from T --until T", "--from 2026-01-01 --until 2026-01-03")
        page.type(f"tickwheel {line}", **named)
    page.ends()


def use(page: Page) -> None:
    """The beginning of README.md, with a topic and a group of its own."""
    number = page.next('tickwheel schedule reminders "stand up" --delay 5s', reminders="notes").split()[0]
    page.type(f"tickwheel reschedule {number} --delay 1s")  # the reader waits
    consume = "tickwheel consume reminders --group screen"
    told = page.next(consume, "-n 1", said=("stand up",), reminders="notes", screen="wall")
    page.next("tickwheel top", "--once", said=("wall",))
    page.next("tickwheel trace ID", said=("ACK: done, by wall",), ID=told.split()[3])
    page.type("tickwheel schedule reminders never --delay 1h --key customer-17/1")
    page.next("tickwheel pending cancel --key-prefix customer-17/", "--yes", said=("1 cancelled",))
    page.ends()


def watch(page: Page) -> None:
    """WATCHING.md, with messages for each command to meet."""
    page.next("tickwheel top", "--once", said=("(?s)hours.*minutes.*seconds",))
    number = page.type("tickwheel schedule reminders later --delay 1h --tag eu").split()[0]
    page.next("tickwheel pending histogram reminders", said=("the fullest",))
    page.type("tickwheel schedule orders never --delay 1h --key customer-17/1")
    page.next("tickwheel pending cancel orders --key-prefix customer-17/", "--yes", said=("1 cancelled",))
    page.next("tickwheel pending reschedule reminders --tag eu --later 1h --yes", said=("1 moved",))
    page.next("tickwheel trace 0-498683-0", said=("(?s)scheduled.*committed.*moved",), **{"0-498683-0": number})
    page.ends()


def monitor(page: Page, terminal: Terminal, dead: str) -> None:
    """MONITORING.md, while one node is down: all but the two commands that need a fourth node or Spark."""
    assert "curl http://10.0.0.2:7702/healthz" in page.text
    health = {node: metrics.replace("/metrics", "/healthz") for node, (_, metrics, _) in terminal.nodes.items()}
    for node, url in health.items():
        assert healthy(url) == (node != dead)
    for _ in range(2):
        page.next("tickwheel status", said=("(?s)no answer.*connection refused",))
    for _ in range(2):
        page.next("tickwheel transfer", said=(" is master in term ",))
        while not all(healthy(url) for node, url in health.items() if node != dead):
            time.sleep(LOOK_S)  # it leads before it has heard from a majority
        page.next("tickwheel status", said=(r"master\*",))
    page.next("tickwheel top", "--once", said=("(?s)pending.*mailers",))
    page.next("tickwheel group list", said=("mailers",))
    page.type("tickwheel schedule reports bad --level 0")
    taken = page.type("tickwheel consume reports --group mailers -n 1 --dead --reason unreadable")
    number = taken.split()[3]
    page.next("tickwheel trace ID", ID=number, said=("DEAD: failed for good",))
    page.next("tickwheel settings set", "retention=7d")
    listed = page.next("tickwheel dead list", "mailers", said=("unreadable",))
    letter = listed.splitlines()[-1].split()[0]
    page.next("tickwheel dead show", f"mailers {letter}", said=("unreadable",))
    page.next("tickwheel dead replay", f"mailers {letter}", said=("1",))
    page.next("tickwheel settings get", said=("retention +7d",))
    page.next("tickwheel top", "--once")
    for _ in range(3):
        page.next("tickwheel status")
    page.next("tickwheel transfer")
    page.next("tickwheel disk", said=(r"journal +[\d,]+",))
    page.next("tickwheel transfer")
    page.next("tickwheel status", said=(r"master\*",))
    page.ends()


def healthy(url: str) -> bool:
    """Whether a node says that it is ready, and not only that it is there."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bytes(answer.read()).startswith(b"ready\n")
    except urllib.error.HTTPError as error:
        return error.read().startswith(b"ready")
    except OSError:
        return False
