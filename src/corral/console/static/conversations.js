// Conversations: the present one stays in its tab (sessionStorage), those that were saved in the browser (localStorage).

import { readContent } from "/static/pictures.js";

const NOW = "corral-play", KEPT = "corral-conversations";
const MOST = 50;

/** The conversation of this tab, as it was before the page was loaded again. */
export const present = () => read(sessionStorage, NOW);

/** Keep the conversation of this tab; where its tokens take too much room, only its texts. */
export function keep(make) {
  for (const whole of [true, false]) {
    try { sessionStorage.setItem(NOW, JSON.stringify(make(whole))); return; } catch { /* the browser has no room */ }
  }
}

/** Saved conversations, newest first: {title, at, held}. */
export const all = () => read(localStorage, KEPT) ?? [];

export function save(held) {
  const first = held.lanes.flatMap((one) => one.messages).find((one) => one.role === "user");
  const said = first ? readContent(first.content).text : held.prompt;
  const title = said.trim().split("\n")[0].slice(0, 60) || "Conversation";
  localStorage.setItem(KEPT, JSON.stringify([{ title, at: Date.now(), held }, ...all()].slice(0, MOST)));
}

export const remove = (at) => localStorage.setItem(KEPT, JSON.stringify(all().filter((one) => one.at !== at)));

function read(storage, name) {
  try { return JSON.parse(storage.getItem(name)); } catch { return null; }
}

/** A conversation as Markdown. */
export function asMarkdown(held) {
  const names = { user: "Question", assistant: "Answer", system: "System" };
  const words = (content) => { const { text, pictures } = readContent(content); return [...pictures.map(() => "(a picture)"), text].join("\n\n"); };
  const turn = (one) => `## ${names[one.role] ?? one.role}\n\n${words(one.content)}\n`;
  return held.lanes.map((one) => [held.lanes.length > 1 ? `# ${one.server}\n` : null, held.system ? turn({ role: "system", content: held.system }) : null,
    held.mode === "completion" && held.prompt ? turn({ role: "user", content: held.prompt }) : null, ...one.messages.map(turn)].filter(Boolean).join("\n")).join("\n");
}
