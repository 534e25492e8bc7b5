// The frame around every page: navigation, search, theme, who is logged in; and which page the path names.

import { change, read, setCsrf, whenLoginIsNeeded } from "./api.js";
import { redrawAll } from "./charts.js";
import { refusal, toast } from "./dialogs.js";
import { h, kept, show } from "./dom.js";
import { count } from "./format.js";
import { icon } from "./icons.js";
import { listen, live, start, stop, whenEnded } from "./live.js";
import { access, audit } from "./pages/access.js";
import { dead } from "./pages/dead.js";
import { groups } from "./pages/groups.js";
import { message } from "./pages/message.js";
import { nodes } from "./pages/nodes.js";
import { overview } from "./pages/overview.js";
import { pending } from "./pages/pending.js";
import { reports } from "./pages/reports.js";
import { schedules } from "./pages/schedules.js";
import { settings } from "./pages/settings.js";
import { sweeps } from "./pages/sweeps.js";
import { topics } from "./pages/topics.js";

const PAGES = {
  "/": ["Overview", overview, "overview"],
  "/pending": ["Pending messages", pending, "pending"],
  "/topics": ["Topics", topics, "topics"],
  "/groups": ["Consumer groups", groups, "groups"],
  "/dead": ["Dead letters", dead, "dead"],
  "/schedules": ["Recurring schedules", schedules, "schedules"],
  "/sweeps": ["Sweeps", sweeps, "sweeps"],
  "/nodes": ["Nodes", nodes, "nodes"],
  "/settings": ["Settings", settings, "settings"],
  "/access": ["Users and roles", access, "access"],
  "/audit": ["Audit log", audit, "audit"],
  "/reports": ["Chaos reports", reports, "reports"],
  "/message": ["Message", message, null],
};
const SECTIONS = [["", ["/"]], ["Messages", ["/pending", "/schedules", "/topics", "/groups", "/dead", "/sweeps"]], ["Cluster", ["/nodes", "/settings", "/access", "/audit", "/reports"]]];

const root = document.getElementById("app");
const main = kept(h("main", { id: "main", tabindex: "-1" }));
let session = null;
let current = null;
let menuOpen = false;

// -- theme

const dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function toggleTheme() {
  const next = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("tickwheel-theme", next); } catch { /* it holds for this page */ }
  redrawAll();
  frame();
}

// -- the frame

let body = null;

function frame() {
  const path = location.pathname;
  const [title] = PAGES[path] ?? PAGES["/"];
  document.title = `${title} · tickwheel`;
  const search = h("input", { id: "search", type: "search", name: "search", placeholder: "Message id, key, tag:…", autocomplete: "off", spellcheck: "false", "aria-label": "Search messages by id, key, tag: or topic:" });
  show(root, h("div", { class: `frame${menuOpen ? " open" : ""}` },
    h("aside", { class: "side", "aria-label": "Console" },
      h("a", { class: "brand", href: "/" }, h("img", { src: "/static/icon.svg", alt: "" }), h("span", null, "tickwheel", h("small", null, live.picture?.cluster_id ?? ""))),
      h("nav", { class: "nav", "aria-label": "Pages" }, SECTIONS.map(([name, paths]) => [
        name ? h("h2", null, name) : null,
        h("ul", null, paths.filter((each) => each !== "/reports" || session?.reports).map((each) => h("li", null, h("a", { href: each, "aria-current": each === path ? "page" : null }, icon(PAGES[each][2]), PAGES[each][0], badgeOf(each)))))])),
      foot()),
    h("div", { class: "body" },
      h("header", { class: "bar" },
        h("button", { type: "button", class: "icon menu", "aria-label": "Menu", "aria-expanded": String(menuOpen), onclick: () => { menuOpen = !menuOpen; frame(); } }, icon("menu")),
        h("h1", null, title),
        h("form", { class: "search", role: "search", onsubmit: find }, search, h("kbd", { "aria-hidden": "true" }, "/")),
        h("button", { type: "button", class: "icon", "aria-label": dark() ? "Use the light theme" : "Use the dark theme", title: "Theme", onclick: toggleTheme }, icon("theme"))),
      alerts(),
      main)));
  body = root.querySelector(".body");
}

function badgeOf(path) {
  const picture = live.picture;
  const number = path === "/dead" ? picture?.dead : path === "/sweeps" ? picture?.sweeps : 0;
  return number ? h("span", { class: "count" }, count(number)) : null;
}

function foot() {
  const picture = live.picture;
  const away = picture?.nodes.filter((node) => node.away).length ?? 0;
  const [kind, text] = live.connected === false ? ["bad", "Not connected"] : !picture ? ["", "Connecting"] : !picture.master_id ? ["bad", "No master"] : away ? ["warn", `${away} of ${picture.nodes.length} nodes away`] : ["good", "Live"];
  const name = session?.caller?.name;
  return h("div", { class: "side-foot" },
    h("div", { class: "live" }, h("span", { class: `dot ${kind}` }), text),
    session?.read_only ? h("div", null, badge("Read-only")) : null,
    session?.logged_in ? h("div", { class: "who" }, h("span", null, name), h("button", { type: "button", class: "small", onclick: logOut }, "Log out")) : null);
}

const badge = (text) => h("span", { class: "badge" }, text);

function alerts() {
  const picture = live.picture;
  if (!picture) return null;
  const found = [];
  if (!picture.master_id) found.push(["bad", "No master: nothing is scheduled, dispatched or settled until a majority of the nodes works again."]);
  for (const node of picture.nodes) {
    if (node.away) continue;
    if (node.disk_above_mark) found.push(["warn", `${node.node_id}: its disk is above its mark.`]);
    if (node.certificate_reason) found.push(["warn", `${node.node_id}: ${node.certificate_reason}`]);
    if (node.clock_reason) found.push(["warn", `${node.node_id}: ${node.clock_reason}`]);
  }
  if (picture.numbers?.unreadable) found.push(["warn", picture.numbers.unreadable]);
  if (picture.numbers && ["late", "behind", "due_soon"].includes(picture.numbers.cold.state)) found.push(["warn", `The cold tier is ${picture.numbers.cold.state.replace("_", " ")}: ${count(picture.numbers.cold.messages)} messages wait outside the cluster.`]);
  return found.length ? h("section", { class: "stack alerts", "aria-label": "Alerts" }, found.map(([kind, text]) => h("div", { class: `notice ${kind}` }, text)), h("span")) : null;
}

// -- search

function find(event) {
  event.preventDefault();
  const text = root.querySelector("#search").value.trim();
  if (!text) return;
  const [, kind, rest] = /^(tag|topic|key|prefix):\s*(.+)$/.exec(text) ?? [];
  if (/^\d+-\d+-\d+$/.test(text)) go(`/message?id=${text}`);
  else if (kind) go(`/pending?${new URLSearchParams({ [kind === "prefix" ? "key_prefix" : kind]: rest, span: "all" })}`);
  else go(`/pending?${new URLSearchParams({ key_prefix: text, span: "all" })}`);
}

// -- which page

export function go(target) {
  history.pushState(null, "", target);
  route();
}

function route() {
  menuOpen = false;
  current?.end?.();
  current = null;
  document.querySelectorAll("dialog[open]").forEach((dialog) => dialog.close());
  if (location.pathname === "/login") return login();
  const [, page] = PAGES[location.pathname] ?? PAGES["/"];
  const place = h("div");  // of this page alone: an answer that comes after one has left it shows nothing
  main.replaceChildren(place);
  frame();
  const context = {
    query: new URLSearchParams(location.search),
    readOnly: Boolean(session?.read_only),
    go,
    // Keeps what a page shows in its address.
    keep: (values) => {
      const text = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined)).toString();
      history.replaceState(null, "", `${location.pathname}${text ? `?${text}` : ""}`);
    },
  };
  current = page(place, context) ?? {};
  scrollTo(0, 0);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    go(link.getAttribute("href"));
    main.focus({ preventScroll: true });
  } else if (menuOpen && !event.target.closest?.(".side, .menu")) {
    menuOpen = false;
    frame();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    root.querySelector("#search")?.focus();
  }
  if (event.key === "Escape" && menuOpen) { menuOpen = false; frame(); }
});
addEventListener("popstate", route);

// -- login

function login() {
  document.title = "Log in · tickwheel";
  stop();
  const trouble = h("div", { class: "stack" });
  const field = h("input", { id: "token", type: "password", name: "token", autocomplete: "current-password", required: true, spellcheck: "false" });
  const enter = async (by) => {
    show(trouble);
    try {
      setCsrf((await change("login", by)).csrf);
      await begin(new URLSearchParams(location.search).get("next") ?? "/");
    } catch (error) {
      show(trouble, refusal(error));
    }
  };
  const typed = (event) => {
    event.preventDefault();
    enter({ token: field.value });
  };
  const certificate = session?.certificate;
  const known = certificate && !certificate.trouble;
  show(root, h("main", { class: "login", id: "main", tabindex: "-1" }, h("section", { class: "panel" },
    h("img", { src: "/static/icon.svg", alt: "" }),
    h("div", null, h("h1", null, "Log in"), h("p", { class: "muted" }, `This cluster has users and rights. Your token${certificate ? " or certificate" : ""} decides what you see and may do.`)),
    known ? [h("button", { type: "button", class: "primary", onclick: () => enter({ certificate: true }) }, `Log in as ${certificate.name}`), h("p", { class: "muted" }, "By the certificate that your browser shows."), h("div", { class: "or" }, "or")] : null,
    certificate?.trouble ? h("p", { class: "muted" }, `The certificate of your browser${certificate.name ? ` (${certificate.name})` : ""} cannot log in. A login takes ${certificate.trouble}.`) : null,
    h("form", { onsubmit: typed }, h("label", { for: "token" }, "Token", field), trouble, h("button", { type: "submit", class: known ? "" : "primary" }, "Log in with a token")),
    h("p", { class: "muted" }, "An administrator makes one with ", h("code", null, "tickwheel user token NAME"), "."))));
  body = null;
  (known ? root.querySelector("button") : field).focus();
}

async function logOut() {
  await change("logout", {});
  stop();
  session = await read("session");
  setCsrf(session.csrf);
  go("/login");
}

whenLoginIsNeeded(() => {
  if (location.pathname !== "/login") go(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
});

whenEnded(() => begin(location.pathname + location.search).catch((error) => toast(error.message)));

async function begin(target) {
  session = await read("session");
  setCsrf(session.csrf);
  if (session.login_needed) return go(`/login?next=${encodeURIComponent(target)}`);
  if (session.trouble) toast(session.trouble);
  stop();
  start();
  // Only a path of this console: never an address that somebody put into a link.
  const path = target.startsWith("/") && !target.startsWith("//") && !target.startsWith("/login") ? target : "/";
  if (path !== location.pathname + location.search) history.replaceState(null, "", path);
  route();
}

listen(() => { if (body && location.pathname !== "/login") frame(); });
begin(location.pathname + location.search).catch((error) => show(root, h("main", { class: "login" }, refusal(error))));
