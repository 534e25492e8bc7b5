// Users, roles, and who changed what.

import { read } from "../api.js";
import { h, show } from "../dom.js";
import { count, moment, plural } from "../format.js";
import { badge, empty, loading, long, panel, table, tags, trouble, when } from "../parts.js";

const patterns = (list) => (list.length ? list.join(", ") : "none");

function grants(role) {
  return role.grants.map((grant) => h("div", null, grant.rights.join(", "), h("span", { class: "muted" }, ` on topics ${patterns(grant.topics)}; groups ${patterns(grant.groups)}`)));
}

function tokens(user) {
  if (!user.tokens.length) return h("span", { class: "muted" }, "none");
  return user.tokens.map((token) => h("div", null, h("span", { class: "mono" }, token.id), " ", long(token.label), " ", h("span", { class: "muted" }, token.expires_ms ? `until ${moment(token.expires_ms)}` : "does not expire")));
}

export function access(main) {
  show(main, loading());
  read("access").then(({ users, roles }) => show(main, h("div", { class: "stack" },
    panel(plural(users.length, "user"), h("code", { class: "muted less" }, "tickwheel user --help"), users.length
      ? table("Users", [["User", "name"], ["Roles"], ["Quotas"], ["Tokens"]], users.map((user) => ({ key: user.name, cells: [long(user.name), tags(user.roles), Object.entries(user.quotas).map(([name, value]) => h("div", null, `${name} ${count(value)}`)), tokens(user)] })))
      : empty("No users", "Without rights everybody who reaches the nodes may do everything. To change that: ", h("code", null, "tickwheel user set root --role administrator"))),
    panel(plural(roles.length, "role"), null, table("Roles", [["Role", "name"], ["Allows"]], roles.map((role) => ({ key: role.name, cells: [long(role.name), grants(role)] })))))),
  (error) => show(main, trouble(error)));
}

export function audit(main) {
  let records = [];
  let silent = [];
  let more = false;
  let error = null;
  let ready = false;

  async function look(before = "") {
    try {
      const page = await read("audit", { before_ms: before });
      records = before ? [...records, ...page.records] : page.records;
      ({ silent, more } = page);
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    ready = true;
    draw();
  }

  function row(record, at) {
    const fine = record.result === "OK";
    return { key: at, cells: [
      when(record.at_ms), h("span", null, record.user || h("span", { class: "muted" }, "no user"), h("small", null, [record.by === "none" ? "" : `by ${record.by}`, `from ${record.peer.replace(/^ipv[46]:/, "")}`].filter(Boolean).join(" "))), record.method,
      h("code", null, record.request || "–"), fine ? badge("OK", "good") : h("span", { class: "bad" }, record.result, record.left_out ? h("small", null, `and ${count(record.left_out)} more`) : null), record.node_id] };
  }

  function draw() {
    if (!ready) return show(main, loading());
    show(main, h("div", { class: "stack" },
      error ? trouble(error) : null,
      silent.map((node) => h("div", { class: "notice warn" }, `${node.address} did not answer: ${node.error}`)),
      panel("Newest first", null, records.length
        ? table("Audit log", [["At (UTC)"], ["Who"], ["Call"], ["Request", "wide"], ["Result"], ["Node"]], records.map(row))
        : empty("Nothing is noted", "Calls that change the cluster are noted here, and calls refused for a lack of rights."),
      more ? h("div", { class: "pager" }, h("span", null, `${count(records.length)} shown`), h("button", { type: "button", class: "small", onclick: () => look(records.at(-1).at_ms) }, "Show more")) : null)));
  }

  draw();
  look();
  return {};
}
