// Numbers, times and spans for people. Times are UTC everywhere: so are the cluster's files, logs and commands.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

export function short(value) {
  if (value < 10_000) return whole.format(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= limit) {
      const part = value / limit;
      return `${part < 100 ? part.toFixed(1) : whole.format(part)} ${unit}`;
    }
  }
  return whole.format(value);
}

export const rate = (value) => (value > 0 && value < 9.95 ? value.toFixed(1) : short(value));

const two = (value) => String(value).padStart(2, "0");

export function day(ms) {
  const at = new Date(ms);
  return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())}`;
}

export function clock(ms, millis = false) {
  const at = new Date(ms);
  const text = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}:${two(at.getUTCSeconds())}`;
  return millis ? `${text}.${String(at.getUTCMilliseconds()).padStart(3, "0")}` : text;
}

export const moment = (ms, millis = false) => `${day(ms)} ${clock(ms, millis)}`;

export function span(ms) {
  const size = Math.abs(ms);
  if (size < 1_000) return `${Math.round(size)} ms`;
  if (size < 10_000) return `${(size / 1_000).toFixed(1)} s`;
  if (size < 120_000) return `${Math.round(size / 1_000)} s`;
  const minutes = Math.round(size / 60_000);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.round(hours / 24);
  return days < 700 ? `${days} days` : `${(days / 365.25).toFixed(1)} years`;
}

export function ahead(ms, nowMs) {
  const left = ms - nowMs;
  return left >= 0 ? `in ${span(left)}` : `${span(left)} ago`;
}

export function bytes(value) {
  if (value < 1_024) return `${value} B`;
  for (const [unit, size] of [["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]].reverse()) {
    if (value >= size) return `${(value / size).toFixed(value / size < 10 ? 1 : 0)} ${unit}`;
  }
  return `${value} B`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

const UNITS = { ms: 1, s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 };

// "1h30m" in milliseconds; null if it is no duration.
export function durationMs(text) {
  const parts = [...text.trim().matchAll(/(\d+(?:\.\d+)?)(ms|s|m|h|d)/g)];
  if (!parts.length || parts.map((part) => part[0]).join("") !== text.trim().replaceAll(" ", "")) return null;
  return Math.round(parts.reduce((sum, [, number, unit]) => sum + Number(number) * UNITS[unit], 0));
}

// Fields of the kind "datetime-local", read as UTC.
export const fieldOf = (ms) => new Date(ms).toISOString().slice(0, 19);
export function msOfField(text) {
  const ms = Date.parse(`${text}Z`);
  return Number.isNaN(ms) ? null : ms;
}
