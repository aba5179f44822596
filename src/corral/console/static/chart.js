// Line charts with uPlot, which is loaded when the first is drawn.

import { el, fill } from "/static/dom.js";

let loading = null;

export function library() {
  loading ??= new Promise((resolve, reject) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/vendor/uPlot.css" }));
    const script = el("script", { src: "/static/vendor/uPlot.js" });
    script.onload = () => resolve(window.uPlot);
    script.onerror = () => reject(new Error("The charts could not be loaded."));
    document.head.append(script);
  });
  return loading;
}

const COLOURS = ["--accent", "--warn", "--good", "--bad"];
/** A colour of the page, as it is when something is drawn: light and dark may change meanwhile. */
export const ink = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const dark = matchMedia("(prefers-color-scheme: dark)");
/** Draw again when the page turns dark or light, until the chart is gone. */
export function follow(plot) {
  const turn = () => plot.root.isConnected ? plot.redraw(false) : dark.removeEventListener("change", turn);
  dark.addEventListener("change", turn);
  return plot;
}

/**
 * A figure: `lines` are {name, x, y, dots, dashed}, each with its own x; `x` and `y` name the axes. Returns the
 * element; it takes the width it is given.
 */
export function chart(title, { x, y, lines, height = 220, log = false }) {
  const box = el("div", { class: "plot" });
  const words = lines.map((line) => `${line.name}: ${line.y.length} points, up to ${round(Math.max(...line.y.filter((value) => value !== null), 0))} ${y}`).join("; ");
  const figure = el("figure", { class: "card chart" }, el("figcaption", {}, title), el("div", { class: "plot-frame", role: "img", "aria-label": `${title}. ${words}` }, box));
  const at = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const values = lines.map((line) => { const known = new Map(line.x.map((one, n) => [one, line.y[n]])); return at.map((one) => known.get(one) ?? null); });
  library().then((UPlot) => {
    const axis = (label) => ({ label, labelSize: 18, labelGap: 0, stroke: ink("--dim"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", size: label === y ? 58 : 42, values: (_, all) => all.map((one) => (one === null ? "" : round(one))) });
    const options = {
      width: box.clientWidth || 480, height, scales: { x: { time: false }, y: { range: (_, low, high) => (log ? [low, high] : [0, (high || 1) * 1.08]), distr: log ? 3 : 1 } },
      axes: [axis(x), axis(y)], cursor: { points: { size: 6 } }, legend: { show: true },
      series: [{ label: x, value: (_, one) => (one === null || one === undefined ? "–" : round(one)) }, ...lines.map((line, n) => ({
        label: line.name, stroke: ink(COLOURS[n % COLOURS.length]), width: 2, dash: line.dashed ? [6, 4] : undefined, spanGaps: true,
        points: { show: Boolean(line.dots), size: 7 }, value: (_, one) => (one === null || one === undefined ? "–" : round(one)) }))],
    };
    if (!box.isConnected) return;
    const drawn = follow(new UPlot(options, [at, ...values], box));
    new ResizeObserver(() => { if (box.clientWidth && Math.abs(box.clientWidth - drawn.width) > 1) drawn.setSize({ width: box.clientWidth, height }); }).observe(box);
  }).catch((error) => fill(box, error.message));
  return figure;
}

export function round(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3 });
}
