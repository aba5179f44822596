// A start as a line of phases. Widths grow with the logarithm of time: a queue of hours does not hide a load of seconds.

import { duration, el } from "/static/dom.js";

// under its piece of the line there is little room: the whole name is in the title
const SHORT = { "installing engine": "engine", "measuring CPU": "CPU", "fetching model": "fetching", "pulling image": "image", initialising: "init", staging: "stage", starting: "start", loading: "load", compiling: "compile", warming: "warm", draining: "drain", queued: "queue" };

const LONG = { "installing engine": "engine", "measuring CPU": "CPU", "fetching model": "fetching", "pulling image": "image" };

const share = (one) => one.done && one.total ? Math.min(1, one.done / one.total) : null;

function seconds(one, now) {
  if (one.since_s === null) return one.expected_s ?? 1;
  return Math.max((one.until_s ?? now) - one.since_s, one.until_s === null ? one.expected_s ?? 0 : 0, 0.2);
}

function words(one, now) {
  const usual = one.expected_s === null ? "" : one.remembered ? `, usually ${duration(one.expected_s)} here` : `, about ${duration(one.expected_s)} expected`;
  if (one.since_s === null) return `${one.phase}: to come${usual}`;
  if (one.until_s === null && one.text) return `${one.phase}: ${one.text}`;
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
      el("span", { class: "phase-name" }, kind === "now" ? LONG[one.phase] ?? one.phase : SHORT[one.phase] ?? one.phase, part === null ? "" : ` ${Math.round(100 * part)}%`));
  });
  return el("ol", { class: `phases${row.state === "failed" ? " failed" : ""}`, "aria-label": "Phases of the start" }, pieces);
}

/** How far the phase is: a share, and amounts where they are bytes. */
function far(one) {
  const part = share(one);
  if (part === null) return "";
  const gb = (bytes) => (bytes / 1e9).toFixed(2);
  return ` ${Math.round(100 * part)}%${one.total > 1e6 ? ` (${gb(one.done)} of ${gb(one.total)} GB)` : ""}`;
}

/** What a scheduler's job has left, where that is known. */
export function timeLeft(row, now) {
  return row.job?.drains_s && !row.ended ? `${duration(Math.max(0, row.job.drains_s - now))} of its job's time left` : "";
}

/** What it is doing now, and until when, in words. */
export function standing(row, now) {
  const at = row.phases?.find((one) => one.since_s !== null && one.until_s === null);
  if (!at || row.ended || row.state === "ready" || row.state === "unknown") return "";
  return [course(row, at, now), timeLeft(row, now)].filter(Boolean).join("; ");
}

function course(row, at, now) {
  const ends = at.ends_s === null || at.ends_s < now ? "" : `, ${duration(Math.max(1, at.ends_s - now))} left`;
  const lasted = `${at.phase}${far(at)} for ${duration(now - at.since_s)}${ends}`;
  const usual = at.expected_s === null ? "" : at.remembered ? ` (usually ${duration(at.expected_s)} here)` : ` (about ${duration(at.expected_s)} expected)`;
  if (row.ready_at_s === null || row.ready_at_s === undefined) return lasted + usual;
  const rest = row.phases.reduce((sum, one) => sum + (one.since_s === null ? one.expected_s ?? 0 : 0), 0);
  // a pace that did not hold says nothing: past the end it promised, what is usual counts
  const usually = at.expected_s === null ? null : at.since_s + at.expected_s;
  const due = at.ends_s === null ? usually : Math.max(at.ends_s, usually ?? at.ends_s);
  // past that nobody knows when this phase ends: what is left is at least what comes after it
  if (due !== null && now > due) return `${lasted}${usual}: longer than usual${rest ? `; then about ${duration(rest)} until ready` : ""}`;
  const ready = at.ends_s !== null && now > at.ends_s ? due + rest : row.ready_at_s;
  return `${lasted}${usual}, ready in about ${duration(Math.max(1, ready - now))}`;
}
