// Icons of 16 by 16, drawn with lines.
import { s } from "./dom.js";

const PATHS = {
  overview: "M8 1.8a6.2 6.2 0 1 0 0 12.4A6.2 6.2 0 0 0 8 1.8zM8 4.6V8l2.2 1.6",
  topics: "M2.5 4h11M2.5 8h11M2.5 12h7",
  groups: "M5.5 7.2a2.3 2.3 0 1 0 0-4.6 2.3 2.3 0 0 0 0 4.6zM1.8 13.4c.2-2.4 1.6-3.7 3.7-3.7s3.5 1.3 3.7 3.7M10.6 2.9a2.2 2.2 0 0 1 0 4.1M11.4 9.8c1.6.4 2.6 1.6 2.8 3.6",
  pending: "M2 13.5V9.5M5 13.5v-8M8 13.5v-5M11 13.5v-11M14 13.5v-3",
  dead: "M8 2.2l6.2 11H1.8zM8 6.6v3.2M8 11.6v.1",
  sweeps: "M2.2 4.2h7M2.2 8h5M2.2 11.8h7M10.4 6l2 2 2-2M12.4 8V3",
  nodes: "M2.5 2.8h11v4h-11zM2.5 9.2h11v4h-11zM5 4.8h.1M5 11.2h.1",
  schedules: "M13.6 6.2A6 6 0 0 0 3 4.8M3 2v2.9h2.9M2.4 9.8A6 6 0 0 0 13 11.2M13 14v-2.9h-2.9",
  settings: "M2 4.5h5M11 4.5h3M9 2.8v3.4M2 11.5h2M8 11.5h6M6 9.8v3.4",
  access: "M5.2 9.4a3.2 3.2 0 1 0 0-6.4 3.2 3.2 0 0 0 0 6.4zM7.6 8.4l5.2 5M10.6 11.2l1.6-1.6",
  audit: "M3.5 1.8h6l3 3v9.4h-9zM9.2 1.8v3.2h3.2M5.6 8h4.8M5.6 10.8h4.8",
  reports: "M3.5 1.8h9v12.4h-9zM5.8 10.8V8.6M8 10.8V5M10.2 10.8V7.2",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
};

export const icon = (name) => s("svg", { viewBox: "0 0 16 16", "aria-hidden": "true", fill: "none", stroke: "currentColor", "stroke-width": "1.5", "stroke-linecap": "round", "stroke-linejoin": "round" }, s("path", { d: PATHS[name] }));
