// The page: what is shown, what is being asked, and what keys and buttons do.

import { ask, failure, findTools, headers, piecesOf, read, request, said } from "./asking.js";
import * as chats from "./chats.js";
import { Chat } from "./chats.js";
import { $, button, element, newId, notice, problem, seconds } from "./dom.js";
import { figures, liveFigures, status } from "./figures.js";
import { taken } from "./files.js";
import { offer } from "./tools.js";
import { Shown, showAttached } from "./view.js";

const SETTINGS = ["system", "temperature", "topp", "most", "seed", "ahead", "schema", "tools"];
const SAVE_MS = 1000, DRAFT_MS = 200, LOOK_MS = 2000, AHEAD_MS = 300;
const MOST_ROUNDS = 8;  // of calls that nobody is asked about, behind a message
const HINT = "Message. Enter sends, Shift-Enter begins a line, Escape stops.";
const state = {
  chat: new Chat(), run: null, images: [], files: [], model: "", status: null,
  sees: false, hears: false, loading: null, unsaved: false, full: false, isIdle: false, defaults: "",
};

// -- what is shown ---------------------------------------------------------------------------------

function show() {
  const { run } = state, nodes = shownNodes();
  $("talk").replaceChildren();
  for (const node of nodes) {
    const isNew = run && (node === run.answer || node === run.question);
    const one = new Shown(node, isNew ? null : acts(node));
    $("talk").append(one.made);
    if (node === run?.answer) run.shown = one;
  }
  hint();
  $("talk").scrollTop = $("talk").scrollHeight;
}
const shownNodes = () => state.run?.chat === state.chat ? state.run.path : state.chat.path();

function acts(node) {
  const { chat } = state, stopped = (act) => (...values) => { if (!state.run) act(...values); };
  return {
    versions: chat.versions(node.parent),
    go: stopped((other) => { chat.head = chat.newest(other.id); kept(); show(); }),
    edit: stopped((content) => {
      const { images, files, call, role } = node;
      const other = { id: newId(), parent: node.parent, role, content };
      for (const [name, value] of Object.entries({ images, files, call })) if (value) other[name] = value;
      if (role === "user") answer(other, node.parent);
      else { chat.add(other); kept(); show(); }
    }),
    retry: node.role === "assistant" ? stopped(() => answer(null, node.parent))
      : node.id === chat.head ? stopped(() => answer(null, node.id)) : null,
    remove: stopped(() => {
      const removed = chat.remove(node);
      kept();
      show();
      notice("Message deleted.", () => { chat.restore(removed); kept(); show(); });
    }),
  };
}
/** The calls at the end of what is shown that have no result yet. */
function openCalls() {
  const path = state.chat.path(), last = path.findLastIndex((one) => one.role === "assistant");
  const given = path.slice(last + 1).map((one) => one.call);
  return (path[last]?.calls ?? []).filter((one) => path.slice(last + 1).every((o) => o.role === "tool")
    && !given.includes(one.id));
}
/** What may be typed and done next. */
function hint() {
  $("export-one").disabled = !state.chat.nodes.size;
  const [call] = openCalls();
  $("message").placeholder = call ? `Result of ${call.name}` : HINT;
  offerCall(false);
}
/** Offer the next open call of a tool of the server; of a new one that needs no asking, make it. */
function offerCall(isNew) {
  const { chat } = state, { head } = chat, [call] = state.run ? [] : openCalls(), path = chat.path();
  const rounds = path.slice(path.findLastIndex((one) => one.role === "user")).filter((one) => one.calls);
  offer(call, state.model, isNew && rounds.length <= MOST_ROUNDS, (content) => {
    if (chat === state.chat && chat.head === head && !state.run) giveResult(content);
  });
}
function giveResult(content) {
  const { chat } = state, [call, ...others] = openCalls();
  chat.add({ id: newId(), parent: chat.head, role: "tool", content, call: call.id });
  kept();
  show();
  if (others.length) offerCall(true);
  else answer(null, chat.head);
}
async function showList() {
  let there = [];
  try { there = await chats.list(); } catch (error) { storageFails(error); }
  $("no-chats").hidden = there.length > 0;
  $("export-all").disabled = !there.length;
  $("list").replaceChildren(...there.map(({ id, title }) => {
    const row = element("li"), name = title || "Chat";
    const go = button(name, () => { leave(); openChat(id); });
    if (id === state.chat.id) go.setAttribute("aria-current", "true");
    go.dir = "auto";
    row.append(go, button("×", () => removeChat(id, name), `Delete chat ${name}`));
    return row;
  }));
}

// -- keeping ---------------------------------------------------------------------------------------

let saveTimer = 0, changes = 0;
/** The chat has changed: it is kept now, or, while an answer grows, once a second. */
function kept(soon = false) {
  const { chat } = state;
  state.unsaved = true;
  changes++;
  if (soon && saveTimer) return;
  clearTimeout(saveTimer);
  saveTimer = setTimeout(() => { saveTimer = 0; save(chat); }, soon ? SAVE_MS : 0);
}
const deleted = new Set();  // ids of chats, which nothing that ends late puts back
async function save(chat) {
  if (!chat.nodes.size || deleted.has(chat.id)) return;
  const before = changes, seen = signature();
  try {
    await chats.save(chat);
    if (before === changes) state.unsaved = state.full = false;
    if (seen !== signature()) show();  // with what another tab wrote
    await showList();
  } catch (error) {
    state.full = true;
    storageFails(error);
  }
}
/** What is shown, so far as another tab may change it. */
const signature = () => shownNodes().map(({ id, parent, content }) =>
  `${id} ${state.chat.versions(parent).length} ${content.length}`).join();
function storageFails(error) {
  problem(error?.name === "QuotaExceededError"
    ? "The browser's storage is full: what is new here is kept until this tab is closed. Export it, or delete chats."
    : `The browser keeps no chats (${error?.message ?? error}): export what you want to keep.`);
}
const draftKey = (id) => `edgespec-draft-${id}`;
/** What is not sent yet, and what has no word of an answer yet: a reload brings it back. */
function draft() {
  const waits = state.run && !state.run.begun && state.run.chat === state.chat ? state.run.question : null;
  return {
    text: [waits?.content, $("message").value].filter(Boolean).join("\n\n"),
    images: [...waits?.images ?? [], ...state.images],
    files: [...waits?.files ?? [], ...state.files],
  };
}
function keepDraft() {
  const { text } = draft();
  for (const store of [sessionStorage, localStorage]) {
    try {
      if (text) store.setItem(draftKey(state.chat.id), text);
      else store.removeItem(draftKey(state.chat.id));
    } catch (error) { storageFails(error); }
  }
}
function keepAttached() {
  const { images, files } = draft();
  chats.saveDraft(state.chat.id, images, files).catch(storageFails);
}
/** A tab that goes away, or is hidden, has no time to wait for the database. */
function keepAtOnce() {
  keepDraft();
  if (!state.unsaved) return;
  const { run, chat } = state;
  chats.saveAtOnce(chat, run?.begun && run.chat === chat ? [run.question, run.answer].filter(Boolean)
    : chat.path().slice(-2));
}
function keepSettings() {
  const values = Object.fromEntries(SETTINGS.map((id) => [id, $(id).value]));
  const text = JSON.stringify({ ...values, model: state.model });
  for (const store of [sessionStorage, localStorage]) {
    try { store.setItem("edgespec-settings", text); } catch (error) { storageFails(error); }
  }
  sessionStorage.setItem("edgespec-key", $("key").value);  // keys end with their tab
}
function restoreSettings() {
  let found = null;
  const name = "edgespec-settings";
  try { found = JSON.parse(sessionStorage.getItem(name) ?? localStorage.getItem(name)); } catch { /* not ours */ }
  for (const id of SETTINGS) $(id).value = found?.[id] ?? "";
  state.model = typeof found?.model === "string" ? found.model : "";
  $("key").value = sessionStorage.getItem("edgespec-key") ?? "";
}

// -- chats -----------------------------------------------------------------------------------------

/** End what is being written, and keep what was typed. */
function leave() {
  state.run?.abort.abort();
  stopReading();
  keepDraft();
  if (state.unsaved) save(state.chat);
}
async function openChat(id) {
  let chat = null;
  try { chat = await chats.read(id); } catch (error) { storageFails(error); }
  state.chat = chat ?? new Chat(id ?? undefined);
  deleted.delete(id);
  sessionStorage.setItem("edgespec-chat", state.chat.id);
  localStorage.setItem("edgespec-chat", state.chat.id);
  $("message").value = sessionStorage.getItem(draftKey(state.chat.id))
    ?? localStorage.getItem(draftKey(state.chat.id)) ?? "";
  let waits = null;
  try { waits = await chats.readDraft(state.chat.id); } catch { /* told above */ }
  state.images = waits?.images ?? [];
  state.files = waits?.files ?? [];
  state.unsaved = false;
  problem("");
  attached();
  show();
  await showList();
  if (!matchMedia("(min-width: 1100px)").matches) showChats(false);
  $("message").focus();
}
async function removeChat(id, name) {
  const isOpen = id === state.chat.id;
  deleted.add(id);
  if (isOpen) state.run?.abort.abort();
  try {
    const chat = isOpen ? state.chat : await chats.read(id);
    await chats.remove(id);
    notice(`"${name}" is deleted.`, async () => {
      try { await chats.save(chat); } catch (error) { storageFails(error); }
      await openChat(id);
    });
  } catch (error) { storageFails(error); }
  if (isOpen) await openChat(undefined);
  else await showList();
}
function download(name, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
async function exportAll() {
  const all = [];
  for (const { id } of await chats.list()) {
    const chat = id === state.chat.id ? state.chat : await chats.read(id);
    if (chat) all.push(chat);
  }
  download("edgespec-chats.json", chats.exported(all));
}
async function importFile(file) {
  let found = [], count = 0;
  try { found = chats.imported(await file.text()); } catch (error) { return problem(`${file.name} ${error.message}.`); }
  try {
    for (const chat of found) {
      await chats.save(chat);
      count++;
    }
  } catch (error) {
    storageFails(error);
    return showList();
  }
  notice(`${count} ${count === 1 ? "chat" : "chats"} imported.`);
  if (found.length) await openChat(found[0].id);
}

// -- asking ----------------------------------------------------------------------------------------

function send() {
  if (state.run) return;
  const content = $("message").value.trim(), { chat } = state, calls = openCalls();
  problem("");
  if (calls.length) {
    $("message").value = "";
    return giveResult(content);
  }
  if (!content && !state.images.length && !state.files.length) return;
  const question = { id: newId(), parent: chat.head, role: "user", content };
  if (state.images.length) question.images = state.images;
  if (state.files.length) question.files = state.files;
  answer(question, chat.head, () => {
    state.images = [];
    state.files = [];
    $("message").value = "";
    attached();
  });
}
/** Ask for what follows on `parent`, and on a question below it if there is one.
 *
 * Both are put into the chat with the first word of the answer. Where none comes, the question goes
 * back to where it was typed, and the chat is as it was.
 */
async function answer(question, parent, begins = () => {}) {
  const { chat } = state;
  const path = [...chat.path(parent), ...question ? [question] : []];
  let body;
  try { body = request(path, state.model); } catch (error) { return problem(error.message); }
  const written = { id: newId(), parent: question?.id ?? parent, role: "assistant", content: "", reasoning: "",
    pieces: [], calls: [], note: "" };
  const run = {
    chat, question, answer: written, path: [...path, written], abort: new AbortController(), begun: false,
    shown: null, began: performance.now(), first: 0, steps: 0, tokens: 0, progress: null, drawn: 0, cost: 0,
  };
  state.run = run;
  stopReading();
  begins();
  problem("");
  notice("");
  busy(true);
  show();
  keepDraft();
  $("drafters").replaceChildren(element("p", "empty", "Being written."));
  const waits = setInterval(() => waiting(run), 500);
  try {
    for await (const event of ask(body, run.abort.signal)) take(event, run);
  } catch (error) {
    written.note = "stopped";
    if (error.name !== "AbortError") problem(said(error));
  }
  clearInterval(waits);
  clearTimeout(run.drawn);
  state.run = null;
  busy(false);
  if (run.begun) ended(run);
  else giveBack(run);
  look();
}
function ended(run) {
  const { answer: node, chat } = run;
  for (const name of ["reasoning", "note"]) if (!node[name]) delete node[name];
  for (const name of ["calls", "pieces"]) if (!node[name].length) delete node[name];
  if (chat === state.chat) {
    const talk = $("talk"), follows = isAtEnd(talk);
    const articles = [...$("talk").children];
    run.path.slice(-2).forEach((one, number, both) => {
      const made = new Shown(one, acts(one));
      articles[articles.length - both.length + number].replaceWith(made.made);
    });
    if (follows) talk.scrollTop = talk.scrollHeight;
    $("said").textContent = `Model: ${node.content || "calls a tool"}`;
    hint();
    offerCall(true);
    readSoon();  // what the chat format puts behind the answer
  }
  save(chat);
}
function giveBack(run) {
  const { question, chat } = run;
  if (chat !== state.chat) return;  // it was left, and waits there as a draft
  if (question) {
    $("message").value = [question.content, $("message").value].filter(Boolean).join("\n\n");
    state.images.unshift(...question.images ?? []);
    state.files.unshift(...question.files ?? []);
  }
  attached();
  keepDraft();
  show();
}
/** What is seen until the first word comes. */
function waiting(run) {
  if (run.begun || !run.shown) return;
  const past = Math.round((performance.now() - run.began) / 1000), { progress, shown } = run;
  let what = `reading the prompt, ${past} s`;
  if (state.loading !== null) {
    const percent = state.loading ? `, ${Math.round(100 * state.loading)}%` : "";
    what = `loading the model, ${past} s${percent}`;
  } else if (progress && progress.processed > progress.cache) {
    const { total, cache, processed, time_ms } = progress;
    const left = (total - processed) * time_ms / 1000 / (processed - cache);
    what += `: ${processed} of ${total} tokens, about ${seconds(left)} left`;
  }
  shown.note.textContent = what;
}
function take(event, run) {
  const choice = event.choices?.[0], delta = choice?.delta ?? {}, { answer: node } = run;
  run.progress = event.prompt_progress ?? run.progress;
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called = {} } of delta.tool_calls ?? []) {
    node.calls[index] ??= { id: id ?? newId(), name: called.name ?? "", arguments: "" };
    node.calls[index].arguments += called.arguments ?? "";
  }
  const sources = event.sources ?? [];
  if (sources.length && run.first === 0) run.first = performance.now();
  run.tokens += sources.length;
  run.steps += sources.filter(([, from]) => from === "").length;
  for (const [text, from] of piecesOf(delta.content ?? "", sources)) {
    const last = node.pieces.at(-1);
    if (last?.[1] === from) last[0] += text;
    else node.pieces.push([text, from]);
  }
  if (choice?.finish_reason === "length") node.note = "cut off";
  if (!run.begun && (node.content || node.reasoning || node.calls.length)) begin(run);
  if (run.begun) {
    draw(run);
    if (run.chat === state.chat) kept(true);
  }
  if (run.chat !== state.chat) return;
  if (event.timings) figures(event.timings, event.usage);
  else if (sources.length) liveFigures(run);
}
function begin(run) {
  run.begun = true;
  if (run.question) run.chat.add(run.question);
  run.chat.add(run.answer);
  if (run.chat !== state.chat) return;
  keepDraft();
  keepAttached();
}
/** Draw what has come: at most once a frame, and so seldom that it takes a third of the time. */
function draw(run) {
  if (run.drawn || run.chat !== state.chat) return;
  run.drawn = setTimeout(() => {
    const talk = $("talk"), began = performance.now(), follows = isAtEnd(talk);
    run.shown.show();
    if (follows) talk.scrollTop = talk.scrollHeight;
    run.cost = performance.now() - began;
    run.drawn = 0;
  }, Math.max(16, 2 * run.cost));
}
const isAtEnd = (talk) => talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
function busy(is) {
  $("stop").hidden = !is;
  $("send").hidden = is;
  $("talk").setAttribute("aria-busy", String(is));
  (is ? $("stop") : $("message")).focus();
}

// -- reading ahead: what is typed is read while nobody else asks, so that the answer begins at once ----

let aheadTimer = 0, reading = null;
function stopReading() {
  clearTimeout(aheadTimer);
  reading?.abort.abort();
  reading = null;
}
/** What would be sent now: where nothing more is typed, its answer begins at once. */
const words = () => $("message").value.trim();
/** Have it read once nothing more is typed for a moment. What is read already, and goes on, is left. */
function readSoon(ms = AHEAD_MS) {
  if (reading && !words().startsWith(reading.content)) stopReading();
  clearTimeout(aheadTimer);
  aheadTimer = setTimeout(readAhead, ms);
}
async function readAhead() {
  if (state.run || reading || openCalls().length) return;
  if (!state.isIdle) return readSoon(LOOK_MS);
  const content = words(), { chat, images, files } = state;
  const mine = reading = { content, abort: new AbortController() };
  try {
    const body = request([...chat.path(), { role: "user", content, images, files }], state.model);
    await read(body, mine.abort.signal);
  } catch { /* settings that are being written; nothing is lost but time */ }
  if (reading !== mine) return;
  reading = null;
  if (words() !== content) readSoon();
}

// -- the server's state ----------------------------------------------------------------------------

async function told(path) {
  const asked = state.model ? `?model=${encodeURIComponent(state.model)}` : "";
  const response = await fetch(path + asked, { headers: headers() });
  if (!response.ok) throw new Error(await failure(response));
  return response.json();
}
async function look() {
  try {
    const now = await told("status"), card = now.models?.find((one) => one.id === now.model);
    const { vision: sees = false, audio: hears = false } = card?.modalities ?? {};
    Object.assign(state, { sees, hears, loading: card?.state === "loading" ? card.progress ?? 0 : null });
    $("attach").textContent = sees && hears ? "Image, sound, file" : sees ? "Image, file" : hears ? "Sound, file" : "File";
    const { running, waiting } = now.queue, how = $("ahead").value;
    state.isIdle = running + waiting <= (reading ? 1 : 0) && card?.state === "ready"
      && (how === "always" || (how !== "never" && !now.on_battery));
    status(now);
    if (state.status !== true) {
      problem("");
      await findTools();
      offerCall(false);
    }
    state.status = true;
    if (card?.state === "ready" && state.defaults !== now.model) {
      state.defaults = now.model;
      defaults((await told("props")).default_generation_settings);
    }
  } catch (error) {
    if (state.status !== false) problem(said(error));
    state.status = false;
  }
}
function defaults({ params = {}, n_ctx: context }) {
  const { temperature = 0, top_p: topP = 1, seed, n_predict: most } = params;
  $("temperature").placeholder = temperature === 0 ? "0: the likeliest token" : String(temperature);
  $("topp").placeholder = topP === 1 ? "1: all tokens" : String(topP);
  $("most").placeholder = most > 0 ? String(most) : `to the end of the context, ${context}`;
  $("seed").placeholder = seed === null || seed === undefined ? "another each time" : String(seed);
  $("system").placeholder = "none";
}

// -- files -----------------------------------------------------------------------------------------

function attached() {
  showAttached(state.images, state.files, (list, number) => {
    list.splice(number, 1);
    attachedAnew();
  });
}
function attachedAnew() {
  attached();
  keepAttached();
  stopReading();
  readSoon();
}
async function takeFiles(files) {
  problem("");
  for (const file of files) {
    try {
      const { image, file: text } = await taken(file, state);
      if (image) state.images.push(image);
      else state.files.push(text);
    } catch (error) { problem(error.message); }
  }
  attachedAnew();
}

// -- keys and buttons ------------------------------------------------------------------------------

function showChats(is) {
  $("chats").hidden = !is;
  $("chats-shown").setAttribute("aria-expanded", String(is));
}
const on = (id, kind, act) => $(id).addEventListener(kind, act);

on("form", "submit", (event) => { event.preventDefault(); send(); });
on("message", "keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
let draftTimer = 0;
on("message", "input", () => {
  clearTimeout(draftTimer);
  draftTimer = setTimeout(keepDraft, DRAFT_MS);
  readSoon();
});
on("attach", "click", () => $("file").click());
on("file", "change", async () => {
  await takeFiles([...$("file").files]);
  $("file").value = "";
});
document.addEventListener("paste", (event) => {
  if (!event.clipboardData?.files.length) return;
  event.preventDefault();
  takeFiles([...event.clipboardData.files]);
});
for (const kind of ["dragover", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    if (kind === "drop") takeFiles([...event.dataTransfer.files]);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.run?.abort.abort();
});
on("stop", "click", () => state.run?.abort.abort());
on("clear", "click", () => { leave(); openChat(undefined); });
on("chats-shown", "click", () => showChats($("chats").hidden));
on("export-one", "click", () => download("edgespec-chat.json", chats.exported([state.chat])));
on("export-all", "click", () => exportAll().catch(storageFails));
on("import", "click", () => $("import-file").click());
on("import-file", "change", async () => {
  const [file] = $("import-file").files;
  if (file) {
    leave();
    await importFile(file);
  }
  $("import-file").value = "";
});
on("tint", "click", () => {
  const off = $("talk").classList.toggle("untinted");
  $("tint").setAttribute("aria-pressed", String(!off));
});
on("theme", "click", () => {
  const order = ["auto", "light", "dark"];
  const next = order[(order.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % 3];
  localStorage.setItem("theme", next);
  theme(next);
});
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
}
on("choice", "change", () => {
  state.model = $("choice").value;
  keepSettings();
  $("message").focus();
  look();
});
for (const id of [...SETTINGS, "key"]) on(id, "change", () => { keepSettings(); look(); });
chats.onChange(async (id) => {  // another tab has kept or deleted one
  if (id === state.chat.id && !state.run) {
    try {
      const theirs = await chats.read(id);
      if (theirs && !state.run && id === state.chat.id) {
        const before = signature();
        state.chat.merge(theirs);
        state.chat.head = state.chat.newest(state.chat.head);
        if (before !== signature() && !document.querySelector("form.edit")) show();
      }
    } catch (error) { storageFails(error); }
  }
  await showList();
});
addEventListener("pagehide", keepAtOnce);
document.addEventListener("visibilitychange", keepAtOnce);  // phones end a hidden page without a word
addEventListener("beforeunload", (event) => { if (state.full) event.preventDefault(); });
setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);

theme(localStorage.getItem("theme") ?? "auto");
restoreSettings();
showChats(matchMedia("(min-width: 1100px)").matches);
look();
try { await chats.takeUnsaved(); } catch (error) { storageFails(error); }
await openChat(sessionStorage.getItem("edgespec-chat") ?? localStorage.getItem("edgespec-chat") ?? undefined);
