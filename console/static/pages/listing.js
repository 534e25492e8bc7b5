// What the lists of topics and groups have in common: pages, sorting, a filter by name, and a look every few seconds.

import { read } from "../api.js";
import { h, show } from "../dom.js";
import { loading, pager, panel, sorted, table, trouble } from "../parts.js";

const AGAIN_MS = 5_000;

export function listing(main, { query, keep }, { call, label, columns, row, none, above = null, extra = {} }) {
  const state = { part: query.get("part") ?? "", sort: query.get("sort") ?? "name", descending: query.get("descending") === "true", page: Number(query.get("page")) || 1 };
  let answer = null;
  let error = null;
  let ended = false;
  let timer = 0;

  async function look() {
    clearTimeout(timer);
    try {
      answer = await read(call, { name: state.part, sort: state.sort, descending: state.descending, page: state.page, ...extra });
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    if (ended) return;
    draw();
    timer = setTimeout(function later() {
      if (document.hidden) timer = setTimeout(later, AGAIN_MS);
      else look();
    }, AGAIN_MS);
  }

  function change(values) {
    Object.assign(state, values);
    keep({ part: state.part, sort: state.sort === "name" ? "" : state.sort, descending: state.descending || "", page: state.page > 1 ? state.page : "" });
    look();
  }

  function draw() {
    const heads = columns.map(([title, name, kind]) => (name ? sorted(title, name, state, change, kind) : [title, kind]));
    show(main, h("div", { class: "stack" },
      h("div", { class: "filters" },
        h("label", { class: "field name" }, "Name contains", h("input", { type: "search", value: state.part, placeholder: "any", autocomplete: "off", oninput: (event) => change({ part: event.target.value.trim(), page: 1 }) })),
        above?.(look)),
      error ? trouble(error) : null,
      !answer ? (error ? null : loading()) : panel("", null,
        answer.items.length ? table(label, heads, answer.items.map((item) => row(item, look))) : none(state.part),
        answer.total ? pager(answer, change) : null)));
  }

  draw();
  look();
  return { end: () => { ended = true; clearTimeout(timer); } };
}
