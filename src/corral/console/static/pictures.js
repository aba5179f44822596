// Pictures beside a prompt: chosen, dropped or pasted, made smaller where they are large, sent as data: URLs.

import { el, fill } from "/static/dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 4, MOST_SIDE = 1568, MOST_BYTES = 1 << 20;

export const isPicture = (url) => /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/.test(url);

/** What a message holds: its text, or where there are pictures these and the text as parts. */
export const withPictures = (text, pictures = []) => (pictures.length ? [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])] : text);

/** A message's content as text and pictures. */
export function readContent(content) {
  if (!Array.isArray(content)) return { text: String(content), pictures: [] };
  return { text: content.filter((one) => one.type === "text").map((one) => String(one.text)).join("\n"), pictures: content.map((one) => one.image_url?.url).filter(isPicture) };
}

export const hasPictures = (prompt) => Array.isArray(prompt) && prompt.some((one) => Array.isArray(one?.content));

export function thumbnail(url, remove = null) {
  const image = el("img", { class: "thumbnail", alt: "Picture" });
  image.src = url;
  return remove ? el("button", { type: "button", class: "plain", "aria-label": "Remove the picture", title: "Remove it", onclick: remove }, image) : image;
}

/** The pictures of the next message: `node` shows them, `offer(on)` says whether the model takes any. */
export function attachments(form, prompt, { toast, changed }) {
  let urls = [], offered = false;
  const file = el("input", { type: "file", accept: KINDS.join(), multiple: true, hidden: true, "aria-label": "Choose pictures" });
  const button = el("button", { type: "button", onclick: () => file.click() }, "Picture…"), shown = el("div", { class: "row" });
  const note = el("p", { class: "note" }, "A chosen model takes no pictures: remove them, or choose another.");
  const draw = () => {
    button.hidden = !offered;
    note.hidden = offered || !urls.length;
    shown.hidden = !urls.length;
    fill(shown, urls.map((url) => thumbnail(url, () => set(urls.filter((one) => one !== url)))));
  };
  const set = (found) => { urls = found; draw(); changed(); };
  async function take(files) {
    for (const one of files) {
      if (!KINDS.includes(one.type)) { toast(`${one.name || "That"} is no PNG, JPEG, WebP or GIF.`); continue; }
      if (urls.length >= MOST) { toast(`A message has at most ${MOST} pictures.`); break; }
      try { set([...new Set([...urls, await asUrl(one)])]); } catch { toast(`${one.name || "The picture"} cannot be read.`); }
    }
  }
  const given = (transfer) => (offered ? [...transfer?.files ?? []] : []);
  file.addEventListener("change", async () => { await take([...file.files]); file.value = ""; });
  prompt.addEventListener("paste", (event) => { const files = given(event.clipboardData); if (files.length) { event.preventDefault(); take(files); } });
  form.addEventListener("dragover", (event) => { if (offered) event.preventDefault(); });
  form.addEventListener("drop", (event) => { const files = given(event.dataTransfer); if (files.length) { event.preventDefault(); take(files); } });
  draw();
  return { node: [note, shown], button: [button, file], set, get urls() { return urls; }, get wrong() { return urls.length > 0 && !offered; }, offer(on) { if (on !== offered) { offered = on; draw(); } } };
}

/** A picture as a data: URL; a large one is drawn smaller, as JPEG. */
async function asUrl(file) {
  const picture = await createImageBitmap(file), share = Math.min(1, MOST_SIDE / Math.max(picture.width, picture.height));
  if (share === 1 && file.size <= MOST_BYTES) return read(file);
  const canvas = el("canvas", {});
  [canvas.width, canvas.height] = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * share)));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff"; // JPEG has no transparency
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
