// Tokens as visible text: white space, control characters and bidirectional marks are shown, never obeyed.

const NAMED = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\xa0": "⍽", "\x7f": "␡" };

// Code points that have no shape of their own, or change how their neighbors are drawn.
const HIDDEN = String.raw`\x7f-\x9f\xad\u061c\u180e\u200b-\u200c\u200e-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{d800}-\u{dfff}\u{e0000}-\u{e0fff}`;
const JOINER = "\u200d"; // harmless in prose, where it joins the parts of emoji
const SIGNED = new RegExp(`([\\0-\\x20\\xa0${JOINER}${HIDDEN}])\\1*`, "gu");
const UNSAFE = new RegExp(`[\\0-\\x08\\x0b-\\x1f${HIDDEN}]`, "gu");

/** The sign of a character; of one that Python's surrogateescape made, the byte that is not UTF-8. */
function sign(character) {
  if (NAMED[character]) return NAMED[character];
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  const isByte = code >= 0xdc80 && code <= 0xdcff;
  return `⟨${isByte ? hex(code - 0xdc00) : `U+${hex(code, 4)}`}⟩`;
}

function hex(code, digits = 2) {
  return code.toString(16).toUpperCase().padStart(digits, "0");
}

/** Return text in which everything can be seen; runs of nine or more equal blanks are counted instead. */
export function visible(text) {
  return text.replace(SIGNED, (run, character) => {
    const many = run.length / character.length;
    return many > 8 ? `${sign(character)}×${many}` : sign(character).repeat(many);
  });
}

/** Return text for prose: hidden characters are named, white space stays. */
export function harmless(text) {
  return text.replace(UNSAFE, sign);
}

const NARROW = /[\p{M}\u200d]/u;
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u;

/** Number of columns that text takes in a fixed-width font. */
export function columns(text) {
  let total = 0;
  for (const character of text) {
    if (character < "\u0300") total += 1;
    else if (!NARROW.test(character)) total += WIDE.test(character) ? 2 : 1;
  }
  return total;
}

const ENCODER = new TextEncoder();
const BYTES = new TextDecoder("latin1");

/** The UTF-8 of a text in lower case as a string, so that tokens which end within a character can be joined. */
export function searchable(text) {
  const lowered = text.toLowerCase();
  return /[^\0-\x7f]/.test(lowered) ? BYTES.decode(ENCODER.encode(lowered)) : lowered;
}

/** The vocabulary that a page uses: ids with their texts, the bytes of an incomplete character, or null if unknown. */
export class Vocabulary {
  constructor(ids, texts) {
    this.ids = ids;
    this.texts = texts;
    this.cache = new Array(ids.length);
    this.searched = new Array(ids.length);
  }

  searchable(index) {
    const text = this.texts[index] ?? "";
    return (this.searched[index] ??= typeof text === "string" ? searchable(text) : BYTES.decode(new Uint8Array(text)));
  }

  entry(index) {
    if (this.cache[index]) return this.cache[index];
    const text = this.texts[index];
    let shown = `⟨${this.ids[index]}⟩`;
    if (typeof text === "string") shown = visible(text) || "∅";
    else if (text) shown = `⟨${text.map((byte) => hex(byte)).join(" ")}⟩`;
    return (this.cache[index] = { shown, width: columns(shown), ends: text?.includes("\n") });
  }
}
