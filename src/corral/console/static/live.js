// Live: load of every server now and over the last hour, GPUs, batches and tunes.

import { duration, el, fill, meter, ms, number, percent, problem } from "/static/dom.js";
import { hour } from "/static/hour.js";
import { ALL, serverTable } from "/static/servers.js";

const CHARTS = [
  { heading: "Tokens per second", lines: [["tok_s", "generated"], ["prompt_s", "prompt"]], words: (v) => number(v, v < 10 ? 1 : 0) },
  { heading: "Requests", lines: [["running", "running"], ["waiting", "waiting"]], words: (v) => number(v, 1) },
  { heading: "KV cache in use", lines: [["kv", "use"]], words: percent, top: 1 },
  { heading: "Time to first token", lines: [["ttft_p50", "P50"], ["ttft_p95", "P95"]], words: ms },
  { heading: "Time per output token", lines: [["tpot_p50", "P50"], ["tpot_p95", "P95"]], words: ms },
];
const MOST_LINES = 8;

export function mount(root, ctx) {
  let chosen = ctx.path[0] ?? ALL, over = false, turn = 0, charts = null, gpuCharts = null, gpuKey = "";
  const state = el("span", { class: "dim", role: "status" }, "Looking…");
  const title = el("h2", { class: "long" }, chosen), drawn = el("div", {});
  const span = el("select", { "aria-label": "Time range" }, [[300, "5 minutes"], [900, "15 minutes"], [3600, "an hour"]].map(([value, text]) => el("option", { value, selected: value === 3600 }, text)));
  span.addEventListener("change", () => { charts?.range(Number(span.value)); gpuCharts?.range(Number(span.value)); });
  const gpus = el("section", { class: "card", "aria-label": "GPUs", hidden: true }), gpuRows = el("tbody", {}), gpuDrawn = el("div", {});
  const jobs = el("section", { class: "card", "aria-label": "Batches and tunes" });
  const servers = serverTable((name) => choose(name));
  fill(root, el("div", { class: "head" }, el("h1", {}, "Live"), state), servers.node, el("section", { class: "card", "aria-label": "The last hour" }, el("div", { class: "head" }, title, el("span", { class: "push" }, span)), drawn), gpus, jobs);
  fill(gpus, el("h2", {}, "GPUs of this machine"), gpuDrawn, gpuTable(gpuRows));

  async function choose(name) {
    const mine = ++turn;
    chosen = name;
    title.textContent = name;
    try {
      const found = await ctx.get(`/api/live/history?${new URLSearchParams({ name })}`);
      if (over || mine !== turn) return;
      const made = hour(CHARTS, name);
      charts?.end();
      charts = made;
      fill(drawn, made.node);
      made.range(Number(span.value));
      await made.load(found.figures);
    } catch (error) { if (!over) fill(drawn, problem(error)); }
  }

  /** Power and memory of each GPU; of many, their mean and the largest. */
  async function drawGpus(found) {
    const key = found.map((one) => one.index).join();
    if (key === gpuKey) return;
    gpuKey = key;
    const names = found.length > MOST_LINES ? [["mean", "mean"], ["most", "largest"]] : found.map((one) => [String(one.index), `GPU ${one.index}`]);
    const lines = (figure) => names.map(([name, label]) => [`${figure} ${name}`, label]);
    const total = Math.max(...found.map((one) => one.total_mib ?? 0));
    const made = hour([
      { heading: "Power", lines: lines("power"), words: (v) => (v === null || v === undefined ? "–" : `${number(v)} W`) },
      { heading: "Memory in use", lines: lines("memory"), words: (v) => (v === null || v === undefined ? "–" : `${number(v, 1)} GiB`), top: total / 1024 || undefined },
    ], "this machine's GPUs");
    gpuCharts?.end();
    gpuCharts = made;
    made.range(Number(span.value));
    fill(gpuDrawn, made.node);
    try { await made.load((await ctx.get("/api/live/gpus")).figures); } catch (error) { fill(gpuDrawn, problem(error)); }
  }

  const end = ctx.stream("/api/live/stream", (news) => {
    const count = news.servers.filter((one) => !one.members).length;
    state.textContent = `${count} server${count === 1 ? "" : "s"} ready`;
    servers.draw(news, chosen);
    charts?.add(news.now_s, chosen === ALL ? news.all : news.servers.find((one) => one.name === chosen) ?? null);
    gpus.hidden = !news.gpus.length;
    if (news.gpus.length) {
      fill(gpuRows, news.gpus.map(gpuRow));
      drawGpus(news.gpus);
      gpuCharts?.add(news.now_s, news.gpu_figures);
    }
    fill(jobs, jobTable(news.jobs));
  }, { hidden: true });
  choose(chosen);
  return () => { over = true; end(); charts?.end(); gpuCharts?.end(); };
}

const gpuTable = (rows) => el("div", { class: "scroll" }, el("table", {},
  el("thead", {}, el("tr", {}, el("th", {}, "GPU"), el("th", { class: "num" }, "Power"), el("th", { class: "num" }, "Memory"), el("th", { class: "num" }, "Use"))), rows));

const gpuRow = (one) => el("tr", {}, el("td", { class: "long" }, `${one.index} ${one.name}`), el("td", { class: "num" }, one.power_w === null ? "–" : `${number(one.power_w)} W`),
  el("td", { class: "num" }, one.used_mib === null ? "–" : `${number(one.used_mib / 1024, 1)} of ${number((one.total_mib ?? 0) / 1024, 0)} GiB`), el("td", { class: "num" }, meter(one.use)));

function jobTable(jobs) {
  if (!jobs.length) return [el("h2", {}, "Batches and tunes"), el("p", { class: "dim" }, "There are none. ", el("code", {}, "corral batch run"), " and ", el("code", {}, "corral tune"), " show up here.")];
  return [el("h2", {}, "Batches and tunes"), el("div", { class: "scroll" }, el("table", { id: "jobs" },
    el("thead", {}, el("tr", {}, ["What", "State", "Progress"].map((text) => el("th", {}, text)), ["Rate", "Left", "Failed"].map((text) => el("th", { class: "num" }, text)))),
    el("tbody", {}, jobs.map((one) => el("tr", { "data-name": one.name }, el("td", { class: "long" }, el("span", { class: "tag" }, one.kind), ` ${one.name}`),
      el("td", {}, el("span", { class: `tag ${one.state === "done" ? "good" : one.state === "running" ? "busy" : ""}` }, one.state), one.text ? el("p", { class: "dim" }, one.text) : null),
      el("td", {}, meter(one.total ? one.done / one.total : 1), el("p", { class: "dim" }, one.unit === "s" ? `${duration(one.done)} of ${duration(one.total)}` : `${number(one.done)} of ${number(one.total)} ${one.unit}`)),
      el("td", { class: "num" }, one.rate === null ? "–" : `${number(one.rate, 1)} ${one.unit}/s`), el("td", { class: "num" }, one.state === "done" || one.eta_s === null ? "–" : duration(one.eta_s)),
      el("td", { class: `num${one.failed ? " bad-text" : ""}` }, number(one.failed)))))))];
}
