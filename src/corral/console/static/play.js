// The Playground: one prompt to one server, or to two side by side. What is said stays in this page until it is left.

import { el, empty, fill, number, problem } from "/static/dom.js";
import { lane } from "/static/lane.js";
import { draw, hide, scale } from "/static/tokens.js";

export function mount(root, ctx) {
  fill(root, el("p", { class: "dim" }, "Looking for servers…"));
  let over = false, lanes = [];
  ctx.get("/api/play/choices").then((known) => { if (!over) build(known); }).catch((error) => { if (!over) fill(root, problem(error)); });

  function build(known) {
    if (!known.servers.length) {
      fill(root, el("h1", {}, "Playground"), empty("There is no server to ask.", el("p", {}, "Start a model, and it is offered here as soon as it is ready."), el("a", { class: "button", href: "#/fleet" }, "Go to Fleet")));
      return;
    }
    const mode = el("select", { "aria-label": "Kind of request" }, el("option", { value: "chat" }, "Chat"), el("option", { value: "completion" }, "Completion"));
    const system = el("textarea", { rows: 1, placeholder: "System message (none)", "aria-label": "System message" });
    const prompt = el("textarea", { rows: 4, placeholder: "Write a prompt. Ctrl+Enter sends it.", "aria-label": "Prompt", class: "prompt" });
    const send = el("button", { class: "primary", type: "submit", disabled: !ctx.asks }, "Send");
    const stop = el("button", { type: "button", disabled: true, onclick: () => lanes.forEach((one) => one.stop()) }, "Stop");
    const look = el("button", { type: "button", disabled: !ctx.asks, title: "How probable each token of the prompt is to the model" }, "Prompt heat map");
    const heat = el("section", { class: "card", "aria-label": "Prompt heat map", hidden: true });
    const side = el("div", { class: "lanes" });
    const compare = el("input", { type: "checkbox" });
    const chat = () => mode.value === "chat";
    const question = (one) => {
      if (!chat()) return prompt.value;
      const said = prompt.value.trim() ? [{ role: "user", content: prompt.value }] : [];
      const found = [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), ...one.messages(), ...said];
      return found.some((each) => each.role === "user") ? found : [];
    };
    let writing = 0;
    const changed = () => {
      const busy = lanes.some((one) => one.busy);
      stop.disabled = !busy;
      send.disabled = busy || !ctx.asks;
      clearTimeout(writing);
      writing = setTimeout(() => lanes.forEach((one) => one.write()), 400);
    };
    const arrange = () => {
      while (lanes.length > (compare.checked ? 2 : 1)) lanes.pop().stop();
      while (lanes.length < (compare.checked ? 2 : 1)) lanes.push(lane(ctx, known, lanes.length ? "right" : "left", question, changed));
      fill(side, lanes.map((one) => one.root));
      side.classList.toggle("two", compare.checked);
    };
    const form = el("form", { class: "card ask" }, el("div", { class: "row" }, mode, el("label", { class: "inline" }, compare, "two side by side")), system, prompt,
      el("div", { class: "row" }, send, stop, look, ctx.asks ? null : el("span", { class: "dim" }, "This console only shows: asking a model takes its time on the GPU. Whoever started it can allow that: ", el("code", {}, "corral console --read-only --playground"))));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!prompt.value.trim() || send.disabled) return;
      const said = prompt.value;
      const asked = lanes.map((one) => [one, question(one)]);
      if (chat()) prompt.value = "";
      else lanes.forEach((one) => one.clear());
      for (const [one, what] of asked) one.ask(what, chat() ? said : null);
      prompt.focus();
    });
    prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); } });
    form.addEventListener("input", changed);
    mode.addEventListener("change", () => { system.hidden = !chat(); lanes.forEach((one) => one.clear()); changed(); });
    compare.addEventListener("change", arrange);
    look.addEventListener("click", async () => {
      const asked = question(lanes[0]);
      heat.hidden = false;
      if (!asked.length) { fill(heat, el("p", { class: "dim" }, "Write a prompt first.")); return; }
      fill(heat, el("p", { class: "dim" }, "Asking…"));
      try {
        const found = await ctx.post("/api/play/prompt", lanes[0].body(asked));
        const box = el("div", { class: "answer" });
        const words = [`${number(found.tokens)} tokens`, found.logits ? null : `log-probability ${found.logprob.toFixed(2)}`, found.perplexity ? `perplexity ${number(found.perplexity, 2)}` : null];
        fill(heat, el("div", { class: "head" }, el("h2", {}, "Prompt heat map"), el("span", { class: "dim" }, words.filter(Boolean).join(" · ")), el("button", { class: "small push", type: "button", onclick: () => { heat.hidden = true; } }, "Close")), box, scale());
        draw(box, found);
      } catch (error) { fill(heat, problem(error)); }
    });
    const file = el("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "Load a conversation" });
    file.addEventListener("change", async () => {
      try { load(JSON.parse(await file.files[0].text())); } catch { ctx.toast("That file holds no conversation of the playground."); }
      file.value = "";
    });
    const load = (given) => {
      mode.value = given.mode === "completion" ? "completion" : "chat";
      system.hidden = !chat();
      system.value = String(given.system ?? "");
      prompt.value = String(given.prompt ?? "");
      compare.checked = given.lanes.length > 1;
      arrange();
      lanes.forEach((one, at) => one.load(given.lanes[at]));
      changed();
    };
    const save = () => {
      const held = { mode: mode.value, system: system.value, prompt: prompt.value, lanes: lanes.map((one) => one.saved()) };
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([JSON.stringify(held, null, 2)], { type: "application/json" }));
      link.download = "playground.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    };
    fill(root, el("div", { class: "head" }, el("h1", {}, "Playground"), el("span", { class: "dim" }, "Nothing is stored unless you save it."),
      el("span", { class: "push row" }, el("button", { type: "button", onclick: () => lanes.forEach((one) => one.clear()) }, "New"), el("button", { type: "button", onclick: save }, "Save…"), el("button", { type: "button", onclick: () => file.click() }, "Load…"), file)),
    side, form, heat, scale());
    arrange();
    prompt.focus();
  }

  return () => { over = true; hide(); lanes.forEach((one) => one.stop()); };
}
