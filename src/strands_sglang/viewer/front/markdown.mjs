// What a model wrote, rendered as Markdown. markdown-it reads the text; elements are made of its tokens, never of HTML.

import { h } from "./dom.mjs";
import { harmless } from "./text.mjs";

// These stay as they are written: nothing is followed or loaded, and formulas keep their backslashes.
const PLAIN = ["link", "image", "autolink", "reference", "escape", "entity"];

const LONGEST = 20000; // characters

let reader;

function newReader() {
  const made = globalThis.markdownit({ html: false }).disable(PLAIN);
  const { State } = made.inline;
  made.inline.State = class extends State {
    scanDelims(start) {
      return super.scanDelims(start, false); // no emphasis inside of a word, such as in 2*3*4
    }
  };
  return made;
}

/** Return an element with the rendered text; null if it is too long, or needs more than `most` elements and texts. */
export function markdown(text, most = 600) {
  if (text.length > LONGEST) return null;
  reader ??= newReader();
  const open = [h("div.body")];
  let left = most;
  const add = (token) => {
    const last = open[open.length - 1];
    if (token.hidden) return; // the paragraphs of a tight list
    left--;
    if (left < 0) return;
    if (token.type === "inline") token.children.forEach(add);
    else if (token.nesting > 0) open.push(h(tagOf(token), { start: token.attrGet("start") }));
    else if (token.nesting < 0) open[open.length - 2].append(open.pop());
    else if (token.type === "code_inline") last.append(h("code", {}, token.content));
    else if (token.type === "fence" || token.type === "code_block") last.append(h("pre", {}, token.content));
    else if (token.type === "hr") last.append(h("hr"));
    else last.append(token.type.endsWith("break") ? "\n" : harmless(token.content));
  };
  reader.parse(text, {}).forEach(add);
  return left < 0 ? null : open[0];
}

/** Headings of a text are none of the page. */
function tagOf({ tag }) {
  return /^h\d$/.test(tag) ? "p.heading" : tag;
}
