// The Playground: one prompt to one server, or to two side by side. It goes on while another view is open, and is there
// again when the page was loaded anew.

import * as conversations from "/static/conversations.js";
import { download, el, empty, fill, number, problem } from "/static/dom.js";
import { lane } from "/static/lane.js";
import { attachments, withPictures } from "/static/pictures.js";
import { draw, hide, scale } from "/static/tokens.js";

let open = null; // the Playground of this tab

export function mount(root, ctx) {
  fill(root, open ? open.nodes : el("p", { class: "dim" }, "Looking for servers…"));
  let over = false;
  ctx.get("/api/play/choices").then((known) => {
    if (over) return;
    if (!open && known.servers.length) open = playground(ctx, known);
    if (!open) fill(root, el("h1", {}, "Playground"), empty("There is no server to ask.", el("p", {}, "Start a model, and it is offered here as soon as it is ready."), el("a", { class: "button", href: "#/fleet" }, "Go to Overview")));
    else { fill(root, open.nodes); open.shown(known, ctx.path[0]); }
  }).catch((error) => { if (!over) fill(root, problem(error)); });
  return () => { over = true; hide(); };
}

function playground(ctx, known) {
  let lanes = [], editing = null, writing = 0;
  const mode = el("select", { "aria-label": "Kind of request" }, el("option", { value: "chat" }, "Chat"), el("option", { value: "completion" }, "Completion"));
  const system = el("textarea", { rows: 1, placeholder: "System message (none)", "aria-label": "System message" });
  const prompt = el("textarea", { rows: 3, placeholder: "Write a prompt. Enter sends it, Shift+Enter begins a line.", "aria-label": "Prompt", class: "prompt" });
  const send = el("button", { class: "primary", type: "submit", disabled: !ctx.asks }, "Send");
  const stop = el("button", { type: "button", disabled: true, onclick: () => lanes.forEach((one) => one.stop()) }, "Stop");
  const look = el("button", { type: "button", disabled: !ctx.asks, title: "How probable each token of the prompt is to the model" }, "Prompt heat map");
  const heat = el("section", { class: "card", "aria-label": "Prompt heat map", hidden: true });
  const side = el("div", { class: "lanes" }), colours = scale(), shelf = el("div", { class: "stack" });
  const edited = el("p", { class: "note row", hidden: true }, "Sending replaces this message and all that came after it.", el("button", { class: "small", type: "button", onclick: () => edit(null, "") }, "Cancel"));
  const compare = el("input", { type: "checkbox" });
  const chat = () => mode.value === "chat";
  const compose = (messages) => [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), ...messages];
  const page = {
    compose, edit, changed,
    written: () => prompt.value.trim() !== "",
    question(one) {
      if (!chat()) return prompt.value;
      const said = prompt.value.trim() ? [{ role: "user", content: withPictures(prompt.value, pictures.urls) }] : [];
      const found = compose([...one.messages(editing ?? undefined), ...said]);
      return found.some((each) => each.role === "user") ? found : [];
    },
  };
  function changed() {
    const busy = lanes.some((one) => one.busy);
    stop.disabled = !busy;
    pictures.offer(chat() && lanes.every((one) => one.takesPictures));
    send.disabled = busy || !ctx.asks || pictures.wrong;
    colours.hidden = lanes.every((one) => one.saved().alternatives === "") && heat.hidden;
    clearTimeout(writing);
    writing = setTimeout(() => { lanes.forEach((one) => one.write()); conversations.keep(held); }, 400);
  }
  function edit(at, text, found = []) {
    editing = at;
    pictures.set(found);
    prompt.value = text;
    edited.hidden = at === null;
    prompt.focus();
    changed();
  }
  const arrange = () => {
    while (lanes.length > (compare.checked ? 2 : 1)) lanes.pop().stop();
    while (lanes.length < (compare.checked ? 2 : 1)) lanes.push(lane(ctx, known, lanes.length ? "right" : "left", page));
    fill(side, lanes.map((one) => one.root));
    side.classList.toggle("two", compare.checked);
    changed();
  };
  const form = el("form", { class: "card ask" });
  const pictures = attachments(form, prompt, { toast: ctx.toast, changed: () => changed() });
  fill(form, el("div", { class: "row" }, mode, el("label", { class: "inline" }, compare, "two side by side")), system, edited, prompt, pictures.node,
    el("div", { class: "row" }, send, stop, pictures.button, look, ctx.asks ? null : el("span", { class: "dim" }, "This console only shows: asking a model takes its time on the GPU. Whoever started it can allow that: ", el("code", {}, "corral console --read-only --playground"))));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!prompt.value.trim() || send.disabled) return;
    const said = prompt.value, seen = pictures.urls;
    const asked = lanes.map((one) => [one, page.question(one)]);
    if (!chat()) lanes.forEach((one) => one.cut());
    else if (editing !== null) lanes.forEach((one) => one.cut(editing));
    if (chat()) edit(null, "");
    for (const [one, what] of asked) one.ask(what, chat() ? said : null, seen);
    prompt.focus();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("input", changed);
  mode.addEventListener("change", () => { system.hidden = !chat(); lanes.forEach((one) => one.cut()); changed(); });
  compare.addEventListener("change", arrange);
  look.addEventListener("click", async () => {
    const asked = page.question(lanes[0]);
    heat.hidden = false;
    if (!asked.length) { fill(heat, el("p", { class: "dim" }, "Write a prompt first.")); return; }
    fill(heat, el("p", { class: "dim" }, "Asking…"));
    try {
      const found = await ctx.post("/api/play/prompt", lanes[0].body(asked));
      const box = el("div", { class: "answer" });
      const words = [`${number(found.tokens)} tokens`, found.logits ? null : `log-probability ${found.logprob.toFixed(2)}`, found.perplexity ? `perplexity ${number(found.perplexity, 2)}` : null];
      fill(heat, el("div", { class: "head" }, el("h2", {}, "Prompt heat map"), el("span", { class: "dim" }, words.filter(Boolean).join(" · ")), el("button", { class: "small push", type: "button", onclick: () => { heat.hidden = true; changed(); } }, "Close")), box);
      draw(box, found);
      changed();
    } catch (error) { fill(heat, problem(error)); }
  });

  const held = (whole = false) => ({ mode: mode.value, system: system.value, prompt: prompt.value, lanes: lanes.map((one) => one.saved(whole)) });
  const load = (given) => {
    mode.value = given.mode === "completion" ? "completion" : "chat";
    system.hidden = !chat();
    system.value = String(given.system ?? "");
    compare.checked = given.lanes.length > 1;
    arrange();
    lanes.forEach((one, at) => one.load(given.lanes[at]));
    edit(null, String(given.prompt ?? ""));
  };
  const file = el("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "Load a conversation" });
  file.addEventListener("change", async () => {
    try { load(JSON.parse(await file.files[0].text())); } catch { ctx.toast("That file holds no conversation of the playground."); }
    file.value = "";
  });
  const saved = el("details", { class: "card" }, el("summary", {}, "Saved conversations"), shelf);
  const list = () => {
    const found = conversations.all();
    saved.hidden = !found.length;
    fill(shelf, found.map((one) => el("div", { class: "row" }, el("button", { type: "button", class: "plain long", onclick: () => load(one.held) }, one.title), el("span", { class: "dim" }, new Date(one.at).toLocaleString("en-GB")),
      el("button", { type: "button", class: "small push", "aria-label": `Delete ${one.title}`, onclick: () => { conversations.remove(one.at); list(); } }, "Delete"))));
  };
  const save = () => {
    try { conversations.save(held()); list(); saved.open = true; } catch { ctx.toast("The browser has no room for it: delete another, or export it to a file."); }
  };
  const button = (text, onclick) => el("button", { type: "button", onclick }, text);
  const nodes = [el("div", { class: "head" }, el("h1", {}, "Playground"), el("span", { class: "dim" }, "Stays in this tab; Save keeps it in this browser."),
    el("span", { class: "push row" }, button("New", () => { lanes.forEach((one) => one.cut()); edit(null, ""); }), button("Save", save),
      button("Export…", () => download("playground.json", JSON.stringify(held(), null, 2), "application/json")), button("As Markdown", () => download("playground.md", conversations.asMarkdown(held()), "text/markdown")), button("Import…", () => file.click()), file)),
  saved, side, form, heat, colours];
  list();
  arrange();
  const before = conversations.present();
  try { if (before) load(before); } catch { lanes.forEach((one) => one.cut()); }
  return {
    nodes,
    /** The view is open: with the servers of now, and the one that was asked for. */
    shown(known, server) {
      for (const one of lanes) one.offer(known.servers);
      if (server) lanes[0].choose(server);
      changed();
      list();
      prompt.focus();
    },
  };
}
