// Asking the console, and listening to it.

/** What went wrong, in the console's words. */
export class Failure extends Error {
  constructor(message, remedy = "", code = 1, status = 0) {
    super(message);
    Object.assign(this, { remedy, code, status });
  }
}

// the link's token: what changes something is sent with it, because other ports get the cookie too
const once = new URLSearchParams(location.search).get("once");
if (once) sessionStorage.setItem("corral-secret", once);
const secret = () => ({ "x-corral-secret": sessionStorage.getItem("corral-secret") ?? "" });

/** The options of a request that changes something, or sends a prompt. */
export const posted = (body, options = {}) =>
  ({ ...options, method: "POST", headers: { "content-type": "application/json", ...secret() }, body: JSON.stringify(body) });

async function ask(path, options) {
  let answer;
  try { answer = await fetch(path, options); } catch { throw gone(); }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  const error = body?.error ?? {};
  throw new Failure(error.message ?? `The console answered ${answer.status}.`, error.remedy, error.code, answer.status);
}

const gone = () => new Failure("The console does not answer.", "If it was ended, start it again: corral console", 9);

export const get = (path, options = {}) => ask(path, options);

export const post = (path, body = {}, options = {}) => ask(path, posted(body, options));

/**
 * Server-sent events: `on(value)` for each, `state(connected, failure)` when that changes. Returns what ends it.
 * A page that is hidden listens to nothing, unless `hidden` says so; it begins anew when it is seen again.
 */
export function stream(path, on, { state = () => {}, hidden = false } = {}) {
  let source = null, timer = 0, waits = 500, over = false;
  const close = () => { clearTimeout(timer); source?.close(); source = null; };
  const open = () => {
    close();
    if (over || (document.hidden && !hidden)) return;
    source = new EventSource(path);
    source.onopen = () => { waits = 500; state(true); };
    source.onmessage = (event) => on(JSON.parse(event.data));
    source.onerror = async () => {
      close();
      state(false, await why());
      if (!over) timer = setTimeout(open, waits = Math.min(waits * 2, 10000));
    };
  };
  const seen = () => { if (!hidden) document.hidden ? close() : open(); };
  document.addEventListener("visibilitychange", seen);
  open();
  return () => { over = true; close(); document.removeEventListener("visibilitychange", seen); };
}

async function why() {
  try { await get("/api/about"); return null; } catch (error) { return error; }
}
