// Models: the catalogue and what is on disk, what fits here or on a profile's hardware, and downloads.

import { command, el, empty, fill, meter, number, problem } from "/static/dom.js";
import { confirmRun } from "/static/runner.js";

const REPOSITORY = /^\w[\w.-]*\/\w[\w.-]*$/;
const SHOWS = { fit: "Fits, or on disk", here: "On disk", all: "All" };
const TAGS = { yes: ["good", "fits"], no: ["", "does not fit"] };

export function mount(root, ctx) {
  let known = null, over = false, timer = 0, turn = 0;
  const search = el("input", { type: "search", placeholder: "Find by name, task, or owner/name…", "aria-label": "Find models", value: ctx.query.get("find") ?? "" });
  const show = el("select", { "aria-label": "Which models" }, Object.entries(SHOWS).map(([value, text]) => el("option", { value, selected: value === ctx.query.get("show") }, text)));
  const on = el("select", { "aria-label": "Hardware" }, el("option", { value: "" }, "this machine"));
  const words = el("span", { class: "dim", role: "status" }, "Looking…"), list = el("div", { class: "card items" });
  const downloads = el("section", { class: "card", "aria-label": "Downloads", hidden: true }), rows = el("div", { class: "stack" });
  fill(downloads, el("h2", {}, "Downloads"), rows);
  fill(root, el("div", { class: "head" }, el("h1", {}, "Models"), words, el("span", { class: "push row tools" }, el("span", { class: "find" }, search), show, on)), downloads, list);
  search.addEventListener("input", () => draw());
  show.addEventListener("change", () => draw());
  on.addEventListener("change", () => load());

  async function load() {
    const mine = ++turn;
    list.setAttribute("aria-busy", "true");
    try {
      const found = await ctx.get(`/api/models?${new URLSearchParams({ on: on.value })}`);
      if (over || mine !== turn) return;
      known = found;
      const chosen = on.value || ctx.query.get("on");
      fill(on, el("option", { value: "" }, "this machine"), found.profiles.map((name) => el("option", { value: name, selected: name === chosen }, `profile ${name}`)));
      draw();
    } catch (error) { if (!over && mine === turn) fill(list, problem(error)); }
    list.removeAttribute("aria-busy");
  }

  function draw() {
    if (!known) return;
    ctx.entered("models", new URLSearchParams([["find", search.value.trim()], ["show", show.value === "fit" ? "" : show.value], ["on", on.value]].filter(([, value]) => value)));
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hay = (one) => `${one.name} ${one.repository} ${one.task}${one.images ? " images" : ""}`.toLowerCase();
    const found = known.models.filter((one) => wanted.every((word) => hay(one).includes(word)));
    const families = new Set();
    const fitting = (one) => { const first = !["", "no"].includes(one.fits) && !families.has(one.family); if (first) families.add(one.family); return first; };
    const shown = found.filter((one) => (show.value === "all" || wanted.length ? true : show.value === "here" ? one.here : fitting(one) || one.here));
    const text = search.value.trim(), typed = REPOSITORY.test(text) && !known.models.some((one) => [one.name, one.repository].some((name) => name.toLowerCase() === text.toLowerCase()));
    words.textContent = `${shown.length} of ${known.models.length} · ${known.hardware}`;
    fill(list, typed ? card({ name: text, repository: "a repository of the Hugging Face hub", task: "", fits: "", bytes: 0, parameters: 0 }) : null, shown.map(card),
      shown.length || typed ? null : empty(wanted.length ? "No model of that name." : "Nothing is on disk yet.", el("p", {}, "Any repository of the hub works: write owner/name.")));
  }

  function card(one) {
    const [tone, fits] = TAGS[one.fits] ?? ["good", `fits with ${one.fits}`];
    const facts = [one.parameters ? billions(one) : null, one.bytes ? gb(one.bytes) : null, one.weights, one.task && one.task !== "generate" ? one.task : null, one.images ? "reads images" : null, one.gated ? "gated" : null, one.path];
    const query = new URLSearchParams([["model", one.name], ["on", on.value]].filter(([, value]) => value));
    return el("article", { class: "item", "data-name": one.name, "aria-label": one.name },
      el("div", { class: "stack" }, el("p", {}, el("strong", { class: "long" }, one.name), " ", one.repository ? el("span", { class: "dim long" }, one.repository) : null),
        el("p", { class: "dim facts-line" }, facts.filter(Boolean).join(" · "))),
      el("div", { class: "row" }, one.here ? el("span", { class: "tag good" }, one.whole ? "on disk" : "partly on disk") : null, one.fits ? el("span", { class: `tag ${tone}` }, fits) : null),
      el("div", { class: "row actions" }, ctx.readOnly || (one.here && one.whole && !on.value) ? null : el("button", { type: "button", onclick: () => download(one.name) }, one.here && !one.whole ? "Continue" : "Download"),
        el("a", { class: "button", href: `#/plan/${encodeURIComponent(one.name)}${on.value ? `?${new URLSearchParams({ profile: on.value })}` : ""}` }, "Plan"),
        ctx.readOnly ? null : el("a", { class: "button", href: `#/fleet/start?${query}` }, "Start…")));
  }

  async function download(name) {
    const asked = { name, on: on.value };
    try {
      const { line } = await ctx.get(`/api/models/line?${new URLSearchParams(asked)}`);
      confirmRun(ctx, `Download ${name}`, line, async () => { const begun = await ctx.post("/api/models/pull", asked); look(); return begun; }, { done: () => load() });
    } catch (error) { ctx.toast(`${error.message} ${error.remedy ?? ""}`); }
  }

  /** Downloads under way, also those that were begun before this page was loaded. */
  async function look() {
    clearTimeout(timer);
    let running = true;
    try {
      const found = (await ctx.get("/api/models/downloads")).downloads;
      if (over) return;
      downloads.hidden = !found.length;
      fill(rows, found.map(progress));
      running = found.some((one) => one.exit_code === null);
    } catch { /* asked again */ }
    if (running && !over) timer = setTimeout(look, 2000);
  }

  load();
  look();
  return () => { over = true; clearTimeout(timer); };
}

function progress(one) {
  const [tone, state] = one.exit_code === null ? ["busy", "running"] : one.exit_code === 0 ? ["good", "done"] : ["bad", `failed (exit code ${one.exit_code})`];
  return el("div", { class: "stack download", "data-name": one.name }, el("div", { class: "row" }, el("span", { class: `tag ${tone}` }, state), el("strong", { class: "long" }, one.name),
    one.total ? [meter(Math.min(0.99, one.bytes / one.total)), el("span", { class: "dim num" }, `${gb(Math.min(one.bytes, one.total))} of ${gb(one.total)}`)] : null),
    one.exit_code === 0 ? null : el("p", { class: "dim mono long" }, one.text || one.line), one.exit_code ? command(one.line) : null);
}

const billions = (one) => {
  const words = (count) => (count < 1e9 ? `${number(count / 1e6)} M` : `${number(count / 1e9, count < 10e9 ? 1 : 0)} B`);
  return `${words(one.parameters)} parameters${one.active_parameters < 0.7 * one.parameters ? `, ${words(one.active_parameters)} active` : ""}`;
};
const gb = (bytes) => `${number(bytes / 1e9, bytes < 10e9 ? 2 : bytes < 100e9 ? 1 : 0)} GB`;
