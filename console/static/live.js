// The stream of pictures that all pages share.

const listeners = new Set();
export const live = { picture: null, history: [], connected: null, offsetMs: 0 };
const AGAIN_MS = 3_000;
let onEnd = () => {};
let source = null;
let again = 0;

export function listen(call) {
  listeners.add(call);
  return () => listeners.delete(call);
}

const tellAll = () => listeners.forEach((call) => call());

// The cluster's time now.
export const now = () => Date.now() + live.offsetMs;

// The session that the stream belongs to has ended.
export const whenEnded = (call) => { onEnd = call; };

export function start() {
  if (source) return;
  source = new EventSource("/api/stream");
  source.addEventListener("open", () => { live.connected = true; tellAll(); });
  source.addEventListener("error", () => {
    live.connected = false;
    if (source?.readyState === EventSource.CLOSED) {  // refused: a browser tries again by itself only after a cut
      stop();
      again = setTimeout(start, AGAIN_MS);
    }
    tellAll();
  });
  source.addEventListener("ended", () => { stop(); onEnd(); });
  source.addEventListener("history", (event) => { live.history = JSON.parse(event.data); });
  source.addEventListener("picture", (event) => {
    const picture = JSON.parse(event.data);
    live.offsetMs = picture.now_ms - Date.now();
    live.connected = true;
    live.picture = picture;
    const numbers = picture.numbers;
    if (numbers && live.history.at(-1)?.[0] !== picture.now_ms) {
      live.history.push([picture.now_ms, numbers.schedule_rate, numbers.dispatch_rate, numbers.deliver_rate, numbers.settle_rate, numbers.late_p50_ms, numbers.late_p99_ms]);
      if (live.history.length > 300) live.history.shift();
    }
    tellAll();
  });
}

export function stop() {
  clearTimeout(again);
  source?.close();
  source = null;
}
