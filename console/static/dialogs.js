// What asks before something changes, and what tells how it went.

import { h, show } from "./dom.js";

export function toast(text) {
  const element = h("div", { class: "toast" }, text);
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), 6_000);
}

// The refusal of the cluster or of the console: its words, and field, value and limit.
export function refusal(error) {
  const { field, value, limit, ...others } = error.details ?? {};
  const rows = Object.entries({ field, value, limit, ...others }).filter(([name, text]) => text && !["master_id", "master_address", "term"].includes(name));
  return h("div", { class: "refusal", role: "alert" },
    h("strong", null, error.message),
    error.reason ? h("span", null, reasonText(error)) : null,
    rows.length ? h("dl", null, rows.map(([name, text]) => [h("dt", null, name), h("dd", null, text)])) : null);
}

const REASONS = {
  RIGHT_REQUIRED: "You do not have the right to do this.",
  READ_ONLY: "Start the console without --read-only to change the cluster.",
  OUTCOME_UNKNOWN: "It may have happened: look before you try again.",
  NO_MASTER: "The cluster has no master now. Nothing has changed.",
  FORGED: "Load the page again.",
};
const reasonText = (error) => REASONS[error.reason] ?? "";

// Asks, does, and tells. `says`: what will happen, and to how many. `act` does it and returns what to tell; what it
// throws is shown, and the dialog stays. `fields`: elements to fill in; `wide`: for payloads.
export function ask({ title, says, verb, danger = false, act, fields = null, wide = false, keep = "Cancel" }) {
  return new Promise((done) => {
    const trouble = h("div", { class: "stack" });
    const yes = h("button", { type: "submit", class: `primary${danger ? " danger" : ""}` }, verb);
    const id = `dialog-${Math.random().toString(36).slice(2)}`;
    const form = h("form", { onsubmit: go },
      h("h2", { id }, title),
      h("div", { class: "says" }, says),
      fields,
      trouble,
      h("div", { class: "row end" }, h("button", { type: "button", autofocus: fields ? false : true, onclick: () => dialog.close() }, keep), verb ? yes : null));
    const dialog = h("dialog", { "aria-labelledby": id, class: wide ? "wide" : "" }, form);
    let result = null;

    async function go(event) {
      event.preventDefault();
      yes.disabled = true;
      show(trouble);
      try {
        result = (await act()) ?? true;
        dialog.close();
        if (typeof result === "string") toast(result);
      } catch (error) {
        show(trouble, refusal(error));
      } finally {
        yes.disabled = false;
      }
    }

    dialog.addEventListener("close", () => { dialog.remove(); done(result); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// Shows something without asking.
export const tell = ({ title, says, wide = false }) => ask({ title, says, verb: "", wide, keep: "Close", act: async () => true });
