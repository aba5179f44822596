// Asking the console, and listening to it.

/** What went wrong, in the console's words. */
export class Failure extends Error {
  constructor(message, remedy = "", code = 1, status = 0) {
    super(message);
    Object.assign(this, { remedy, code, status });
  }
}

// the link's token, for all tabs of this page: every port of this machine gets the cookie, none but the console's the token
const once = new URLSearchParams(location.search).get("once");
if (once) localStorage.setItem("corral-secret", once);
const secret = () => ({ "x-corral-secret": localStorage.getItem("corral-secret") ?? "" });

/** The options of a request that changes something, or sends a prompt. */
const posted = (body, options = {}) =>
  ({ ...options, method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

async function begin(path, options) {
  let answer;
  try { answer = await fetch(path, { ...options, headers: { ...options.headers, ...secret() } }); } catch {
    throw new Failure("The console does not answer.", "If it was ended, start it again: corral console", 9);
  }
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => null))?.error ?? {};
  throw new Failure(error.message ?? `The console answered ${answer.status}.`, error.remedy, error.code, answer.status);
}

async function ask(path, options) {
  const answer = await begin(path, options);
  try { return await answer.json(); } catch { throw new Failure("The answer broke off.", "Is the console still running?"); }
}

/** The server-sent events of an answer, by fetch: EventSource sends no header. `signal` ends them, and the request. */
async function* events(path, options, begun = () => {}) {
  try {
    const answer = await begin(path, options), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    begun();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  } catch (error) {
    if (options.signal.aborted) return;
    throw error instanceof Failure ? error : new Failure("The answer broke off.", "Is the console still running? Ask again.");
  }
}

export const get = (path, options = {}) => ask(path, options);

export const post = (path, body = {}, options = {}) => ask(path, posted(body, options));

/** The events of the answer to one question: a POST, so that a prompt stands in no address. */
export const answers = (path, body, signal) => events(path, posted(body, { signal }));

/**
 * Server-sent events: `on(value)` for each, `state(connected, failure)` when that changes. Returns what ends it.
 * A page that is hidden listens to nothing, unless `hidden` says so; it begins anew when it is seen again.
 */
export function stream(path, on, { state = () => {}, hidden = false } = {}) {
  let listening = null, timer = 0, waits = 500, over = false;
  const close = () => { clearTimeout(timer); listening?.abort(); listening = null; };
  const open = async () => {
    close();
    if (over || (document.hidden && !hidden)) return;
    const mine = listening = new AbortController();
    const begun = () => { waits = 500; state(true); };
    try {
      for await (const value of events(path, { signal: mine.signal }, begun)) try { on(value); } catch (error) { reportError(error); }
    } catch { /* state says why */ }
    if (mine.signal.aborted) return;
    close();
    state(false, await why());
    if (!over) timer = setTimeout(open, waits = Math.min(waits * 2, 10000));
  };
  const seen = () => { if (!hidden) document.hidden ? close() : open(); };
  document.addEventListener("visibilitychange", seen);
  open();
  return () => { over = true; close(); document.removeEventListener("visibilitychange", seen); };
}

async function why() {
  try { await get("/api/about"); return null; } catch (error) { return error; }
}
