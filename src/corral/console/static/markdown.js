// Markdown as elements. Text becomes text nodes only, so that nothing a model writes is run or loaded; what is not
// understood stays as it was written.

import { copier, el } from "/static/dom.js";

const DEEPEST = 6; // lists and quotations in each other
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]{0,30})[^`]*$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const BETWEEN = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/; // the line below the head of a table
// every repetition has a bound: a hostile text takes no more time than its length
const INLINE = /\\([*_`#|~])|`([^`\n]{1,2000})`|\*\*([^\s*](?:[^*]|\*(?!\*)){0,1000})\*\*|(?<!\w)__([^\s_](?:[^_]|_(?!_)){0,1000})__(?!\w)|~~([^~\n]{1,1000})~~|\*([^\s*][^*\n]{0,1000})\*|(?<!\w)_([^\s_][^_\n]{0,1000})_(?!\w)|\[([^\]\n]{1,500})\]\((https?:\/\/[^\s)]{1,2000})\)|(https?:\/\/[^\s<>"'`)\]*]{1,2000})/g;
const TAGS = { 3: "strong", 4: "strong", 5: "s", 6: "em", 7: "em" };

/** The elements of a text. */
export const markdown = (text) => blocks(text.replaceAll("\t", "    ").split("\n"), 0);

function blocks(lines, depth) {
  if (depth > DEEPEST) return [el("p", {}, lines.join("\n"))];
  const made = [];
  let at = 0;
  const take = (fits) => { const from = at; while (at < lines.length && fits(lines[at])) at++; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      at++;
      const code = take((one) => !one.trim().startsWith(fence[1])).join("\n");
      at++;
      made.push(block(code, fence[2]));
    } else if (heading) {
      at++;
      made.push(el("p", { class: "md-head", role: "heading", "aria-level": String(heading[1].length + 2) }, inline(heading[2].replace(/ +#+ *$/, ""))));
    } else if (RULE.test(line)) {
      at++;
      made.push(el("hr"));
    } else if (/^ {0,3}>/.test(line)) made.push(el("blockquote", {}, blocks(take((one) => /^ {0,3}>/.test(one)).map((one) => one.replace(/^ {0,3}> ?/, "")), depth + 1)));
    else if (line.includes("|") && BETWEEN.test(lines[at + 1] ?? "")) made.push(table(take((one) => one.includes("|"))));
    else if (ITEM.test(line)) {
      let blank = false;
      const [, { length: indent }, mark] = ITEM.exec(line);
      const alike = (item) => item && /\d/.test(item[2]) === /\d/.test(mark);
      made.push(list(take((one) => {
        const inside = !one.trim() || alike(ITEM.exec(one)) || one.search(/\S/) > indent || (!blank && !starts(one));
        blank = !one.trim();
        return inside;
      }), depth));
    } else made.push(el("p", {}, inline([lines[at++], ...take((one) => one.trim() && !starts(one))].join("\n"))));
  }
  return made;
}

const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^ {0,3}>/.test(line);

const block = (code, language) => el("div", { class: "code" }, el("div", { class: "code-head dim" }, el("span", {}, language), copier(code, "Copy the code")), el("pre", { tabindex: "0" }, el("code", {}, code)));

function list(lines, depth) {
  const first = ITEM.exec(lines[0]), indent = first[1].length, items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) items.push({ cut: line.length - item[3].length, lines: [item[3]] });
    else items.at(-1).lines.push(line.slice(Math.min(items.at(-1).cut, Math.max(0, line.search(/\S|$/)))));
  }
  const ordered = /\d/.test(first[2]);
  return el(ordered ? "ol" : "ul", ordered ? { start: String(parseInt(first[2], 10)) } : {}, items.map((one) => el("li", {}, blocks(one.lines, depth + 1))));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((one) => inline(one.trim()));
  const [head, , ...rows] = lines;
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, cells(head).map((one) => el("th", {}, one)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells(row).map((one) => el("td", {}, one)))))));
}

/** Bold, italic, code and links; a link goes to http or https, and tells nobody where it was clicked. */
function inline(text) {
  const made = [];
  let done = 0;
  for (const found of text.matchAll(INLINE)) {
    made.push(text.slice(done, found.index));
    done = found.index + found[0].length;
    const [, escaped, code, , , , , , words, url, bare] = found;
    const kind = [3, 4, 5, 6, 7].find((one) => found[one] !== undefined);
    if (escaped !== undefined) made.push(escaped);
    else if (code !== undefined) made.push(el("code", {}, code));
    else if (kind) made.push(el(TAGS[kind], {}, inline(found[kind])));
    else made.push(el("a", { href: url ?? bare, target: "_blank", rel: "noopener noreferrer" }, words ?? bare));
  }
  made.push(text.slice(done));
  return made;
}
