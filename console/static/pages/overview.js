// The cluster at a glance.

import { lines } from "../charts.js";
import { h, show } from "../dom.js";
import { count, rate, short, span } from "../format.js";
import { listen, live, now } from "../live.js";
import { empty, loading, panel, table } from "../parts.js";
import { wheel } from "../wheel.js";
import { nodeRows, NODE_COLUMNS } from "./nodes.js";

const RATES = [["Scheduled", "--series-1"], ["Dispatched", "--series-2"], ["Delivered", "--series-3"], ["Settled", "--series-4"]];
const GAP_MS = 5_000;
const LATE = [["Median", "--series-1"], ["p99", "--series-3"]];

const late = (ms) => (ms < 0 ? "–" : span(ms));

function keys(series, values) {
  return h("div", { class: "keys" }, series.map(([name, key], at) => h("span", null, h("i", { class: `key-${key.at(-1)}` }), name, h("b", null, values[at]))));
}

function figures(picture) {
  const numbers = picture.numbers;
  const cells = [
    ["Pending", short(numbers.pending), "waiting for their time"],
    ["Backlog", short(numbers.ready), "due, not settled"],
    ["In flight", short(numbers.in_flight), "with consumers"],
    ["Lateness, median", late(numbers.late_p50_ms), numbers.late_p50_ms < 0 ? "no deliveries" : "at most"],
    ["Lateness, p99", late(numbers.late_p99_ms), numbers.late_p99_ms < 0 ? "no deliveries" : "at most"],
    ["Dead letters", short(picture.dead), numbers.redeliver_rate >= 0.05 ? `${rate(numbers.redeliver_rate)}/s come again` : "no redeliveries"],
  ];
  return h("dl", { class: "panel numbers" }, cells.map(([name, value, words]) => h("div", null, h("dt", null, name), h("dd", null, value, h("br"), h("small", null, words)))));
}

function topicRows(picture) {
  return picture.topics.map((topic) => ({ key: topic.name, cells: [
    h("a", { href: `/topics?name=${encodeURIComponent(topic.name)}` }, topic.name),
    rate(topic.schedule_rate), rate(topic.dispatch_rate), rate(topic.deliver_rate), rate(topic.settle_rate), count(topic.backlog)] }));
}

// A row without values where pictures are missing, so that no line is drawn over what nobody saw.
function withGaps(rows) {
  return rows.flatMap((row, at) => (at && row[0] - rows[at - 1][0] > GAP_MS ? [[row[0] - 1, -1, -1, -1, -1, -1, -1], row] : [row]));
}

export function overview(main) {
  const rates = lines("Messages a second over the last five minutes", RATES);
  const lateness = lines("Lateness of deliveries over the last five minutes", LATE, (ms) => (ms ? span(ms) : "0"));

  function draw() {
    const picture = live.picture;
    if (!picture) return show(main, loading());
    const numbers = picture.numbers;
    const error = picture.nodes.find((node) => node.node_id === picture.master_id)?.clock_error_ms;
    const busy = topicRows(picture);
    show(main, h("div", { class: "stack" },
      numbers ? figures(picture) : null,
      picture.trouble ? h("div", { class: "notice warn" }, `What is ahead may be out of date: ${picture.trouble}`) : null,
      h("div", { class: "wheel-row" },
        h("section", { class: "panel wheel-panel" }, h("header", null, h("h2", null, "What is ahead"), h("div", { class: "keys" }, h("span", null, h("i", { class: "key-1" }), "24 hours"), h("span", null, h("i", { class: "key-2" }), "60 seconds"))),
          h("div", { class: "inside" }, wheel({ ...picture, clock_error_ms: error }, now()))),
        h("div", { class: "charts" },
          panel("Messages a second", keys(RATES, numbers ? [numbers.schedule_rate, numbers.dispatch_rate, numbers.deliver_rate, numbers.settle_rate].map(rate) : ["–", "–", "–", "–"]), rates.element),
          panel("Lateness", keys(LATE, numbers ? [late(numbers.late_p50_ms), late(numbers.late_p99_ms)] : ["–", "–"]), lateness.element))),
      panel("Nodes", h("span", { class: "muted" }, picture.master_id ? `${picture.master_id} leads in term ${count(picture.term)}` : `no master; term ${count(picture.term)}`),
        table("Nodes", NODE_COLUMNS, nodeRows(picture))),
      panel("Busiest topics", h("a", { href: "/topics" }, "All topics"),
        busy.length ? table("Busiest topics", [["Topic", "name"], ["In/s", "num"], ["Due/s", "num"], ["Out/s", "num"], ["Done/s", "num"], ["Backlog", "num"]], busy) : empty("No topic is busy", "Schedule a message: ", h("code", null, "tickwheel schedule reminders \"stand up\" --delay 5s")))));
    const history = withGaps(live.history);
    const seconds = history.map((row) => row[0] / 1_000);
    const column = (at) => history.map((row) => (row[at] < 0 ? null : row[at]));
    rates.show([seconds, column(1), column(2), column(3), column(4)]);
    lateness.show([seconds, column(5), column(6)]);
  }

  draw();
  const stop = listen(draw);
  return { end: () => { stop(); rates.end(); lateness.end(); } };
}

