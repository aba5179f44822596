// Elements are made from text and attributes only: whatever a model, a log or a node says stays text.

const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "hidden", "indeterminate", "open"]);

/** An element: `el("a", {href: "#/fleet", class: "x", onclick: f, style: {width: "3px"}}, "text", other)`. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) set(made, name, value);
  made.append(...kept(children));
  return made;
}

/** The same for the elements of a drawing. */
export function svg(tag, props = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props ?? {})) set(made, name, value);
  made.append(...kept(children));
  return made;
}

function set(made, name, value) {
  if (value === null || value === undefined) return;
  if (name.startsWith("on") && typeof value === "function") made.addEventListener(name.slice(2), value);
  else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
  else if (name === "dataset") Object.assign(made.dataset, value);
  else if (PROPERTIES.has(name)) made[name] = value;
  else if (value === false) return;
  else if (name === "href" && !/^(#|\/|https?:)/.test(String(value))) return; // no javascript: from anywhere
  else made.setAttribute(name, value === true ? "" : String(value));
}

const kept = (children) => children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false)
  .map((one) => (one instanceof Node ? one : String(one)));

/** Replace what an element holds; what had the focus and stays has it still. */
export function fill(parent, ...children) {
  const held = document.activeElement;
  parent.replaceChildren(...kept(children));
  if (held !== document.activeElement && parent.contains(held)) held.focus({ preventScroll: true });
  return parent;
}

/** Put another element in the place of one; the focus goes on to what stands in the same place. */
export function exchange(old, made) {
  const all = (node) => [...node.querySelectorAll("a, button, summary")];
  const at = all(old).indexOf(document.activeElement);
  old.replaceWith(made);
  all(made)[at]?.focus({ preventScroll: true });
}

/** Seconds as a person says them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A figure of about three digits; a dash where there is none. */
export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

/** Seconds of a token. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${number(1000 * value, value < 0.01 ? 1 : 0)} ms` : `${number(value, 2)} s`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)}%`);

/** A share as a bar, with its number. */
export function meter(share) {
  if (share === null || share === undefined) return "–";
  return el("span", { class: "meter" }, el("span", { class: "meter-bar" }, el("span", { style: { width: `${Math.min(100, 100 * share)}%` } })), percent(share));
}

const WORDS = { weights_gib: "weights", load_s: "loaded in", compile_s: "compiled in", kv_tokens: "KV cache", graph_gib: "CUDA graphs", max_model_len: "context", max_num_seqs: "requests at once",
  max_num_batched_tokens: "tokens in a step", gpu_memory_utilization: "share of GPU memory", decode_tokens_per_s: "one stream", prefill_tokens_per_s: "prompts", throughput_tokens_per_s: "together", kv_cache_tokens: "KV cache", ttft_s: "first token" };
const UNITS = [[/_tokens_per_s$/, (value) => `${number(value)} tokens/s`], [/_gib$/, (value) => `${number(value, 1)} GiB`], [/_bytes(_per_gpu)?$/, (value) => `${number(value / 1024 ** 3, 1)} GiB`],
  [/_tokens$|^max_model_len$/, (value) => `${number(value)} tokens`], [/_s$/, duration], [/_mib$/, (value) => `${number(value)} MiB`]];

/** A figure of a record in words: `kv_tokens` 412345 is "KV cache", "412,345 tokens". */
export function worded(key, value) {
  const name = key.split(".").at(-1), [unit, text] = UNITS.find(([ends]) => ends.test(name)) ?? [];
  const known = value !== "" && value !== null && typeof value !== "boolean" && isFinite(value);
  const words = WORDS[name] ?? key.replace(unit && known ? unit : "", "").replaceAll(/[._]/g, " ").trim();
  if (known) return [words, unit ? text(Number(value)) : number(Number(value), 2)];
  return [words, typeof value === "object" ? JSON.stringify(value) : String(value).replaceAll("_", " ")];
}

/** Errors begin like the middle of a line; here they begin one. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** A message about what went wrong, and what to do. */
export function problem(error) {
  return el("div", { class: "problem", role: "alert" }, el("strong", {}, sentence(error.message || String(error))),
    error.remedy ? el("p", {}, error.remedy) : null);
}

/** What stands where there is nothing to show. */
export function empty(title, ...more) {
  return el("div", { class: "empty" }, el("p", { class: "empty-title" }, title), ...more);
}

/** A button that copies a text. */
export function copier(text, label = "Copy") {
  const button = el("button", { class: "small", type: "button", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select it"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** A command line with a button that copies it. */
export const command = (line) => el("div", { class: "command" }, el("code", {}, line), copier(line, "Copy the command"));

/** Hand a text to the user as a file. */
export function download(name, text, type) {
  const link = el("a", { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
