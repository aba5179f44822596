// Live: load of every server now and over the last hour, GPUs, batches and tunes.

import { follow, ink, library } from "/static/chart.js";
import { duration, el, empty, fill, number, problem } from "/static/dom.js";

const ALL = "all servers";
const KEPT_S = 3600;
const CHARTS = [
  ["Tokens per second", [["tok_s", "generated"], ["prompt_s", "prompt"]], (v) => number(v)],
  ["Requests", [["running", "running"], ["waiting", "waiting"]], (v) => number(v, 1)],
  ["KV cache in use", [["kv", "use"]], (v) => v === null || v === undefined ? "–" : `${(100 * v).toFixed(0)}%`],
  ["Time to first token", [["ttft_p50", "P50"], ["ttft_p95", "P95"]], ms],
  ["Time per output token", [["tpot_p50", "P50"], ["tpot_p95", "P95"]], ms],
];
const FIGURES = [...new Set(CHARTS.flatMap(([, lines]) => lines.map(([name]) => name)))];

function ms(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${number(1000 * value, value < 0.01 ? 1 : 0)} ms` : `${number(value, 2)} s`;
}

export function mount(root, ctx) {
  let chosen = ctx.path[0] ?? ALL, data = null, over = false, charts = [];
  const servers = el("div", { class: "scroll" }), drawn = el("div", { class: "charts" }), gpus = el("section", { class: "card", hidden: true }), jobs = el("section", { class: "card" });
  const title = el("h2", { class: "long" }, chosen);
  fill(root, el("div", { class: "head" }, el("h1", {}, "Live"), el("span", { class: "dim", id: "live-state" }, "Looking…")),
    el("section", { class: "card" }, servers), el("section", { class: "card" }, title, drawn), gpus, jobs);

  async function history() {
    const found = await ctx.get(`/api/live/history?${new URLSearchParams({ name: chosen })}`);
    const times = new Set();
    for (const points of Object.values(found.figures)) for (const [at] of points) times.add(at);
    const at = [...times].sort((a, b) => a - b);
    const index = new Map(at.map((time, place) => [time, place]));
    data = { at, ...Object.fromEntries(FIGURES.map((name) => [name, new Array(at.length).fill(null)])) };
    for (const name of FIGURES) for (const [time, value] of found.figures[name] ?? []) data[name][index.get(time)] = value;
  }

  async function choose(name) {
    chosen = name;
    title.textContent = name;
    data = null;
    await Promise.all([history(), library()]);
    if (!over) draw();
  }

  function draw() {
    charts.forEach((one) => one.plot.destroy());
    charts = CHARTS.map(([heading, lines, words]) => {
      const box = el("figure", { class: "chart" }, el("figcaption", {}, heading));
      drawn.append(box);
      return { box, lines, words, heading };
    });
    fill(drawn, charts.map((one) => one.box));
    const colours = [ink("--accent"), ink("--warn")], grid = ink("--line");
    const axis = { stroke: ink("--dim"), grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    for (const one of charts) {
      one.plot = follow(new uPlot({
        width: Math.max(260, one.box.clientWidth), height: 170, cursor: { y: false }, scales: { y: { range: (_, low, high) => [0, one.lines[0][0] === "kv" ? 1 : high > 0 ? high * 1.1 : 1] } },
        series: [{ value: (_, at) => at ? new Date(at * 1000).toLocaleTimeString("en-GB") : "–" }, ...one.lines.map(([, label], place) => ({ label, stroke: colours[place], width: 1.5, points: { show: false }, spanGaps: false, value: (_, v) => one.words(v) }))],
        axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB")) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(one.words) }],
      }, values(one), one.box));
      one.box.setAttribute("role", "img");
      one.box.setAttribute("aria-label", `${one.heading} of ${chosen} over the last hour`);
    }
  }

  const values = (one) => [data.at, ...one.lines.map(([name]) => data[name])];
  const resized = new ResizeObserver(() => { for (const one of charts) one.plot?.setSize({ width: Math.max(260, one.box.clientWidth), height: 170 }); });
  resized.observe(drawn);

  function add(now, figures) {
    if (!data || !figures) return;
    data.at.push(now);
    for (const name of FIGURES) data[name].push(figures[name] ?? null);
    const old = data.at.findIndex((time) => time >= now - KEPT_S);
    if (old > 60) { data.at.splice(0, old); for (const name of FIGURES) data[name].splice(0, old); }
    if (!document.hidden) for (const one of charts) one.plot?.setData(values(one));
  }

  const end = ctx.stream("/api/live/stream", (news) => {
    document.getElementById("live-state").textContent = `${news.servers.length} server${news.servers.length === 1 ? "" : "s"} ready`;
    fill(servers, news.servers.length ? table(news, chosen, choose) : empty("No server is ready.", el("p", {}, "What runs shows its load here: tokens per second, requests, cache, times.")));
    add(news.now_s, chosen === ALL ? news.all : news.servers.find((one) => one.name === chosen) ?? null);
    gpus.hidden = !news.gpus.length;
    fill(gpus, gpuTable(news.gpus));
    fill(jobs, jobTable(news.jobs));
  }, { hidden: true });
  choose(chosen).catch((error) => fill(drawn, problem(error)));
  return () => { over = true; end(); resized.disconnect(); charts.forEach((one) => one.plot?.destroy()); };
}

const percent = (share) => share === null || share === undefined ? "–" : `${Math.round(100 * share)}%`;
const meter = (share) => share === null || share === undefined ? "–" : el("span", { class: "meter" }, el("span", { class: "meter-bar" }, el("span", { style: { width: `${Math.min(100, 100 * share)}%` } })), percent(share));

function table(news, chosen, choose) {
  const heads = ["Tok/s", "Prompt/s", "Run", "Wait"];
  const line = (name, row, more) => el("tr", { class: name === chosen ? "chosen" : "" },
    el("td", {}, el("button", { type: "button", class: "plain long", "aria-pressed": String(name === chosen), onclick: () => choose(name) }, name), more ? el("span", { class: "dim" }, ` ${more}`) : null),
    [row.tok_s, row.prompt_s, row.running, row.waiting].map((value) => el("td", { class: "num" }, number(value, value < 10 ? 1 : 0))),
    el("td", { class: "num" }, meter(row.kv)), [[row.ttft_p50, row.ttft_p95], [row.tpot_p50, row.tpot_p95]].map(([half, most]) => el("td", { class: "num" }, half === null ? "–" : `${ms(half)} / ${ms(most)}`)),
    el("td", { class: "num" }, percent(row.prefix)));
  const told = (row) => row.problem ? el("tr", {}, el("td", { colspan: "9", class: "bad-text" }, row.problem)) : null;
  return el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Server"), heads.map((text) => el("th", { class: "num" }, text)), el("th", { class: "num" }, "KV use"), el("th", { class: "num" }, "TTFT P50 / P95"), el("th", { class: "num" }, "TPOT P50 / P95"), el("th", { class: "num" }, "Prefix hits"))),
    el("tbody", {}, news.servers.length > 1 ? line(ALL, news.all) : null, news.servers.map((row) => [line(row.name, row, row.fleet ? `of ${row.fleet}` : row.model === row.name ? null : row.model), told(row)])));
}

function gpuTable(gpus) {
  return [el("h2", {}, "GPUs of this machine"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "GPU"), el("th", { class: "num" }, "Power"), el("th", { class: "num" }, "Memory"), el("th", { class: "num" }, "Use"))),
    el("tbody", {}, gpus.map((one) => el("tr", {}, el("td", {}, `${one.index} ${one.name}`), el("td", { class: "num" }, one.power_w === null ? "–" : `${number(one.power_w)} W`),
      el("td", { class: "num" }, one.used_mib === null ? "–" : `${number(one.used_mib / 1024, 1)} of ${number((one.total_mib ?? 0) / 1024, 0)} GiB`), el("td", { class: "num" }, meter(one.use)))))))];
}

function jobTable(jobs) {
  if (!jobs.length) return [el("h2", {}, "Batches and tunes"), el("p", { class: "dim" }, "None. `corral batch run` and `corral tune` show up here.")];
  return [el("h2", {}, "Batches and tunes"), el("div", { class: "scroll" }, el("table", { id: "jobs" },
    el("thead", {}, el("tr", {}, ["What", "State", "Progress"].map((text) => el("th", {}, text)), ["Rate", "Left", "Failed"].map((text) => el("th", { class: "num" }, text)))),
    el("tbody", {}, jobs.map((one) => el("tr", { "data-name": one.name }, el("td", { class: "long" }, el("span", { class: "tag" }, one.kind), ` ${one.name}`),
      el("td", {}, el("span", { class: `tag ${one.state === "done" ? "good" : one.state === "running" ? "busy" : ""}` }, one.state), one.text ? el("p", { class: "dim" }, one.text) : null),
      el("td", {}, meter(one.total ? one.done / one.total : 1), el("p", { class: "dim" }, one.unit === "s" ? `${duration(one.done)} of ${duration(one.total)}` : `${number(one.done)} of ${number(one.total)} ${one.unit}`)),
      el("td", { class: "num" }, one.rate === null ? "–" : `${number(one.rate, 1)} ${one.unit}/s`), el("td", { class: "num" }, one.state === "done" || one.eta_s === null ? "–" : duration(one.eta_s)),
      el("td", { class: `num${one.failed ? " bad-text" : ""}` }, number(one.failed)))))))];
}
