// Jobs that cancel, move or delete many messages.

import { change, read } from "../api.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { count, moment, span } from "../format.js";
import { now } from "../live.js";
import { badge, empty, loading, long, panel, selectionWords, table, trouble, when } from "../parts.js";

const STATES = { RUNNING: ["runs", "accent"], FINISHED: ["finished", "good"], STOPPED: ["stopped", "warn"] };
const LOOK_MS = 1_000;
const IDLE_MS = 5_000;

function action(text) {
  const [, to] = /^move to (\d+)$/.exec(text) ?? [];
  const [, by] = /^shift by (-?\d+)$/.exec(text) ?? [];
  if (to) return `move to ${moment(Number(to))}`;
  if (by) return `move by ${Number(by) < 0 ? "−" : ""}${span(Number(by))}`;
  return text;
}

function stop(sweep, look) {
  return ask({
    title: "Stop this sweep?",
    says: h("p", null, `${count(sweep.done)} messages are done and stay so; the others are not touched. It cannot be continued, only begun anew.`),
    verb: "Stop 1 sweep", danger: true, keep: "Let it run",
    act: async () => { await change("sweeps/stop", { job_id: sweep.job_id }); look(); return "The sweep is stopped."; },
  });
}

export function sweeps(main, { readOnly }) {
  let items = null;
  let error = null;
  let timer = 0;
  let ended = false;

  async function look() {
    clearTimeout(timer);
    try {
      ({ items } = await read("sweeps"));
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    if (ended) return;
    draw();
    timer = setTimeout(look, document.hidden || !items?.some((sweep) => sweep.state === "RUNNING") ? IDLE_MS : LOOK_MS);
  }

  function row(sweep) {
    const [text, kind] = STATES[sweep.state] ?? [sweep.state, ""];
    const others = [[sweep.too_late, "too late"], [sweep.gone, "gone"], [sweep.too_far, "too far ahead"]].filter(([number]) => number).map(([number, words]) => `${count(number)} ${words}`).join(", ");
    const percent = Math.round(sweep.fraction * 100);
    return { key: sweep.job_id, cells: [
      h("span", null, action(sweep.action), h("small", null, long(selectionWords(sweep.selection)))),
      badge(text, kind),
      sweep.state === "STOPPED" ? "–" : h("div", { class: "row" }, h("div", { class: "progress", role: "progressbar", "aria-label": "Progress", "aria-valuenow": percent, "aria-valuemin": "0", "aria-valuemax": "100" }, h("div", { style: { width: `${percent}%` } })), h("span", { class: "muted" }, `${percent} %`)),
      h("span", null, count(sweep.done), others ? h("small", null, others) : null),
      h("span", null, when(sweep.begun_ms), h("small", null, sweep.ended_ms ? `took ${span(sweep.ended_ms - sweep.begun_ms)}` : `for ${span(now() - sweep.begun_ms)}`)),
      h("span", { class: "mono muted" }, sweep.job_id),
      sweep.state === "RUNNING" && !readOnly ? h("button", { type: "button", class: "small", onclick: () => stop(sweep, look) }, "Stop…") : ""] };
  }

  function draw() {
    show(main, h("div", { class: "stack" },
      error ? trouble(error) : null,
      !items ? (error ? null : loading()) : panel("", null, items.length
        ? table("Sweeps", [["What"], ["State"], ["Progress"], ["Done", "num"], ["Begun (UTC)"], ["Job", "less"], [h("span", { class: "hidden" }, "Actions"), "act"]], items.map(row))
        : empty("No sweeps", "A sweep cancels or moves everything pending that matches. Begin one from ", h("a", { href: "/pending" }, "Pending messages"), ": search by topic, key or tag first."))));
  }

  draw();
  look();
  return { end: () => { ended = true; clearTimeout(timer); } };
}
