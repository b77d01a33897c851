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

/** A number of at most four digits with a unit, or a number with separators. */
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

/** Seconds, short. */
export function seconds(value) {
  return value < 0.01 ? `${(value * 1000).toFixed(1)} ms` : value < 100 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}
