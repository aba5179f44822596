// The servers of the Live view: a row each, fleets with their members below them; found, sorted and turned by pages.
// Rows stay the same elements while their figures change, so that nothing loses its focus once a second.

import { el, empty, fill, meter, ms, number, percent } from "/static/dom.js";

export const ALL = "all servers";
const PAGE = 25;
const SORTS = { name: null, "tokens/s": "tok_s", waiting: "waiting", "KV use": "kv", "time to first token": "ttft_p95" };
const amount = (value) => number(value, value < 10 ? 1 : 0);
const pair = (half, most) => (half === null || half === undefined ? "–" : `${ms(half)} / ${ms(most)}`);
const CELLS = [(row) => amount(row.tok_s), (row) => amount(row.prompt_s), (row) => amount(row.running), (row) => amount(row.waiting), (row) => meter(row.kv),
  (row) => pair(row.ttft_p50, row.ttft_p95), (row) => pair(row.tpot_p50, row.tpot_p95), (row) => percent(row.prefix)];
const HEADS = ["Tok/s", "Prompt/s", "Run", "Wait", "KV use", "TTFT P50 / P95", "TPOT P50 / P95", "Prefix hits"];

/** The table; `choose(name)` is called for the server to be drawn. */
export function serverTable(choose) {
  const search = el("input", { type: "search", placeholder: "Find by name, model or fleet…", "aria-label": "Find servers" });
  const sort = el("select", { "aria-label": "Sort by" }, Object.keys(SORTS).map((name) => el("option", { value: name }, `by ${name}`)));
  const tools = el("div", { class: "row tools", hidden: true }, el("span", { class: "find" }, search), sort);
  const body = el("tbody", {}), turn = el("div", { class: "row", hidden: true }), words = el("span", { class: "dim" });
  const step = (by, text) => el("button", { class: "small", type: "button", onclick: () => { at += by; again(); } }, text);
  const back = step(-PAGE, "◀ Before"), next = step(PAGE, "Next ▶");
  const table = el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Server"), HEADS.map((text) => el("th", { class: "num", scope: "col" }, text)))), body));
  const nothing = el("div", { hidden: true });
  const made = new Map();
  let at = 0, last = null, order = "";
  fill(turn, back, words, next);
  search.addEventListener("input", () => { at = 0; again(); });
  sort.addEventListener("change", () => { at = 0; again(); });
  const again = () => { if (last) draw(...last); };

  function draw(news, chosen) {
    last = [news, chosen];
    const found = arranged(news.servers, search.value, SORTS[sort.value]);
    tools.hidden = news.servers.length <= 10 && !search.value;
    at = Math.max(0, Math.min(at, Math.floor((found.length - 1) / PAGE) * PAGE));
    const sum = news.servers.length > 1 && !search.value ? [{ ...news.all, name: ALL }] : [];
    const shown = [...sum, ...found.slice(at, at + PAGE)];
    const key = JSON.stringify(shown.map((row) => row.name));
    const lines = shown.map((row) => line(row, chosen));
    if (key !== order) { order = key; fill(body, lines.map((one) => one.parts)); }
    for (const name of made.keys()) if (!news.servers.some((row) => row.name === name) && name !== ALL) made.delete(name);
    turn.hidden = found.length <= PAGE;
    words.textContent = `${at + 1} to ${Math.min(at + PAGE, found.length)} of ${found.length}`;
    back.disabled = at === 0;
    next.disabled = at + PAGE >= found.length;
    table.hidden = !found.length;
    nothing.hidden = Boolean(found.length);
    if (!found.length) fill(nothing, news.servers.length ? empty("No server is called that.") : empty("No server is ready.", el("p", {}, "What runs shows its load here: tokens per second, requests, cache, times."), el("a", { class: "button", href: "#/fleet" }, "Go to Overview")));
  }

  function line(row, chosen) {
    if (!made.has(row.name)) made.set(row.name, lineOf(row));
    const one = made.get(row.name);
    one.tr.className = `${row.name === chosen ? "chosen" : ""}${row.fleet ? " member" : ""}`;
    one.button.setAttribute("aria-pressed", String(row.name === chosen));
    set(one.about, row.members ? ` fleet of ${row.members}` : row.fleet || row.model === row.name ? "" : row.model ? ` ${row.model}` : "");
    CELLS.forEach((cell, place) => { const value = cell(row); typeof value === "string" ? set(one.cells[place], value) : fill(one.cells[place], value); });
    set(one.told.firstChild, row.problem ?? "");
    one.told.hidden = !row.problem;
    return one;
  }

  function lineOf(row) {
    const button = el("button", { type: "button", class: "plain long", onclick: () => choose(row.name) }, row.name), about = el("span", { class: "dim" });
    const cells = CELLS.map(() => el("td", { class: "num" }));
    const tr = el("tr", { "data-name": row.name }, el("td", { class: "server" }, button, about), cells);
    const told = el("tr", { hidden: true }, el("td", { colspan: String(CELLS.length + 1), class: "bad-text long" }));
    return { tr, told, button, about, cells, parts: [tr, told] };
  }

  return { node: el("section", { class: "card", "aria-label": "Servers" }, tools, table, nothing, turn), draw };
}

const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };

/** Fleets with their members first, then the rest by name; or all of them by a figure, the largest first. */
export function arranged(servers, search, figure) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const hay = (row) => [row.name, row.model, row.fleet, row.members ? "fleet" : ""].join(" ").toLowerCase();
  const found = servers.filter((row) => words.every((word) => hay(row).includes(word)));
  if (figure) return found.sort((a, b) => (b[figure] ?? -1) - (a[figure] ?? -1));
  const group = (row) => (row.members ? [0, row.name, 0] : row.fleet ? [0, row.fleet, 1] : [1, "", 1]);
  const compare = (a, b) => a[0] - b[0] || a[1].localeCompare(b[1], "en", { numeric: true }) || a[2] - b[2];
  return found.sort((a, b) => compare(group(a), group(b)) || a.name.localeCompare(b.name, "en", { numeric: true }));
}
