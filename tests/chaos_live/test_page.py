"""The report of a live run: one page that stands alone, tables, and the command that runs the plan again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from tests.chaos_live.stories import KILL_MS, good
from tickwheel.chaos.live.page import page, write_files
from tickwheel.chaos.live.report import fault_rows, headline, print_report, replay_command
from tickwheel.chaos.live.verdict import judge


def test_the_page_needs_nothing_else() -> None:
    """It can be mailed: no address of a script, style, font or image in it; the drawings are well-formed."""
    text = page(judge(good().sorted()))
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text)
    assert links == []
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert "all promises held" in text
    assert "kill-master" in text


def test_a_broken_promise_stands_on_the_page_as_text() -> None:
    """What was broken is told in words, and what came from a log cannot become markup."""
    story = good()
    story.tell(KILL_MS, "died", node="n3", code=3, log="<script>alert(1)</script>")
    text = page(judge(story.sorted()))
    assert "nodes stay up broken" in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_every_promise_has_a_name_in_the_headline() -> None:
    """A run whose nodes hold too much memory says what is broken; the headline was empty words once."""
    story = good()
    story.tell(KILL_MS, "memory", node="n3", bytes=1 << 40)
    verdict = judge(story.sorted())
    assert set(verdict.broken_counts) == {"P11"}
    assert headline(verdict)[0] == "P11 (bounded) broken"


def test_the_tables_name_faults_failovers_and_the_verdict() -> None:
    """A run is understood in the terminal without the page."""
    story = good()
    story.all_of("over")[0]["count"] = 0
    verdict = judge(story.sorted())
    console = Console(record=True, width=140, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        print_report(verdict, console)
    text = captured.get()
    assert re.search(r"kill-master\s+1\s+0\s+0\s+processes killed", text)
    assert re.search(r"n1 to n2\s+700", text)
    assert "had no effect that was seen" in text
    assert headline(verdict)[0] == "all promises held"
    assert [row.kind for row in fault_rows(verdict)] == ["kill-master"]


def test_the_files_of_a_run(tmp_path: Path) -> None:
    """JSON for scripts, HTML for people; the command runs the same plan again."""
    verdict = judge(good().sorted())
    write_files(verdict, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["holds"] is True
    assert report["failovers"][0]["without_ms"] == 700
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert replay_command(verdict) == (
        "tickwheel chaos run --nodes 3 --minutes 0.133333 --faults kill --rate 240 --seed 1"
    )
