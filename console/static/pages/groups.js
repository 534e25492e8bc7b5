// Consumer groups: what each has still to settle, and what may be done with one.

import { change, read } from "../api.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { count, fieldOf, moment, plural, span } from "../format.js";
import { now } from "../live.js";
import { badge, crumbs, empty, loading, long, panel, trouble } from "../parts.js";
import { listing } from "./listing.js";
import { timeOf } from "./pending.js";

export const GROUP_COLUMNS = [["Group", "name", "name"], ["Topics", "", ""], ["Backlog", "backlog", "num"], ["Oldest", "oldest_ms", "num"], ["In flight", "in_flight", "num"], ["Consumers", "consumers", "num"], ["Dead letters", "dead", "num"]];

const link = (name) => h("a", { href: `/groups?name=${encodeURIComponent(name)}` }, name);
const topicLink = (name) => h("a", { href: `/topics?name=${encodeURIComponent(name)}` }, name);
const marks = (group) => h("span", { class: "tags" }, group.paused ? badge("paused", "warn") : null, group.broadcasting ? badge("broadcasting") : null, group.filter ? badge(group.filter) : null);

// How long ago the oldest message of the backlog was due.
const age = (group) => (group.oldest_ms === null ? h("span", { class: "muted" }, "–") : h("time", { datetime: new Date(group.oldest_ms).toISOString(), title: moment(group.oldest_ms) }, span(Math.max(0, now() - group.oldest_ms))));

export function groupCells(group) {
  const alone = group.backlog && !group.consumers;
  return [
    h("span", null, link(group.name), marks(group)),
    h("span", null, long(group.topics.slice(0, 3).join(", ")), group.topics.length > 3 ? h("small", null, `and ${group.topics.length + group.topics_left_out - 3} more`) : null),
    h("span", { class: alone ? "warn" : "" }, count(group.backlog)), age(group), count(group.in_flight),
    h("span", { class: alone ? "bad" : "" }, count(group.consumers)),
    group.dead ? h("a", { href: `/dead?group=${encodeURIComponent(group.name)}`, class: "bad" }, count(group.dead)) : "0"];
}

function pause(group, look) {
  return ask({
    title: group.paused ? `Resume ${group.name}?` : `Pause ${group.name}?`,
    says: h("p", null, group.paused ? `Deliveries go on at once; ${plural(group.backlog, "message")} wait.` : "Nothing is handed out to this group until it is resumed. Other groups are not touched, and what is out can be settled."),
    verb: group.paused ? "Resume 1 group" : "Pause 1 group",
    act: async () => { await change("groups/pause", { name: group.name, paused: !group.paused }); look(); return group.paused ? `${group.name} goes on.` : `${group.name} is paused.`; },
  });
}

function reset(group, look) {
  const place = h("select", { "aria-label": "Where it starts" }, h("option", { value: "latest" }, "with what is dispatched from now on"), h("option", { value: "earliest" }, "with everything that is retained"), h("option", { value: "time" }, "with what is due from a time on (UTC)"));
  const at = h("input", { type: "datetime-local", step: "1", value: fieldOf(now() - 3_600_000), "aria-label": "Time in UTC", hidden: true });
  place.addEventListener("change", () => { at.hidden = place.value !== "time"; });
  return ask({
    title: `Reset ${group.name}?`,
    says: [h("p", null, `The group starts anew in ${plural(group.topics.length, "topic")}. Its ${plural(group.in_flight, "open delivery", "open deliveries")} become invalid, and attempts begin at 1.`), h("p", { class: "muted" }, "From now on: it never gets its backlog. Earlier: it gets messages again that it has settled.")],
    fields: h("div", { class: "row" }, place, at), verb: "Reset 1 group", danger: true, keep: "Leave it",
    act: async () => { await change("groups/reset", { name: group.name, start_from: place.value, ...(place.value === "time" ? { start_ms: timeOf(at) } : {}) }); look(); return `${group.name} starts anew.`; },
  });
}

function remove(group, go) {
  let confirmed = false;
  const says = h("div", { class: "says" }, h("p", null, "A group that holds nothing is deleted at once. One that holds anything is not: you are told what first."));
  return ask({
    title: `Delete ${group.name}?`, says, verb: "Delete 1 group", danger: true, keep: "Keep it",
    act: async () => {
      try {
        const answer = await change("groups/delete", { name: group.name, confirmed });
        go("/groups");
        return answer.finished ? `${group.name} is deleted.` : `The deletion goes on as sweep ${answer.job_id}.`;
      } catch (error) {
        if (error.reason === "WRONG_STATE" && !confirmed && "undelivered" in error.details) {
          confirmed = true;
          const { undelivered = 0, retries = 0, dead = 0 } = error.details;
          show(says, h("p", null, h("strong", null, `It has ${plural(Number(undelivered), "unsettled message")}, ${plural(Number(retries), "retry", "retries")} and ${plural(Number(dead), "dead letter")}.`), " Confirm once more: they are dropped, for good."));
        }
        throw error;
      }
    },
  });
}

function one(main, { query, readOnly, go }) {
  const name = query.get("name");
  let answer = null;
  let error = null;

  async function look() {
    try {
      answer = await read("group", { name });
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    draw();
  }

  function draw() {
    if (!answer) return show(main, error ? trouble(error) : loading());
    const group = answer.group;
    if (!group) return show(main, empty(`There is no group ${name}`, "It was deleted, or you have no right to see it."));
    const cells = [["Backlog", count(group.backlog)], ["In flight", count(group.in_flight)], ["Consumers", count(group.consumers)], ["Dead letters", h("a", { href: `/dead?group=${encodeURIComponent(name)}` }, count(group.dead))], ["Oldest unsettled", age(group)], ["Attempts at most", group.attempts_max || h("a", { href: "/settings" }, "by settings")]];
    show(main, h("div", { class: "stack" },
      crumbs("/groups", "All groups", group.name, marks(group), readOnly ? null : [
        h("button", { type: "button", onclick: () => pause(group, look) }, group.paused ? "Resume…" : "Pause…"), h("button", { type: "button", onclick: () => reset(group, look) }, "Reset…"), h("button", { type: "button", class: "danger", onclick: () => remove(group, go) }, "Delete…")]),
      error ? trouble(error) : null,
      group.backlog && !group.consumers ? h("div", { class: "notice warn" }, "Messages wait and no consumer is connected.") : null,
      h("dl", { class: "panel numbers" }, cells.map(([title, value]) => h("div", null, h("dt", null, title), h("dd", null, value)))),
      panel("Set up", null, h("div", { class: "inside" }, h("dl", { class: "facts" },
        h("dt", null, "Topics"), h("dd", null, group.topics.map((topic, at) => [at ? ", " : "", topicLink(topic)]), group.topics_left_out ? ` and ${group.topics_left_out} more` : ""),
        h("dt", null, "Filter"), h("dd", null, group.filter ? h("code", null, group.filter) : "every message"),
        h("dt", null, "Retries"), h("dd", null, group.retry),
        h("dt", null, "Deliveries"), h("dd", null, group.broadcasting ? "every consumer gets every message" : "each message goes to one consumer"))))));
  }

  draw();
  look();
  const timer = setInterval(() => { if (!document.hidden) look(); }, 5_000);
  return { end: () => clearInterval(timer) };
}

export function groups(main, context) {
  if (context.query.get("name")) return one(main, context);
  return listing(main, context, {
    call: "groups", label: "Consumer groups", columns: GROUP_COLUMNS,
    row: (group) => ({ key: group.name, cells: groupCells(group) }),
    none: (part) => (part ? empty("No group is named so", `No name contains “${part}”.`) : empty("There is no consumer group yet", "The first consumer makes one: ", h("code", null, "tickwheel consume reminders --group screen"))),
  });
}
