// Nodes: where deployments run, what each takes of a node's GPUs, and what its engine reports; asks no host anything.

import { el, empty, fill, meter, number } from "/static/dom.js";
import { tag } from "/static/fleet.js";

const GIB = 1024 ** 3;

export function mount(root, ctx) {
  const rows = new Map(), words = el("span", { class: "dim", role: "status" }, "Looking…"), body = el("div", { class: "stack-wide" });
  let order = [], load = new Map(), gpus = [], came = false;
  fill(root, el("div", { class: "head" }, el("h1", {}, "Nodes"), words), body);
  const ends = [ctx.stream("/api/fleet/stream", (news) => {
    for (const row of news.rows) rows.set(row.key, row);
    if (news.order) order = news.order;
    came = true;
    draw();
  }), ctx.stream("/api/live/stream", (news) => {
    load = new Map(news.servers.map((one) => [one.name, one]));
    gpus = news.gpus;
    draw();
  })];

  function draw() {
    if (!came) return;
    const nodes = new Map(gpus.length ? [[ctx.host, []]] : []);
    for (const row of order.map((key) => rows.get(key))) {
      if (!row || row.kind === "fleet" || row.ended) continue;
      for (const rank of row.nodes ?? []) {
        if (row.job && !rank.joined) continue; // a scheduler has not said yet where it runs
        const node = row.target === "local" ? ctx.host : rank.node;
        if (!nodes.has(node)) nodes.set(node, []);
        nodes.get(node).push({ row, rank });
      }
    }
    words.textContent = `${nodes.size} node${nodes.size === 1 ? "" : "s"} with running deployments`;
    fill(body, [...nodes].map(([name, ranks]) => card(name, ranks)), nodes.size ? null : empty("Nothing runs.", el("p", {}, "A node is shown here while a deployment runs on it."), el("a", { class: "button", href: "#/fleet" }, "Go to Overview")));
  }

  function card(name, ranks) {
    const here = name === ctx.host, taken = ranks.reduce((sum, one) => sum + one.rank.gpus, 0);
    const kind = ranks.find((one) => one.row.memory?.gpu)?.row.memory.gpu;
    const about = [here ? "this machine" : null, taken ? `${taken} ${kind ?? "GPU"}${kind ? "" : taken > 1 ? "s" : ""} in use` : here && gpus.length ? null : "no GPU in use"];
    return el("section", { class: "card", "aria-label": `Node ${name}`, "data-name": name },
      el("div", { class: "head" }, el("h2", { class: "long" }, name), el("span", { class: "dim" }, about.filter(Boolean).join(" · "))),
      here && gpus.length ? el("div", { class: "grid gpus" }, gpus.map(gpu)) : null,
      el("div", { class: "items" }, ranks.map(item)));
  }

  function item({ row, rank }) {
    const now = load.get(row.name), count = row.nodes.length;
    const pairs = [["GPUs", rank.gpus || null], [row.memory?.gpu ? "memory of each GPU" : "memory", memory(row)],
      ["KV cache in use", now?.kv === null || now?.kv === undefined ? null : meter(now.kv)], ["requests", now && now.running !== null ? `${number(now.running)} running, ${number(now.waiting ?? 0)} waiting` : null]];
    return el("article", { class: "item wide", "data-name": row.name },
      el("div", {}, el("p", {}, el("a", { class: "long", href: `#/fleet/d/${encodeURIComponent(row.name)}` }, row.name), " ", tag(row)),
        el("p", { class: "dim" }, [row.target, count > 1 ? `rank ${rank.rank} of ${count}` : null, rank.joined ? null : "its agent has not joined yet"].filter(Boolean).join(" · "))),
      el("dl", { class: "figures-line" }, pairs.filter(([, value]) => value !== null).map(([word, value]) => el("div", {}, el("dt", {}, word), el("dd", {}, value)))));
  }
  return () => ends.forEach((end) => end());
}

/** As the engine measured it; before it has, as it was planned. */
function memory(row) {
  const seen = row.observed ?? {}, plan = row.memory, gib = (value) => `${number(value, 1)} GiB`;
  if (isFinite(seen.weights_gib)) return ["weights ", gib(Number(seen.weights_gib)), isFinite(seen.kv_gib) ? `, KV cache ${gib(Number(seen.kv_gib))}` : "", plan?.total_bytes ? ` of ${gib(plan.total_bytes / GIB)}` : ""].join("");
  return plan ? `planned: weights ${gib(plan.weights_bytes / GIB)}, KV cache ${gib(plan.kv_bytes / GIB)} of ${gib(plan.total_bytes / GIB)}` : null;
}

const gpu = (one) => el("div", { class: "stack gpu", "data-gpu": one.index }, el("p", {}, el("strong", {}, `GPU ${one.index}`), " ", el("span", { class: "dim" }, one.name)),
  el("dl", { class: "figures-line" }, [["memory", one.used_mib === null ? "–" : [meter(one.total_mib ? one.used_mib / one.total_mib : null), " ", el("span", { class: "dim" }, `${number(one.used_mib / 1024, 1)} of ${number((one.total_mib ?? 0) / 1024)} GiB`)]],
    ["use", meter(one.use)], ["power", one.power_w === null ? "–" : `${number(one.power_w)} W`]].map(([word, value]) => el("div", {}, el("dt", {}, word), el("dd", {}, value)))));
