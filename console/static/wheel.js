// The wheel turning: the next 24 hours outside, the next 60 seconds inside. Each hour and second has its place on the
// ring; the ring turns under the hand, which points at now.

import { clock, count, day, plural, short } from "./format.js";
import { s } from "./dom.js";

const SIZE = 460;
const MIDDLE = SIZE / 2;
const HOURS = { inner: 158, outer: 208, parts: 24, ms: 3_600_000, gap: 1.6 };
const SECONDS = { inner: 104, outer: 142, parts: 60, ms: 1_000, gap: 1.4 };
const LEAST = 3;

function point(radius, degrees) {
  const angle = ((degrees - 90) * Math.PI) / 180;
  return `${(MIDDLE + radius * Math.cos(angle)).toFixed(2)} ${(MIDDLE + radius * Math.sin(angle)).toFixed(2)}`;
}

function sector(inner, outer, from, to) {
  const large = to - from > 180 ? 1 : 0;
  return `M${point(inner, from)}A${inner} ${inner} 0 ${large} 1 ${point(inner, to)}L${point(outer, to)}A${outer} ${outer} 0 ${large} 0 ${point(outer, from)}Z`;
}

// The loads of the next parts of a ring, each at its place on the dial.
function placed(ring, found, nowMs) {
  const first = Math.floor(nowMs / ring.ms);
  const loads = new Array(ring.parts).fill(0);
  for (const [startMs, number] of found) {
    const step = Math.floor(startMs / ring.ms);
    if (step >= first && step < first + ring.parts) loads[step % ring.parts] += number;
  }
  return loads;
}

function bars(ring, loads, kind, nowPart) {
  const most = Math.max(1, ...loads);
  const width = 360 / ring.parts;
  return loads.map((load, part) => {
    const from = part * width + ring.gap / 2;
    const to = (part + 1) * width - ring.gap / 2;
    const length = load ? LEAST + (ring.outer - ring.inner - LEAST) * (load / most) ** 0.8 : 0;
    return s("g", { key: `${kind}${part}`, opacity: part === nowPart ? 1 : 0.86 },
      s("path", { class: "slot", d: sector(ring.inner, ring.inner + LEAST, from, to) }),
      load ? s("path", { class: kind, d: sector(ring.inner, ring.inner + length, from, to) }) : null);
  });
}

// Degrees that a ring has turned, growing without end so that no turn goes backwards.
const turned = (ring, nowMs, sinceMs) => -((nowMs - sinceMs) / ring.ms) * (360 / ring.parts);

let sinceMs = 0;

export function wheel(picture, nowMs) {
  sinceMs ||= Math.floor(nowMs / 86_400_000) * 86_400_000;
  const wholeSecondMs = Math.floor(nowMs / 1_000) * 1_000;
  const hours = placed(HOURS, picture.hours ?? [], nowMs);
  const seconds = placed(SECONDS, picture.seconds ?? [], nowMs);
  const turn = turned(HOURS, wholeSecondMs, sinceMs);
  const nowHour = Math.floor(nowMs / HOURS.ms) % 24;
  const nowSecond = Math.floor(nowMs / 1_000) % 60;
  const day24 = hours.reduce((sum, load) => sum + load, 0);
  const minute = seconds.reduce((sum, load) => sum + load, 0);
  const labels = hours.map((_, part) => {
    const [x, y] = point(HOURS.outer + 14, part * 15 + turn).split(" ");
    return part % 2 ? null : s("text", { key: part, x, y }, String(part).padStart(2, "0"));
  });
  const error = picture.clock_error_ms ? ` ± ${picture.clock_error_ms.toFixed(1)} ms` : "";
  const known = picture.hours !== null;  // no master has told yet
  const says = `The wheel at ${clock(nowMs)} UTC: ${known ? `${plural(day24, "message")} due within 24 hours, ${count(minute)} within the next minute` : "what is ahead is not known yet"}`;
  return s("svg", { class: "wheel", viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": says },
    s("g", { transform: `rotate(${turn.toFixed(3)} ${MIDDLE} ${MIDDLE})` }, bars(HOURS, hours, "hour", nowHour)),
    s("g", { class: "turning", style: { transform: `rotate(${turned(SECONDS, wholeSecondMs, sinceMs)}deg)`, "transform-origin": "50% 50%" } },
      bars(SECONDS, seconds, "second", nowSecond)),
    labels,
    s("path", { class: "hand", d: `M${MIDDLE - 6} ${MIDDLE - SECONDS.outer - 5}h12l-6 10z` }),
    s("path", { class: "hand", d: `M${MIDDLE - 7} ${MIDDLE - HOURS.outer - 4}h14l-7 11z` }),
    s("text", { class: "small", x: MIDDLE, y: MIDDLE - 40 }, `${day(nowMs)} UTC${error}`),
    s("text", { class: "time", x: MIDDLE, y: MIDDLE - 10 }, clock(nowMs)),
    s("text", { class: "next", x: MIDDLE, y: MIDDLE + 24 }, known ? `${short(minute)} in the next minute` : "not known yet"),
    s("text", { class: "small", x: MIDDLE, y: MIDDLE + 44 }, known ? `${short(day24)} in 24 hours` : ""));
}
