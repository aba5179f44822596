import { empty, fill } from "/static/dom.js";

export function mount(root, ctx) {
  fill(root, empty("Nothing here yet."));
  return () => {};
}
