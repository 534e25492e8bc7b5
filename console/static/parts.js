// Pieces that several pages share.

import { h, visible } from "./dom.js";
import { count, moment, plural } from "./format.js";
import { refusal } from "./dialogs.js";

const BADGE_MAX = 24;
const LONG_MAX = 40;

export const panel = (title, actions, ...content) => h("section", { class: "panel" },
  title ? h("header", null, h("h2", null, title), actions) : null, ...content);

export const empty = (title, ...text) => h("div", { class: "empty" }, h("strong", null, title), text.length ? h("p", null, ...text) : null);

export const badge = (text, kind = "") => h("span", { class: `badge ${kind}`, title: text.length > BADGE_MAX ? visible(text) : null }, text);

// A text of any length in a cell: its beginning, and the whole of it under the pointer.
export const long = (text) => h("span", { class: "long", title: text.length > LONG_MAX ? visible(text) : null }, text);

// Where one is: the list that leads here, and the name; then what may be done.
export const crumbs = (href, list, name, marks, actions) => h("div", { class: "crumbs" },
  h("div", { class: "row" }, h("a", { href }, list), h("span", { class: "muted" }, "/"), h("strong", null, name), marks),
  actions ? h("div", { class: "row actions" }, actions) : null);

export const tags = (list) => (list.length ? h("span", { class: "tags" }, list.map((tag) => badge(tag))) : h("span", { class: "muted" }, "–"));

export const when = (ms, millis = false) => h("time", { datetime: new Date(ms).toISOString(), title: new Date(ms).toString(), class: "nowrap" }, moment(ms, millis));

export const messageLink = (id) => h("a", { href: `/message?id=${id}`, class: "mono nowrap" }, id);

// `columns`: [title, class]; `rows`: {key, cells}. Wide tables scroll sideways inside, and can be scrolled by keys.
export function table(label, columns, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", null,
      h("thead", null, h("tr", null, columns.map(([title, kind = "", extra = {}]) => h("th", { scope: "col", class: kind, ...extra }, title)))),
      h("tbody", null, rows.map(({ key, cells }) => h("tr", { key }, cells.map((cell, at) => h("td", { class: columns[at][1] ?? "" }, cell)))))));
}

// A column title that sorts by its column.
export function sorted(title, name, state, change, kind = "") {
  const mine = state.sort === name;
  const direction = mine ? (state.descending ? "descending" : "ascending") : "none";
  const press = () => change({ sort: name, descending: mine ? !state.descending : name !== "name", page: 1 });
  return [h("button", { type: "button", onclick: press }, title), kind, { "aria-sort": direction }];
}

export function pager(state, change) {
  const { page, pages, found, total } = state;
  const text = found === total ? plural(total, "entry", "entries") : `${count(found)} of ${plural(total, "entry", "entries")}`;
  return h("div", { class: "pager" },
    h("span", null, text),
    pages > 1 ? h("nav", { class: "row", "aria-label": "Pages" },
      h("button", { type: "button", class: "small", disabled: page <= 1, onclick: () => change({ page: page - 1 }) }, "Back"),
      h("span", null, `${page} of ${pages}`),
      h("button", { type: "button", class: "small", disabled: page >= pages, onclick: () => change({ page: page + 1 }) }, "Next")) : null);
}

export const trouble = (error) => refusal(error);

export const loading = () => h("div", { class: "empty", "aria-busy": "true" }, "Loading…");

export function payload(found) {
  if (!found) return empty("No payload", "No member can read it, or its hour was removed.");
  if (found.kind === "bytes") return h("pre", { class: "payload hex", tabindex: "0" }, hex(found.base64));
  return h("pre", { class: "payload", tabindex: "0" }, found.text);
}

function hex(base64) {
  const content = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const lines = [];
  for (let at = 0; at < content.length; at += 16) {
    const part = [...content.slice(at, at + 16)];
    const codes = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const letters = part.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes.padEnd(47)}  ${letters}`);
  }
  return lines.join("\n");
}

// What a selection of pending messages covers, in words.
export function selectionWords(found) {
  const parts = [];
  if (found.topic) parts.push(`topic ${found.topic}`);
  if (found.tag) parts.push(`tag ${found.tag}`);
  if (found.key) parts.push(`key ${found.key}`);
  if (found.key_prefix) parts.push(`keys from ${found.key_prefix}…`);
  if (found.due_ms_min) parts.push(`from ${moment(found.due_ms_min)}`);
  if (found.due_ms_max) parts.push(`before ${moment(found.due_ms_max)}`);
  return parts.join(", ") || "everything";
}
