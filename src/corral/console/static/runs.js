// The Runs view: measurements listed, drawn, and laid over each other; batches and their rows.

import { download, duration, el, empty, fill, number, problem, worded } from "/static/dom.js";
import { chart, round } from "/static/chart.js";

const NAMES = { ttft: "Time to first token", tpot: "Time per output token", itl: "Between tokens", e2el: "Whole answer" };
const TONES = { valid: "good", caution: "warn", invalid: "bad", done: "good", running: "busy", failed: "bad", interrupted: "bad" };
const tag = (word) => el("span", { class: `tag ${TONES[word] ?? ""}` }, word || "–");
const ago = (seconds) => `${duration(Math.max(0, Date.now() / 1000 - seconds))} ago`;
const heads = (...names) => el("thead", {}, el("tr", {}, names.map(([name, num, more]) => el("th", { class: num ? "num" : more, scope: "col" }, name))));

export function mount(root, ctx) {
  let over = false;
  const [first, ...rest] = ctx.path ?? [];
  const shows = { run: () => run(rest.join("/")), compare: () => compare(...rest), batch: () => batch(rest[0] ?? "") };
  fill(root, el("p", { class: "dim" }, "Reading…"));
  const page = async (...parts) => { if (!over) fill(root, ...parts); };
  const guard = async (work) => { try { await work(); } catch (error) { await page(back(), problem(error)); } };
  guard(shows[first] ?? list);

  const back = () => el("a", { href: "#/runs" }, "← Runs");
  const at = (...parts) => `#/runs/${parts.map(encodeURIComponent).join("/")}`;

  /** A button that compares the two that are ticked, and what makes the boxes to tick. */
  function choosing() {
    const chosen = [];
    const go = el("button", { class: "primary", type: "button", disabled: true, onclick: () => ctx.go(at("compare", ...chosen)) }, "Compare two runs");
    const pick = (name) => el("input", { type: "checkbox", "aria-label": `Compare ${name}`, onchange: (event) => {
      event.target.checked ? chosen.push(name) : chosen.splice(chosen.indexOf(name), 1);
      go.disabled = chosen.length !== 2;
    } });
    return { go, pick };
  }

  async function list() {
    const found = await ctx.get("/api/runs"), { go, pick } = choosing();
    const runs = found.runs.length ? el("div", { class: "scroll" }, el("table", {}, heads(["", 0, "pick"], ["Run"], ["Load"], ["Verdict"], ["Output tokens/s", 1], ["When", 1]),
      el("tbody", {}, found.runs.map((one) => el("tr", {}, el("td", { class: "pick" }, pick(one.name)), el("td", { class: "long" }, el("a", { href: at("run", one.name) }, one.name)), el("td", {}, one.load), el("td", {}, tag(one.verdict)), el("td", { class: "num" }, round(one.output_throughput)), el("td", { class: "num dim" }, ago(one.created_s)))))))
      : empty("No measurement yet.", el("p", {}, "A first one: ", el("code", {}, "corral bench quick")));
    const batches = found.batches.length ? el("div", { class: "scroll" }, el("table", {}, heads(["Output"], ["State"], ["Rows", 1], ["Done", 1], ["Failed", 1], ["Model"], ["Begun", 1]),
      el("tbody", {}, found.batches.map((one) => el("tr", {}, el("td", { class: "long" }, el("a", { href: at("batch", one.output) }, one.shown)), el("td", {}, tag(one.state), one.reason ? el("div", { class: "dim" }, one.reason) : null),
        el("td", { class: "num" }, number(one.rows)), el("td", { class: "num" }, one.rows === undefined ? "–" : number(one.fine + one.failed)), el("td", { class: "num" }, number(one.failed)), el("td", { class: "long" }, one.model ?? ""), el("td", { class: "num dim" }, one.created_s ? ago(one.created_s) : "–"))))))
      : empty("No batch yet.", el("p", {}, "One is begun with ", el("code", {}, "corral batch run INPUT -o OUTPUT"), ", and is listed here from then on."));
    await page(el("div", { class: "head" }, el("h1", {}, "Runs"), el("span", { class: "push" }, found.runs.length > 1 ? go : null)), el("section", { class: "card", "aria-label": "Measurements" }, el("h2", {}, "Measurements"), runs), el("section", { class: "card", "aria-label": "Batches" }, el("h2", {}, "Batches"), batches));
  }

  async function run(name) {
    const found = await ctx.get(`/api/runs/run?${new URLSearchParams({ name })}`);
    await page(back(), ...(found.points ? series(found) : single(found)));
  }

  /** The report of `corral bench report`: one file, which reads without the console. */
  const report = (name) => el("button", { type: "button", onclick: async () => {
    try { download(`${name.replaceAll("/", "-")}.html`, (await ctx.get(`/api/runs/report?${new URLSearchParams({ name })}`)).html, "text/html"); } catch (error) { ctx.toast(error.message); }
  } }, "HTML report");

  function series(found) {
    const points = found.points, { go, pick } = choosing();
    const by = points.every((one) => one.concurrency) ? ["requests at once", (one) => one.concurrency] : points.every((one) => one.rate) ? ["requests/s offered", (one) => one.rate] : ["run", (_, n) => n + 1];
    const x = points.map(by[1]);
    const roofs = points.map((one) => one.limit?.roof_tokens_per_s ?? null);
    const lines = [{ name: "measured", x, y: points.map((one) => one.output_throughput), dots: true }];
    if (roofs.some((one) => one !== null)) lines.push({ name: "the plan's roofline", x, y: roofs, dashed: true });
    const latency = (metric) => chart(`${NAMES[metric]}, by load`, { x: by[0], y: "ms", lines: [{ name: "median", x, y: points.map((one) => one.latency[metric].median), dots: true }, { name: "p99", x, y: points.map((one) => one.latency[metric].p99 ?? null), dots: true }] });
    return [el("div", { class: "head" }, el("h1", { class: "long" }, found.name), el("span", { class: "tag" }, found.kind), el("span", { class: "push" }, report(found.name))), el("p", { class: "dim" }, points[0]?.title ?? ""),
      el("div", { class: "grid charts" }, chart("Output tokens per second, by load", { x: by[0], y: "tokens/s", lines }), latency("ttft"), latency("tpot"),
        chart("Latency against throughput", { x: "output tokens/s", y: "ms", lines: [{ name: "median time per output token", x: points.map((one) => one.output_throughput), y: points.map((one) => one.latency.tpot.median), dots: true }] })),
      el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, "Its runs"), el("span", { class: "push" }, go)), el("div", { class: "scroll" }, el("table", {}, heads(["", 0, "pick"], ["Load"], ["Verdict"], ["Output tokens/s", 1], ["Of the roofline", 1], ["TTFT median, ms", 1], ["TPOT median, ms", 1], ["Failed", 1]),
        el("tbody", {}, points.map((one) => el("tr", {}, el("td", { class: "pick" }, pick(one.name)), el("td", {}, el("a", { href: at("run", one.name) }, one.load)), el("td", {}, tag(one.verdict)), [round(one.output_throughput), share(one.limit?.reached), round(one.latency.ttft.median), round(one.latency.tpot.median), number(one.failed)].map((cell) => el("td", { class: "num" }, cell))))))))];
  }

  function single(one) {
    return [el("div", { class: "head" }, el("h1", { class: "long" }, one.name), tag(one.verdict), el("span", { class: "push" }, report(one.name))), el("p", { class: "dim" }, one.title),
      one.problems.map((each) => el("p", { class: each.severity === "invalid" ? "problem" : "note" }, each.text)),
      el("section", { class: "figures" }, figure("Output", round(one.output_throughput), "tokens/s"), figure("Requests", round(one.request_throughput), "a second"), figure("Answers", number(one.completed), `in ${duration(one.duration_s)}${one.failed ? `, ${number(one.failed)} failed` : ""}`), figure("At once", round(one.mean_concurrency), "on average")),
      roofline(one), spreads([one]), el("div", { class: "grid charts" }, timelines([one]), distributions([one])), facts(one)];
  }

  async function compare(a, b) {
    const query = new URLSearchParams({ a, b });
    const [difference, one, other] = await Promise.all([ctx.get(`/api/runs/compare?${query}`), ...[a, b].map((name) => ctx.get(`/api/runs/run?${new URLSearchParams({ name })}`))]);
    const both = [one, other].filter((each) => each.distribution);
    const how = difference.repeats ? "Intervals cover what changes from run to run." : "Intervals cover chance inside a run only: repeats would tell more.";
    await page(back(), el("h1", { class: "long" }, `${a} against ${b}`), difference.invalid.map((name) => el("p", { class: "problem" }, `${name} is invalid: do not use its figures.`)),
      el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, "What changed"), el("span", { class: "dim" }, how)), el("div", { class: "scroll" }, el("table", {}, heads(["Figure"], [a, 1], [b, 1], ["Change", 1], ["95% interval", 1], ["Verdict"]),
        el("tbody", {}, difference.figures.map((row) => el("tr", {}, el("td", {}, metricName(row.name)), [`${round(row.a)} ${row.unit}`, `${round(row.b)} ${row.unit}`, signed(row.change), `${signed(row.low)} … ${signed(row.high)}`].map((cell) => el("td", { class: "num" }, cell)), el("td", {}, el("span", { class: `tag ${{ better: "good", worse: "bad" }[row.verdict] ?? ""}` }, row.verdict))))))), el("p", { class: "dim" }, difference.differs.length ? null : "Nothing that is known of server, hardware and load differs.")),
      difference.differs.length ? el("section", { class: "card" }, el("h2", {}, "What differed"), el("div", { class: "scroll" }, el("table", {}, heads(["What"], [a], [b]), el("tbody", {}, difference.differs.map((row) => el("tr", {}, row.map((cell) => el("td", { class: "long" }, cell)))))))) : null,
      both.length === 2 ? [spreads(both), el("div", { class: "grid charts" }, timelines(both), distributions(both))] : null);
  }

  async function batch(output) {
    const found = await ctx.get(`/api/runs/batch?${new URLSearchParams({ output })}`);
    const done = found.fine + found.failed, rows = el("div", { class: "stack" });
    const title = el("h2", {}, "Rows");
    let shownRows = null;
    const show = async (words, extra, from = 0) => {
      fill(title, words);
      shownRows = { words, extra };
      try {
        const page = await ctx.get(`/api/runs/rows?${new URLSearchParams({ output, at: from, count: 25, ...extra })}`);
        if (!over && shownRows.words === words) fill(rows, table(page.rows, from, (next) => show(words, extra, next)));
      } catch (error) { fill(rows, problem(error)); }
    };
    const groups = found.failures.length ? el("div", { class: "scroll" }, el("table", { class: "stacks" }, heads(["Cause"], ["Message"], ["Rows", 1], ["First lines"], [""]),
      el("tbody", {}, found.failures.map((one) => el("tr", {}, el("td", {}, el("code", {}, one.code)), el("td", { class: "long whole", dataset: { label: "Message" } }, one.message), el("td", { class: "num" }, number(one.count)), el("td", { class: "dim whole", dataset: { label: "First lines" } }, one.lines.join(", ")),
        el("td", {}, el("button", { class: "small", type: "button", onclick: () => show(`Rows that failed: ${one.code}`, { failed: 1, code: one.code, like: one.message }) }, "Show")))))))
      : el("p", { class: "dim" }, "No row failed.");
    const share = found.rows ? (100 * done) / found.rows : 100;
    await page(back(), el("div", { class: "head" }, el("h1", { class: "long" }, found.shown), tag(found.state)), found.reason ? el("p", { class: "note" }, found.reason) : null,
      el("section", { class: "card" }, el("progress", { max: 100, value: share, "aria-label": "Rows done" }), el("p", {}, `${number(done)} of ${number(found.rows)} rows done, ${number(found.failed)} failed`), el("dl", { class: "facts" }, [["Model", found.model], ["Input", found.input], ["Begun", ago(found.created_s)], ["At work", found.runners ? `${found.runners}` : "no one"]].map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))),
      el("section", { class: "card" }, el("h2", {}, "Failures by cause"), groups),
      el("section", { class: "card" }, el("div", { class: "head" }, title, el("button", { class: "small push", type: "button", onclick: () => show("Rows that were answered", {}) }, "Answered"), el("button", { class: "small", type: "button", disabled: !found.failed, onclick: () => show("Rows that failed", { failed: 1 }) }, "Failed")), rows));
    show("Rows that were answered", {});
  }

  return () => { over = true; };
}

function table(rows, from, turn) {
  if (!rows.length && !from) return el("p", { class: "dim" }, "There are none.");
  return [el("div", { class: "scroll" }, el("table", { class: "rows stacks" }, heads(["Line", 1], ["Id"], ["Question"], ["Answer"], ["End"]),
    el("tbody", {}, rows.map((row) => el("tr", {}, el("td", { class: "num" }, number(row.line)), el("td", { class: "long" }, row.id), el("td", { class: "whole", dataset: { label: "Question" } }, cut(row.question)), el("td", { class: `whole ${row.error ? "bad-text" : ""}`, dataset: { label: "Answer" } }, cut(row.error || row.answer)), el("td", { class: "dim" }, row.error ? row.code : row.finish_reason)))))),
  el("div", { class: "row" }, el("button", { class: "small", type: "button", disabled: from === 0, onclick: () => turn(Math.max(0, from - 25)) }, "◀ Before"), el("span", { class: "dim" }, rows.length ? `${number(from + 1)} to ${number(from + rows.length)}` : "no more"), el("button", { class: "small", type: "button", disabled: rows.length < 25, onclick: () => turn(from + 25) }, "Next ▶"))];
}

/** A long text on a few lines, the whole of it on demand. */
const cut = (text) => (text.length < 300 ? el("div", { class: "cell" }, text) : el("details", { class: "cell" }, el("summary", {}, `${text.slice(0, 240)}…`), text));
/** `p90_ttft_ms` as people write it; the unit stands beside the value. */
const metricName = (name) => name.replace(/_ms$/, "").replaceAll("_", " ").replace(/\b(ttft|tpot|itl|e2el)\b/g, (short) => short.toUpperCase()).replace(/^p(\d)/, "P$1");
const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}%`);
const signed = (value) => `${value > 0 ? "+" : ""}${round(value)}%`;
const figure = (name, value, unit) => el("div", { class: "card figure" }, el("h3", {}, name), el("p", { class: "figure-value" }, value, " ", el("small", {}, unit)));

function roofline(one) {
  const limit = one.limit;
  if (!limit) return el("p", { class: "dim" }, "How far this is from what the hardware allows is not known: the run has no plan to measure it against.");
  const bars = [["memory bandwidth while decoding", limit.decode_share], ["arithmetic over the run", limit.compute_share], ...(limit.prefill_share === null ? [] : [["arithmetic while prefilling", limit.prefill_share]]), ...(limit.reached === null ? [] : [[`of the plan's ${round(limit.roof_tokens_per_s)} tokens/s`, limit.reached]])];
  return el("section", { class: "card" }, el("h2", {}, "Distance to the roofline"), el("table", { class: "shares" }, el("tbody", {}, bars.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", { class: "num" }, share(value)), el("td", { class: "likely" }, el("span", { class: "likely-bar", style: { width: `${Math.min(100, 100 * value)}%` } })))))),
    el("p", {}, `Limited by ${limit.limited_by}. Likely to help: ${limit.advice}.`), el("p", { class: "dim" }, `Rates: ${limit.basis}.`));
}

function spreads(runs) {
  const columns = ["mean", "median", "p90", "p99"];
  return el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, "Latencies, ms"), runs.length > 1 ? el("span", { class: "dim" }, runs.map((one) => one.name).join(" → ")) : null), el("div", { class: "scroll" }, el("table", {}, heads(["Metric"], ...columns.map((name) => [name, 1])),
    el("tbody", {}, Object.entries(NAMES).map(([metric, name]) => el("tr", {}, el("td", {}, name), columns.map((column) => el("td", { class: "num" }, runs.map((one) => round(one.latency[metric][column])).join(" → ")))))))));
}

function timelines(runs) {
  const lines = (field) => runs.map((one) => ({ name: one.name, x: one.timeline[field].map((_, n) => Number(((n + 0.5) * one.timeline.step_s).toFixed(3))), y: one.timeline[field] }));
  const tokens = lines("tokens_per_s");
  const roof = runs.length === 1 ? runs[0].limit?.roof_tokens_per_s : null;
  if (roof) tokens.push({ name: "the plan's roofline", x: tokens[0].x, y: tokens[0].x.map(() => roof), dashed: true });
  return [chart("Output tokens per second, over time", { x: "s", y: "tokens/s", lines: tokens }), chart("Requests at once", { x: "s", y: "requests", lines: lines("concurrency") })];
}

function distributions(runs) {
  return Object.entries(NAMES).map(([metric, name]) => chart(`${name}, by percentile`, { x: "percentile", y: "ms", lines: runs.map((one) => ({ name: one.name, x: one.distribution.percent, y: one.distribution[metric] })).filter((line) => line.y.length) }));
}

function facts(one) {
  return el("details", { class: "card" }, el("summary", {}, "What was measured on what"), el("dl", { class: "facts" }, Object.entries(one.facts).map(([name, value]) => [el("dt", {}, worded(name, value)[0]), el("dd", {}, worded(name, value)[1])])));
}
