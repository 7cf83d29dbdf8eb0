// Requests to the server: what is sent, and the events of an answer.

import { $ } from "./dom.js";
import { isSound } from "./files.js";

const NUMBERS = { temperature: "temperature", topp: "top_p", most: "max_tokens", seed: "seed" };

export function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

export async function failure(response) {
  try { return (await response.json()).error.message; } catch { return `status ${response.status}`; }
}

/** What is said where a request fails. */
export const said = (error) => error instanceof TypeError ? "The server does not answer." : error.message;

/** A request for what follows on some messages. Throws Error for settings that are no JSON. */
export function request(messages, model) {
  const system = $("system").value.trim();
  const body = {
    messages: [...system ? [{ role: "system", content: system }] : [], ...messages.map(sent)],
    stream: true,
    stream_options: { include_usage: true, include_sources: true },
    return_progress: true,
  };
  if (model) body.model = model;
  for (const [id, field] of Object.entries(NUMBERS)) {
    if ($(id).value !== "") body[field] = Number($(id).value);
  }
  const schema = json("schema", "The JSON schema"), tools = json("tools", "The list of tools");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const own = tools ?? [], { tools: others } = ofServer;
  if (tools || others.length) body.tools = Array.isArray(own) ? [...own, ...others] : own;
  return body;
}

/** The tools of MCP servers beside the server, and the names of those that need no asking. */
export let ofServer = { tools: [], allowed: [] };
export async function findTools() {
  const response = await fetch("tools", { headers: headers() });
  if (response.ok) ofServer = await response.json();
}
/** The text that a call of one of them gives. */
export async function callTool({ name, arguments: values }, model) {
  try {
    const body = JSON.stringify({ name, arguments: values, ...model ? { model } : {} });
    const response = await fetch("tools", { method: "POST", headers: headers(), body });
    return response.ok ? (await response.json()).content : `error: ${await failure(response)}`;
  } catch (error) { return `error: ${said(error)}`; }
}

function json(id, what) {
  const text = $(id).value.trim();
  if (!text) return null;
  try { return JSON.parse(text); } catch (error) {
    $("settings").open = true;
    $(id).focus();
    throw new Error(`${what} is no JSON: ${error.message}`);
  }
}

function sent({ role, content, images = [], files = [], calls, call, reasoning = "" }) {
  const texts = files.map((one) => `${one.name}:\n${fenced(one.text)}`);
  const text = whole([...texts, content].filter(Boolean).join("\n\n"));
  if (role === "tool") return { role, content: text, tool_call_id: call };
  if (calls) {
    const called = calls.map(({ id, name, arguments: values }) =>
      ({ id, type: "function", function: { name, arguments: values } }));
    return { role, content: text, reasoning_content: whole(reasoning), tool_calls: called };
  }
  return { role, content: images.length ? [...images.map(part), { type: "text", text }] : text };
}

// Half of a pair of surrogates, as a cut text may end with, is no text that can be sent.
const whole = (text) => text.replace(/[\ud800-\udfff]/gu, "\ufffd");

function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([one]) => one.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

function part(url) {
  if (!isSound(url)) return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.split(",")[1], format: "wav" } };
}

/** Have a prompt read that nobody asks about yet; the server stops where somebody else comes. */
export async function read(body, signal) {
  const { stream, stream_options: _, return_progress: __, ...asked } = body;
  const options = { ...asked, prompt_cache_options: { prewarm: true } };
  await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(options), signal });
}

/** The events of a streamed answer. Throws Error with what the server says. */
export async function* ask(body, signal) {
  const asked = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch("v1/chat/completions", asked);
  if (!response.ok) throw new Error(await failure(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const one of parts) {
      if (!one.startsWith("data: ") || one === "data: [DONE]") continue;
      const event = JSON.parse(one.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Each part of `content` with its drafter. An event's tokens may begin with what is no content (a
// thought, its tags), and its content with what earlier events held back: that has no colour.
export function piecesOf(content, sources) {
  const pieces = [];
  let rest = content;
  for (const [text, from] of [...sources].reverse()) {
    const part = rest && text.slice(-rest.length);
    if (!part) break;
    if (!rest.endsWith(part)) return [[content, ""]];
    pieces.unshift([part, from]);
    rest = rest.slice(0, -part.length);
  }
  return rest ? [[rest, ""], ...pieces] : pieces;
}
