// What stands beside the conversation: an answer's figures, memory, plan, models.

import { $, element } from "./dom.js";

function list(where, rows) {
  $(where).replaceChildren(...rows.map(([name, value]) => {
    const row = element("div");
    row.append(element("dt", "", name), element("dd", "", value));
    return row;
  }));
}
/** Of an answer that is being written. */
export function liveFigures(live) {
  const seconds = (performance.now() - live.first) / 1000;
  list("answer", [
    ["tokens/s", seconds > 0.2 ? (live.tokens / seconds).toFixed(1) : "…"],
    ["tokens a step", live.steps ? (live.tokens / live.steps).toFixed(2) : "…"],
    ["tokens", String(live.tokens)],
    ["first token", `${((live.first - live.began) / 1000).toFixed(2)} s`],
  ]);
}
/** Of an answer that has ended. */
export function figures(timings, usage) {
  const rows = [
    ["tokens/s", timings.predicted_per_second.toFixed(1)],
    ["tokens a step", timings.acceptance_length.toFixed(2)],
    ["tokens", String(timings.predicted_n)],
    ["first token", `${(timings.prompt_ms / 1000).toFixed(2)} s`],
  ];
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    rows.push(["prompt tokens", String(usage.prompt_tokens)], ["of them in the cache", String(cached)]);
  }
  list("answer", rows);
  const names = Object.keys(timings.drafted_by);
  const plain = timings.predicted_n - timings.draft_n_accepted;
  $("drafters").replaceChildren(
    bar("the model's own steps", `${plain}`, plain / Math.max(1, timings.predicted_n)),
    ...names.map((name) => {
      const right = timings.accepted_by[name] ?? 0;
      const row = bar(name, `${right} of ${timings.drafted_by[name]} accepted`,
        right / Math.max(1, timings.drafted_by[name]));
      const mark = element("mark", "", name);
      mark.dataset.from = name;
      row.querySelector("span").replaceChildren(mark);
      return row;
    }),
  );
}
function bar(name, value, part) {
  const row = element("div");
  const head = element("div", "row");
  head.append(element("span", "", name), element("span", "", value));
  const line = element("span", "bar");
  const inner = element("i");
  inner.style.width = `${Math.min(100, 100 * part)}%`;
  line.append(inner);
  row.append(head, line);
  return row;
}
const size = (bytes) => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB`
  : `${(bytes / 2 ** 20).toFixed(bytes < 2 ** 20 ? 1 : 0)} MiB`;
const words = (name) => name.replaceAll("_", " ");

/** Which models there are. */
function models(now) {
  const there = (now.models ?? []).filter((one) => one.kind === "chat");
  const several = there.length > 1;
  $("model").textContent = several ? "" : now.model;
  $("choice").hidden = $("several").hidden = !several;
  if (!several) return;
  if (document.activeElement !== $("choice")) {
    $("choice").replaceChildren(...there.map((one) => {
      const broken = one.problem && !one.bytes;
      const said = broken ? "cannot be loaded" : one.state;
      const option = element("option", "", said === "ready" ? one.id : `${one.id} (${said})`);
      option.disabled = broken;
      option.value = one.id;
      option.selected = one.id === now.model;
      return option;
    }));
  }
  const limit = now.memory.limit_bytes;
  $("models").replaceChildren(...now.models.map((one) => {
    const held = one.state === "unloaded" ? 0 : one.bytes;
    const said = one.problem ? "cannot be loaded" : one.pinned ? `${one.state}, pinned` : one.state;
    const row = bar(one.id, one.bytes ? `${size(one.bytes)}, ${said}` : said, limit ? held / limit : 0);
    if (one.problem) row.title = one.problem;
    return row;
  }));
}
/** What `/status` tells. */
export function status(now) {
  models(now);
  const totals = now.totals;
  list("server", [
    ["running", String(now.queue.running)],
    ["waiting", `${now.queue.waiting} of ${now.queue.most}`],
    ["answers", String(totals.generations)],
    ["tokens written", String(totals.generated_tokens)],
    ["tokens a step, all", totals.rounds
      ? ((totals.accepted_tokens + totals.rounds) / totals.rounds).toFixed(2) : "…"],
    ["context", String(now.context_size ?? "…")],
  ]);
  const memory = now.memory, planned = memory.planned_peak_bytes;
  $("memory").replaceChildren(
    bar("in use now", planned ? `${size(memory.resident_bytes)} of ${size(planned)} planned`
      : size(memory.resident_bytes), planned ? memory.resident_bytes / planned : 0),
    ...Object.entries(memory.planned).filter(([, bytes]) => bytes > 0).map(([name, bytes]) =>
      bar(words(name), size(bytes), bytes / Math.max(1, planned))),
  );
  $("plan").replaceChildren(...Object.entries(now.plan).map(([name, choice]) => {
    const row = element("p", "choice", `${words(name)}: `);
    row.append(element("b", "", String(choice.value)), element("small", "", choice.reason));
    return row;
  }));
}
