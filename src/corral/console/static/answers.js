// One question to one server: what comes back, event by event. A POST, so that a prompt stands in no address.

import { Failure, posted } from "/static/net.js";

/** The events of an answer; `signal` ends it, and with it the request at the server. */
export async function* answers(path, body, signal) {
  let answer;
  try { answer = await fetch(path, posted(body, { signal })); } catch (error) {
    if (signal.aborted) return;
    throw new Failure("The console does not answer.", "If it was ended, start it again: corral console");
  }
  if (!answer.ok) {
    const error = (await answer.json().catch(() => null))?.error ?? {};
    throw new Failure(error.message ?? `The console answered ${answer.status}.`, error.remedy, error.code, answer.status);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  } catch (error) {
    if (!signal.aborted) throw new Failure("The answer broke off.", "Is the console still running? Ask again.");
  }
}
