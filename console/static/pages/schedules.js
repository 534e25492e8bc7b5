// Recurring schedules: all of them by name, and one with its last and its next runs.

import { change, read } from "../api.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { ahead, count, plural, span } from "../format.js";
import { now } from "../live.js";
import { badge, crumbs, empty, loading, long, messageLink, panel, payload, table, tags, trouble, when } from "../parts.js";

const STATES = { active: ["active", "good"], paused: ["paused", "warn"], ended: ["ended", ""] };
const OUTCOMES = { made: ["made", "good"], triggered: ["triggered", "accent"], backfilled: ["backfilled", "accent"], missed: ["missed", "bad"], no_topic: ["no topic", "bad"], skipped_overlap: ["skipped: the one before is not settled", "warn"], cancelled: ["cancelled", "warn"] };

const link = (name) => h("a", { href: `/schedules?name=${encodeURIComponent(name)}` }, name);
const state = (item) => badge(...(STATES[item.state] ?? ["unknown", ""]));
const plan = (item) => (item.cron ? h("span", null, h("code", null, item.cron), h("small", null, item.zone || "UTC")) : `every ${span(item.interval_ms)}`);

function row(item) {
  return { key: item.name, cells: [
    link(item.name), plan(item), long(item.topic), state(item),
    item.next_ms && item.state === "active" ? h("span", null, when(item.next_ms), h("small", null, ahead(item.next_ms, now()))) : h("span", { class: "muted" }, "–"),
    count(item.made), h("span", { class: item.missed ? "warn" : "" }, count(item.missed))] };
}

function pause(item, look) {
  const paused = item.state === "paused";
  return ask({
    title: paused ? `Resume ${item.name}?` : `Pause ${item.name}?`,
    says: h("p", null, paused ? "It goes on with the first planned time from now on. Times that passed meanwhile are not made up for." : "No more runs are made. A run that was made ahead for a later time is cancelled; what is due already stays."),
    verb: paused ? "Resume 1 schedule" : "Pause 1 schedule",
    act: async () => { await change("schedules/pause", { name: item.name, paused: !paused }); look(); return paused ? `${item.name} goes on.` : `${item.name} is paused.`; },
  });
}

function trigger(item, look) {
  const request = `console-${Array.from(crypto.getRandomValues(new Uint32Array(2)), (part) => part.toString(36)).join("")}`;
  return ask({
    title: `Run ${item.name} now?`,
    says: h("p", null, `One message is made on ${item.topic}, due at once. The plan goes on as before${item.state === "paused" ? "; the schedule stays paused" : ""}.`),
    verb: "Make 1 run now",
    act: async () => { const { id } = await change("schedules/trigger", { name: item.name, request_id: request }); look(); return `Message ${id} is made.`; },
  });
}

function remove(item, go) {
  return ask({
    title: `Delete ${item.name}?`,
    says: h("p", null, "The plan goes, with its history. A run that was made ahead for a later time is cancelled; messages that are due already stay."),
    verb: "Delete 1 schedule", danger: true, keep: "Keep it",
    act: async () => { await change("schedules/delete", { name: item.name }); go("/schedules"); return `${item.name} is deleted.`; },
  });
}

function one(main, { query, readOnly, go }) {
  const name = query.get("name");
  let item = null;
  let error = null;

  async function look() {
    try {
      item = await read("schedule", { name });
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    draw();
  }

  function facts() {
    const pairs = [
      ["Plan", plan(item)], ["Topic", h("a", { href: `/topics?name=${encodeURIComponent(item.topic)}` }, item.topic)],
      ["Not before", item.start_ms ? when(item.start_ms) : null], ["Not after", item.end_ms ? when(item.end_ms) : null],
      ["Ends after", item.count ? plural(item.count, "run") : null], ["Later by up to", item.jitter_ms ? span(item.jitter_ms) : null],
      ["Missed runs", { skip: "are left out", unspecified: "are left out", last: "the last one is made late", all: "all within a window are made late" }[item.missed_policy]],
      ["Overlap", item.overlap_policy === "skip" ? "no run while the one before is not settled" : "runs may overlap"],
      ["Key", item.key || null], ["Tags", item.tags.length ? tags(item.tags) : null],
      ["Put by", item.owner || null], ["Changed", item.changed_ms ? [when(item.changed_ms), h("span", { class: "muted" }, ` revision ${count(item.revision)}`)] : null]];
    return h("dl", { class: "facts" }, pairs.filter(([, value]) => value).map(([title, value]) => [h("dt", null, title), h("dd", null, value)]));
  }

  function draw() {
    if (!item) return show(main, error ? trouble(error) : loading());
    const cells = [["Made", item.made], ["Triggered", item.triggered], ["Backfilled", item.backfilled], ["Missed", item.missed], ["Skipped", item.skipped], ["Cancelled", item.cancelled]];
    show(main, h("div", { class: "stack" },
      crumbs("/schedules", "All schedules", item.name, state(item), readOnly ? null : [
        h("button", { type: "button", onclick: () => trigger(item, look) }, "Run now…"), item.state === "ended" ? null : h("button", { type: "button", onclick: () => pause(item, look) }, item.state === "paused" ? "Resume…" : "Pause…"), h("button", { type: "button", class: "danger", onclick: () => remove(item, go) }, "Delete…")]),
      error ? trouble(error) : null,
      h("dl", { class: "panel numbers" }, cells.map(([title, value]) => h("div", null, h("dt", null, title), h("dd", null, count(value))))),
      h("div", { class: "split" }, panel("What it does", null, h("div", { class: "inside" }, facts())), panel("Payload", null, payload(item.payload))),
      h("div", { class: "two" },
        panel("Next runs", item.state === "paused" ? h("span", { class: "muted" }, "if it were not paused") : null, item.upcoming.length ? table("Next runs", [["Planned (UTC)"], ["From now"]], item.upcoming.map((ms) => ({ key: ms, cells: [when(ms), ahead(ms, now())] }))) : empty("No more runs", "Its end or its count is reached.")),
        panel("Last runs", null, item.runs.length ? table("Last runs", [["Planned (UTC)"], ["Outcome"], ["Message"]], item.runs.map((run, at) => ({ key: at, cells: [when(run.planned_ms), h("span", null, badge(...(OUTCOMES[run.outcome] ?? [run.outcome, ""])), run.count > 1 ? ` ${count(run.count)} times` : ""), run.id ? messageLink(run.id) : "–"] }))) : empty("No run yet")))));
  }

  draw();
  look();
  const timer = setInterval(() => { if (!document.hidden) look(); }, 5_000);
  return { end: () => clearInterval(timer) };
}

export function schedules(main, context) {
  if (context.query.get("name")) return one(main, context);
  const { query, keep } = context;
  let prefix = query.get("prefix") ?? "";
  let items = null;
  let next = "";
  let error = null;

  async function look(from = "") {
    try {
      const page = await read("schedules", { prefix, next: from });
      items = from ? [...items, ...page.items] : page.items;
      ({ next } = page);
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    draw();
  }

  function draw() {
    show(main, h("div", { class: "stack" },
      h("div", { class: "filters" }, h("label", { class: "field name" }, "Name begins with", h("input", { type: "search", value: prefix, placeholder: "any", autocomplete: "off", oninput: (event) => { prefix = event.target.value.trim(); keep({ prefix }); look(); } }))),
      error ? trouble(error) : null,
      !items ? (error ? null : loading()) : panel("", null,
        items.length ? table("Recurring schedules", [["Schedule", "name"], ["Plan"], ["Topic"], ["State"], ["Next run (UTC)"], ["Made", "num"], ["Missed", "num"]], items.map(row))
          : prefix ? empty("No schedule is named so", `No name begins with “${prefix}”.`) : empty("There is no recurring schedule", "One makes a message at each planned time: ", h("code", null, "tickwheel schedules --help")),
        next ? h("div", { class: "pager" }, h("span", null, `${count(items.length)} shown`), h("button", { type: "button", class: "small", onclick: () => look(next) }, "Show more")) : null)));
  }

  draw();
  look();
  return {};
}
