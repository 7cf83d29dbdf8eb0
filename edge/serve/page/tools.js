// Calls of tools that the server has (`serve --mcp`): made when the person agrees.

import { callTool, ofServer } from "./asking.js";
import { $, button, element } from "./dom.js";

const always = new Set();

/** Ask whether a call is made; `give` gets its result. Nobody is asked where that `may` be. */
export function offer(call, model, may, give) {
  const place = $("may-call");
  place.replaceChildren();
  if (!call || !ofServer.tools.some((one) => one.function.name === call.name)) return;
  const make = async () => {
    place.replaceChildren(element("span", "", `Calling ${call.name}`));
    give(await callTool(call, model));
  };
  const free = [...ofServer.allowed, ...always];
  if (may && (free.includes(call.name) || free.includes("*"))) return void make();
  place.replaceChildren(
    button(`Call ${call.name}`, make),
    button("Always call it", () => { always.add(call.name); make(); }),
    button("Do not call it", () => give("error: the user does not want this call")),
  );
}
