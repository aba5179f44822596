// Overview: every deployment with its phases, failures with their remedy, and what can be done about it.

import { command, copier, duration, el, empty, exchange, fill, sentence } from "/static/dom.js";
import { details, fleetPage } from "/static/deployment.js";
import { startForm } from "/static/start.js";
import { confirmRun } from "/static/runner.js";
import { standing, timeLeft, timeline } from "/static/phases.js";

export const TAGS = { ready: "good", failed: "bad", unknown: "warn", stopped: "", draining: "warn" };
const MOVING = new Set(["staging", "queued", "starting", "loading", "draining"]);
const RANK = { failed: 0, unknown: 1, staging: 2, queued: 2, starting: 2, loading: 2, draining: 3, ready: 4, stopped: 5 };

export const tag = (row) => el("span", { class: `tag ${TAGS[row.state] ?? "busy"}` }, row.state);

export function mount(root, ctx) {
  const [where, name] = ctx.path;
  if (where === "start") return startForm(root, ctx);
  const rows = new Map();
  let order = [], skew = 0, came = false;
  const clock = () => Date.now() / 1000 + skew;
  const show = where === "d" ? details(root, ctx, name) : where === "f" ? fleetPage(root, ctx, name) : list(root, ctx);
  const draw = () => { if (came) show.draw(order.map((key) => rows.get(key)).filter(Boolean), clock()); };
  const end = ctx.stream("/api/fleet/stream", (news) => {
    skew = news.now_s - Date.now() / 1000;
    for (const row of news.rows) rows.set(row.key, row);
    if (news.order) { order = news.order; for (const key of rows.keys()) if (!order.includes(key)) rows.delete(key); }
    came = true;
    draw();
  });
  const timer = setInterval(() => { if (!document.hidden) show.tick(clock()); }, 1000);
  return () => { end(); clearInterval(timer); show.end(); };
}

function list(root, ctx) {
  const search = el("input", { type: "search", placeholder: "Find by name, model, state, node…", "aria-label": "Find deployments" });
  const counts = el("span", { class: "dim" });
  const body = el("div", { class: "stack-wide" }, el("p", { class: "dim" }, "Looking…"));
  const warnings = el("div", {});
  const cards = new Map(); // key -> {row, node, tick}
  let known = [], now = 0;
  const start = ctx.readOnly ? null : el("a", { class: "button primary", href: "#/fleet/start" }, "Start a model");
  fill(root, el("div", { class: "head" }, el("h1", {}, "Overview"), counts, el("span", { class: "push find" }, search), start), warnings, body);
  search.addEventListener("input", () => arrange());
  addEventListener("corral-dismissed", arrange);

  function arrange() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => { const text = hay(row); return words.every((word) => text.includes(word)); };
    const shown = known.filter(fits);
    const fleets = shown.filter((row) => row.kind === "fleet" && !row.ended);
    const inFleet = new Set(fleets.flatMap((row) => row.members.map((one) => one.name)));
    const alone = shown.filter((row) => row.kind !== "fleet" && !inFleet.has(row.name));
    const shut = (row) => row.ended && (row.state !== "failed" || dismissed(row));
    const living = alone.filter((row) => !shut(row)).sort((a, b) => (RANK[a.state] ?? 1) - (RANK[b.state] ?? 1));
    const ended = alone.filter(shut);
    const state = known.filter((row) => row.kind !== "fleet").reduce((sums, row) => ({ ...sums, [row.state]: (sums[row.state] ?? 0) + 1 }), {});
    counts.textContent = Object.entries(state).map(([word, count]) => `${count} ${word}`).join(" · ");
    const card = (row) => cards.get(row.key)?.node;
    if (!known.length) return fill(body, nothing(ctx));
    if (!shown.length) return fill(body, empty("Nothing of that name.", el("p", {}, "The search looks at names, models, states, targets and nodes.")));
    const byName = new Map(known.filter((row) => row.kind !== "fleet").map((row) => [row.name, row]));
    const kept = body.querySelector("details")?.open ?? false;
    fill(body,
      fleets.map((row) => el("section", { class: "fleet" }, card(row), el("div", { class: "grid" }, row.members.map((one) => byName.get(one.name)).filter(Boolean).map(card)))),
      living.length ? el("div", { class: "grid" }, living.map(card)) : null,
      ended.length ? el("details", { open: kept || (!living.length && !fleets.length) }, el("summary", {}, `${ended.length} ended`), el("div", { class: "grid" }, ended.map(card))) : null);
  }

  return {
    draw(rows, at) {
      now = at;
      let changed = rows.length !== known.length;
      for (const row of rows) {
        const old = cards.get(row.key);
        if (old?.row === row) continue;
        const made = row.kind === "fleet" ? fleetCard(row, ctx) : deploymentCard(row, ctx, at);
        if (old?.node.isConnected && old.row.state === row.state) exchange(old.node, made.node); else changed = true;
        cards.set(row.key, { row, ...made });
      }
      const keys = new Set(rows.map((row) => row.key));
      for (const key of cards.keys()) if (!keys.has(key)) cards.delete(key);
      known = rows;
      fill(warnings, rows.filter((row) => row.warning).map((row) => el("p", { class: "problem", role: "alert" }, sentence(row.warning))));
      if (changed || !rows.length) arrange();
    },
    tick(at) { for (const one of cards.values()) one.tick?.(at); },
    end() { removeEventListener("corral-dismissed", arrange); },
  };
}

// failures that were seen and dismissed in this browser, by name and time
const DISMISSED = "corral-dismissed";
const seen = () => { try { return JSON.parse(localStorage.getItem(DISMISSED)) ?? []; } catch { return []; } };
const failureOf = (row) => `${row.created_s} ${row.name}`;
const dismissed = (row) => seen().includes(failureOf(row));

/** A button that puts an old failure among what has ended. */
export function dismissal(row) {
  if (row.state !== "failed" || dismissed(row)) return null;
  return el("button", { type: "button", title: "Put it among what has ended", onclick: (event) => {
    localStorage.setItem(DISMISSED, JSON.stringify([failureOf(row), ...seen()].slice(0, 200)));
    event.target.remove();
    dispatchEvent(new Event("corral-dismissed"));
  } }, "Dismiss");
}

const hay = (row) => [row.name, row.model, row.state, row.target, row.reason, row.text, row.job?.id, ...(row.nodes ?? []).map((one) => one.node)].join(" ").toLowerCase();

function nothing(ctx) {
  return empty("No deployments yet.",
    el("p", {}, ctx.readOnly ? "Start one in a terminal:" : "Start one here, or in a terminal:"), command("corral up"),
    ctx.readOnly ? null : el("a", { class: "button primary", href: "#/fleet/start" }, "Start a model"));
}

export function failure(row) {
  if (!(row.state === "failed" || (row.state === "stopped" && row.reason && row.reason !== "requested") || row.state === "unknown")) return null;
  const reason = row.reason ? row.reason.replaceAll("_", " ") : row.state === "unknown" ? "how it stands is not known" : row.state;
  return el("div", { class: row.state === "failed" ? "problem" : "note", role: row.state === "failed" ? "alert" : null },
    el("strong", {}, sentence(reason)), row.text ? el("p", {}, sentence(row.text)) : null,
    row.remedy ? el("p", { class: "remedy" }, el("span", { class: "dim" }, "What to do: "), row.remedy) : null);
}

/** What a scheduler says of a job that waits. */
export function waiting(row) {
  if (row.state !== "queued" || !row.text) return null;
  return el("div", { class: "note" }, el("p", {}, sentence(row.text)), row.remedy ? el("p", { class: "remedy" }, row.remedy) : null);
}

function deploymentCard(row, ctx, now) {
  const line = el("p", { class: "dim standing" });
  const bar = el("div", {});
  const moving = MOVING.has(row.state);
  const tick = (at) => {
    if (moving) { line.textContent = standing(row, at); fill(bar, timeline(row, at)); } else if (row.state === "ready") line.textContent = readyWords(row, at);
    else line.textContent = row.since_s && row.state !== "unknown" ? `${row.state} ${duration(at - row.since_s)} ago` : "";
    line.hidden = !line.textContent;
  };
  if (!moving && row.phases.length > 1 && row.state === "failed") fill(bar, timeline(row, now));
  tick(now);
  const href = `#/fleet/d/${encodeURIComponent(row.name)}`;
  const node = el("article", { class: `card deployment ${row.state}`, "data-name": row.name, "aria-label": `Deployment ${row.name}, ${row.state}` },
    el("div", { class: "card-head" }, el("h2", {}, el("a", { href, title: row.name }, row.name)), tag(row)),
    el("p", { class: "dim facts-line" }, [row.model === row.name ? null : row.model, row.target, row.engine, row.job ? `job ${row.job.id}` : null, nodesWords(row)].filter((one) => one && one !== "-").join(" · ")),
    bar, line, failure(row), waiting(row),
    row.url ? el("div", { class: "row" }, el("code", { class: "url" }, row.url), copier(row.url, "Copy the address")) : null,
    el("div", { class: "row actions" }, el("a", { class: "button", href }, "Logs and events"), row.state === "ready" ? el("a", { class: "button", href: `#/play/${encodeURIComponent(row.name)}` }, "Playground") : null, actions(row, ctx), dismissal(row)));
  return { node, tick };
}

const nodesWords = (row) => {
  if (!row.nodes?.length) return null;
  return row.nodes.length === 1 ? row.nodes[0].node : `${row.nodes.filter((one) => one.joined).length} of ${row.nodes.length} nodes`;
};

export function readyWords(row, at) {
  const words = [`ready for ${duration(at - row.since_s)}`];
  if (row.ready_s !== null) words.push(`after ${duration(row.ready_s)}`);
  if (timeLeft(row, at)) words.push(timeLeft(row, at));
  if (row.restarts) words.push(`${row.restarts} restart${row.restarts > 1 ? "s" : ""}`);
  return words.join(", ");
}

export function actions(row, ctx) {
  if (ctx.readOnly) return [];
  const button = (text, line, path, danger) => line ? el("button", { type: "button", class: danger ? "danger" : "",
    onclick: () => confirmRun(ctx, `${text} ${row.name}`, line, () => ctx.post(path, { name: row.name }), { danger }) }, text) : null;
  const again = row.restart && row.stop ? `${row.stop} && ${row.restart}` : row.restart;
  return [button(row.ended ? "Start again" : "Restart", again, "/api/fleet/restart", false), button("Stop", row.stop, "/api/fleet/stop", true)];
}

function fleetCard(row, ctx) {
  const size = row.least === row.most ? `${row.wanted} members` : `${row.wanted} members (${row.least} to ${row.most})`;
  const node = el("article", { class: "card fleet-card", "data-name": row.name, "aria-label": `Fleet ${row.name}, ${row.state}` },
    el("div", { class: "card-head" }, el("h2", {}, el("a", { href: `#/fleet/f/${encodeURIComponent(row.name)}` }, row.name)), el("span", { class: "tag" }, "fleet"), tag(row)),
    el("p", { class: "dim facts-line" }, [row.model, size, row.text, row.running === undefined ? null : `${row.running} running, ${row.waiting} waiting`,
      row.at_urls?.length ? `also ${row.at_urls.join(", ")}` : null].filter(Boolean).join(" · ")),
    row.url ? el("code", { class: "url" }, row.url) : null,
    el("div", { class: "row actions" }, el("a", { class: "button", href: `#/fleet/f/${encodeURIComponent(row.name)}` }, "Scale, logs and events"), actions({ ...row, restart: null }, ctx)));
  return { node };
}
