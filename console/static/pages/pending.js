// Pending messages by time: a histogram to zoom into, the list below it, and what may be done with all that match.

import { change, read, Refusal } from "../api.js";
import { histogram } from "../charts.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { ahead, bytes, durationMs, fieldOf, moment, msOfField, plural, short, span } from "../format.js";
import { now } from "../live.js";
import { empty, long, messageLink, panel, selectionWords, table, tags, trouble, when } from "../parts.js";

const SECOND = 1_000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const STEPS = [1, 2, 5, 10, 15, 30].map((n) => n * SECOND).concat([1, 2, 5, 10, 15, 30].map((n) => n * MINUTE), [1, 2, 3, 6, 12].map((n) => n * HOUR), [1, 2, 5, 10, 30].map((n) => n * DAY));
const BARS = 120;
const PAGE = 50;
const SPANS = [["10m", "10 min", 10 * MINUTE], ["1h", "1 hour", HOUR], ["24h", "24 hours", DAY], ["7d", "7 days", 7 * DAY], ["all", "All", 0]];
const CONDITIONS = ["topic", "key", "key_prefix", "tag"];

const stepOf = (spanMs) => STEPS.find((step) => spanMs / step <= BARS) ?? STEPS.at(-1);

export function pending(main, { query, readOnly, keep }) {
  const state = {
    ...Object.fromEntries(CONDITIONS.map((name) => [name, query.get(name) ?? ""])),
    span: query.get("span") ?? "24h",
    from: Number(query.get("from")) || 0,
    to: Number(query.get("to")) || 0,
  };
  const counted = { steps: [], total: 0, done: true, step: HOUR, from: 0, to: 0, error: null };
  const listed = { items: [], next: "", error: null, busy: false };
  const chart = histogram("Pending messages by due time", (from, to) => zoom(from, to));
  let asking = new AbortController();

  const selection = () => Object.fromEntries(CONDITIONS.map((name) => [name, state[name]]));
  const selective = () => CONDITIONS.some((name) => state[name]);
  const zoomed = () => state.span === "zoom";
  // The conditions as a sweep covers them.
  const covered = () => ({ ...selection(), ...(zoomed() ? { due_ms_min: state.from, due_ms_max: state.to } : state.span === "all" ? {} : { due_ms_max: counted.to }) });

  function range() {
    if (zoomed()) return [state.from, state.to];
    const length = SPANS.find(([name]) => name === state.span)?.[2] ?? DAY;
    return length ? [0, now() + length] : [0, 0];
  }

  function look() {
    keep({ ...selection(), span: state.span, ...(zoomed() ? { from: state.from, to: state.to } : {}) });
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    list("", signal);  // first: what is drawn then says that it looks
    countAll(signal);
  }

  async function countAll(signal) {
    const [from, to] = range();
    const begin = from || now();
    const asked = to ? stepOf(to - begin) : HOUR;
    Object.assign(counted, { steps: [], total: 0, done: false, error: null, from: begin, to: to || begin + DAY, step: asked });
    const sums = new Map();
    let next = "";
    draw();
    try {
      do {
        const piece = await read("count", { ...selection(), due_ms_min: from || "", due_ms_max: to ? Math.ceil(to) : "", step_ms: asked, next }, signal);
        for (const [start, number] of piece.steps) sums.set(start, (sums.get(start) ?? 0) + number);
        counted.total += piece.total;
        next = piece.next;
        counted.steps = [...sums].sort((one, other) => one[0] - other[0]);
        if (!to) coarser(begin);
        counted.done = !next;
        draw();
      } while (next);
    } catch (error) {
      if (error.name === "AbortError") return;
      Object.assign(counted, { error, done: true });
      draw();
    }
  }

  // All of the future is counted by hours; only then is it known how long it is, and how wide its bars are.
  function coarser(begin) {
    const last = counted.steps.at(-1)?.[0];
    counted.to = last === undefined ? begin + DAY : last + HOUR;
    counted.step = Math.max(HOUR, stepOf(counted.to - begin));
    const sums = new Map();
    for (const [start, number] of counted.steps) {
      const bar = Math.floor(start / counted.step) * counted.step;
      sums.set(bar, (sums.get(bar) ?? 0) + number);
    }
    counted.steps = [...sums];
  }

  // One answer looks at a bounded number of messages: ask on until there is a page of those that match.
  async function list(from, signal) {
    const [begin, end] = range();
    let next = from;
    let found = 0;
    listed.busy = true;
    if (from) draw();
    try {
      do {
        const page = await read("pending", { ...selection(), due_ms_min: begin || "", due_ms_max: end ? Math.ceil(end) : "", next }, signal);
        const grows = page.items.length > 0 || next === "";
        listed.items = next ? [...listed.items, ...page.items] : page.items;
        ({ next } = page);
        found += page.items.length;
        Object.assign(listed, { next, error: null, busy: next !== "" && found < PAGE });
        if (grows || !listed.busy) draw();
      } while (listed.busy);
    } catch (error) {
      if (error.name === "AbortError") return;
      Object.assign(listed, { error, busy: false, ...(from ? {} : { items: [], next: "" }) });
      draw();
    }
  }

  function zoom(from, to) {
    const step = Math.max(SECOND, stepOf(to - from));
    state.from = Math.floor(from / step) * step;
    state.to = Math.max(state.from + 10 * SECOND, Math.ceil(to / step) * step);
    state.span = "zoom";
    look();
  }

  function wider() {
    const length = counted.to - counted.from;
    zoom(Math.max(now(), counted.from - length), counted.to + length);
  }

  function narrower() {
    const length = counted.to - counted.from;
    zoom(counted.from + length / 4, counted.to - length / 4);
  }

  function bars() {
    const { step, steps, from, to } = counted;
    const begin = Math.floor(from / step) * step;
    const loads = new Map(steps);
    const length = Math.min(2_000, Math.max(1, Math.ceil((to - begin) / step)));
    // One more, without a bar: the axis ends where the last bar does.
    const times = Array.from({ length: length + 1 }, (_, at) => begin + at * step);
    chart.show([times.map((ms) => ms / 1_000), times.map((ms, at) => (at < length ? loads.get(ms) ?? 0 : null))]);
  }

  const input = (name, label, placeholder) => h("label", { class: "field grow" }, label,
    h("input", { name, value: state[name], placeholder, autocomplete: "off", spellcheck: "false", type: "text" }));

  function submit(event) {
    event.preventDefault();
    const data = new FormData(event.target);
    for (const name of CONDITIONS) state[name] = String(data.get(name) ?? "").trim();
    look();
  }

  function clear() {
    for (const name of CONDITIONS) state[name] = "";
    main.querySelectorAll(".filters input").forEach((field) => { field.value = ""; });
    look();
  }

  async function countAgain() {
    let total = 0;
    let next = "";
    do {
      const piece = await read("count", { ...covered(), step_ms: HOUR, next });
      total += piece.total;
      next = piece.next;
    } while (next);
    return total;
  }

  async function cancelAll() {
    const total = await countAgain().catch(() => counted.total);
    const what = covered();
    await ask({
      title: `Cancel ${plural(total, "message")}?`,
      says: [
        h("p", null, "Everything pending that matches is cancelled and will never be delivered: ", h("strong", null, selectionWords(what)), "."),
        h("p", { class: "muted" }, "Messages scheduled after you confirm are not touched. The job goes on by itself through a change of master; Sweeps shows how far it is."),
      ],
      verb: `Cancel ${plural(total, "message")}`, danger: true, keep: "Keep them",
      act: async () => {
        const sweep = await change("sweeps/begin", { ...given(what), action: "cancel", job_id: jobId("cancel") });
        setTimeout(look, 600);
        return `Sweep ${sweep.job_id} has begun.`;
      },
    });
  }

  async function moveAll() {
    const total = await countAgain().catch(() => counted.total);
    const what = covered();
    const kind = h("select", { name: "kind", "aria-label": "How" }, h("option", { value: "shift" }, "by a span"), h("option", { value: "delay" }, "to a span from now"), h("option", { value: "move" }, "to a time (UTC)"));
    const amount = h("input", { name: "amount", type: "text", value: "1h", "aria-label": "Span, such as 90m or -1h", placeholder: "1h30m, or -1h" });
    const at = h("input", { name: "at", type: "datetime-local", step: "1", value: fieldOf(now() + HOUR), "aria-label": "Time in UTC", hidden: true });
    kind.addEventListener("change", () => { at.hidden = kind.value !== "move"; amount.hidden = kind.value === "move"; });
    await ask({
      title: `Move ${plural(total, "message")}?`,
      says: [h("p", null, "Everything pending that matches gets another time: ", h("strong", null, selectionWords(what)), "."), h("p", { class: "muted" }, "A time that would be past is due at once.")],
      fields: h("div", { class: "row" }, kind, amount, at),
      verb: `Move ${plural(total, "message")}`, keep: "Keep their times",
      act: async () => {
        const body = { ...given(what), action: kind.value, job_id: jobId("move") };
        if (kind.value === "move") body.due_ms = timeOf(at);
        else body[kind.value === "shift" ? "shift_ms" : "delay_ms"] = spanOf(amount, kind.value === "shift");
        const sweep = await change("sweeps/begin", body);
        setTimeout(look, 600);
        return `Sweep ${sweep.job_id} has begun.`;
      },
    });
  }

  function totalText() {
    if (counted.error) return "";
    const text = plural(counted.total, "message");
    return counted.done ? text : `${text} so far, counting…`;
  }

  function rows() {
    return listed.items.map((item) => ({ key: item.id, cells: [
      when(item.due_ms), h("span", { class: "muted nowrap" }, ahead(item.due_ms, now())), messageLink(item.id),
      h("span", null, long(item.topic), item.group ? h("small", null, long(`retry ${item.attempts} for ${item.group}`)) : null),
      item.key ? long(item.key) : h("span", { class: "muted" }, "–"), tags(item.tags), bytes(item.payload_bytes)] }));
  }

  function draw() {
    const words = zoomed() ? `${moment(state.from)} to ${moment(state.to)}` : "";
    show(main, h("div", { class: "stack" },
      h("form", { class: "filters", onsubmit: submit, role: "search", "aria-label": "Conditions" },
        input("topic", "Topic", "any"), input("key", "Key", "exactly"), input("key_prefix", "Key begins with", "customer-17/"), input("tag", "Tag", "any"),
        h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Search"), selective() ? h("button", { type: "button", class: "quiet", onclick: clear }, "Clear") : null)),
      h("section", { class: "panel" },
        h("header", null, h("h2", { "aria-live": "polite" }, totalText(), words ? h("span", { class: "muted less" }, ` · ${words}`) : null),
          h("div", { class: "segments", role: "group", "aria-label": "Span of time" }, SPANS.map(([name, text]) => h("button", { type: "button", "aria-pressed": String(state.span === name), onclick: () => { state.span = name; look(); } }, text))),
          h("div", { class: "segments", role: "group", "aria-label": "Zoom" }, h("button", { type: "button", "aria-label": "Zoom in", onclick: narrower }, "+"), h("button", { type: "button", "aria-label": "Zoom out", onclick: wider }, "−"))),
        counted.error ? h("div", { class: "inside" }, trouble(counted.error)) : chart.element,
        h("div", { class: "pager" }, h("span", null, `Messages by due time (UTC); each bar is ${span(counted.step)}. Draw over the bars to zoom in.`),
          selective() && !readOnly && counted.total ? h("div", { class: "row" },
            h("button", { type: "button", class: "small", onclick: moveAll }, "Move all…"), h("button", { type: "button", class: "small danger", onclick: cancelAll }, "Cancel all…")) : null)),
      panel("In the order of their delivery", null,
        listed.error ? h("div", { class: "inside" }, trouble(listed.error))
          : listed.items.length ? table("Pending messages", [["Due (UTC)"], ["From now", "less"], ["Message"], ["Topic"], ["Key"], ["Tags", "less"], ["Size", "num"]], rows())
            : listed.busy ? h("div", { class: "empty" }, "Looking…")
                : selective() ? empty("Nothing matches", "A key must be exact; use “Key begins with” for a part of it. Messages that are due already are no longer pending.")
                  : empty("Nothing is pending here", "Choose a longer span, or schedule a message: ", h("code", null, "tickwheel schedule reminders \"stand up\" --delay 5m")),
        listed.next ? h("div", { class: "pager" }, h("span", null, `${short(listed.items.length)} shown${listed.busy ? ", looking for more…" : ""}`), listed.busy ? null : h("button", { type: "button", class: "small", onclick: () => list(listed.next, asking.signal) }, "Show more")) : null)));
    bars();
  }

  look();
  return { end: () => { asking.abort(); chart.end(); } };
}

const given = (what) => Object.fromEntries(Object.entries(what).filter(([, value]) => value).map(([name, value]) => [name, typeof value === "number" ? Math.ceil(value) : value]));
const jobId = (kind) => `console-${kind}-${Array.from(crypto.getRandomValues(new Uint32Array(2)), (part) => part.toString(36)).join("")}`;

export function timeOf(field) {
  const ms = msOfField(field.value);
  if (ms === null) throw new Refusal(0, { error: `time: ${field.value || "absent"}: a date and a time in UTC`, reason: "INVALID_FIELD" });
  return ms;
}

export function spanOf(field, signed = false) {
  const text = field.value.trim();
  const back = signed && text.startsWith("-");
  const ms = durationMs(back ? text.slice(1) : text);
  if (ms === null) throw new Refusal(0, { error: `span: ${text || "absent"}: a number and ms, s, m, h or d, such as 250ms or 1h30m`, reason: "INVALID_FIELD" });
  return back ? -ms : ms;
}

