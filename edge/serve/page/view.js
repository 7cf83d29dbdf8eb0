// The conversation as it is seen: an article for each message.

import { $, button, copy, element } from "./dom.js";
import { preview } from "./files.js";
import { Markdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result" };

/** A message as it is seen. `show` is called again while it grows.
 *
 * `acts` are what its buttons do, by their names; None are shown while it is written.
 */
export class Shown {
  constructor(node, acts) {
    this.node = node;
    this.made = element("article", node.role);
    this.text = element("div", "text");
    this.note = element("div", "note");
    this.foot = element("div", "foot");
    this.made.append(element("h3", "", NAMES[node.role]));
    if (node.images?.length || node.files?.length) this.made.append(attached(node));
    this.made.append(this.text, this.note, this.foot);
    this.markdown = node.role === "assistant" ? new Markdown(this.text) : null;
    this.show();
    if (acts) this.actable(acts);
  }

  show() {
    const { node } = this;
    if (node.reasoning) this.thought(node.reasoning);
    if (this.markdown) this.markdown.show(node.content, node.pieces ?? []);
    else {
      this.text.textContent = node.content;
      this.text.dir = "auto";
    }
    if (node.calls?.length) this.calls(node.calls);
    this.note.textContent = node.note ?? "";
  }

  thought(text) {
    if (!this.folded) {
      this.folded = element("details", "thought");
      this.folded.append(element("summary", "", "Thinking"), element("div"));
      this.text.before(this.folded);
    }
    this.folded.lastChild.textContent = text;
  }

  calls(calls) {
    if (!this.called) {
      this.called = element("div", "calls");
      this.text.after(this.called);
    }
    this.called.replaceChildren(...calls.map((one) => {
      const made = element("details", "call");
      made.open = true;
      made.append(element("summary", "", `Calls ${one.name}`), element("pre", "", pretty(one.arguments)));
      return made;
    }));
  }

  /** Buttons under a message, and arrows where it has other versions. */
  actable({ versions, go, edit, retry, remove }) {
    const { node } = this, at = versions.indexOf(node), parts = [];
    if (versions.length > 1) {
      const step = (by, sign, name) => {
        const made = button(sign, () => go(versions[at + by]), name);
        made.disabled = !versions[at + by];
        return made;
      };
      const count = element("span", "", `${at + 1} / ${versions.length}`);
      parts.push(step(-1, "‹", "Version before"), count, step(1, "›", "Version after"));
    }
    if (node.content) parts.push(button("Copy", () => copy(node.content), "Copy message"));
    parts.push(button("Edit", () => this.edit(edit), "Edit message"));
    if (retry) parts.push(button("Retry", retry, "Answer again"));
    parts.push(button("Delete", remove, "Delete message and what follows"));
    this.foot.replaceChildren(...parts);
  }

  /** Write it anew: a version beside this one. */
  edit(done) {
    const form = element("form", "edit"), field = element("textarea");
    field.value = this.node.content;
    field.rows = Math.min(12, this.node.content.split("\n").length + 1);
    field.setAttribute("aria-label", "Text of the message");
    const end = () => { form.replaceWith(this.text); this.foot.hidden = false; };
    const save = button(this.node.role === "user" ? "Send" : "Save", () => form.requestSubmit());
    save.className = "main";
    form.append(field, save, button("Cancel", end));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      end();
      if (text && text !== this.node.content) done(text);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.text.replaceWith(form);
    this.foot.hidden = true;
    field.focus();
  }
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function attached({ images = [], files = [] }) {
  const made = element("div", "images");
  made.append(...images.map((url, number) => {
    const one = preview(url, number);
    one.controls = true;
    return one;
  }));
  for (const file of files) {
    const folded = element("details", "file");
    folded.append(element("summary", "", file.name), element("pre", "", file.text));
    made.append(folded);
  }
  return made;
}

/** What waits to be sent, each with a button that takes it away. */
export function showAttached(images, files, remove) {
  const one = (list, number, name, what) => {
    const made = button(what, () => remove(list, number), name);
    if (typeof what !== "string") made.replaceChildren(what);
    return made;
  };
  $("images").replaceChildren(
    ...images.map((url, number) => url.startsWith("data:audio/")
      ? one(images, number, `Remove sound ${number + 1}`, "Sound")
      : one(images, number, `Remove image ${number + 1}`, preview(url, number))),
    ...files.map((file, number) => one(files, number, `Remove file ${file.name}`, file.name)),
  );
}
