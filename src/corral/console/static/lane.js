// One side of the Playground: a server, its settings, and the conversation with it.

import { el, fill, ms, number, problem } from "/static/dom.js";
import { answers } from "/static/net.js";
import { settings } from "/static/settings.js";
import { draw, hide, piece } from "/static/tokens.js";

/** A lane; `question(lane)` gives what is to be asked now: text, or messages. */
export function lane(ctx, known, title, question, changed) {
  let turns = [], asking = null;
  const server = el("select", {}, known.servers.map((one) => el("option", { value: one.name, disabled: !one.ready }, `${one.label}${one.ready ? "" : ` (${one.state})`}`)));
  const ready = known.servers.filter((one) => one.ready);
  if (ready.length) server.value = (ready[title === "right" ? 1 : 0] ?? ready[0]).name; // two models, where there are two
  const form = settings(known.parameters, () => changed());
  const alternatives = el("select", {}, [["", "none"], ...[0, 3, 5, 10, 20].map((n) => [String(n), n ? `${n} alternatives` : "the token's own"])].map(([value, text]) => el("option", { value }, text)));
  alternatives.value = "5";
  const model = el("p", { class: "dim long model" });
  const talk = el("div", { class: "talk", role: "log", "aria-label": `Conversation ${title}` });
  const texts = el("div", { class: "stack" });
  const request = el("details", {}, el("summary", {}, "The request as curl and Python"), texts);
  const about = () => {
    const named = known.servers.find((one) => one.name === server.value)?.model ?? "";
    fill(model, named === server.value ? "" : named);
    model.hidden = !model.textContent;
  };
  server.addEventListener("change", () => { about(); changed(); });
  alternatives.addEventListener("change", () => changed());
  request.addEventListener("toggle", write);
  about();
  const root = el("section", { class: "card lane", "aria-label": title },
    el("div", { class: "fields" }, el("label", {}, "Server", server), el("label", {}, "Probabilities", alternatives)), model,
    el("details", { class: "settings" }, el("summary", {}, "Settings"), form.root), talk, request);

  const body = (prompt) => ({ server: server.value, prompt, sampling: form.values(), alternatives: alternatives.value === "" ? null : Number(alternatives.value) });

  /** Messages so far, as the server gets them. */
  const messages = () => turns.map((turn) => ({ role: turn.role, content: turn.role === "user" ? turn.text : turn.variants[turn.at].text }));

  async function ask(prompt, said) {
    if (said !== null) turns.push({ role: "user", text: said });
    const turn = { role: "assistant", variants: [variant()], at: 0 };
    turns.push(turn);
    await run(turn, turn.variants[0], body(prompt));
  }

  /** Go on from a place of an answer with another token: the model gets the ids of all that was before. */
  async function branch(turn, from, at, token) {
    const kept = from.tokens.slice(0, at), chosen = { ...token, top: from.tokens[at].top };
    const made = variant();
    Object.assign(made, { base: from.base, before: [...kept, chosen], spans: [...spansOf(from.spans, at), { text: token.text, logprob: token.logprob, tokens: [chosen] }] });
    made.tokens = made.before;
    made.text = made.spans.map((span) => span.text).join("");
    turn.variants.push(made);
    turn.at = turn.variants.length - 1;
    await run(turn, made, body([...from.base, ...kept.map((one) => one.id), token.id]), true);
  }

  async function run(turn, target, asked, going = false) {
    stop();
    asking = new AbortController();
    const mine = asking;
    target.busy = true;
    paint();
    changed();
    const choice = (index) => {
      if (index === 0) return target;
      while (turn.variants.length <= index) turn.variants.push(variant());
      return turn.variants[index];
    };
    try {
      for await (const event of answers("/api/play/ask", asked, mine.signal)) {
        if (event.kind === "prompt" && !going) for (const one of turn.variants) one.base = event.ids;
        else if (event.kind === "piece") take(choice(event.index), event, target.base);
        else if (event.kind === "spans") exact(choice(event.index), event);
        else if (event.kind === "end") target.end = event;
        else if (event.kind === "error") target.error = event;
        if (event.kind !== "prompt") soon();
      }
    } catch (error) { target.error = error; }
    if (mine.signal.aborted) await settle(target, asked);
    target.busy = false;
    if (asking === mine) asking = null;
    paint();
    changed();
  }

  function take(one, event, base) {
    one.base ??= base;
    one.text += event.text;
    one.thought += event.reasoning;
    one.raw.push(...event.tokens);
    const sum = event.tokens.reduce((total, token) => (token.logprob === null ? total : total + token.logprob), 0);
    one.pieces.push({ text: event.text, logprob: event.tokens.length ? sum : null });
  }

  function exact(one, { spans, logits }) {
    one.spans = [...(one.before.length ? one.spans : []), ...spans];
    one.tokens = [...one.before, ...spans.flatMap((span) => span.tokens)];
    one.logits = logits;
    one.pieces = [];
    one.raw = [];
  }

  /** What was stopped half-way has its tokens, too. */
  async function settle(one, asked) {
    one.stopped = true;
    if (!one.raw.length) return;
    try { exact(one, await ctx.post("/api/play/spell", { server: asked.server, text: one.text, tokens: one.raw })); } catch { /* the text stays */ }
  }

  let due = 0;
  const soon = () => { due ||= requestAnimationFrame(() => { due = 0; paint(); }); };

  function paint() {
    const low = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    fill(talk, turns.map((turn) => (turn.role === "user" ? el("div", { class: "said" }, turn.text) : answered(turn))));
    if (low) talk.scrollTop = talk.scrollHeight;
  }

  function answered(turn) {
    const one = turn.variants[turn.at], box = el("div", { class: "answer" });
    if (one.spans.length) draw(box, one, one.base && !one.busy && ctx.asks ? (at, token) => branch(turn, one, at, token) : null);
    box.append(...one.pieces.map((each) => piece(each.text, each.logprob)));
    if (one.busy) box.append(el("span", { class: "caret", "aria-hidden": "true" }));
    const turnTo = (step) => el("button", { class: "small", type: "button", "aria-label": step < 0 ? "The answer before" : "The next answer", disabled: !turn.variants[turn.at + step], onclick: () => { turn.at += step; paint(); } }, step < 0 ? "◀" : "▶");
    const many = turn.variants.length > 1;
    return el("div", { class: "answered" },
      one.thought ? el("details", {}, el("summary", {}, "Thoughts"), el("div", { class: "answer dim" }, one.thought)) : null, box,
      one.error ? problem(one.error) : null,
      el("p", { class: "dim row" }, many ? [turnTo(-1), `${turn.at + 1} of ${turn.variants.length}`, turnTo(1)] : null, el("span", {}, summary(one))));
  }

  async function write() {
    if (!request.open) return;
    const prompt = question(made);
    if (!prompt?.length) { fill(texts, el("p", { class: "dim" }, "Write a prompt, and the request stands here.")); return; }
    try {
      const found = await ctx.post("/api/play/texts", body(prompt));
      fill(texts, [["curl", found.curl], ["Python", found.python]].map(([name, text]) => el("div", { class: "stack" }, el("div", { class: "row" }, el("h3", {}, name), copier(text)), el("pre", { class: "log" }, text))));
    } catch (error) { fill(texts, problem(error)); }
  }

  const stop = () => { asking?.abort(); };
  const made = {
    root, ask, messages, stop, write, body,
    get busy() { return asking !== null; },
    clear() { stop(); hide(); turns = []; paint(); },
    saved: () => ({ server: server.value, sampling: form.values(), messages: messages() }),
    load(given) {
      if (known.servers.some((one) => one.name === given.server && one.ready)) server.value = given.server;
      form.set(given.sampling ?? {});
      turns = (given.messages ?? []).map((one) => (one.role === "assistant" ? { role: "assistant", at: 0, variants: [{ ...variant(), text: String(one.content), pieces: [{ text: String(one.content), logprob: null }] }] } : { role: "user", text: String(one.content) }));
      about();
      paint();
    },
  };
  return made;
}

const variant = () => ({ text: "", thought: "", pieces: [], spans: [], tokens: [], raw: [], before: [], base: null, logits: false, busy: false });

/** The spans of the first `count` tokens; one that is cut becomes a span for each of its tokens. */
function spansOf(spans, count) {
  const found = [];
  let at = 0;
  for (const span of spans) {
    if (at + span.tokens.length <= count) found.push(span);
    else found.push(...span.tokens.slice(0, Math.max(0, count - at)).map((token) => ({ text: token.text, logprob: token.logprob, tokens: [token] })));
    at += span.tokens.length;
    if (at >= count) break;
  }
  return found;
}

function summary(one) {
  const end = one.end;
  if (one.busy) return "…";
  if (!end) return one.stopped ? "stopped" : "";
  const cached = end.cached_tokens ? ` (${number(end.cached_tokens)} cached)` : "";
  return [`${number(end.prompt_tokens)} tokens in${cached}, ${number(end.completion_tokens)} out`, end.ttft_s === null ? null : `first after ${ms(end.ttft_s)}`,
    end.tokens_per_s ? `${number(end.tokens_per_s, 1)} tokens/s` : null, `ended by ${end.finish.join(", ")}`].filter(Boolean).join(" · ");
}

function copier(text) {
  const button = el("button", { class: "small", type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select it"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
