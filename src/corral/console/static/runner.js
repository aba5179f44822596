// Whatever a button does is a command line: shown first, then run, with what it prints.

import { command, el, fill, problem, sentence } from "/static/dom.js";

/** Show a line and run it on demand: `go()` posts and returns the running command. */
export function confirmRun(ctx, title, line, go, { danger = false, done = () => {} } = {}) {
  const out = el("div", { class: "stack" });
  const run = el("button", { class: danger ? "danger" : "primary", type: "button", autofocus: true }, danger ? "Do it" : "Run");
  const close = el("button", { type: "button" }, "Cancel");
  const box = el("dialog", { class: "card", "aria-label": title },
    el("h2", {}, title),
    el("p", { class: "dim" }, "This runs the same command as in a terminal:"),
    command(line), out, el("div", { class: "row" }, run, close));
  let ending = () => {};
  box.addEventListener("close", () => { ending(); box.remove(); });
  close.addEventListener("click", () => box.close());
  run.addEventListener("click", async () => {
    run.disabled = true;
    try {
      const begun = await go();
      run.remove();
      close.textContent = "Close";
      ending = follow(ctx, begun, out, done);
    } catch (error) { run.disabled = false; fill(out, problem(error)); }
  });
  document.body.append(box);
  box.showModal();
}

/** A command's output as it comes; returns what stops looking. The command itself goes on. */
export function follow(ctx, begun, out, done = () => {}) {
  let over = false, timer = 0;
  const words = el("span", { class: "tag busy", role: "status" }, "running");
  const log = el("pre", { class: "log", tabindex: "0", "aria-label": "Output" });
  fill(out, el("div", { class: "row" }, words), log);
  const look = async () => {
    try {
      const now = await ctx.get(`/api/commands/${encodeURIComponent(begun.id)}`);
      if (over) return;
      const text = now.output.join("\n");
      if (log.textContent !== text) { log.textContent = text; log.scrollTop = log.scrollHeight; }
      if (now.exit_code !== null) {
        words.className = now.exit_code === 0 ? "tag good" : "tag bad";
        words.textContent = now.exit_code === 0 ? "done" : `failed (exit code ${now.exit_code})`;
        done(now);
        return;
      }
    } catch (error) { if (!over) words.textContent = sentence(error.message); }
    if (!over) timer = setTimeout(look, 1000);
  };
  look();
  return () => { over = true; clearTimeout(timer); };
}
