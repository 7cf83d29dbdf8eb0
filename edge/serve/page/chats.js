// Chats: trees of messages, whose versions stand beside each other, kept in the browser (IndexedDB).

import { newId } from "./dom.js";

const ID = /^[\w-]{1,64}$/;
const ROLES = ["user", "assistant", "tool"];
const MEDIA = /^data:(image|audio)\/[\w.+-]+;base64,[A-Za-z0-9+/=]*$/;
const MOST_TITLE = 80;
const FORMAT = 1;  // of what is exported

const isText = (value) => typeof value === "string";
const size = (node) => (node.content?.length ?? 0) + (node.reasoning?.length ?? 0) + (node.calls?.length ?? 0);

export class Chat {
  constructor(id = newId()) {
    this.id = id;
    this.title = "";
    this.updated = Date.now();
    this.head = null;  // the message at the end of what is shown
    this.nodes = new Map();  // a message comes after the one that it answers
  }

  /** A chat as it was kept or exported. Throws Error for what is none.
   *
   * `strict` refuses messages that are damaged, which are left out otherwise. `known` are ids of
   * messages that may be answered though they are not in `document`.
   */
  static from(document, { strict = false, known = new Map() } = {}) {
    if (!ID.test(document?.id) || !Array.isArray(document.nodes)) throw new Error("it is no chat");
    const chat = new Chat(document.id);
    chat.title = isText(document.title) ? document.title.slice(0, MOST_TITLE) : "";
    chat.updated = Number.isFinite(document.updated) ? document.updated : Date.now();
    for (const [number, value] of document.nodes.entries()) {
      try {
        const node = nodeOf(value);
        if (node.parent !== null && !chat.nodes.has(node.parent) && !known.has(node.parent)) {
          throw new Error("answers no message");
        }
        chat.nodes.set(node.id, node);
      } catch (error) {
        if (strict) throw new Error(`message ${number + 1} ${error.message}`);
      }
    }
    const head = chat.nodes.get(document.head);
    chat.head = head && !head.deleted ? head.id : chat.newest(null);
    return chat;
  }

  document() {
    const { id, title, updated, head } = this;
    return { id, title, updated, head, nodes: [...this.nodes.values()] };
  }

  path(head = this.head) {
    const found = [];
    for (let one = this.nodes.get(head); one; one = this.nodes.get(one.parent)) found.push(one);
    return found.reverse();
  }

  /** What answers a message, or begins the chat: each is a version of the others. */
  versions(parent) {
    return [...this.nodes.values()].filter((one) => one.parent === parent && !one.deleted);
  }

  /** The end of what was written last below a message. */
  newest(id) {
    for (;;) {
      const next = this.versions(id).at(-1);
      if (!next) return id;
      id = next.id;
    }
  }

  add(node) {
    this.nodes.set(node.id, node);
    this.head = node.id;
    this.updated = Date.now();
    if (!this.title && node.role === "user") {
      const text = node.content || node.files?.[0]?.name || "Image";
      this.title = text.replace(/\s+/g, " ").trim().slice(0, MOST_TITLE);
    }
  }

  /** Take a message out with all that follows it; returns what `restore` takes. */
  remove(node) {
    const gone = new Set([node.id]), before = this.head, removed = [];
    for (const one of this.nodes.values()) if (gone.has(one.parent)) gone.add(one.id);
    for (const id of gone) {
      const one = this.nodes.get(id);
      removed.push(one);
      this.nodes.set(id, { id, parent: one.parent, deleted: true });
    }
    const other = this.versions(node.parent).at(-1);
    this.head = other ? this.newest(other.id) : node.parent;
    this.updated = Date.now();
    return { removed, before };
  }

  /** Put back what `remove` took out, under ids that no tab knows as deleted. */
  restore({ removed, before }) {
    const ids = new Map(removed.map((one) => [one.id, newId()]));
    for (const one of removed) {
      const id = ids.get(one.id), parent = ids.get(one.parent) ?? one.parent;
      this.nodes.set(id, { ...one, id, parent });
    }
    this.head = ids.get(before) ?? before;
  }

  /** Take over what another tab wrote. Nothing of either is lost, but what one of them deleted. */
  merge(other) {
    for (const theirs of other.nodes.values()) {
      const mine = this.nodes.get(theirs.id);
      if (theirs.parent !== null && !this.nodes.has(theirs.parent)) continue;
      if (!mine || (!mine.deleted && (theirs.deleted || size(theirs) > size(mine)))) {
        this.nodes.set(theirs.id, theirs);
      }
    }
    this.title ||= other.title;
    this.updated = Math.max(this.updated, other.updated);
    while (this.head !== null && this.nodes.get(this.head)?.deleted) this.head = this.nodes.get(this.head).parent;
  }
}

function nodeOf(value) {
  if (!value || !ID.test(value.id)) throw new Error("has no id");
  const { id, parent = null, role, content } = value;
  if (value.deleted) return { id, parent, deleted: true };
  if (!ROLES.includes(role) || !isText(content)) throw new Error("has no role or no text");
  const node = { id, parent, role, content };
  for (const name of ["reasoning", "note", "call"]) if (isText(value[name])) node[name] = value[name];
  const lists = {
    images: (one) => isText(one) && MEDIA.test(one),
    files: (one) => isText(one?.name) && isText(one.text),
    calls: (one) => isText(one?.id) && isText(one.name) && isText(one.arguments),
    pieces: (one) => Array.isArray(one) && one.length === 2 && one.every(isText),
  };
  for (const [name, fits] of Object.entries(lists)) {
    if (!Array.isArray(value[name]) || !value[name].length) continue;
    if (!value[name].every(fits)) throw new Error(`has ${name} that are none`);
    node[name] = value[name];
  }
  if (node.pieces && node.pieces.map(([text]) => text).join("") !== content) delete node.pieces;
  return node;
}

// -- files that are exported -----------------------------------------------------------------------

export function exported(chats) {
  return JSON.stringify({ edgespec_chats: FORMAT, chats: chats.map((one) => one.document()) }, null, 1);
}

/** The chats of a file. Throws Error with what is wrong with it. */
export function imported(text) {
  let document;
  try { document = JSON.parse(text); } catch (error) { throw new Error(`is no JSON: ${error.message}`); }
  if (document?.edgespec_chats === undefined || !Array.isArray(document.chats)) {
    throw new Error("was not exported by this page");
  }
  if (document.edgespec_chats !== FORMAT) throw new Error("was exported by another version of this page");
  return document.chats.map((one, number) => {
    try { return Chat.from(one, { strict: true }); } catch (error) {
      throw new Error(`is damaged: chat ${number + 1}: ${error.message}`);
    }
  });
}

// -- storage ---------------------------------------------------------------------------------------

const UNSAVED = "edgespec-unsaved-";
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("edgespec") : null;
let database = null;

function open() {
  database ??= new Promise((done, fail) => {
    const asked = indexedDB.open("edgespec", 1);
    asked.onupgradeneeded = () => {
      for (const name of ["list", "chats", "drafts"]) asked.result.createObjectStore(name, { keyPath: "id" });
    };
    asked.onsuccess = () => done(asked.result);
    asked.onerror = () => fail(asked.error);
  });
  return database;
}

async function run(names, mode, act) {
  const transaction = (await open()).transaction(names, mode);
  return new Promise((done, fail) => {
    let request = null;
    transaction.oncomplete = () => done(request?.result);
    transaction.onabort = () => fail(transaction.error ?? new Error("aborted"));
    request = act(...names.map((name) => transaction.objectStore(name)));
  });
}

/** What there is, the latest first: id, title, updated. */
export async function list() {
  return (await run(["list"], "readonly", (all) => all.getAll())).sort((a, b) => b.updated - a.updated);
}

export async function read(id) {
  const found = await run(["chats"], "readonly", (chats) => chats.get(id));
  return found ? Chat.from(found) : null;
}

/** Keep a chat, which takes over what other tabs have kept of it. Throws where storage is full. */
export async function save(chat) {
  await run(["chats", "list"], "readwrite", (chats, all) => {
    const asked = chats.get(chat.id);
    asked.onsuccess = () => {
      try { if (asked.result) chat.merge(Chat.from(asked.result)); } catch { /* it was damaged */ }
      chats.put(chat.document());
      all.put({ id: chat.id, title: chat.title, updated: chat.updated });
    };
    return asked;
  });
  channel?.postMessage(chat.id);
}

export async function remove(id) {
  await run(["chats", "list", "drafts"], "readwrite", (...stores) => { stores.forEach((one) => one.delete(id)); });
  channel?.postMessage(id);
}

/** Images and files that wait to be sent with the next message. */
export const saveDraft = (id, images, files) =>
  run(["drafts"], "readwrite", (drafts) => drafts.put({ id, images, files }));
export const readDraft = (id) => run(["drafts"], "readonly", (drafts) => drafts.get(id));

/** Call `act` with the id of a chat that another tab has kept. */
export function onChange(act) {
  channel?.addEventListener("message", ({ data }) => act(data));
}

/** Keep messages at once, as a tab that goes away must: the database may take too long. */
export function saveAtOnce(chat, nodes) {
  const { id, title, updated, head } = chat;
  const keep = (kept) => localStorage.setItem(UNSAVED + id, JSON.stringify({ id, title, updated, head, nodes: kept }));
  try { keep(nodes); } catch {
    try { keep(nodes.map(({ images, ...one }) => one)); } catch { /* no room: the last save counts */ }
  }
}

/** Put what tabs kept at once into the database. */
export async function takeUnsaved() {
  for (const key of Object.keys(localStorage).filter((one) => one.startsWith(UNSAVED))) {
    try {
      const kept = JSON.parse(localStorage.getItem(key));
      const stored = await read(kept.id) ?? new Chat(kept.id);
      const late = Chat.from(kept, { known: stored.nodes });
      stored.merge(late);
      if (stored.nodes.has(kept.head)) stored.head = kept.head;
      await save(stored);
    } catch (error) {
      if (error?.name === "QuotaExceededError") return;
    }
    localStorage.removeItem(key);
  }
}
