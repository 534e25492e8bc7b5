"""The picture of a run: faults, roles, rates and lateness over one axis of time, as SVG.

Owns the geometry. Two drawings: a gutter with names and scales that stays in place, and a plot that may be wider than
the page. Colours are classes; the page gives them their values, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tickwheel.chaos.live.plan import FAMILIES
from tickwheel.chaos.live.verdict import Verdict

GUTTER = 118
LEAST_WIDTH, MOST_WIDTH = 1_010, 9_000
PIXELS_PER_S = 3.0
LANE, LANE_GAP = 17, 4
PANEL_GAP = 30
RATES_HEIGHT, LATENESS_HEIGHT = 120, 160
AXIS_HEIGHT = 26
LATE_MS = (1.0, 60_000.0)
LATE_LINES = ((1, "1 ms"), (10, "10 ms"), (100, "100 ms"), (1_000, "1 s"), (10_000, "10 s"), (60_000, "60 s"))
TIME_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300)
TICK_PIXELS_LEAST = 60
LABEL_PIXELS = 6.2
"""Width of a letter of a label, about."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Two drawings of the same height, and where the time is in the wide one."""

    gutter: str
    plot: str
    height: int
    width: int
    seconds: float


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


class _Drawing:
    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        ends = [*verdict.marks.values(), *verdict.heard_until.values(), 1.0]
        self.seconds = max(ends)
        self.width = int(min(max(LEAST_WIDTH, self.seconds * PIXELS_PER_S), MOST_WIDTH))
        self.gutter: list[str] = []
        self.plot: list[str] = []
        self.y = 8.0

    def x(self, at_s: float) -> float:
        return max(0.0, min(1.0, at_s / self.seconds)) * self.width

    # -- pieces

    def heading(self, text: str) -> None:
        self.gutter.append(f'<text class="head" x="0" y="{self.y + 10:.1f}">{escape(text)}</text>')
        self.y += 18

    def name(self, text: str, y: float, kind: str = "name") -> None:
        self.gutter.append(
            f'<text class="{kind}" x="{GUTTER - 10}" y="{y:.1f}" text-anchor="end">{escape(text)}</text>'
        )

    def bar(
        self, from_s: float, until_s: float, y: float, kind: str, title: str, least: float = 1.0
    ) -> tuple[float, float]:
        left = self.x(from_s)
        width = max(least, self.x(until_s) - left)
        self.plot.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LANE}" rx="2">'
            f"<title>{escape(title)}</title></rect>"
        )
        return left, width

    def rule(self, y: float, kind: str = "rule") -> None:
        self.plot.append(f'<line class="{kind}" x1="0" x2="{self.width}" y1="{y:.1f}" y2="{y:.1f}"/>')

    def line(self, points: Sequence[tuple[float, float] | None], kind: str) -> None:
        """A line through the points; None is a gap."""
        parts, pen_down = [], False
        for point in points:
            if point is None:
                pen_down = False
                continue
            parts.append(f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
            pen_down = True
        self.plot.append(f'<path class="{kind}" d="{"".join(parts)}"/>')

    # -- panels

    def faults(self) -> None:
        self.heading("Faults")
        for family in FAMILIES:
            mine = [fault for fault in self.verdict.faults if fault["family"] == family]
            if not mine:
                continue
            self.name(family, self.y + 12.5)
            self.rule(self.y + LANE / 2)
            for fault in mine:
                self._fault(fault, family, mine)
            self.y += LANE + LANE_GAP
        self.y += PANEL_GAP - LANE_GAP

    def _fault(self, fault: dict[str, Any], family: str, mine: list[dict[str, Any]]) -> None:
        until_s = fault["until_s"] if fault["until_s"] is not None else self.seconds
        kind = f"fault f-{family}" + ("" if fault["count"] else " vain")
        seen = f"{fault['count']:,} {fault['unit']}" if fault["count"] else "NO EFFECT SEEN"
        title = (
            f"#{fault['number']} {fault['kind']} of {', '.join(fault['struck'])}\n"
            f"{fault['from_s']:.1f} s to {until_s:.1f} s\n{fault['detail']}\n{seen}"
        )
        left, width = self.bar(fault["from_s"], until_s, self.y, kind, title, 3.0)
        label = fault["kind"] + (f" {fault['struck'][0]}" if len(fault["struck"]) == 1 else "")
        following = min((self.x(o["from_s"]) for o in mine if o["from_s"] > fault["from_s"]), default=float(self.width))
        for text in (label, fault["kind"]):
            if len(text) * LABEL_PIXELS + 8 <= following - left:
                inside = len(text) * LABEL_PIXELS + 8 <= width
                at = left + 4 if inside else left + width + 3
                if inside or at + len(text) * LABEL_PIXELS <= following:
                    style = "on" if inside else "beside"
                    self.plot.append(
                        f'<text class="{style}" x="{at:.1f}" y="{self.y + 12.5:.1f}">{escape(text)}</text>'
                    )
                    return

    def roles(self) -> None:
        self.heading("Role of each node")
        for node, told in self.verdict.roles.items():
            self.name(node, self.y + 12.5)
            until = [at_s for at_s, _ in told[1:]] + [self.verdict.heard_until.get(node, self.seconds)]
            for (from_s, role), until_s in zip(told, until, strict=True):
                if until_s > 0:
                    self.bar(
                        from_s,
                        until_s,
                        self.y,
                        f"role r-{role}",
                        f"{node} {role}\n{from_s:.2f} s to {until_s:.2f} s",
                        0.6,
                    )
            self.y += LANE + LANE_GAP
        self.y += PANEL_GAP - LANE_GAP

    def rates(self) -> None:
        self.heading("Messages a second")
        series = self.verdict.series
        top = _nice(max([*series.acknowledged, *series.delivered, 1.0]))
        low = self.y + RATES_HEIGHT
        for part in (0.0, 0.5, 1.0):
            y = low - part * RATES_HEIGHT
            self.rule(y)
            self.name(f"{top * part:,.0f}", y + 4, "scale")

        def points(values: Sequence[float]) -> list[tuple[float, float] | None]:
            return [(self.x(s), low - v / top * RATES_HEIGHT) for s, v in zip(series.seconds, values, strict=True)]

        delivered = points(series.delivered)
        if delivered:
            outline = "L".join(f"{x:.1f} {y:.1f}" for x, y in (p for p in delivered if p is not None))
            last = delivered[-1]
            assert last is not None
            self.plot.append(f'<path class="a-delivered" d="M0 {low:.1f}L{outline}L{last[0]:.1f} {low:.1f}Z"/>')
        self.line(delivered, "l-delivered")
        self.line(points(series.acknowledged), "l-acknowledged")
        self.y = low + PANEL_GAP

    def lateness(self) -> None:
        self.heading("Lateness")
        low = self.y + LATENESS_HEIGHT
        span = math.log(LATE_MS[1] / LATE_MS[0])

        def at(late_ms: float) -> float:
            return low - math.log(max(LATE_MS[0], min(LATE_MS[1], late_ms)) / LATE_MS[0]) / span * LATENESS_HEIGHT

        for value, text in LATE_LINES:
            self.rule(at(value))
            self.name(text, at(value) + 4, "scale")
        series = self.verdict.series

        def points(values: Sequence[float | None]) -> list[tuple[float, float] | None]:
            return [
                None if value is None else (self.x(second), at(value))
                for second, value in zip(series.seconds, values, strict=True)
            ]

        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in (p for p in points(series.late_worst) if p is not None))
        self.line(points(series.late_p99), "l-p99")
        self.line(points(series.late_p50), "l-p50")
        self.plot.append(f'<path class="d-worst" d="{dots}"/>')
        self.y = low

    def axis(self) -> None:
        step = next((s for s in TIME_STEPS_S if s * self.width / self.seconds >= TICK_PIXELS_LEAST), TIME_STEPS_S[-1])
        at_s = 0.0
        while at_s <= self.seconds:
            x = self.x(at_s)
            self.plot.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{self.y:.1f}" y2="{self.y + 5:.1f}"/>')
            anchor = "start" if at_s == 0 else "end" if x > self.width - 14 else "middle"
            text = f"{int(at_s // 60)}:{int(at_s % 60):02d}"
            self.plot.append(
                f'<text class="scale" x="{x:.1f}" y="{self.y + 18:.1f}" text-anchor="{anchor}">{text}</text>'
            )
            at_s += step
        self.name("min:s", self.y + 18, "scale")
        self.y += AXIS_HEIGHT

    def bands(self, top: float, low: float) -> str:
        """The faults behind roles, rates and lateness, and the marks of heal and drain."""
        parts = []
        for fault in self.verdict.faults:
            until_s = fault["until_s"] if fault["until_s"] is not None else self.seconds
            left = self.x(fault["from_s"])
            parts.append(
                f'<rect class="band f-{fault["family"]}" x="{left:.1f}" y="{top:.1f}" '
                f'width="{max(1.0, self.x(until_s) - left):.1f}" height="{low - top:.1f}"/>'
            )
        for line, mark in enumerate(("heal", "drain")):  # one below the other: in a long run they are close together
            if mark in self.verdict.marks:
                x = self.x(self.verdict.marks[mark])
                parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{low:.1f}"/>')
                y = top - 16 + 11 * line
                parts.append(f'<text class="mark" x="{x - 4:.1f}" y="{y:.1f}" text-anchor="end">{mark}</text>')
        for broken in self.verdict.broken:
            x = self.x(broken.at_s)
            parts.append(
                f'<path class="broken" d="M{x:.1f} {low:.1f}l-5 -9h10z">'
                f"<title>{escape(broken.promise)}: {escape(broken.text[:300])}</title></path>"
            )
        return "".join(parts)


def _nice(value: float) -> float:
    """The next round number above."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value)


def _svg(width: float, height: float, kind: str, content: str) -> str:
    size = f'width="{_number(width)}" height="{_number(height)}" viewBox="0 0 {_number(width)} {_number(height)}"'
    return f'<svg class="{kind}" {size} xmlns="http://www.w3.org/2000/svg">{content}</svg>'


def draw(verdict: Verdict) -> Picture:
    """The picture of a run."""
    drawing = _Drawing(verdict)
    panels: tuple[Callable[[], None], ...] = (drawing.roles, drawing.rates, drawing.lateness)
    drawing.faults()
    top = drawing.y
    for panel in panels:
        panel()
    low = drawing.y
    drawing.axis()
    cursor = f'<line id="now" class="now" x1="-9" x2="-9" y1="0" y2="{low:.1f}"/>'
    plot = drawing.bands(top, low) + "".join(drawing.plot) + cursor
    return Picture(
        _svg(GUTTER, drawing.y, "gutter", "".join(drawing.gutter)),
        _svg(drawing.width, drawing.y, "plot", plot),
        int(drawing.y),
        drawing.width,
        drawing.seconds,
    )
