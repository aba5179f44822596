// One side of the Playground: a server, its settings, and the conversation with it.

import { copier, el, fill, ms, number, problem } from "/static/dom.js";
import { answers } from "/static/net.js";
import { markdown } from "/static/markdown.js";
import { hasPictures, isPicture, readContent, thumbnail, withPictures } from "/static/pictures.js";
import { settings } from "/static/settings.js";
import { draw, hide, piece } from "/static/tokens.js";

const AT_FIRST = { max_tokens: 1024, temperature: 0.7 };

/**
 * A lane. `page` is the Playground: `question(lane)` is what would be asked now (text, or messages), `compose(messages)`
 * puts the system message before a conversation, `edit(at)` changes the message at that place, `changed()` is told of
 * every change.
 */
export function lane(ctx, known, title, page) {
  let turns = [], asking = null, sent = null;
  const server = el("select", {});
  const form = settings(known.parameters, () => page.changed());
  form.set(AT_FIRST);
  const alternatives = el("select", {}, [["", "off"], ...[0, 3, 5, 10, 20].map((n) => [String(n), n ? `${n} alternatives` : "the token's own"])].map(([value, text]) => el("option", { value }, text)));
  const model = el("p", { class: "dim long model" });
  const talk = el("div", { class: "talk", role: "log", "aria-label": `Conversation ${title}` });
  const texts = el("div", { class: "stack" });
  const request = el("details", {}, el("summary", {}, "The request as curl and Python"), texts);
  let servers = [];
  const about = () => {
    const named = servers.find((one) => one.name === server.value)?.model ?? "";
    fill(model, named === server.value ? "" : named);
    model.hidden = !model.textContent;
  };
  /** The servers to choose from; the one that was chosen stays. */
  function offer(found) {
    const chosen = server.value, first = !servers.length;
    servers = found;
    fill(server, found.map((one) => el("option", { value: one.name, disabled: !one.ready }, `${one.label}${one.ready ? "" : ` (${one.state})`}`)));
    const ready = found.filter((one) => one.ready);
    if (!first && found.some((one) => one.name === chosen)) server.value = chosen;
    else if (ready.length) server.value = (ready[title === "right" ? 1 : 0] ?? ready[0]).name; // two models, where there are two
    about();
  }
  server.addEventListener("change", () => { about(); page.changed(); });
  alternatives.addEventListener("change", () => page.changed());
  request.addEventListener("toggle", write);
  offer(known.servers);
  const root = el("section", { class: "card lane", "aria-label": title },
    el("div", { class: "fields" }, el("label", {}, "Server", server), el("label", {}, "Probabilities", alternatives)), model,
    el("details", { class: "settings" }, el("summary", {}, "Settings"), form.root), talk, request);

  const body = (prompt) => ({ server: server.value, prompt, sampling: form.values(), alternatives: alternatives.value === "" ? null : Number(alternatives.value) });

  /** Messages so far, as the server gets them. */
  const messages = (until = turns.length) => turns.slice(0, until).map((turn) => ({ role: turn.role, content: turn.role === "user" ? withPictures(turn.text, turn.pictures) : turn.variants[turn.at].text }));

  async function ask(prompt, said, pictures = []) {
    if (said !== null) turns.push({ role: "user", text: said, pictures });
    const turn = { role: "assistant", variants: [variant()], at: 0 };
    turns.push(turn);
    await run(turn, turn.variants[0], body(prompt));
  }

  /** Another answer to the same question, with the settings of now. */
  async function again(turn) {
    const at = turns.indexOf(turn);
    const prompt = turns[at - 1]?.role === "user" ? page.compose(messages(at)) : page.question(made);
    if (!prompt.length) return;
    turn.at = turn.variants.push(variant()) - 1;
    await run(turn, turn.variants[turn.at], body(prompt));
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
    sent = asked;
    target.busy = true;
    paint();
    talk.scrollTop = talk.scrollHeight;
    page.changed();
    const choices = [target];
    const choice = (index) => {
      while (choices.length <= index) turn.variants.push(choices[choices.push(variant()) - 1]);
      return choices[index];
    };
    try {
      for await (const event of answers("/api/play/ask", asked, mine.signal)) {
        if (event.kind === "prompt" && !going && !hasPictures(asked.prompt)) for (const one of choices) one.base = event.ids;
        else if (event.kind === "piece") take(choice(event.index), event, target.base);
        else if (event.kind === "spans") exact(choice(event.index), event);
        else if (event.kind === "end") target.end = event;
        else if (event.kind === "error") target.error = event;
        if (event.kind !== "prompt") soon(turn);
      }
    } catch (error) { target.error = error; }
    if (mine.signal.aborted) await settle(target, asked);
    target.busy = false;
    if (asking === mine) asking = null;
    paint();
    page.changed();
  }

  function take(one, event, base) {
    one.base ??= base;
    one.text += event.text;
    one.thought += event.reasoning;
    one.raw.push(...event.tokens);
    if (!event.tokens.length && !one.pieces.length && !one.spans.length) return; // no probabilities: the text is shown
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
  const soon = (turn) => { due ||= requestAnimationFrame(() => { due = 0; paint(turn); }); };

  /** Draw the conversation, or the one turn that changed. */
  function paint(only = null) {
    const low = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    const node = (turn, at) => (turn.role === "user" ? said(turn, at) : answered(turn, at === turns.length - 1));
    const at = only ? turns.indexOf(only) : -1;
    if (at >= 0 && talk.childNodes[at]) talk.childNodes[at].replaceWith(node(only, at));
    else fill(talk, turns.map(node));
    if (low) talk.scrollTop = talk.scrollHeight;
  }

  const said = (turn, at) => el("div", { class: "question" }, turn.pictures?.length ? el("div", { class: "row" }, turn.pictures.map((one) => thumbnail(one))) : null, el("div", { class: "said" }, turn.text),
    ctx.asks ? el("button", { class: "small", type: "button", "aria-label": "Edit the message", disabled: asking !== null, onclick: () => page.edit(at, turn.text, turn.pictures) }, "Edit") : null);

  function answered(turn, last) {
    const one = turn.variants[turn.at], drawn = one.spans.length || one.pieces.length;
    const box = el("div", { class: drawn ? "answer" : "answer prose" });
    if (one.spans.length) draw(box, one, one.base && !one.busy && ctx.asks ? (at, token) => branch(turn, one, at, token) : null);
    box.append(...(drawn ? one.pieces.map((each) => piece(each.text, each.logprob)) : markdown(one.text)));
    if (one.busy) box.append(el("span", { class: "caret", "aria-hidden": "true" }));
    const turnTo = (step) => el("button", { class: "small", type: "button", "aria-label": step < 0 ? "The answer before" : "The next answer", disabled: !turn.variants[turn.at + step], onclick: () => { turn.at += step; paint(); page.changed(); } }, step < 0 ? "◀" : "▶");
    const many = turn.variants.length > 1, still = !one.busy;
    return el("div", { class: "answered" },
      one.thought ? el("details", { open: !one.text }, el("summary", {}, "Thoughts"), el("div", { class: "answer dim" }, one.thought)) : null, box,
      one.error ? problem(one.error) : null,
      el("p", { class: "dim row" }, still && one.text ? copier(one.text, "Copy the answer") : null,
        still && last && ctx.asks ? el("button", { class: "small", type: "button", disabled: asking !== null, onclick: () => again(turn) }, "Regenerate") : null,
        many ? [turnTo(-1), `${turn.at + 1} of ${turn.variants.length}`, turnTo(1)] : null, el("span", {}, summary(one))));
  }

  /** The request that Send would send; where nothing is written, the last that was sent. */
  async function write() {
    if (!request.open) return;
    const next = page.written() ? page.question(made) : null;
    const asked = next ? body(next) : sent ?? before();
    if (!asked) { fill(texts, el("p", { class: "dim" }, "Write a prompt, and the request stands here.")); return; }
    try {
      const found = await ctx.post("/api/play/texts", asked);
      fill(texts, el("p", { class: "dim" }, next ? "This will be sent:" : "This was sent:"),
        [["curl", found.curl], ["Python", found.python]].map(([name, text]) => el("div", { class: "stack" }, el("div", { class: "row" }, el("h3", {}, name), copier(text)), el("pre", { class: "log" }, text))));
    } catch (error) { fill(texts, problem(error)); }
  }

  /** The question of the last answer, with the settings of now. */
  const before = () => {
    const at = turns.findLastIndex((turn) => turn.role === "user");
    return at < 0 ? null : body(page.compose(messages(at + 1)));
  };

  const stop = () => { asking?.abort(); };
  const made = {
    root, ask, messages, stop, write, body, offer,
    get busy() { return asking !== null; },
    get takesPictures() { return Boolean(servers.find((one) => one.name === server.value)?.images); },
    get turns() { return turns.length; },
    /** Leave out all from a place on. */
    cut(at = 0) { stop(); hide(); turns = turns.slice(0, at); if (!at) sent = null; paint(); },
    choose(name) { if (servers.some((one) => one.name === name && one.ready)) { server.value = name; about(); } },
    /** All of it; `whole`: with the tokens and their alternatives. */
    saved: (whole = false) => ({ server: server.value, sampling: form.values(), alternatives: alternatives.value, messages: messages(),
      ...(whole ? { turns: turns.map((turn) => (turn.role === "user" ? turn : { ...turn, variants: turn.variants.map(({ raw, tokens, busy, ...kept }) => ({ ...kept, stopped: kept.stopped || busy })) })) } : {}) }),
    load(given) {
      stop();
      made.choose(given.server);
      form.set(given.sampling ?? AT_FIRST);
      alternatives.value = given.alternatives ?? "";
      turns = given.turns ? given.turns.map(restored) : (given.messages ?? []).map((one) => (one.role === "assistant" ? { role: "assistant", at: 0, variants: [{ ...variant(), text: String(one.content) }] } : { role: "user", ...readContent(one.content) }));
      sent = null;
      paint();
    },
  };
  return made;
}

const variant = () => ({ text: "", thought: "", pieces: [], spans: [], tokens: [], raw: [], before: [], base: null, logits: false, busy: false });

const restored = (turn) => (turn.role === "user" ? { ...turn, pictures: (turn.pictures ?? []).filter(isPicture) }
  : { ...turn, variants: turn.variants.map((one) => ({ ...variant(), ...one, before: [], tokens: one.spans.flatMap((span) => span.tokens) })) });

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
  const cut = end.finish.includes("length") ? " (max_tokens in Settings, or the context)" : "";
  return [`${number(end.prompt_tokens)} tokens in${cached}, ${number(end.completion_tokens)} out`, end.ttft_s === null ? null : `first after ${ms(end.ttft_s)}`,
    end.tokens_per_s ? `${number(end.tokens_per_s, 1)} tokens/s` : null, `ended by ${end.finish.join(", ")}${cut}`].filter(Boolean).join(" · ");
}
