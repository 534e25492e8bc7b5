// Dead letters: the groups that have some, and the letters of one with replay and purge.

import { change, read } from "../api.js";
import { ask, tell } from "../dialogs.js";
import { h, show } from "../dom.js";
import { count, plural } from "../format.js";
import { badge, crumbs, empty, loading, long, messageLink, panel, payload, table, tags, trouble, when } from "../parts.js";
import { listing } from "./listing.js";

const CAUSES = { refused: "attempts used up", declared_dead: "declared dead", lease_expired: "lease expired", payload_lost: "payload lost" };
const CHOSEN_MAX = 1_000;

const outcome = (answer, did) => [`${plural(answer.changed, "dead letter")} ${did}.`, answer.missing ? ` ${count(answer.missing)} were gone already.` : "", answer.kept ? ` ${count(answer.kept)} stay: their topic is gone, is none of the group's any more, or their payload is lost.` : ""].join("");

async function open(group, number) {
  const letter = await read("letter", { group, number });
  await tell({
    title: `Dead letter ${number}`, wide: true,
    says: [
      h("dl", { class: "facts" }, [["Message", messageLink(letter.id)], ["Topic", letter.topic || "deleted"], ["Cause", CAUSES[letter.cause] ?? letter.cause], ["Error", letter.error || "–"], ["Attempts", count(letter.attempts)], ["First due", when(letter.first_due_ms, true)], ["Died", when(letter.died_ms, true)], ["Key", letter.key || "–"], ["Tags", tags(letter.tags)]].map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
      payload(letter.payload)],
  });
}

function one(main, { query, readOnly }) {
  const group = query.get("group");
  const chosen = new Set();
  let items = [];
  let total = 0;
  let next = "";
  let error = null;
  let ready = false;

  async function look(from = "") {
    try {
      const page = await read("dead", { group, next: from });
      items = from ? [...items, ...page.items] : page.items;
      ({ total, next } = page);
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    const known = new Set(items.map((item) => item.number));
    for (const number of chosen) if (!known.has(number)) chosen.delete(number);
    ready = true;
    draw();
  }

  const subject = () => (chosen.size ? plural(chosen.size, "dead letter") : `all ${plural(total, "dead letter")}`);
  const numbers = () => (chosen.size ? { numbers: [...chosen] } : {});

  const replay = () => ask({
    title: `Replay ${subject()}?`,
    says: [h("p", null, `They are delivered to ${group} once more, with attempts from 1, and leave this list.`), h("p", { class: "muted" }, "Only this group gets them. What fails again comes back as a new dead letter.")],
    verb: `Replay ${subject()}`, keep: "Leave them",
    act: async () => { const answer = await change("dead/replay", { group, ...numbers() }); chosen.clear(); await look(); return outcome(answer, "replayed"); },
  });
  const purge = () => ask({
    title: `Purge ${subject()}?`,
    says: h("p", null, `They are thrown away for good: ${group} never gets them, and their payloads cannot be had back.`),
    verb: `Purge ${subject()}`, danger: true, keep: "Keep them",
    act: async () => { const answer = await change("dead/purge", { group, ...numbers() }); chosen.clear(); await look(); return outcome(answer, "purged"); },
  });

  function choose(number, on) {
    if (on && chosen.size < CHOSEN_MAX) chosen.add(number);
    else chosen.delete(number);
    draw();
  }

  function row(item) {
    const cells = [when(item.died_ms), h("button", { type: "button", class: "small quiet", "aria-label": `Open dead letter #${item.number}`, onclick: () => open(group, item.number).catch((refusal) => tell({ title: "It cannot be shown", says: trouble(refusal) })) }, `#${item.number}`),
      messageLink(item.id), item.topic ? long(item.topic) : h("span", { class: "muted" }, "deleted"), badge(CAUSES[item.cause] ?? item.cause, item.cause === "payload_lost" ? "bad" : ""), long(item.error || "–"), count(item.attempts)];
    const box = h("input", { type: "checkbox", checked: chosen.has(item.number), "aria-label": `Choose dead letter ${item.number}`, onchange: (event) => choose(item.number, event.target.checked) });
    return { key: item.number, cells: readOnly ? cells : [box, ...cells] };
  }

  function everything() {
    const all = items.length > 0 && items.every((item) => chosen.has(item.number));
    return h("input", { type: "checkbox", "aria-label": "Choose all that are shown", checked: all, indeterminate: !all && chosen.size > 0, onchange: (event) => { items.slice(0, CHOSEN_MAX).forEach((item) => (event.target.checked ? chosen.add(item.number) : chosen.delete(item.number))); draw(); } });
  }

  function draw() {
    if (!ready) return show(main, loading());
    const columns = [["Died (UTC)"], ["Letter"], ["Message"], ["Topic"], ["Cause"], ["Error"], ["Attempts", "num"]];
    show(main, h("div", { class: "stack" },
      crumbs("/dead", "All groups", group, h("span", { class: "muted nowrap" }, plural(total, "dead letter")),
        total && !readOnly ? [h("button", { type: "button", onclick: replay }, `Replay ${chosen.size ? count(chosen.size) : "all"}…`), h("button", { type: "button", class: "danger", onclick: purge }, `Purge ${chosen.size ? count(chosen.size) : "all"}…`)] : null),
      error ? trouble(error) : null,
      panel("", null,
        items.length ? table("Dead letters", readOnly ? columns : [[everything()], ...columns], items.map(row)) : empty("No dead letters", `${group} has given nothing up.`),
        next ? h("div", { class: "pager" }, h("span", null, `${count(items.length)} of ${count(total)}, oldest first`), h("button", { type: "button", class: "small", onclick: () => look(next) }, "Show more")) : null)));
  }

  draw();
  look();
  return {};
}

export function dead(main, context) {
  if (context.query.get("group")) return one(main, context);
  return listing(main, context, {
    call: "groups", label: "Groups with dead letters", extra: { dead: true },
    columns: [["Group", "name", "name"], ["Topics", "", ""], ["Backlog", "backlog", "num"], ["Dead letters", "dead", "num"]],
    row: (group) => ({ key: group.name, cells: [h("a", { href: `/dead?group=${encodeURIComponent(group.name)}` }, group.name), long(group.topics.slice(0, 3).join(", ")), count(group.backlog), h("span", { class: "bad" }, count(group.dead))] }),
    none: (part) => (part ? empty("No group is named so", `None with dead letters contains “${part}”.`) : empty("No dead letters", "No group has given a message up. Here you will see why, and can replay or purge them.")),
  });
}
