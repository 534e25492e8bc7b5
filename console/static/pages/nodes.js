// The members of the cluster, and the handover of the master's role.

import { change } from "../api.js";
import { ask } from "../dialogs.js";
import { h, show } from "../dom.js";
import { bytes, count, plural, span } from "../format.js";
import { listen, live } from "../live.js";
import { badge, loading, panel, table } from "../parts.js";

export const NODE_COLUMNS = [["Node", "name"], ["Role"], ["State"], ["Term", "num"], ["Lag", "num"], ["Sync", "num"], ["Clock", "num"], ["Loop", "num"], ["Disk free", "num"], ["Up", "num"]];

const signed = (ms) => `${ms > 0 ? "+" : ms < 0 ? "−" : ""}${Math.abs(ms).toFixed(1)} ms`;

export function nodeRows(picture, act = null) {
  return picture.nodes.map((node) => ({ key: node.address, cells: node.away ? [
    h("span", null, node.node_id, h("small", null, node.address)), badge("away", "bad"), h("span", { class: "muted" }, node.why), ...Array(7).fill("–"), ...(act ? [""] : []),
  ] : [
    h("span", null, node.node_id, h("small", null, node.address)),
    node.role === "master" ? badge(node.lease_held ? "master" : "master, no lease", node.lease_held ? "accent" : "warn") : badge(node.role, node.role === "candidate" ? "warn" : ""),
    node.state === "serving" && !node.state_reason ? h("span", { class: "good" }, "serving") : h("span", { class: "warn", title: node.state_reason }, node.state.replaceAll("_", " ")),
    count(node.term),
    node.role === "master" ? "–" : count(node.lag),
    node.role === "master" ? "–" : `${count(node.sync_age_ms)} ms`,
    node.clock_state === "agreed" ? h("span", { title: `± ${node.clock_error_ms.toFixed(1)} ms` }, signed(node.clock_offset_ms)) : badge(node.clock_state, "warn"),
    h("span", { class: node.loop_lag_ms > 100 ? "warn" : "" }, `${count(node.loop_lag_ms)} ms`),
    h("span", { class: node.disk_above_mark ? "warn" : "" }, bytes(node.disk_free)),
    span(node.uptime_s * 1_000),
    ...(act ? [act(node)] : []),
  ] }));
}

function transfer(node) {
  const from = live.picture.master_id;
  return ask({
    title: node ? `Make ${node.node_id} the master?` : "Hand the master's role over?",
    says: [
      h("p", null, from ? `${from} stops leading, and ${node ? node.node_id : "the node that is furthest"} takes over as soon as it has everything.` : "There is no master now."),
      h("p", { class: "muted" }, "Deliveries pause for about a tenth of a second. Nothing is lost and nothing is delivered twice."),
    ],
    verb: node ? `Make ${node.node_id} the master` : "Hand over",
    act: async () => {
      const answer = await change("members/transfer", { target: node?.node_id ?? "" });
      return `${answer.master_id} leads in term ${count(answer.term)}.${answer.pause_ms === null ? "" : ` The pause was ${plural(answer.pause_ms, "millisecond")}.`}`;
    },
  });
}

export function nodes(main, { readOnly }) {
  function draw() {
    const picture = live.picture;
    if (!picture) return show(main, loading());
    const act = (node) => (node.role === "slave" && !readOnly ? h("button", { type: "button", class: "small", "aria-label": `Make master: ${node.node_id}`, onclick: () => transfer(node) }, "Make master") : "");
    const button = readOnly ? null : h("button", { type: "button", onclick: () => transfer(null) }, "Hand over");
    show(main, h("div", { class: "stack" },
      panel(plural(picture.nodes.length, "node"), button, table("Nodes", [...NODE_COLUMNS, [h("span", { class: "hidden" }, "Actions"), "act"]], nodeRows(picture, act))),
      panel("Clocks and versions", null, table("Clocks and versions", [["Node", "name"], ["Version"], ["Applied entry", "num"], ["Clock"], ["Offset", "num"], ["Error at most", "num"]],
        picture.nodes.filter((node) => !node.away).map((node) => ({ key: node.address, cells: [node.node_id, node.version, count(node.applied_index), badge(node.clock_state, node.clock_state === "agreed" ? "good" : "warn"), signed(node.clock_offset_ms), `${node.clock_error_ms.toFixed(1)} ms`] }))))));
  }
  draw();
  return { end: listen(draw) };
}
