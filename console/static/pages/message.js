// One message: what it is, its content, and what every node has noted about it.

import { change, read } from "../api.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { ahead, bytes, clock, count, day, fieldOf, moment, span } from "../format.js";
import { now } from "../live.js";
import { badge, empty, loading, messageLink, panel, payload, table, tags, trouble, when } from "../parts.js";
import { spanOf, timeOf } from "./pending.js";

const STATES = { PENDING: ["pending", "accent"], DISPATCHED: ["dispatched", "good"], CANCELLED: ["cancelled", "warn"], REMOVED: ["removed", ""], COLD: ["in the cold tier", ""] };
const KINDS = { scheduled: ["Scheduled", "accent"], dispatched: ["Dispatched", "good"], delivered: ["Delivered", "good"], settled: ["Settled", "good"], cancelled: ["Cancelled", "warn"], moved: ["Moved", "accent"] };

function words(event) {
  if (event.kind === "scheduled") return `on ${event.topic}, due ${moment(event.due_ms, true)}; entry ${count(event.log_index)} in term ${event.term}`;
  if (event.kind === "moved") return `to ${moment(event.due_ms, true)} as ${event.new_id}`;
  if (event.kind === "dispatched") return `into the ready queue of ${event.topic}${event.unit && event.unit !== event.id ? ` as ${event.unit}` : ""}`;
  if (event.kind === "delivered") return `to ${event.group}${event.consumer ? ` (${event.consumer})` : ""}, attempt ${event.attempt}, ${span(event.at_ms - event.due_ms)} after its time`;
  if (event.kind === "settled") return `${event.settle_words || event.settle}, by ${event.group}${event.reason ? `: ${event.reason}` : ""}`;
  return "";
}

const kindOf = (event) => (event.kind === "settled" && event.settle !== "ACK" && event.settle !== "SKIP" ? (event.settle === "DEAD" ? "bad" : "warn") : KINDS[event.kind]?.[1] ?? "");

function timeline(story) {
  const names = [...new Set(story.nodes.filter((node) => !node.error).map((node) => node.node_id ?? node.address))].sort();
  if (!story.events.length) return empty("No node has a note", "Nodes keep notes for a while (storage.events_bytes_max). Older messages have none any more.");
  let last = "";
  const rows = story.events.map((event, at) => {
    const today = day(event.at_ms);
    const shownDay = today !== last;
    last = today;
    return { key: at, cells: [
      h("span", { class: "nowrap" }, clock(event.at_ms, true), shownDay ? h("small", null, today) : null),
      h("div", { class: "what" }, h("span", { class: `dot ${kindOf(event)}` }), h("div", null, h("strong", null, KINDS[event.kind]?.[0] ?? event.kind), h("small", { class: "long" }, words(event)))),
      ...names.map((name) => {
        const ms = event.nodes[name];
        if (ms === undefined) return h("span", { class: "muted" }, "–");
        return ms === event.at_ms ? h("span", { title: "noted here first" }, "first") : h("span", { class: "muted" }, `+${span(ms - event.at_ms)}`);
      })] };
  });
  return h("div", { class: "events" }, table("What the nodes have noted", [["At (UTC)"], ["What"], ...names.map((name) => [name, "num"])], rows));
}

function notes(story) {
  return story.nodes.flatMap((node) => {
    if (node.error) return [`${node.address} did not answer: ${node.error}`];
    if (!node.enabled) return [`${node.node_id} keeps no notes (storage.events_bytes_max is 0)`];
    return [node.lost ? `${node.node_id} left out ${count(node.lost)} batches` : "", node.complete ? "" : `${node.node_id} has more than 1,000 notes; the newest are shown`].filter(Boolean);
  });
}

function cancelOne(found, again) {
  return ask({
    title: "Cancel this message?",
    says: [h("p", null, h("span", { class: "mono" }, found.id), ` on ${found.topic} is due ${ahead(found.due_ms, now())}, at ${moment(found.due_ms)} UTC. It will never be delivered to any group.`), h("p", { class: "muted" }, "A cancel is definite: it cannot be taken back.")],
    verb: "Cancel 1 message", danger: true, keep: "Keep it",
    act: async () => {
      const { outcome } = await change("messages/cancel", { id: found.id });
      again();
      return { CANCELLED: "Cancelled: it will never be delivered.", ALREADY_DISPATCHED: "Too late: it has been dispatched.", NOT_FOUND: "There is no such message." }[outcome];
    },
  });
}

function moveOne(found, again) {
  const at = h("input", { type: "datetime-local", step: "1", value: fieldOf(found.due_ms), "aria-label": "New time in UTC" });
  const delay = h("input", { type: "text", placeholder: "or in 1h30m from now", "aria-label": "Or a span from now, such as 1h30m" });
  return ask({
    title: "Reschedule this message?",
    says: h("p", null, h("span", { class: "mono" }, found.id), ` on ${found.topic} gets another time. Its id stays valid. A time that is past is due at once.`),
    fields: h("div", { class: "row" }, h("label", { class: "field" }, "New time (UTC)", at), h("label", { class: "field" }, "Or from now", delay)),
    verb: "Reschedule 1 message", keep: "Keep its time",
    act: async () => {
      const body = delay.value.trim() ? { delay_ms: spanOf(delay) } : { due_ms: timeOf(at) };
      const { outcome, due_ms } = await change("messages/reschedule", { id: found.id, ...body });
      again();
      return outcome === "RESCHEDULED" ? `Rescheduled to ${moment(due_ms)} UTC.` : { ALREADY_DISPATCHED: "Too late: it has been dispatched.", NOT_FOUND: "There is no such message.", CANCELLED: "It was cancelled before." }[outcome];
    },
  });
}

const list = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== "").map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));

export function message(main, { query, readOnly }) {
  const id = query.get("id") ?? "";
  let found = null;
  let foundError = null;
  let story = null;
  let storyError = null;
  let ended = false;

  function again() {
    read("message", { id }).then((value) => { found = value; foundError = null; }, (error) => { foundError = error; }).then(draw);
    read("trace", { id }).then((value) => { story = value; storyError = null; }, (error) => { storyError = error; }).then(draw);
  }

  function head() {
    const [text, kind] = STATES[found.state] ?? [found.state, ""];
    return h("div", { class: "crumbs" }, h("div", { class: "row" }, h("span", { class: "mono" }, found.id), badge(text, kind)),
      found.state === "PENDING" && !readOnly ? h("div", { class: "row actions" },
        h("button", { type: "button", onclick: () => moveOne(found, again) }, "Reschedule…"), h("button", { type: "button", class: "danger", onclick: () => cancelOne(found, again) }, "Cancel…")) : null);
  }

  function facts() {
    return list([
      ["Topic", found.topic ? h("a", { href: `/topics?name=${encodeURIComponent(found.topic)}` }, found.topic) : null],
      ["Due", found.due_ms ? [when(found.due_ms, true), h("span", { class: "muted" }, `  ${ahead(found.due_ms, now())}`)] : null],
      ["Asked for", found.due_requested_ms && found.due_requested_ms !== found.due_ms ? when(found.due_requested_ms, true) : null],
      ["Scheduled", found.scheduled_ms ? when(found.scheduled_ms, true) : null],
      ["Key", found.key ? h("a", { href: `/pending?key=${encodeURIComponent(found.key)}&span=all`, class: "mono" }, found.key) : null],
      ["Tags", found.tags.length ? tags(found.tags) : null],
      ["Message group", found.message_group || null],
      ["Unique key", found.unique_key ? h("span", { class: "mono" }, found.unique_key) : null],
      ["Retry for", found.group ? `${found.group}, after ${found.attempts} attempts` : null],
      ["Waits for a retry", found.retries.length ? found.retries.map((retry) => h("div", null, `${retry.group}: `, when(retry.due_ms))) : null],
      ["Also named", story && story.ids.length > 1 ? story.ids.filter((each) => each !== found.id).map((each) => h("div", null, messageLink(each))) : null],
      ["Headers", Object.keys(found.headers).length ? Object.entries(found.headers).map(([name, value]) => h("div", { class: "mono" }, `${name}: ${value}`)) : null],
    ]);
  }

  function draw() {
    if (ended) return;
    if (!id) return show(main, empty("Which message?", "Search for its id: press / and paste it."));
    if (!found && !foundError) return show(main, loading());
    const content = found?.payload;
    const size = content ? `${bytes(content.bytes)}${content.cut ? ", its beginning" : ""}${content.content_type ? `, ${content.content_type}` : ""}` : "";
    show(main, h("div", { class: "stack" },
      found ? head() : trouble(foundError),
      found ? h("div", { class: "split" },
        panel("Facts", null, h("div", { class: "inside" }, facts())),
        panel("Payload", h("span", { class: "muted" }, size), payload(content))) : null,
      !found && storyError ? null : panel("Trace across nodes", h("button", { type: "button", class: "small quiet", onclick: again }, "Look again"),
        story ? [timeline(story), notes(story).length ? h("div", { class: "pager" }, notes(story).map((text) => h("span", null, text))) : null]
          : storyError ? h("div", { class: "inside" }, trouble(storyError)) : loading())));
  }

  draw();
  if (id) again();
  return { end: () => { ended = true; } };
}
