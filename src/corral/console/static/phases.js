// A start as a line of phases. Widths grow with the logarithm of time: a queue of hours does not hide a load of seconds.

import { duration, el } from "/static/dom.js";

const NAMES = { "installing engine": "engine", "fetching model": "fetching", initialising: "init" };

const share = (one) => one.done && one.total ? Math.min(1, one.done / one.total) : null;

function seconds(one, now) {
  if (one.since_s === null) return one.expected_s ?? 1;
  return Math.max((one.until_s ?? now) - one.since_s, one.until_s === null ? one.expected_s ?? 0 : 0, 0.2);
}

function words(one, now) {
  const usual = one.expected_s === null ? "" : one.remembered ? `, usually ${duration(one.expected_s)} here` : `, about ${duration(one.expected_s)} expected`;
  if (one.since_s === null) return `${one.phase}: to come${usual}`;
  return `${one.phase}: ${duration((one.until_s ?? now) - one.since_s)}${usual}`;
}

/** The line; `now` is the console's clock. */
export function timeline(row, now) {
  const pieces = row.phases.filter((one) => one.phase !== "failed" && one.phase !== "stopped").map((one) => {
    const kind = one.since_s === null ? "later" : one.until_s === null && !row.ended ? (one.phase === "ready" ? "ready" : "now") : "past";
    const part = share(one);
    const width = one.phase === "ready" ? 1 : Math.log2(1 + seconds(one, now)) + 0.6;
    const filled = kind === "now" ? part ?? (one.expected_s ? Math.min(0.97, (now - one.since_s) / one.expected_s) : null) : null;
    return el("li", { class: `phase ${kind}`, style: { "flex-grow": String(width) }, title: words(one, now) },
      el("span", { class: `phase-bar${kind === "now" && filled === null ? " unknown" : ""}`, "data-phase": one.phase },
        filled === null ? null : el("span", { class: "phase-done", style: { width: `${100 * filled}%` } })),
      el("span", { class: "phase-name" }, NAMES[one.phase] ?? one.phase, part === null ? "" : ` ${Math.round(100 * part)}%`));
  });
  return el("ol", { class: `phases${row.state === "failed" ? " failed" : ""}`, "aria-label": "Phases of the start" }, pieces);
}

/** What it is doing now, and until when, in words. */
export function standing(row, now) {
  const at = row.phases?.find((one) => one.since_s !== null && one.until_s === null);
  if (!at || row.ended || row.state === "ready") return "";
  const lasted = `${at.phase} for ${duration(now - at.since_s)}`;
  const usual = at.expected_s === null ? "" : at.remembered ? ` (usually ${duration(at.expected_s)} here)` : ` (about ${duration(at.expected_s)} expected)`;
  if (row.ready_at_s === null || row.ready_at_s === undefined) return lasted + usual;
  // past its usual end nobody knows when this phase ends: what is left is at least what comes after it
  if (share(at) === null && at.expected_s !== null && now - at.since_s > at.expected_s) {
    const rest = row.phases.reduce((sum, one) => sum + (one.since_s === null ? one.expected_s ?? 0 : 0), 0);
    return `${lasted}${usual}: longer than usual${rest ? `; then about ${duration(rest)} until ready` : ""}`;
  }
  return `${lasted}${usual}, ready in about ${duration(Math.max(1, row.ready_at_s - now))}`;
}
