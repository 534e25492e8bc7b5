// Reports of chaos runs: all of them, and one with what happened when. Everything in them is text of a stranger: it
// becomes text nodes and numbers here, never markup, classes or addresses.

import { read } from "../api.js";
import { lines } from "../charts.js";
import { h, s, show } from "../dom.js";
import { count, plural, rate, span } from "../format.js";
import { badge, empty, loading, pager, panel, table, trouble, when } from "../parts.js";

const VERDICTS = { held: ["all promises held", "good"], broken: ["broken", "bad"], void: ["void", "warn"] };
const RATES = [["Acknowledged", "--series-1"], ["Delivered, all groups", "--series-3"]];
const LATE = [["Median", "--series-1"], ["p99", "--series-3"], ["Worst", "--series-4"]];
const ROLES = [["master", "master"], ["aligning", "master, not serving"], ["slave", "slave"], ["candidate", "candidate"], ["recovering", "recovering"], ["halted", "takes no part"], ["silent", "silent"]];
const CLOCK = [["earliest_ms", "Earliest message, before its time by true time"], ["clock_error_ms", "Most that a master said its time might be off"], ["time_ahead_ms", "Most that a serving master's time was ahead"], ["time_beyond_ms", "Of that, beyond what it said"]];
const AUDIT = [["scheduled", "Scheduled"], ["lost", "Lost"], ["early", "Early by true time"], ["duplicated", "Twice under one attempt"], ["without_master_ms", "Without a master, ms"]];

const link = (name) => h("a", { href: `/reports?name=${encodeURIComponent(name)}` }, name);
const some = (ms) => (ms === null ? "–" : span(ms));
const seconds = (value) => value.toFixed(1);
const kindOf = (report) => (report.case ? `chaos clock: ${report.case}` : "chaos run");

function verdict(report) {
  const [text, kind] = VERDICTS[report.verdict];
  const broken = Object.keys(report.broken_counts);
  return badge(report.verdict === "broken" ? `${broken.slice(0, 4).join(", ")}${broken.length > 4 ? ", …" : ""} ${text}` : text, kind);
}

function row(report) {
  if (report.trouble) return { key: report.shown, cells: [h("span", null, report.shown), badge("cannot be shown", "bad"), h("span", { class: "bad" }, report.trouble), ...Array(5).fill("")] };
  const { figures, faults } = report;
  const injected = faults.reduce((sum, fault) => sum + fault.injected, 0);
  return { key: report.name, cells: [
    h("span", null, link(report.name), h("small", null, kindOf(report))),
    verdict(report),
    when(report.began_ms),
    h("span", null, span(report.seconds * 1_000), h("small", null, `${plural(report.nodes, "node")}, ${rate(report.rate)}/s`)),
    h("span", { title: faults.map((fault) => fault.kind).join(", ") }, count(injected), h("small", null, faults.length ? `of ${plural(faults.length, "kind")}` : "")),
    h("span", null, count(figures.failovers), h("small", null, figures.failovers ? `${span(figures.without_max_ms)} at most` : "")),
    h("span", { class: figures.lost || figures.early ? "bad" : "" }, `${count(figures.lost)} / ${count(figures.early)}`),
    h("span", null, span(figures.outside.p99), h("small", null, `${span(Math.max(figures.outside.worst, figures.inside.worst))} at worst`))] };
}

const COLUMNS = [["Report", "name"], ["Verdict"], ["Began (UTC)"], ["Load"], ["Faults", "num"], ["Failovers", "num"], ["Lost / early", "num"], ["Lateness, p99", "num"]];

function all(main, { query, keep }) {
  let answer = null;
  let error = null;

  async function look(page) {
    try {
      answer = await read("reports", { page });
      error = null;
    } catch (refusal) {
      error = refusal;
    }
    draw();
  }

  function change({ page }) {
    keep({ page: page > 1 ? page : "" });
    look(page);
  }

  function draw() {
    show(main, h("div", { class: "stack" },
      error ? trouble(error) : null,
      answer?.more ? h("div", { class: "notice warn" }, `The directory has more than ${count(answer.entries_max)} entries: not all of them were looked at.`) : null,
      !answer ? (error ? null : loading()) : panel("", null,
        answer.items.length ? table("Reports of chaos runs", COLUMNS, answer.items.map(row))
          : empty("There is no report", "Leave one in the directory that the console was started with: ", h("code", null, "tickwheel chaos run --dir DIRECTORY/NAME")),
        answer.items.length ? pager(answer, change) : null),
      answer?.without ? h("p", { class: "muted" }, `${plural(answer.without, "directory has", "directories have")} no report.json: of runs that have not ended, or of something else.`) : null));
  }

  draw();
  look(Number(query.get("page")) || 1);
  return {};
}

function figures(cells) {
  return h("dl", { class: "panel numbers" }, cells.map(([title, value, words, kind]) => h("div", null, h("dt", null, title), h("dd", { class: kind ?? "" }, value, h("br"), h("small", null, words)))));
}

const keys = (list) => h("div", { class: "keys" }, list.map(([name, key]) => h("span", null, h("i", { class: key }), name)));
const seriesKeys = (series) => keys(series.map(([name, key]) => [name, `key-${key.at(-1)}`]));

// A lane under the time of the charts: what lasted from when to when.
function lane(title, label, from, until, marks) {
  const places = marks.filter((mark) => mark.until > from && mark.from < until);
  return h("div", { class: "lane" }, h("span", null, title),
    s("svg", { viewBox: `0 0 ${until - from} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label }, places.map((mark) => s("rect", {
      class: mark.class, x: Math.max(0, mark.from - from), width: Math.max((until - from) / 600, Math.min(until, mark.until) - Math.max(from, mark.from)), y: 0, height: 1 }, s("title", null, mark.text)))));
}

function lanes(report, from, until) {
  const end = (fault) => fault.until_s ?? until;
  const faults = report.struck.map((fault) => ({ class: "lane-fault", from: fault.from_s, until: end(fault), text: `${fault.kind} ${fault.struck.join(", ")}, ${seconds(fault.from_s)} to ${seconds(end(fault))} s` }));
  const broken = report.broken.map((one) => ({ class: "lane-broken", from: one.at_s, until: one.at_s + 0.001, text: `${one.promise} broken at ${seconds(one.at_s)} s` }));
  const known = new Set(ROLES.map(([role]) => role));
  return h("div", { class: "lanes" },
    lane("Faults", `${plural(faults.length, "fault")}; the table below has each kind`, from, until, [...faults, ...broken]),
    report.roles.map(({ node, changes, until_s: heard }) => lane(node, `${node}: ${changes.slice(0, 40).map(([at, role]) => `${role} from ${seconds(at)} s`).join(", ")}`, from, until,
      changes.map(([at, role], place) => {
        const to = changes[place + 1]?.[0] ?? heard ?? until;
        return { class: known.has(role) ? `lane-${role}` : "", from: at, until: to, text: `${node}: ${role}, ${seconds(at)} to ${seconds(to)} s` };
      }))));
}

function promises(report) {
  return table("Promises", [["Number"], ["Promise"], ["Verdict"]], report.promises.map(({ promise, title }) => {
    const times = report.broken_counts[promise] ?? 0;
    return { key: promise, cells: [/^P\d/.test(promise) ? promise : "", title, times ? badge(`broken ${times === 1 ? "once" : `${count(times)} times`}`, "bad") : badge("held", "good")] };
  }));
}

function faultRows(report) {
  return report.faults.map((fault) => ({ key: fault.kind, cells: [fault.kind,
    fault.effective === fault.injected ? `${count(fault.injected)} of ${count(fault.injected)}` : badge(`${count(fault.effective)} of ${count(fault.injected)}`, fault.effective ? "warn" : "bad"),
    count(fault.seen), fault.unit] }));
}

function masters(report) {
  const more = report.figures.failovers - report.masters.length;
  return panel("Failovers", null, table("Failovers", [["At, s", "num"], ["Master", "nowrap"], ["Term", "num"], ["Without a master", "num"], ["No delivery", "num"], ["Faults at that time"]], report.masters.map((failover, at) => ({ key: at, cells: [
    seconds(failover.at_s), `${failover.old} → ${failover.new}`, count(failover.term), span(failover.without_ms), some(failover.silence_ms), failover.cause || badge("no fault", "warn")] }))),
  more > 0 ? h("div", { class: "pager" }, `and ${count(more)} more`) : null);
}

const pairs = (label, list) => table(label, [[label], ["How much", "num"]], list.map(([name, value]) => ({ key: name, cells: [name, value] })));

function doubts(report) {
  const { without_effect: without, elections, starved_share: starved, unjudged_ms: unjudged, dead_letters: dead } = report.doubts;
  return [
    report.void ? `This run proves nothing: ${report.void}` : null,
    without ? `${plural(without, "fault")} had no effect that was seen.` : null,
    elections ? `${plural(elections, "election")} had no fault to explain ${elections === 1 ? "it" : "them"}.` : null,
    starved > 0.2 ? `The machine was busy: nodes waited for a processor ${Math.round(starved * 100)} % of the time.` : null,
    unjudged.length ? `P10 could not be judged ${plural(unjudged.length, "time")}, while nodes waited for a processor.` : null,
    dead ? `${plural(dead, "message")} went to dead letters.` : null,
  ].filter((text) => text);
}

function about(report) {
  const facts = [
    ["Played", kindOf(report)], ["Began", when(report.began_ms)], ["Load", `${span(report.seconds * 1_000)} at ${rate(report.rate)} messages a second`], ["Nodes", count(report.nodes)],
    ["Families of faults", report.families.join(", ") || (report.case ? "a script of its own" : "none")], ["Seed", report.seed === null || report.case ? null : h("code", null, String(report.seed))], ["Network", report.netns ? "namespaces: packets were really lost" : null]];
  return h("dl", { class: "facts" }, facts.filter(([, value]) => value).map(([title, value]) => [h("dt", null, title), h("dd", null, value)]));
}

function one(main, { query }) {
  const name = query.get("name");
  let report = null;
  let error = null;
  const bands = () => report.struck.map((fault) => [report.load_ms / 1_000 + fault.from_s, report.load_ms / 1_000 + (fault.until_s ?? report.series.seconds.at(-1))]);
  const rates = lines("Messages a second during the run", RATES, undefined, { bands, tall: true });
  const lateness = lines("Lateness of deliveries during the run, on a logarithmic scale", LATE, span, { bands, log: true, tall: true });

  function picture() {
    const [from, until] = [report.series.seconds[0], report.series.seconds.at(-1)];
    if (report.series.seconds.length < 2 || until <= from) return panel("What happened", null, empty("There is no picture", "The run ended before a second of load had passed."));
    return [
      panel("What happened", keys([["fault", "key-fault"], ["broken promise", "key-broken"], ...ROLES.map(([role, words]) => [words, `key-${role}`])]), lanes(report, from, until)),
      panel("Messages a second", seriesKeys(RATES), rates.element),
      panel("Lateness", seriesKeys(LATE), lateness.element)];
  }

  function draw() {
    if (!report) return show(main, h("div", { class: "stack" }, h("div", { class: "row" }, h("a", { href: "/reports" }, "All reports"), h("span", { class: "muted" }, "/"), h("strong", null, name)), error ? trouble(error) : loading()));
    const { figures: found } = report;
    const again = Object.entries(report.duplicates).sort(([, a], [, b]) => b - a).map(([reason, number]) => [reason, count(number)]);
    show(main, h("div", { class: "stack" },
      h("div", { class: "row" }, h("a", { href: "/reports" }, "All reports"), h("span", { class: "muted" }, "/"), h("strong", null, name), verdict(report)),
      doubts(report).map((text) => h("div", { class: "notice warn" }, text)),
      report.broken.length ? panel("What was broken", null, table("What was broken", [["At, s", "num"], ["Promise"], ["What"]], report.broken.map((each, at) => ({ key: at, cells: [seconds(each.at_s), each.promise, h("code", { class: "told" }, each.text)] })))) : null,
      figures([
        ["Acknowledged", count(found.acknowledged), "by the cluster"], ["Delivered", count(found.delivered), "to all groups"],
        ["Lost", count(found.lost), "not delivered", found.lost ? "bad" : ""], ["Early", count(found.early), "before their time", found.early ? "bad" : ""],
        ["Delivered again", count(found.again), `${count(found.again_failover)} by failover`], ["Failovers", count(found.failovers), found.failovers ? `at most ${some(found.without_max_ms)}` : "one master"]]),
      picture(),
      report.checks.length ? panel("What was expected", null, table("What was expected", [["At, s", "num"], ["Expected"], ["Outcome"], ["Seen"]], report.checks.map((check, at) => ({ key: at, cells: [seconds(check.at_s), check.what, check.passed ? badge("as expected", "good") : badge("not so", "bad"), check.seen] })))) : null,
      report.figures.failovers ? masters(report) : null,
      h("div", { class: "two" },
        h("div", { class: "stack" },
          panel("Promises", null, promises(report)),
          panel("The run", null, h("div", { class: "inside" }, about(report)))),
        h("div", { class: "stack" },
          panel("Faults", null, report.faults.length ? table("Faults", [["Fault", "nowrap"], ["With effect", "nowrap"], ["Seen", "num"], ["Of what"]], faultRows(report)) : empty("No faults", "Only load.")),
          panel("Lateness", null, table("Lateness", [["When"], ["Messages", "num"], ["Median", "num"], ["p99", "num"], ["p99.9", "num"], ["Worst", "num"]], [["Outside faults", found.outside], ["Inside", found.inside]].map(([title, late]) => ({ key: title, cells: [title, count(late.messages), ...[late.p50, late.p99, late.p99_9, late.worst].map(span)] })))),
          panel("Counts", null, pairs("Delivered again because", again.length ? again : [["never", "0"]]), pairs("Clock", CLOCK.map(([field, words]) => [words, span(report.clock[field])])), report.audit ? pairs("The audit's count", AUDIT.map(([field, words]) => [words, count(report.audit[field])])) : null)))));
    const start = report.load_ms / 1_000;
    const column = report.series;
    const times = column.seconds.map((at) => start + at);
    const least = (list) => list.map((ms) => (ms === null ? null : Math.max(1, ms)));
    rates.show([times, column.acknowledged, column.delivered]);
    lateness.show([times, least(column.late_p50), least(column.late_p99), least(column.late_worst)]);
  }

  draw();
  read("report", { name }).then((found) => { report = found; draw(); }, (refusal) => { error = refusal; draw(); });
  return { end: () => { rates.end(); lateness.end(); } };
}

export function reports(main, context) {
  return context.query.get("name") ? one(main, context) : all(main, context);
}
