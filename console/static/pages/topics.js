// All topics, and one of them.

import { change, read } from "../api.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { count, plural, rate } from "../format.js";
import { badge, crumbs, empty, loading, panel, table, trouble } from "../parts.js";
import { GROUP_COLUMNS, groupCells } from "./groups.js";
import { listing } from "./listing.js";

const link = (name) => h("a", { href: `/topics?name=${encodeURIComponent(name)}` }, name);
const marks = (topic) => h("span", { class: "tags" }, topic.fifo ? badge("FIFO") : null, topic.paused ? badge("paused", "warn") : null);
const number = (value) => (value === null || value === undefined ? h("span", { class: "muted" }, "–") : count(value));

function row(topic) {
  const rates = topic.rates;
  return { key: topic.name, cells: [link(topic.name), marks(topic), rates ? rate(rates.schedule_rate) : "–", rates ? rate(rates.deliver_rate) : "–", number(rates?.backlog), count(topic.dispatched)] };
}

function create(look) {
  const name = h("input", { name: "name", required: true, autocomplete: "off", spellcheck: "false" });
  const fifo = h("input", { type: "checkbox", name: "fifo" });
  return ask({
    title: "Create a topic",
    says: h("p", null, "Messages are scheduled to a topic; consumer groups take from it. A FIFO topic keeps the order within a message group, and that cannot be changed later."),
    fields: h("div", { class: "stack" }, h("label", { class: "field" }, "Name", name), h("label", { class: "row" }, fifo, "FIFO")),
    verb: "Create",
    act: async () => { await change("topics/create", { name: name.value.trim(), fifo: fifo.checked }); look(); return `Topic ${name.value.trim()} exists.`; },
  });
}

function pause(topic, look) {
  return ask({
    title: topic.paused ? `Resume ${topic.name}?` : `Pause ${topic.name}?`,
    says: h("p", null, topic.paused ? "Deliveries go on at once, with all that has come due meanwhile." : "Nothing of this topic is handed out to any group until it is resumed. Scheduling goes on, and what is out can be settled."),
    verb: topic.paused ? "Resume 1 topic" : "Pause 1 topic",
    act: async () => { await change("topics/pause", { name: topic.name, paused: !topic.paused }); look(); return topic.paused ? `${topic.name} goes on.` : `${topic.name} is paused.`; },
  });
}

function remove(topic, go) {
  let confirmed = false;
  const says = h("div", { class: "says" }, h("p", null, "A topic without messages is deleted at once. One that holds messages is not: you are told how many first."));
  return ask({
    title: `Delete ${topic.name}?`,
    says, verb: "Delete 1 topic", danger: true, keep: "Keep it",
    act: async () => {
      try {
        const answer = await change("topics/delete", { name: topic.name, confirmed });
        go("/topics");
        return answer.finished ? `${topic.name} is deleted.` : `The deletion goes on as sweep ${answer.job_id}.`;
      } catch (error) {
        if (error.reason === "WRONG_STATE" && !confirmed && "undelivered" in error.details) {
          confirmed = true;
          const { pending = 0, undelivered = 0, dead = 0 } = error.details;
          show(says, h("p", null, h("strong", null, `It holds ${plural(Number(pending), "pending message")}, ${plural(Number(undelivered), "delivery that no group", "deliveries that no group")} has settled, and ${plural(Number(dead), "dead letter")}.`), " Confirm once more: they are cancelled and dropped, for good."));
        }
        throw error;
      }
    },
  });
}

function one(main, { query, readOnly, go }) {
  const name = query.get("name");
  let answer = null;
  let total = null;
  let error = null;
  let ended = false;

  async function look() {
    try {
      answer = await read("topic", { name });
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    draw();
  }

  async function countPending() {
    let sum = 0;
    let next = "";
    try {
      do {
        const piece = await read("count", { topic: name, step_ms: 3_600_000, next });
        sum += piece.total;
        next = piece.next;
        total = next ? `${count(sum)}…` : count(sum);
        draw();
      } while (next && !ended);
    } catch {
      total = "–";
    }
  }

  function draw() {
    if (ended) return;
    if (!answer) return show(main, error ? trouble(error) : loading());
    const topic = answer.topic;
    if (!topic) return show(main, empty(`There is no topic ${name}`, "It was deleted, or you have no right to see it."));
    const rates = topic.rates;
    const cells = [["Pending", h("a", { href: `/pending?topic=${encodeURIComponent(name)}&span=all` }, total ?? "…")], ["Backlog", rates ? count(rates.backlog) : "–"], ["Dispatched so far", count(topic.dispatched)], ["In/s", rates ? rate(rates.schedule_rate) : "–"], ["Out/s", rates ? rate(rates.deliver_rate) : "–"], ["Groups", count(answer.groups.length)]];
    show(main, h("div", { class: "stack" },
      crumbs("/topics", "All topics", topic.name, marks(topic), readOnly ? null : [
        h("button", { type: "button", onclick: () => pause(topic, look) }, topic.paused ? "Resume…" : "Pause…"), h("button", { type: "button", class: "danger", onclick: () => remove(topic, go) }, "Delete…")]),
      error ? trouble(error) : null,
      h("dl", { class: "panel numbers" }, cells.map(([title, value]) => h("div", null, h("dt", null, title), h("dd", null, value)))),
      panel("Consumer groups", null, answer.groups.length ? table("Consumer groups", GROUP_COLUMNS.map(([title, , kind]) => [title, kind]), answer.groups.map((group) => ({ key: group.name, cells: groupCells(group) }))) : empty("No group takes this topic", "What comes due waits until retention is over: create one with ", h("code", null, `tickwheel consume ${name} --group NAME`)))));
  }

  draw();
  look();
  countPending();
  const timer = setInterval(() => { if (!document.hidden) look(); }, 5_000);
  return { end: () => { ended = true; clearInterval(timer); } };
}

export function topics(main, context) {
  if (context.query.get("name")) return one(main, context);
  return listing(main, context, {
    call: "topics", label: "Topics", row,
    columns: [["Topic", "name", "name"], ["Kind", "", ""], ["In/s", "schedule_rate", "num"], ["Out/s", "deliver_rate", "num"], ["Backlog", "backlog", "num"], ["Dispatched", "dispatched", "num"]],
    above: (look) => (context.readOnly ? null : h("button", { type: "button", onclick: () => create(look) }, "Create a topic")),
    none: (part) => (part ? empty("No topic is named so", `No name contains “${part}”.`) : empty("There is no topic yet", "The first message makes one: ", h("code", null, "tickwheel schedule reminders \"stand up\" --delay 5s"))),
  });
}
