// The form that is `corral plan`: what would run, why, and the line that starts it.

import { command, el, fill, problem, worded } from "/static/dom.js";
import { follow } from "/static/runner.js";

export function startForm(root, ctx) {
  const fields = {}, flags = el("div", { class: "fields" });
  const line = el("div", {}), plan = el("div", { class: "stack" }), out = el("div", { class: "stack" });
  let turn = 0, typing = 0, busy = false, planned = "", ending = () => {};
  const input = (name, label, props = {}) => { fields[name] = el("input", { autocomplete: "off", ...props }); return el("label", {}, label, fields[name]); };
  const select = (name, label, options) => { fields[name] = el("select", {}, options.map(([value, text]) => el("option", { value }, text))); return el("label", {}, label, fields[name]); };
  const run = el("button", { class: "primary", type: "submit" }, "Start");
  const form = el("form", { class: "card" });
  fill(root, el("a", { href: "#/fleet" }, "← Overview"), el("h1", {}, "Start a model"), form, el("section", { class: "card", "aria-label": "Plan" }, el("h2", {}, "Plan"), plan));
  fill(plan, el("p", { class: "dim" }, "Planning…"));

  const values = () => Object.fromEntries(Object.entries(fields).map(([name, one]) => [name, one.value.trim()]).filter(([, value]) => value));

  async function look(whole) {
    const mine = ++turn;
    const asked = values();
    const first = await ctx.get(`/api/fleet/plan?${new URLSearchParams({ ...asked, line_only: "1" })}`).catch((error) => error);
    if (mine !== turn) return;
    if (first instanceof Error) { fill(line); fill(plan, problem(first)); run.disabled = true; return; }
    fill(line, command(first.line));
    run.disabled = ctx.readOnly || busy;
    if (!whole) return;
    fill(plan, el("p", { class: "dim" }, "Planning…"));
    try {
      const found = await ctx.get(`/api/fleet/plan?${new URLSearchParams(asked)}`);
      if (mine !== turn) return;
      planned = found.plan.name;
      fill(plan, shown(found.plan));
    } catch (error) { if (mine === turn) fill(plan, problem(error)); }
  }

  const changed = () => {
    clearTimeout(typing);
    typing = setTimeout(() => look(true), 350);
    // a secret in a flag is nothing for the history of a browser
    ctx.entered("fleet/start", new URLSearchParams(Object.entries(values()).filter(([name, value]) => name !== "flags" || !/key|token|secret|password/i.test(value))));
  };

  ctx.get("/api/fleet/choices").then((known) => {
    const more = el("details", {}, el("summary", {}, "Settings, vLLM flags, runtime, port"), el("div", { class: "fields wide" },
      input("settings", "Settings of the plan", { placeholder: "weights=int4 tensor=2" }), input("flags", "Flags of vLLM", { placeholder: "--enable-prefix-caching" }),
      select("runtime", "Runtime", [["", "profile's, or managed"], ...known.runtimes.map((one) => [one, one])]), input("runtime_options", "Options of the runtime", { placeholder: "image=…" }),
      input("port", "Port", { inputmode: "numeric", placeholder: "8000, or a free one" })));
    const targets = known.targets.filter((one) => one.flags.length);
    fill(form,
      el("div", { class: "fields" },
        input("model", "Model", { list: "models", placeholder: "Corral chooses" }), el("datalist", { id: "models" }, known.models.map((name) => el("option", { value: name }))),
        input("name", "Name", { placeholder: "the model's" }),
        select("on", "Profile", [["", "none"], ...known.profiles.map((one) => [one.name, one.name])]),
        select("target", "Where", [["", "profile, or here"], ...targets.map((one) => [one.name, one.title])]),
        input("context", "Context", { placeholder: "32k" }), input("concurrency", "Requests at once", { inputmode: "numeric" }),
        select("goal", "Goal", [["", "balanced"], ...known.goals.filter((one) => one !== "balanced").map((one) => [one, one])]),
        input("replicas", "Servers", { placeholder: "1" })),
      flags, more, line, el("div", { class: "row" }, run, ctx.readOnly ? el("span", { class: "dim" }, "This console is read-only: copy the line.") : null), out);
    const chosen = () => {
      for (const name of Object.keys(fields)) if (name.startsWith("-")) delete fields[name];
      const known = targets.find((one) => one.name === fields.target.value);
      fill(flags, (known?.flags ?? []).map((one) => { const made = input(one.flag, one.flag.replace(/^--/, ""), { placeholder: one.metavar ?? "", title: one.help }); return made; }));
    };
    fields.target.addEventListener("change", chosen);
    fields.target.value = ctx.query.get("target") ?? "";
    chosen();
    for (const [name, value] of ctx.query) if (fields[name]) fields[name].value = value;
    more.open = ["settings", "flags", "runtime", "runtime_options", "port"].some((name) => fields[name].value);
    form.addEventListener("input", changed);
    form.addEventListener("change", changed);
    fields.model.focus();
    look(true);
  }).catch((error) => fill(form, problem(error)));

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (ctx.readOnly || run.disabled || busy) return;
    busy = run.disabled = true;
    run.textContent = "Starting…";
    const name = fields.name.value.trim() || planned;
    const over = () => { busy = run.disabled = false; run.textContent = "Start"; };
    const given = values();
    const options = Object.fromEntries(Object.entries(given).filter(([name]) => name.startsWith("-")));
    for (const name of Object.keys(options)) delete given[name];
    fill(out);
    try {
      const begun = await ctx.post("/api/fleet/start", { ...given, options });
      const box = el("div", { class: "stack" });
      fill(out, el("div", { class: "row" }, el("h2", {}, "Starting"), name && !given.replicas ? el("a", { class: "button", href: `#/fleet/d/${encodeURIComponent(name)}` }, `Watch ${name}`) : el("a", { class: "button", href: "#/fleet" }, "Watch it"),
        el("span", { class: "dim" }, "It goes on when this page is left.")), box);
      ending();
      ending = follow(ctx, begun, box, (now) => {
        over();
        if (now.exit_code === 0) box.append(el("div", { class: "row" }, el("a", { class: "button primary", href: `#/play/${encodeURIComponent(name)}` }, "Open in the Playground")));
      });
      out.scrollIntoView({ block: "nearest" });
    } catch (error) { fill(out, problem(error)); over(); }
  });
  return () => { ending(); clearTimeout(typing); turn++; };
}

function shown(plan) {
  return [
    el("dl", { class: "facts" }, [["deployment", plan.name], ["checkpoint", plan.model], ["weights in", plan.weights], ["hardware", plan.hardware], ["context", plan.context?.toLocaleString("en")]]
      .filter(([, value]) => value).map(([key, value]) => [el("dt", {}, key), el("dd", {}, String(value))])),
    ...plan.notes.map((text) => el("div", { class: "note" }, text)),
    el("h3", {}, "Every number with its reason"),
    el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, plan.reasons.map((one) => el("tr", {}, el("td", {}, worded(one.field, one.value ?? "")[0]), el("td", { class: "num" }, worded(one.field, one.value ?? "")[1]), el("td", { class: "dim" }, one.because)))))),
  ];
}
