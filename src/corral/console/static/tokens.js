// Tokens coloured by their probability: point at one for its alternatives, take one to go on from there.

import { el, fill } from "/static/dom.js";

const STEPS = [[0.9, 6], [0.6, 5], [0.3, 4], [0.1, 3], [0.03, 2], [0.01, 1], [0, 0]];
const VISIBLE = { "\n": "⏎\n", "\t": "⇥" };

const chance = (logprob) => (logprob === null || logprob === undefined || logprob > 1e-3 ? null : Math.exp(logprob));

export function percent(logprob, logits = false) {
  if (logprob === null || logprob === undefined) return "–";
  if (logits) return logprob.toFixed(2);
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)}%` : `${share.toExponential(1)}%`;
}

/** The class that colours a token; none where nothing is known. */
export function shade(logprob) {
  const p = chance(logprob);
  return p === null ? "" : `p${STEPS.find(([least]) => p >= least)[1]}`;
}

/** A stretch of text while it streams: no alternatives yet. */
export const piece = (text, logprob) => el("span", { class: `token ${shade(logprob)}` }, text.replace(/[\n\t]/g, (one) => VISIBLE[one]));

export function scale() {
  const names = ["<1%", "≥1%", "≥3%", "≥10%", "≥30%", "≥60%", "≥90%"];
  return el("p", { class: "scale", "aria-label": "Colours: probability of a token" }, names.map((name, at) => el("span", { class: `token p${at}` }, name)));
}

/**
 * Exact tokens in `box`. Arrow keys move between them, pointing or focusing shows alternatives, a click or Enter keeps
 * them open; `branch(at, token)` goes on with another token at that place (none: only to look at).
 */
export function draw(box, { spans, logits }, branch = null) {
  let at = 0;
  const made = spans.map((span) => {
    const first = at;
    at += span.tokens.length;
    const words = `${span.tokens.map((token) => token.label).join(" ")}, ${percent(span.logprob, logits)}`;
    const one = el("span", { class: `token ${logits ? "" : shade(span.logprob)}`, tabindex: "-1", role: "button", "aria-label": words },
      span.text.replace(/[\n\t]/g, (sign) => VISIBLE[sign]));
    const open = (kept) => show(one, span.tokens, first, logits, branch, kept);
    one.addEventListener("mouseenter", () => open(false));
    one.addEventListener("mouseleave", () => hide(false));
    one.addEventListener("focus", () => { if (!returning) open(false); });
    one.addEventListener("blur", (event) => { if (!panel?.contains(event.relatedTarget)) hide(false); });
    one.addEventListener("click", () => open(true));
    one.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
      if (step) { event.preventDefault(); (made[Math.max(0, Math.min(made.length - 1, made.indexOf(one) + step))]).focus(); }
      else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(true); panel?.querySelector("button")?.focus(); }
      else if (event.key === "Escape") hide(true);
    });
    return one;
  });
  if (made.length) made[0].tabIndex = 0;
  fill(box, made);
}

let panel = null, holder = null, pinned = false, returning = false;

/** Take the alternatives away; unless `always`, those that were kept open stay. */
export function hide(always = true) {
  if (!panel || (pinned && !always)) return;
  panel.remove();
  panel = null;
  pinned = false;
}

function show(one, tokens, first, logits, branch, kept) {
  if (pinned && !kept) return;
  hide();
  holder = one;
  pinned = kept;
  panel = el("div", { class: "alternatives", role: kept ? "dialog" : "tooltip", "aria-label": "Alternatives" },
    tokens.map((token, step) => part(token, first + step, logits, branch, kept)),
    kept || !branch ? null : el("p", { class: "dim" }, "Click to go on from here."));
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") { hide(); returning = true; one.focus(); returning = false; } });
  document.body.append(panel);
  const box = one.getBoundingClientRect(), size = panel.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - size.width - 8));
  const below = box.bottom + 6 + size.height < innerHeight || box.top < size.height + 14;
  panel.style.setProperty("left", `${left + scrollX}px`);
  panel.style.setProperty("top", `${(below ? box.bottom + 6 : box.top - size.height - 6) + scrollY}px`);
}

function part(token, at, logits, branch, kept) {
  const others = token.top.length ? token.top : [token];
  const known = others.some((other) => other.id === token.id && other.id !== null || other.label === token.label);
  const rows = known ? others : [...others, token];
  const facts = [percent(token.logprob, logits), token.logprob === null ? null : logits ? "logit" : `log-probability ${token.logprob.toFixed(3)}`,
    token.rank ? `rank ${token.rank}` : null, token.id === null ? null : `id ${token.id}`];
  return el("div", { class: "stack" },
    el("p", {}, el("code", { class: "token-name" }, token.label), " ", el("span", { class: "dim" }, facts.filter(Boolean).join(" · "))),
    el("table", {}, el("tbody", {}, rows.map((other) => {
      const own = other === token || (other.id !== null && other.id === token.id);
      const can = kept && branch && other.id !== null;
      const name = el("code", { class: "token-name" }, other.label);
      return el("tr", { class: own ? "own" : null }, el("td", {}, can
        ? el("button", { class: "small", type: "button", title: own ? "Ask again from here" : "Go on with this token", onclick: () => { hide(); branch(at, other); } }, name)
        : name),
      el("td", { class: "num" }, percent(other.logprob, logits)),
      el("td", { class: "likely" }, logits ? null : el("span", { class: "likely-bar", style: { width: `${Math.round(100 * (chance(other.logprob) ?? 0))}%` } })));
    }))));
}

document.addEventListener("mousedown", (event) => { if (panel && !panel.contains(event.target) && event.target !== holder) hide(); });
