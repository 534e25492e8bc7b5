// The replicated settings, to look at.

import { read } from "../api.js";
import { h, show } from "../dom.js";
import { bytes, count, span } from "../format.js";
import { loading, panel, table, trouble } from "../parts.js";

function text({ name, value }) {
  if (value === null) return h("span", { class: "muted" }, "not set");
  if (typeof value === "boolean") return value ? "on" : "off";
  if (value === "") return h("span", { class: "muted" }, "none");
  if (typeof value === "string") return h("code", null, value);
  if (name.endsWith("_ms") || name.endsWith("_ms_max")) return [count(value), " ms", value >= 1_000 ? h("span", { class: "muted" }, ` (${span(value)})`) : null];
  if (name.includes("bytes")) return [count(value), h("span", { class: "muted" }, ` (${bytes(value)})`)];
  return value === 0 ? h("span", null, "0", h("span", { class: "muted" }, " (no limit)")) : count(value);
}

export function settings(main) {
  show(main, loading());
  read("settings").then(({ items }) => show(main, h("div", { class: "stack" },
    panel("What every node agrees on", h("code", { class: "muted less" }, "tickwheel settings set NAME=VALUE"),
      table("Settings", [["Setting", "name"], ["Value"]], items.map((item) => ({ key: item.name, cells: [h("code", null, item.name), text(item)] })))))),
  (error) => show(main, trouble(error)));
}
