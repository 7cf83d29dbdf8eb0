// Markdown as elements. markdown-it says what is what; each of its tokens becomes an element of the
// list below or a text, so that nothing a model writes is ever read as HTML.

import MarkdownIt from "./markdown-it.js";
import { button, copy, element } from "./dom.js";

const MOST_DEPTH = 50;  // of lists and quotations: what is deeper is shown as it was written
const MOST_INLINE = 20_000;  // characters of a paragraph that is searched for emphasis and links
const TAGS = {
  p: "p", h1: "h4", h2: "h5", h3: "h6", h4: "h6", h5: "h6", h6: "h6",  // below the page's own
  ul: "ul", ol: "ol", li: "li", blockquote: "blockquote", hr: "hr", br: "br", em: "em",
  strong: "strong", s: "s", a: "a", table: "table", thead: "thead", tbody: "tbody", tr: "tr",
  th: "th", td: "td",
};
const CONTROLS = /[\u202a-\u202e\u2066-\u2069]/;  // they turn code around (Trojan Source)

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: MOST_DEPTH });
parser.disable("image");  // fetched from nowhere: an image is a link
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (address) => /^https?:\/\//i.test(address);
parser.normalizeLinkText = (text) => text;
parser.core.ruler.before("inline", "long", ({ tokens }) => {
  for (const one of tokens) {
    if (one.type === "inline" && one.content.length > MOST_INLINE) one.type = "text";
  }
});

/** A text that grows in `box`. Blocks that have ended are not made again.
 *
 * A block ends where the next one begins, so only the last one may change.
 */
export class Markdown {
  constructor(box) {
    this.box = box;
    this.ended = 0;  // characters of the text whose blocks have ended
    this.count = 0;  // those blocks
  }

  /** Show `text`; `pieces` are its parts, each with who drafted it. */
  show(text, pieces) {
    const rest = text.slice(this.ended);
    const tokens = parser.parse(rest, {});
    const isDeep = tokens.some((one) => one.level >= MOST_DEPTH - 2);
    const writer = new Writer(rest, this.ended, pieces);
    const made = isDeep ? [writer.plain()] : writer.blocks(tokens);
    while (this.box.childNodes.length > this.count) this.box.lastChild.remove();
    this.box.append(...made);
    if (isDeep) return;
    const begins = tokens.filter((one) => one.level === 0 && one.nesting >= 0 && one.map);
    if (begins.length < 2) return;
    this.ended += writer.lines[begins.at(-1).map[0]];
    this.count += made.length - 1;
  }
}

/** Makes the elements of one text, and tints in them what was drafted. */
class Writer {
  constructor(source, offset, pieces) {
    this.source = source;
    this.lines = [0];  // where each begins
    for (let at = source.indexOf("\n"); at >= 0; at = source.indexOf("\n", at + 1)) this.lines.push(at + 1);
    this.lines.push(source.length);
    this.at = 0;  // in the source, behind what was written last
    this.until = source.length;  // of the block that is being written
    this.spans = [];  // [begin, end, drafter]
    let end = -offset;
    for (const [text, from] of pieces) {
      const begin = end;
      end += text.length;
      if (from && end > 0) this.spans.push([begin, end, from]);
    }
    this.next = 0;  // of the spans
  }

  plain() {
    const made = element("div", "plain");
    this.text(made, this.source);
    return made;
  }

  blocks(tokens) {
    const top = document.createDocumentFragment();
    this.build(top, tokens);
    return [...top.childNodes];
  }

  build(top, tokens) {
    const open = [top];
    for (const token of tokens) {
      if (token.map && token.nesting >= 0) {
        this.at = Math.max(this.at, this.lines[token.map[0]]);
        this.until = this.lines[Math.min(token.map[1], this.lines.length - 1)];
      }
      if (token.hidden) continue;
      if (token.nesting < 0) open.pop();
      else if (token.type === "inline") this.build(open.at(-1), token.children);
      else if (token.type === "fence" || token.type === "code_block") open.at(-1).append(this.code(token));
      else if (token.type === "code_inline") {
        const made = element("code");
        this.text(made, token.content);
        open.at(-1).append(made);
      } else if (token.type === "softbreak") open.at(-1).append(element("br"));
      else if (TAGS[token.tag]) {
        const made = this.tag(token);
        const isTable = token.tag === "table";  // which scrolls in a box
        open.at(-1).append(isTable ? box("scrolls", "Table", made) : made);
        if (token.nesting > 0) open.push(made);
      } else this.text(open.at(-1), token.content);
    }
  }

  tag(token) {
    const made = element(TAGS[token.tag]);
    if (token.tag[0] === "h" && token.tag !== "hr") made.className = token.tag;
    if (token.tag === "a") {
      made.href = made.title = token.attrGet("href");  // the title shows where it really leads
      made.rel = "noopener noreferrer";
      made.target = "_blank";
    } else if (token.block) made.dir = "auto";
    if (token.tag === "ol" && token.attrGet("start") !== null) made.start = Number(token.attrGet("start"));
    const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
    if (align) made.style.textAlign = align[1];
    return made;
  }

  code(token) {
    const made = element("div", "code"), head = element("div", "head"), inner = element("code");
    head.append(element("span", "", token.info.trim().split(/\s/)[0].slice(0, 40)));
    head.append(button("Copy", async ({ target }) => {
      await copy(token.content);
      target.textContent = "Copied";
      setTimeout(() => { target.textContent = "Copy"; }, 2000);
    }, "Copy code"));
    const content = token.content.replace(/\n$/, "");
    for (const line of content.split(/(?<=\n)/)) this.text(inner, line);  // of lists: without indents
    const pre = element("pre");
    pre.append(inner);
    made.append(head, box("scrolls", "Code", pre));
    return made;
  }

  /** Append a text to an element, with what was drafted in marks. */
  text(parent, text) {
    const found = text ? this.source.indexOf(text, this.at) : -1;
    if (found < 0 || found + text.length > this.until) {
      add(parent, text, "");
      return;
    }
    this.at = found + text.length;
    let at = found;
    while (this.next < this.spans.length && this.spans[this.next][1] <= at) this.next++;
    for (let n = this.next; n < this.spans.length && this.spans[n][0] < this.at; n++) {
      const [begin, end, from] = this.spans[n];
      if (begin > at) add(parent, this.source.slice(at, begin), "");
      const last = Math.min(end, this.at);
      add(parent, this.source.slice(Math.max(at, begin), last), from);
      at = last;
    }
    if (at < this.at) add(parent, this.source.slice(at, this.at), "");
  }
}

function add(parent, text, from) {
  const isCode = parent.nodeName === "CODE" && CONTROLS.test(text);
  for (const part of isCode ? text.split(/([\u202a-\u202e\u2066-\u2069])/) : [text]) {
    if (isCode && CONTROLS.test(part)) {
      const name = `U+${part.charCodeAt(0).toString(16).toUpperCase()}`;
      parent.append(element("span", "control", name));
    } else if (from && parent.lastChild?.dataset?.from === from) {
      parent.lastChild.append(part);
    } else if (from) {
      const mark = element("mark", "", part);
      mark.dataset.from = from;
      mark.title = `drafted by ${from}, accepted by the model`;
      parent.append(mark);
    } else parent.append(part);
  }
}

function box(className, name, inner) {  // keys scroll it as well
  const made = element("div", className);
  made.tabIndex = 0;
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", name);
  made.append(inner);
  return made;
}
