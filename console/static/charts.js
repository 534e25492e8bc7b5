// Charts with uPlot, in the colours of the theme; drawn anew when that changes.

import uPlot from "./vendor/uPlot.esm.js";
import { h, kept } from "./dom.js";
import { clock, day, short } from "./format.js";

const charts = new Set();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const utc = (seconds) => uPlot.tzDate(new Date(seconds * 1_000), "Etc/UTC");
const font = () => `12px ${colour("--sans")}`;

function axis(extra) {
  return { stroke: colour("--muted"), font: font(), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, ...extra };
}

// Distances between the labels of an axis: whole numbers and whole seconds, so that no two labels are the same.
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const SECONDS = [1, 2, 5, 10, 15, 30].concat([1, 2, 5, 10, 15, 30].map((minutes) => minutes * 60), [1, 2, 3, 6, 12].map((hours) => hours * 3_600), [1, 2, 5, 10, 30, 60, 120, 365].map((days) => days * 86_400));

const STEP_TEXTS = [[86_400, (ms) => day(ms).slice(5)], [60, (ms) => clock(ms).slice(0, 5)], [0, (ms) => clock(ms)]];

function timeTexts(_, splits) {
  const step = splits.length > 1 ? splits[1] - splits[0] : 60;
  const long = splits.length > 1 && splits.at(-1) - splits[0] > 86_400;
  const [, text] = STEP_TEXTS.find(([least]) => step >= least);
  return splits.map((at) => {
    const midnight = at % 86_400 === 0;
    return long && (midnight || step >= 86_400) ? day(at * 1_000).slice(5) : text(at * 1_000);
  });
}

// An element that holds one chart. `make(width, height)` gives uPlot's options; `data()` what to draw.
class Chart {
  constructor(label, make, className = "") {
    this.element = kept(h("div", { class: `chart ${className}`, role: "img", "aria-label": label }));
    this.make = make;
    this.data = [[]];
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.element);
    charts.add(this);
  }

  size() {
    const box = this.element.getBoundingClientRect();
    return { width: Math.max(120, Math.floor(box.width - 16)), height: Math.max(100, Math.floor(box.height - 14)) };
  }

  fit() {
    if (!this.element.isConnected) return;
    if (this.plot) this.plot.setSize(this.size());
    else this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = new uPlot({ ...this.make(), ...this.size() }, this.data, this.element);
  }

  show(data) {
    this.data = data;
    if (this.plot) this.plot.setData(data);
    else if (this.element.isConnected) this.draw();
  }

  end() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
    charts.delete(this);
  }
}

export function redrawAll() {
  for (const chart of [...charts]) if (chart.element.isConnected && chart.plot) chart.draw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

// `bands`: spans that are shaded, in seconds; `log`: a logarithmic scale, for values from 1 on, with lines at powers of 10.
export function lines(label, series, text = short, { bands = () => [], log = false, tall = false } = {}) {
  const shade = (plot) => {
    plot.ctx.fillStyle = colour("--warn-soft");
    for (const [from, until] of bands()) {
      const left = Math.max(plot.bbox.left, plot.valToPos(from, "x", true));
      const right = Math.min(plot.bbox.left + plot.bbox.width, plot.valToPos(until, "x", true));
      if (right > left) plot.ctx.fillRect(left, plot.bbox.top, right - left, plot.bbox.height);
    }
  };
  const scale = log ? { distr: 3, range: (_, low, high) => [1, 10 ** Math.ceil(Math.log10(Math.max(10, high ?? 10)))] } : { range: (_, low, high) => [0, Math.max(1, (high ?? 1) * 1.12)] };
  const powers = (_, axisAt, low, high) => Array.from({ length: Math.round(Math.log10(high)) + 1 }, (__, at) => 10 ** at);
  return new Chart(label, () => ({
    tzDate: utc,
    legend: { show: false },
    cursor: { points: { size: 6 }, y: false, drag: { x: false, y: false } },
    scales: { y: scale },
    axes: [axis({ values: timeTexts, space: 70, size: 28, incrs: SECONDS }), axis({ size: 56, space: 34, incrs: WHOLE, ...(log ? { splits: powers } : {}), values: (_, splits) => splits.map(text) })],
    padding: [null, 25, null, null],
    hooks: { drawClear: [shade] },
    series: [{}, ...series.map(([name, key]) => ({ label: name, stroke: colour(key), width: 1.75, points: { show: false }, spanGaps: false }))],
  }), tall ? "tall" : "");
}

// A histogram over time. `chosen(fromMs, toMs)` is called with a span that somebody has drawn with the mouse.
export function histogram(label, chosen) {
  return new Chart(label, () => ({
    tzDate: utc,
    legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, (high ?? 1) * 1.1)] } },
    axes: [axis({ values: timeTexts, space: 80, size: 28, incrs: SECONDS, grid: { show: false } }), axis({ size: 52, space: 34, incrs: WHOLE, values: (_, splits) => splits.map(short) })],
    series: [{}, { fill: colour("--series-1"), stroke: colour("--series-1"), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.82, 40], align: 1, radius: 0.15 }) }],
    hooks: {
      setSelect: [(plot) => {
        const { left, width } = plot.select;
        if (width < 4) return;
        chosen(plot.posToVal(left, "x") * 1_000, plot.posToVal(left + width, "x") * 1_000);
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  }), "tall");
}
