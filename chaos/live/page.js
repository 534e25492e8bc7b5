// The crosshair over the plot: what was going on at that moment.
const plot = document.querySelector("svg.plot");
const now = document.getElementById("now");
const tip = document.getElementById("tip");

const clock = (s) => `${Math.floor(s / 60)}:${(s % 60).toFixed(1).padStart(4, "0")}`;
const count = (v) => Math.round(v).toLocaleString("en");
const late = (v) => (v === null || v === undefined ? "–" : v < 1000 ? `${v.toFixed(0)} ms` : `${(v / 1000).toFixed(1)} s`);

const roleAt = (told, s) => {
  let role = "–";
  for (const [from, name] of told) if (from <= s) role = name;
  return role;
};

const rowsAt = (s) => {
  const place = Math.floor(s / run.step);
  const rows = [["", clock(s)]];
  for (const [from, until, name] of run.faults) if (from <= s && (until === null || s <= until)) rows.push(["fault", name]);
  for (const node in run.roles) rows.push([node, roleAt(run.roles[node], s)]);
  if (place < run.acknowledged.length) {
    rows.push(["acknowledged", `${count(run.acknowledged[place])}/s`]);
    rows.push(["delivered", `${count(run.delivered[place])}/s`]);
    rows.push(["late p50, p99", `${late(run.p50[place])}, ${late(run.p99[place])}`]);
    rows.push(["worst", late(run.worst[place])]);
  }
  return rows;
};

plot.addEventListener("mousemove", (event) => {
  const x = event.clientX - plot.getBoundingClientRect().left;
  const s = Math.max(0, (x / run.width) * run.seconds);
  now.setAttribute("x1", x);
  now.setAttribute("x2", x);
  tip.replaceChildren();
  for (const [name, value] of rowsAt(s)) {
    const row = tip.appendChild(document.createElement("div"));
    row.appendChild(document.createElement("span")).textContent = name;
    row.appendChild(document.createElement("b")).textContent = value;
  }
  tip.hidden = false;
  const right = event.clientX + 24 + tip.offsetWidth > window.innerWidth;
  tip.style.left = `${right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16}px`;
  tip.style.top = `${Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 8)}px`;
});

plot.addEventListener("mouseleave", () => {
  tip.hidden = true;
  now.setAttribute("x1", -9);
  now.setAttribute("x2", -9);
});
