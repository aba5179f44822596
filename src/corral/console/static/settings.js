// Sampling parameters as a form: empty fields are left to the server.

import { el, fill } from "/static/dom.js";

const FIRST = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"];

/** A form for the parameters; `values()` reads it, `set(values)` fills it. */
export function settings(parameters, changed) {
  const inputs = {};
  const plain = parameters.filter((one) => !one.structured), forms = parameters.filter((one) => one.structured);
  const field = (one) => {
    inputs[one.name] = input(one);
    return el("label", { title: [one.help, one.range].filter(Boolean).join(" ") }, one.name, inputs[one.name]);
  };
  const form = el("select", { "aria-label": "Form of the answer" }, el("option", { value: "" }, "free text"), forms.map((one) => el("option", { value: one.name }, one.name)));
  const text = el("textarea", { rows: 4, class: "mono", hidden: true, spellcheck: "false" });
  const hint = el("p", { class: "dim" });
  const choose = () => {
    const chosen = forms.find((one) => one.name === form.value);
    text.hidden = !chosen;
    text.setAttribute("aria-label", chosen?.help ?? "");
    text.placeholder = { json_schema: '{"type": "object", "properties": {"city": {"type": "string"}}}', regex: "[A-Z][a-z]+", choice: "yes\nno", grammar: 'root ::= "yes" | "no"' }[form.value] ?? "";
    fill(hint, chosen ? chosen.help + (form.value === "choice" ? " One a line." : "") : "");
  };
  const first = FIRST.map((name) => plain.find((one) => one.name === name)).filter(Boolean);
  const root = el("div", { class: "stack" }, el("div", { class: "fields narrow" }, first.map(field)),
    el("details", {}, el("summary", {}, "More parameters"), el("div", { class: "fields narrow" }, plain.filter((one) => !first.includes(one)).map(field))),
    el("label", {}, "Form of the answer", form), text, hint);
  form.addEventListener("change", choose);
  root.addEventListener("input", () => changed?.());

  function values() {
    const found = {};
    for (const one of plain) {
      const given = inputs[one.name].value.trim();
      if (given !== "") found[one.name] = read(one, given);
    }
    if (form.value && text.value.trim()) found[form.value] = form.value === "choice" ? lines(text.value) : text.value;
    return found;
  }
  function set(given) {
    for (const one of plain) inputs[one.name].value = shown(given[one.name]);
    form.value = forms.find((one) => given[one.name] !== undefined)?.name ?? "";
    text.value = form.value ? shown(given[form.value]) : "";
    choose();
  }
  return { root, values, set };
}

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const shown = (value) => (value === undefined ? "" : Array.isArray(value) ? value.join("\n") : typeof value === "object" ? JSON.stringify(value) : String(value));

function input(one) {
  if (one.kind === "flag") return el("select", {}, [["", "–"], ["true", "yes"], ["false", "no"]].map(([value, text]) => el("option", { value }, text)));
  if (one.kind === "texts" || one.kind === "ints") return el("textarea", { rows: 1, placeholder: "one a line", spellcheck: "false" });
  return el("input", { inputmode: "decimal", autocomplete: "off", placeholder: one.range.length < 20 && one.range || "–" });
}

/** What was typed, as the server takes it; what is no number goes on as text and is refused with its range. */
function read(one, given) {
  if (one.kind === "flag") return given === "true";
  if (one.kind === "texts") return lines(given);
  if (one.kind === "ints") return given.split(/[\s,]+/).map(number);
  return one.kind === "int" || one.kind === "float" ? number(given) : given;
}

const number = (text) => (text !== "" && isFinite(Number(text)) ? Number(text) : text);
