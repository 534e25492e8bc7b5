// Calls of the console's own API. An error is a `Refusal` with what the cluster said.

export class Refusal extends Error {
  constructor(status, body) {
    super(body.error ?? `the console answered ${status}`);
    this.status = status;
    this.reason = body.reason ?? "";
    this.details = body.details ?? {};
  }
}

let csrf = "";
let onLogin = () => {};

export const setCsrf = (value) => { csrf = value; };
export const whenLoginIsNeeded = (call) => { onLogin = call; };

async function answerOf(response) {
  let body = {};
  try { body = await response.json(); } catch { /* no JSON: an error of a proxy */ }
  if (response.ok) return body;
  const refusal = new Refusal(response.status, body);
  if (response.status === 401 && !location.pathname.startsWith("/login")) onLogin();
  throw refusal;
}

async function fetched(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, { error: "the console does not answer", reason: "NO_CONSOLE" });
  }
}

export async function read(name, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  return answerOf(await fetched(`/api/${name}${text ? `?${text}` : ""}`, { signal }));
}

export async function change(name, body) {
  const headers = { "content-type": "application/json", "x-csrf-token": csrf };
  return answerOf(await fetched(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(body) }));
}
