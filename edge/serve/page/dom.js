// What every other file makes elements with. Texts are set as texts: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

export function element(name, className = "", text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A button whose `name` is what a screen reader says, where its text is a sign. */
export function button(text, act, name = "") {
  const made = element("button", "", text);
  made.type = "button";
  if (name) {
    made.setAttribute("aria-label", name);
    made.title = name;
  }
  made.addEventListener("click", act);
  return made;
}

/** What went wrong, until the next one; "" takes it away. */
export function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

let ends = 0;
/** What was done, with a button that undoes it. */
export function notice(text, undo) {
  clearTimeout(ends);
  const parts = [element("span", "", text)];
  if (undo) parts.push(button("Undo", () => { notice(""); undo(); }));
  $("notice").replaceChildren(...text ? parts : []);
  $("notice").hidden = !text;
  if (text) ends = setTimeout(() => notice(""), 20_000);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page over plain http may not, but in this way
    const held = element("textarea");
    held.value = text;
    document.body.append(held);
    held.select();
    document.execCommand("copy");
    held.remove();
  }
}

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))]
  .map((one) => one.toString(16).padStart(2, "0")).join("");

export function seconds(value) {
  if (value < 90) return `${Math.max(0, Math.round(value))} s`;
  return `${Math.round(value / 60)} min`;
}
