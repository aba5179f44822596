// One deployment: all that is known, its log with search, its journal.

import { copier, duration, el, empty, fill, number, problem, sentence, worded } from "/static/dom.js";
import { actions, dismissal, failure, readyWords, tag, waiting } from "/static/fleet.js";
import { standing, timeline } from "/static/phases.js";
import { confirmRun } from "/static/runner.js";

const clockTime = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function details(root, ctx, name) {
  const head = el("div", { class: "head" }), facts = el("section", { class: "card" });
  const line = el("p", { class: "dim" }), bar = el("div", {});
  const log = logPanel(ctx, { name }), journal = journalPanel(ctx, { name }), access = accessPanel(ctx, name);
  let row = null;
  fill(root, el("a", { href: "#/fleet" }, "← Overview"), head, facts, access.node, log.node, journal.node);
  return {
    draw(rows, now) {
      const found = rows.find((one) => one.kind !== "fleet" && one.name === name);
      if (found && found === row) return;
      row = found ?? null;
      fill(head, el("h1", { class: "long" }, name), row ? tag(row) : null, el("span", { class: "push row" }, row ? [row.state === "ready" ? el("a", { class: "button primary", href: `#/play/${encodeURIComponent(name)}` }, "Open in the Playground") : null, actions(row, ctx), dismissal(row)] : null));
      access.node.hidden = !row?.url || row.ended;
      if (!row) { fill(facts, empty("There is no such deployment.", el("p", {}, "It may have been deleted: corral down --purge"))); return; }
      log.ranks(row.ranks);
      journal.look();
      fill(facts, bar, line, failure(row), waiting(row), factList(row, now), phaseTable(row, now), nodeTable(row));
      this.tick(now);
    },
    tick(now) {
      if (!row) return;
      line.textContent = row.state === "ready" ? readyWords(row, now) : standing(row, now);
      line.hidden = !line.textContent;
      if (!row.ended) fill(bar, timeline(row, now)); else if (!bar.firstChild) fill(bar, timeline(row, now));
    },
    end() { log.end(); journal.end(); },
  };
}

function factList(row, now) {
  const pairs = [["model", row.model], ["engine", row.engine], ["target", row.target], ["endpoint", row.url],
    ["made", row.created_s ? `${duration(now - row.created_s)} ago` : null],
    ["job", row.job ? row.job.id : null],
    ["time left", row.job?.drains_s && !row.ended ? `${duration(Math.max(0, row.job.drains_s - now))} until it drains` : null],
    ["restarts", row.restarts || null],
    ...Object.entries(row.observed ?? {}).map(([key, value]) => worded(key, value)),
    ["start again", row.restart]];
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value && value !== "-").map(([key, value]) => [el("dt", {}, key), el("dd", { class: key === "start again" ? "mono" : "" }, value, " ", key === "endpoint" || key === "start again" ? copier(value, `Copy: ${key}`) : null)]));
}

/** Address, key and a first request; the key is asked for only when somebody wants to see it. */
function accessPanel(ctx, name) {
  const out = el("div", { class: "stack" });
  const line = (label, text) => el("div", { class: "command" }, el("span", { class: "dim" }, label), el("code", {}, text), copier(text, `Copy the ${label}`));
  const show = el("button", { type: "button", disabled: ctx.readOnly, onclick: async () => {
    try {
      const found = await ctx.post("/api/fleet/access", { name });
      fill(out, line("address", found.url), line("model", found.model), found.key ? line("key", found.key) : null, line("curl", found.curl));
    } catch (error) { fill(out, problem(error)); }
  } }, "Show key and curl");
  return { node: el("section", { class: "card", "aria-label": "Access", hidden: true }, el("div", { class: "head" }, el("h2", {}, "Access"), el("span", { class: "push" }, show)),
    ctx.readOnly ? el("p", { class: "dim" }, "This console only shows, and names no key: corral env") : null, out) };
}

/** One fleet: its members, how many there are to be, and what its keeper decides and writes. */
export function fleetPage(root, ctx, name) {
  const head = el("div", { class: "head" }), facts = el("section", { class: "card", "aria-label": "Fleet" }), access = accessPanel(ctx, name);
  const log = logPanel(ctx, { fleet: name }, "The keeper's log"), journal = journalPanel(ctx, { fleet: name });
  const size = el("input", { placeholder: "4, or 2..8", "aria-label": "Members", autocomplete: "off" });
  const scale = el("form", { class: "row", hidden: true }, el("label", { class: "inline" }, "Members", size), el("button", { type: "submit" }, "Scale"));
  scale.addEventListener("submit", (event) => {
    event.preventDefault();
    const replicas = size.value.trim();
    if (/^\d+(\.\.\d+)?$/.test(replicas)) confirmRun(ctx, `Scale ${name}`, `${row.scale} ${replicas}`, () => ctx.post("/api/fleet/scale", { name, replicas }));
    else ctx.toast("Write a number of members, such as 4, or a range, such as 2..8.");
  });
  let row = null;
  fill(root, el("a", { href: "#/fleet" }, "← Overview"), head, facts, access.node, log.node, journal.node);
  return {
    draw(rows) {
      const found = rows.find((one) => one.kind === "fleet" && one.name === name);
      if (found && found === row) return;
      row = found ?? null;
      fill(head, el("h1", { class: "long" }, name), el("span", { class: "tag" }, "fleet"), row ? tag(row) : null, el("span", { class: "push row" },
        row?.url && !row.ended ? el("a", { class: "button primary", href: `#/play/${encodeURIComponent(name)}` }, "Open in the Playground") : null, row ? actions({ ...row, restart: null }, ctx) : null));
      if (!row) { fill(facts, empty("There is no such fleet.")); return; }
      access.node.hidden = !row.url || row.ended;
      scale.hidden = ctx.readOnly || row.ended;
      if (document.activeElement !== size) size.value = row.least === row.most ? String(row.wanted) : `${row.least}..${row.most}`;
      journal.look();
      const pairs = [["model", row.model], ["endpoint", row.url], ["status", row.text], ["members", `${row.ready} ready of ${row.wanted} wanted`], ["requests", row.running === undefined ? null : `${row.running} running, ${row.waiting} waiting`]];
      fill(facts, row.warning ? el("p", { class: "problem" }, sentence(row.warning)) : null, el("dl", { class: "facts" }, pairs.filter(([, value]) => value).map(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])), scale,
        el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Member"), el("th", {}, "State"), el("th", { class: "num" }, "Requests"))),
          el("tbody", {}, row.members.map((one) => {
            const known = rows.find((each) => each.kind !== "fleet" && each.name === one.name);
            return el("tr", {}, el("td", { class: "long" }, el("a", { href: `#/fleet/d/${encodeURIComponent(one.name)}` }, one.name)), el("td", {}, known ? tag(known) : "–", one.leaving ? " leaving" : null), el("td", { class: "num" }, number(one.load?.running)));
          })))));
    },
    tick() {},
    end() { log.end(); journal.end(); },
  };
}

function phaseTable(row, now) {
  const past = row.phases.filter((one) => one.since_s !== null);
  if (!past.length) return null;
  return el("details", {}, el("summary", {}, "Phases in figures"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "Phase"), el("th", {}, "Began"), el("th", { class: "num" }, "Took"), el("th", { class: "num" }, "Usual"))),
    el("tbody", {}, past.map((one) => el("tr", {}, el("td", {}, one.phase), el("td", {}, clockTime(one.since_s)),
      el("td", { class: "num" }, duration((one.until_s ?? now) - one.since_s)), el("td", { class: "num" }, one.expected_s === null ? "–" : duration(one.expected_s))))))));
}

function nodeTable(row) {
  if (!row.nodes || row.nodes.length < 1) return null;
  return el("details", {}, el("summary", {}, `${row.nodes.length} node${row.nodes.length > 1 ? "s" : ""}`), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "Rank"), el("th", {}, "Node"), el("th", { class: "num" }, "GPUs"), el("th", {}, "Joined"))),
    el("tbody", {}, row.nodes.map((one) => el("tr", {}, el("td", {}, String(one.rank)), el("td", { class: "long" }, one.node), el("td", { class: "num" }, String(one.gpus)), el("td", {}, one.joined ? "yes" : "not yet")))))));
}

function logPanel(ctx, whose, title = "The engine's log") {
  const search = el("input", { type: "search", placeholder: "Search the log", "aria-label": "Search the log" });
  const rank = el("select", { "aria-label": "Rank", hidden: true });
  const follow = el("input", { type: "checkbox", checked: true });
  const count = el("span", { class: "dim", role: "status" });
  const text = el("pre", { class: "log", tabindex: "0", "aria-label": title });
  let end = null, turn = 0, timer = 0, over = false, shown = 0;
  const url = (more) => `/api/fleet/logs?${new URLSearchParams({ ...whose, rank: rank.value || "0", ...more })}`;

  async function anew() {
    const mine = ++turn, word = search.value.trim();
    try {
      const page = await ctx.get(url(word ? { search: word } : {}));
      if (mine !== turn) return;
      end = page.end;
      fill(text, page.lines.map((one) => lineOf(one, word)));
      shown = page.lines.length;
      count.textContent = word ? `${page.found} line${page.found === 1 ? "" : "s"} with “${word}”` : page.size ? `${(page.size / 1024).toFixed(0)} KiB` : "";
      if (!page.lines.length) text.textContent = word ? "No line has it." : "Nothing has been written yet.";
      text.scrollTop = text.scrollHeight;
    } catch (error) { if (mine === turn) fill(text, `${sentence(error.message)} ${error.remedy ?? ""}`); }
  }

  async function more() {
    clearTimeout(timer);
    if (over) return;
    if (follow.checked && !document.hidden && end !== null && !search.value.trim()) {
      const mine = turn;
      try {
        const page = await ctx.get(url({ after: end }));
        if (mine === turn && page.size < end) await anew(); // trimmed
        else if (mine === turn && page.lines.length) {
          if (!shown) fill(text);
          end = page.end;
          shown += page.lines.length;
          const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 60;
          text.append(...page.lines.map((one) => lineOf(one, "")));
          while (text.childNodes.length > 2000) text.firstChild.remove();
          if (atEnd) text.scrollTop = text.scrollHeight;
        }
      } catch { /* the next look says more */ }
    }
    if (!over) timer = setTimeout(more, 2000);
  }

  let typing = 0;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(anew, 250); });
  rank.addEventListener("change", anew);
  anew().then(more);
  return {
    node: el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, "Log"), count, el("span", { class: "push row" }, rank, el("label", { class: "inline" }, follow, " follow"), el("span", { class: "find" }, search))), text),
    ranks(number) {
      if (rank.options.length === number) return;
      const chosen = rank.value || "0";
      fill(rank, Array.from({ length: number }, (_, at) => el("option", { value: String(at), selected: String(at) === chosen }, `rank ${at}`)));
      rank.hidden = number < 2;
    },
    end() { over = true; clearTimeout(timer); },
  };
}

function lineOf(line, word) {
  const node = el("span", {});
  const at = word ? line.toLowerCase().indexOf(word.toLowerCase()) : -1;
  if (at < 0) node.append(line, "\n");
  else node.append(line.slice(0, at), el("mark", {}, line.slice(at, at + word.length)), line.slice(at + word.length), "\n");
  return node;
}

function journalPanel(ctx, whose) {
  const body = el("tbody", {});
  let over = false;
  return {
    node: el("section", { class: "card" }, el("h2", {}, "Events"), el("div", { class: "scroll journal" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, "When"), el("th", { class: "num" }, "After"), el("th", {}, "Rank"), el("th", {}, "What"), el("th", {}, "Details"))), body))),
    async look() {
      try {
        const { events } = await ctx.get(`/api/fleet/events?${new URLSearchParams(whose)}`);
        if (over) return;
        fill(body, events.length ? events.map(eventRow) : el("tr", {}, el("td", { colspan: "5", class: "dim" }, "Nothing has happened yet.")));
      } catch (error) { fill(body, el("tr", {}, el("td", { colspan: "5" }, problem(error)))); }
    },
    end() { over = true; },
  };
}

function eventRow(one) {
  const { state, phase, ...rest } = one.details;
  const words = Object.entries(rest).filter(([, value]) => value !== null && value !== "").map(([key, value]) => worded(key, value).join(" ")).join(", ");
  return el("tr", {}, el("td", {}, clockTime(one.at_s)), el("td", { class: "num" }, duration(one.elapsed_s)), el("td", {}, String(one.rank)),
    el("td", {}, `${one.kind} ${state ?? phase ?? ""}`), el("td", { class: "dim long" }, words.slice(0, 600)));
}
