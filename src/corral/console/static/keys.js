// Keys: the gateways' clients by name, their limits and use; a key is made and revoked here, and its secret shown once.

import { command, copier, duration, el, empty, fill, number, problem } from "/static/dom.js";
import { confirmRun } from "/static/runner.js";

const EVERY_MS = 5000;

export function mount(root, ctx) {
  let over = false, timer = 0, typing = 0, turn = 0;
  const words = el("span", { class: "dim", role: "status" }, "Looking…"), list = el("section", { class: "card items", "aria-label": "Keys" });
  const fields = {}, line = el("div", {}), out = el("div", { class: "stack" });
  const field = (name, label, props) => { fields[name] = el("input", { autocomplete: "off", ...props }); return el("label", {}, label, fields[name]); };
  const make = el("button", { class: "primary", type: "submit", disabled: true }, "Make the key");
  const form = el("form", { class: "card", "aria-label": "New key" }, el("h2", {}, "New key"),
    el("div", { class: "fields" }, field("name", "Client", { placeholder: "alice" }), field("rpm", "Requests per minute", { inputmode: "numeric", placeholder: "no limit" }),
      field("tpm", "Tokens per minute", { inputmode: "numeric", placeholder: "no limit" }), field("models", "Models, fleets, deployments", { placeholder: "all" })),
    line, el("div", { class: "row" }, make), out);
  fill(root, el("div", { class: "head" }, el("h1", {}, "Keys"), words), list, form);

  const values = () => Object.fromEntries(Object.entries(fields).map(([name, one]) => [name, one.value.trim()]));
  async function preview() {
    const mine = ++turn, given = values();
    make.disabled = true;
    if (!given.name) { fill(line); return; }
    try {
      const found = await ctx.get(`/api/keys/line?${new URLSearchParams(given)}`);
      if (mine !== turn) return;
      fill(line, command(found.line));
      make.disabled = false;
    } catch (error) { if (mine === turn) fill(line, problem(error)); }
  }
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(preview, 250); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (make.disabled) return;
    make.disabled = true;
    try {
      const made = await ctx.post("/api/keys/add", values());
      for (const one of Object.values(fields)) one.value = "";
      fill(line);
      fill(out, el("div", { class: "note stack", role: "status" }, el("p", {}, `The key of ${made.name}, shown only this once; gateways accept it within seconds:`),
        el("div", { class: "command" }, el("code", {}, made.key), copier(made.key, "Copy the key"))));
      look();
    } catch (error) { fill(out, problem(error)); make.disabled = false; }
  });

  async function look() {
    clearTimeout(timer);
    try {
      if (!document.hidden) draw(await ctx.get("/api/keys"));
    } catch (error) { if (!over) { words.textContent = ""; fill(list, problem(error)); form.hidden = ctx.readOnly; } if (ctx.readOnly) return; }
    if (!over) timer = setTimeout(look, EVERY_MS);
  }

  function draw(found) {
    if (over) return;
    const gateways = found.gateways.length;
    words.textContent = gateways ? `use at ${found.gateways.join(", ")}, since each was started` : "no gateway of a fleet runs here, so no use is known";
    fill(list, found.keys.length ? found.keys.map((one) => item(one, gateways)) : empty("There are no client keys.", el("p", {}, "Clients can use a fleet's own key; a key of their own has limits, and can be revoked.")));
  }

  function item(one, gateways) {
    const limits = [one.rpm ? `${number(one.rpm)} requests/min` : null, one.tpm ? `${number(one.tpm)} tokens/min` : null].filter(Boolean);
    const pairs = [["limits", limits.join(", ") || "none"], ["for", one.models.join(", ") || "all models"], ...(gateways ? [["answered", number(one.answered)], ["refused by a limit", number(one.limited)], ["failed", number(one.failed)],
      ["tokens in", number(one.prompt_tokens)], ["tokens out", number(one.output_tokens)]] : [])];
    return el("article", { class: "item wide", "data-name": one.name, "aria-label": one.name },
      el("div", {}, el("strong", { class: "long" }, one.name), el("p", { class: "dim" }, `made ${duration(Date.now() / 1000 - one.created_s)} ago`)),
      el("dl", { class: "figures-line" }, pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      el("div", { class: "row actions" }, el("button", { type: "button", class: "danger", onclick: () => confirmRun(ctx, `Revoke the key of ${one.name}`, one.remove, () => ctx.post("/api/keys/remove", { name: one.name }), { danger: true, done: look }) }, "Revoke")));
  }

  look();
  return () => { over = true; clearTimeout(timer); clearTimeout(typing); turn++; };
}
