// An hour of figures as lines: points are added as they come, and old ones leave.

import { follow, ink, library } from "/static/chart.js";
import { el, fill } from "/static/dom.js";

const KEPT_S = 3600, LEAST_S = 60, HEIGHT = 170, GAP_S = 20; // nobody looked for so long
const COLOURS = ["--accent", "--warn", "--good", "--bad", "--c5", "--c6", "--c7", "--c8"];
const clockTime = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

/** Charts over the same times: each is {heading, lines: [[figure, label]], words, top}; `top` is where its axis ends. */
export function hour(charts, whose) {
  const node = el("div", { class: "charts" });
  const figures = [...new Set(charts.flatMap((one) => one.lines.map(([name]) => name)))];
  let data = null, drawn = [], over = false, shown = KEPT_S;
  const values = (one) => [data.at, ...one.lines.map(([name]) => data[name])];
  const width = (box) => Math.max(260, box.clientWidth);
  const resized = new ResizeObserver(() => { for (const one of drawn) one.plot.setSize({ width: width(one.box), height: HEIGHT }); });
  resized.observe(node);

  /** Take an hour of points by figure, and draw it. */
  async function load(known) {
    await library();
    if (over) return;
    const times = new Set();
    for (const name of figures) for (const [at] of known[name] ?? []) times.add(at);
    const seen = [...times].sort((a, b) => a - b);
    seen.forEach((time, place) => { if (time - seen[place - 1] > GAP_S) times.add(time - 1); });
    const at = [...times].sort((a, b) => a - b), index = new Map(at.map((time, place) => [time, place]));
    data = { at, ...Object.fromEntries(figures.map((name) => [name, new Array(at.length).fill(null)])) };
    for (const name of figures) for (const [time, value] of known[name] ?? []) data[name][index.get(time)] = value;
    drawn.forEach((one) => one.plot.destroy());
    const boxes = charts.map((one) => el("figure", { class: "chart", role: "img", "aria-label": `${one.heading} of ${whose} over the last hour` }, el("figcaption", {}, one.heading, el("span", { class: "latest" }))));
    fill(node, boxes);
    drawn = charts.map((one, place) => ({ ...one, box: boxes[place], plot: plot(one, boxes[place]) }));
    tell();
  }

  function plot(one, box) {
    const grid = ink("--line"), axis = { stroke: ink("--dim"), grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    return follow(new uPlot({
      width: width(box), height: HEIGHT, cursor: { y: false }, padding: [8, 32, 0, 0], scales: { x: { range: (_, first, last) => (last === null ? [0, LEAST_S] : [Math.max(last - shown, Math.min(first, last - LEAST_S)), last]) }, y: { range: (_, low, high) => [0, one.top ?? (high > 0 ? high * 1.1 : 1)] } },
      series: [{ value: (_, at) => at ? clockTime(at) : "–" }, ...one.lines.map(([, label], place) => ({ label, stroke: ink(COLOURS[place % COLOURS.length]), width: 1.5, points: { show: false }, spanGaps: false, value: (_, v) => one.words(v) }))],
      axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(clockTime) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(one.words) }],
    }, values(one), box));
  }

  /** The newest values beside each heading. */
  function tell() {
    for (const one of drawn) fill(one.box.querySelector(".latest"), one.lines.map(([name, label], place) => el("span", {}, el("span", { class: "swatch", style: { background: `var(${COLOURS[place % COLOURS.length]})` } }), ` ${label} ${one.words(data[name].at(-1))}`)));
  }

  /** Show the last so many seconds. */
  function range(seconds) {
    shown = seconds;
    for (const one of drawn) one.plot.setData(values(one));
  }

  /** One moment more. */
  function add(now, known) {
    if (!data || !known) return;
    if (now - data.at.at(-1) > GAP_S) { data.at.push(now - 1); for (const name of figures) data[name].push(null); }
    data.at.push(now);
    for (const name of figures) data[name].push(known[name] ?? null);
    const old = data.at.findIndex((time) => time >= now - KEPT_S);
    if (old > 60) { data.at.splice(0, old); for (const name of figures) data[name].splice(0, old); }
    if (document.hidden) return;
    for (const one of drawn) one.plot.setData(values(one));
    tell();
  }

  return { node, load, add, range, end() { over = true; resized.disconnect(); drawn.forEach((one) => one.plot.destroy()); drawn = []; } };
}
