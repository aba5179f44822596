// The Plan view: sliders, and the plan they make, every number with its reason.

import { command, el, fill, number, problem, sentence } from "/static/dom.js";

const GIB = 1024 ** 3;
const PARTS = { weights: "part-weights", activations: "part-activations", "CUDA graphs": "part-graphs", overhead: "part-overhead", learned: "part-learned", "KV cache": "part-kv" };
const POWERS = (from, to) => { const found = []; for (let at = from; at <= to; at *= 2) found.push(at); return found; };

export function mount(root, ctx) {
  fill(root, el("p", { class: "dim" }, "Looking at this machine…"));
  let over = false, typing = 0, turn = 0;
  ctx.get("/api/plan/choices").then((known) => { if (!over) build(known); }).catch((error) => { if (!over) fill(root, problem(error)); });

  function build(known) {
    const result = el("div", { class: "stack wide" }), others = el("div", {});
    const details = el("details", { class: "card" }, el("summary", {}, "Table of alternatives"), others);
    const form = el("form", { class: "card sliders", onsubmit: (event) => event.preventDefault() });
    const jump = el("button", { type: "button", class: "jump", hidden: true, onclick: () => result.scrollIntoView() }); // where the plan is below the form
    const show = (parts, verdict) => { fill(result, parts); fill(jump, verdict, " See the plan ↓"); jump.hidden = false; };
    const given = {};
    const select = (name, label, options) => { given[name] = el("select", {}, options.map(([value, text]) => el("option", { value }, text))); return el("label", {}, label, given[name]); };
    const input = (name, label, props) => { given[name] = el("input", { autocomplete: "off", ...props }); return el("label", {}, label, given[name]); };
    /** A slider over steps; the first may mean that the planner chooses. */
    const slider = (name, label, steps, start, words = (one) => number(one)) => {
      const shown = el("output", { class: "num" });
      const range = el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, "aria-label": label });
      const tell = () => { const one = steps[Number(range.value)]; const text = one === "" ? "Corral chooses" : words(one); shown.textContent = text; range.setAttribute("aria-valuetext", text); };
      range.value = Math.max(0, steps.indexOf(start));
      given[name] = { get value() { return String(steps[Number(range.value)]); }, set value(one) { range.value = Math.max(0, steps.findIndex((step) => String(step) === String(one))); tell(); } };
      range.addEventListener("input", tell);
      tell();
      return el("label", { class: "slider", dataset: { name } }, el("span", { class: "slider-head" }, el("span", {}, label), shown), range);
    };
    const here = `this machine (${known.here.label})`;
    const gpuFields = el("div", { class: "stack", hidden: true });
    fill(form,
      input("model", "Model", { list: "plan-models", value: known.models[0] ?? "", placeholder: "a name, a folder, or a repository" }),
      el("datalist", { id: "plan-models" }, known.models.map((name) => el("option", { value: name }))),
      select("kind", "Hardware", [["", here], ...known.kinds.map((one) => [one.name, `${one.name} (${number(one.gib)} GiB)`])]),
      gpuFields, select("profile", "Profile", [["", "none"], ...known.profiles.map((name) => [name, name])]),
      slider("context", "Context", ["", ...POWERS(1024, 131072)], "", (one) => `${number(one)} tokens`),
      slider("concurrency", "Requests at once", ["", ...POWERS(1, 1024)], ""),
      slider("weights", "Precision", ["", ...known.weights], "", String),
      slider("kv", "KV cache in", ["", ...known.kv], "", String),
      select("goal", "Goal", known.goals.map((one) => [one, one])),
      el("div", { class: "fields narrow" }, input("prompt", "Prompt tokens", { inputmode: "numeric", placeholder: "512" }), input("output", "Output tokens", { inputmode: "numeric", placeholder: "256" }), input("price", "Price of a GPU hour", { inputmode: "decimal", placeholder: "none" })), jump);
    fill(gpuFields, slider("count", "GPUs in a node", [1, 2, 4, 8], 1), slider("nodes", "Nodes", [1, 2, 3, 4, 6, 8, 12, 16], 1), select("link", "Between nodes", known.links.map((one) => [one.name, `${one.name}: ${one.note}`])));
    given.goal.value = "balanced";
    if (ctx.path[0]) given.model.value = ctx.path[0];
    for (const [name, value] of ctx.query) if (given[name]) given[name].value = value;
    gpuFields.hidden = given.kind.value === "";

    const query = () => {
      const gpus = given.kind.value !== "";
      const names = ["model", "kind", "profile", "context", "concurrency", "weights", "kv", "goal", "prompt", "output", "price", ...(gpus ? ["count", "nodes", "link"] : [])];
      return new URLSearchParams(names.map((name) => [name, String(given[name].value).trim()]).filter(([, value]) => value !== ""));
    };
    async function look() {
      const mine = ++turn;
      const asked = query();
      result.setAttribute("aria-busy", "true");
      try {
        const found = await ctx.get(`/api/plan?${asked}`);
        if (mine === turn && !over) show(shown(found, start(asked)), tag(found));
      } catch (error) { if (mine === turn && !over) show(problem(error), null); }
      if (mine === turn) result.removeAttribute("aria-busy");
      if (mine === turn && details.open) compare(asked, mine);
    }
    async function compare(asked, mine) {
      try {
        const { rows } = await ctx.get(`/api/plan/alternatives?${asked}`);
        if (mine === turn && !over) fill(others, table(rows));
      } catch (error) { if (mine === turn && !over) fill(others, problem(error)); }
    }
    /** Where this plan is started: a plan for hardware that is only imagined, nowhere. */
    function start(asked) {
      if (ctx.readOnly || asked.has("kind")) return null;
      const wish = new URLSearchParams([["model", asked.get("model")], ["on", asked.get("profile")], ...["context", "concurrency", "goal"].map((name) => [name, asked.get(name)]),
        ["settings", ["weights", "kv"].filter((name) => asked.has(name)).map((name) => `${name}=${asked.get(name)}`).join(" ")]].filter(([, value]) => value));
      return `#/fleet/start?${wish}`;
    }
    const changed = () => { ctx.entered("plan", query()); gpuFields.hidden = given.kind.value === ""; clearTimeout(typing); typing = setTimeout(look, 250); };
    form.addEventListener("input", changed);
    form.addEventListener("change", changed);
    details.addEventListener("toggle", () => { if (details.open) compare(query(), turn); });
    fill(root, el("h1", {}, "Plan"), el("div", { class: "beside" }, form, el("div", { class: "stack wide" }, result, details)));
    look();
  }
  return () => { over = true; clearTimeout(typing); };
}

const tag = (plan, props = {}) => el("span", { class: `tag ${plan.fits ? "good" : "bad"}`, ...props }, plan.verdict);

function shown(plan, start) {
  return [
    el("section", { class: "card", "aria-label": "Verdict" },
      el("div", { class: "head" }, el("h2", { class: "long" }, `${plan.model} on ${plan.hardware}`), tag(plan, { role: "status" })),
      plan.reason ? el("p", {}, sentence(plan.reason)) : null,
      plan.nearest.length ? el("div", { class: "stack" }, el("h3", {}, "Nearest that would fit"), el("ul", { class: "plain" }, plan.nearest.map((one) => el("li", {}, one.what, " ", el("code", {}, one.change), " ", el("span", { class: "dim" }, `${number(one.kv_cache_tokens)} KV tokens`))))) : null,
      plan.warnings.map((text) => el("p", { class: "note" }, sentence(text))), plan.notes.map((text) => el("p", { class: "dim" }, sentence(text)))),
    plan.memory ? memory(plan) : null,
    plan.figures.length ? el("section", { class: "figures", "aria-label": "Figures" }, plan.figures.map(figure)) : null,
    plan.commands ? el("section", { class: "card", "aria-label": "Commands" }, el("h3", {}, "Start it"), command(plan.commands.up), start ? el("div", { class: "row" }, el("a", { class: "button primary", href: start }, "Start…")) : null, el("h3", {}, "Or by hand"), command(plan.commands.vllm)) : null,
    plan.rejected.length ? el("details", { class: "card" }, el("summary", {}, `Not taken (${plan.rejected.length})`), el("dl", { class: "facts" }, plan.rejected.map((one) => [el("dt", {}, one.what), el("dd", {}, one.because)]))) : null,
    plan.arithmetic.length ? el("details", { class: "card" }, el("summary", {}, "The arithmetic, line by line"), el("pre", { class: "log" }, plan.arithmetic.join("\n"))) : null,
  ];
}

function figure(one) {
  const value = typeof one.value === "number" ? (one.predicted ? two(one.value, one.unit) : number(one.value)) : one.value;
  return el("div", { class: "card figure" }, el("h3", {}, one.name), el("p", { class: "figure-value" }, one.predicted && !one.unit.includes("hour") ? "≈ " : "", value, " ", el("small", {}, / (ms|min)$/.test(value) ? "" : one.unit)), el("p", { class: "dim" }, one.because));
}

/** A prediction in the two digits that it can claim. */
function two(value, unit) {
  if (unit === "s" && value < 1) return `${Number((value * 1000).toPrecision(2))} ms`;
  if (unit === "s" && value >= 100) return `${Number((value / 60).toPrecision(2))} min`;
  const rounded = Number(value.toPrecision(2));
  return rounded.toLocaleString("en", { maximumFractionDigits: rounded < 10 ? 2 : 0 });
}

function memory(plan) {
  const { parts, total_bytes: total, budget_bytes: budget, per_gpu } = plan.memory;
  const used = parts.reduce((sum, part) => sum + part.bytes, 0);
  const whole = Math.max(total, used);
  const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`;
  const width = (bytes) => ({ width: `${(100 * bytes) / whole}%` });
  const title = per_gpu ? `Memory of each GPU${plan.gpus > 1 ? ` (${plan.gpus} alike)` : ""}` : "Memory";
  const words = parts.map((part) => `${part.name} ${gib(part.bytes)}`).join(", ");
  return el("section", { class: "card", "aria-label": title },
    el("div", { class: "head" }, el("h2", {}, title), el("span", { class: "dim" }, `${gib(used)} planned of ${gib(budget)} usable, ${gib(total)} in all`)),
    el("div", { class: "memory", role: "img", "aria-label": words },
      parts.map((part) => el("span", { class: `part ${PARTS[part.name] ?? ""}`, style: width(part.bytes), title: `${part.name}: ${gib(part.bytes)}` }, part.bytes / whole > 0.09 ? part.name : "")),
      el("span", { class: "budget", style: { left: `${(100 * budget) / whole}%` }, title: `usable: ${gib(budget)}` }), used > total ? el("span", { class: "edge", style: { left: `${(100 * total) / whole}%` }, title: `all of it: ${gib(total)}` }) : null),
    el("table", { class: "parts" }, el("tbody", {}, parts.map((part) => el("tr", {}, el("td", {}, el("span", { class: `swatch ${PARTS[part.name] ?? ""}`, "aria-hidden": "true" }), " ", part.name), el("td", { class: "num" }, gib(part.bytes)), el("td", { class: "dim" }, part.because))),
      el("tr", {}, el("td", {}, el("span", { class: "swatch swatch-budget", "aria-hidden": "true" }), " usable"), el("td", { class: "num" }, gib(budget)), el("td", { class: "dim" }, plan.memory.budget_because)))));
}

function table(rows) {
  const runs = rows.filter((one) => !one.problem), refused = rows.filter((one) => one.problem);
  const fast = (value) => (value === null ? "–" : two(value, ""));
  return [
    runs.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Split"), el("th", {}, "Weights"), ["Context", "KV tokens", "One stream, tokens/s", "Together, tokens/s", "Weights, GiB/GPU"].map((head) => el("th", { class: "num" }, head)))),
      el("tbody", {}, runs.map((one) => el("tr", {}, el("td", {}, one.split), el("td", {}, one.kv === "auto" ? one.weights : `${one.weights} + ${one.kv} KV`), [number(one.context), number(one.kv_tokens), fast(one.one_stream), fast(one.together), (one.weights_bytes_per_gpu / GIB).toFixed(1)].map((cell) => el("td", { class: "num" }, cell))))))) : null,
    refused.length ? el("details", {}, el("summary", {}, `${refused.length} do not run`), el("dl", { class: "facts" }, refused.map((one) => [el("dt", {}, `${one.split} in ${one.weights}`), el("dd", {}, one.problem)]))) : null,
  ];
}
