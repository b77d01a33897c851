// Elements from plain values. Strings become text nodes: nothing that a model wrote is ever read as HTML, and no
// control character or bidirectional mark of it is obeyed.

import { harmless } from "./text.mjs";

/**
 * Make an element.
 *
 * @param {string} kind such as "div.card" or "button"
 * @param {Object<string, any>} [attributes] "on..." are listeners; false, null and undefined are left out
 * @param {...(Node|string|number|null|false|undefined)} children
 */
export function h(kind, attributes = {}, ...children) {
  const [name, ...classes] = kind.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : harmless(String(value)));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "string" ? harmless(child) : child);
  }
  return element;
}

/** Call a function whenever the width of an element changes, its first one included. */
export function onWidth(element, changed) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    changed();
  }).observe(element);
}

/** A number with separators. */
export function count(value) {
  return Number(value).toLocaleString("en-US");
}

/** A number with what it counts: "1 turn", "2 turns". */
export function counted(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** A measured number, short. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 2);
  return text.replaceAll("-", "−");
}

/** Names with what they mean or have. */
export function definitions(pairs) {
  return h("dl", {}, pairs.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
}

/** The options of a select, given as pairs of value and label. */
export function options(pairs, chosen) {
  return pairs.map(([value, label]) => h("option", { value, selected: String(value) === String(chosen) }, label));
}

/** The items of a list around a position: a select of thousands would be slow. */
export function near(items, at) {
  return items.slice(Math.max(0, at - 99), at + 100);
}

/** A part of the page that scrolls, with a name for those who do not see it. */
export function pane(kind, label, role = "group") {
  return h(`div.${kind}`, { tabindex: "0", role, "aria-label": label });
}

/** A field whose text filters what is shown. */
export function filterField(label, placeholder, filter) {
  return h("input", { type: "search", placeholder, "aria-label": label, spellcheck: "false", oninput: filter });
}
