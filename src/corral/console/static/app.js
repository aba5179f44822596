// The page: one view at a time, by what stands after #. A view that is not looked at is unmounted and costs nothing.

import { el, fill, problem, sentence } from "/static/dom.js";
import { get, post, stream } from "/static/net.js";

const VIEWS = { fleet: "Overview", live: "Live", nodes: "Nodes", play: "Playground", plan: "Plan", models: "Models", runs: "Runs", keys: "Keys" };
const main = document.getElementById("main");
let unmount = () => {};
let turn = 0;

history.replaceState(null, "", location.pathname + location.hash); // the token in the link is used up

let about = null;
const asked = get("/api/about");

async function show() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  const view = name in VIEWS ? name : "fleet";
  const mine = ++turn;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#/${view}`;
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
    if (here) link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  document.title = `${VIEWS[view]} – Corral`;
  try { unmount(); } finally { unmount = () => {}; }
  try {
    const [module, known] = await Promise.all([import(`/static/${view}.js`), asked]);
    if (mine !== turn) return;
    about = known;
    const root = el("div", { class: `view view-${view}` });
    fill(main, root);
    unmount = module.mount(root, context(rest.map(decodeURIComponent), new URLSearchParams(query))) ?? (() => {});
  } catch (error) {
    if (mine === turn) fill(main, problem(error));
  }
}

function context(path, query) {
  return {
    get, post, el, toast, path, query,
    readOnly: about.read_only,
    asks: about.asks,
    host: about.host,
    /** What was entered stands in the address, for a reload and a bookmark. */
    entered: (where, values) => { history.replaceState(null, "", `#/${where}${values.size ? `?${values}` : ""}`); },
    go: (hash) => { location.hash = hash; },
    stream: (where, on, options = {}) => stream(where, on, { ...options, state: (up, failure) => { connected(up, failure); options.state?.(up, failure); } }),
  };
}

function connected(up, failure) {
  const dot = document.getElementById("link");
  const words = up ? "connected" : failure?.message ?? "connecting again";
  dot.classList.toggle("off", !up);
  dot.setAttribute("aria-label", words);
  dot.title = words;
  if (!up && failure) toast(`${sentence(failure.message)} ${failure.remedy}`);
}

let clearing = 0;
function toast(text) {
  const box = fill(document.getElementById("toast"), el("div", {}, text));
  clearTimeout(clearing);
  clearing = setTimeout(() => fill(box), 6000);
}

asked.then((known) => {
  document.getElementById("host").textContent = `${known.host} · ${known.version}`;
  document.getElementById("read-only").hidden = !known.read_only;
  document.getElementById("keys").hidden = !known.keys;
}).catch(() => {});
window.addEventListener("hashchange", show);
show();
