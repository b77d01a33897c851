// Tokens as visible text: white space, control characters and bidirectional marks are shown, never obeyed.

const NAMED = new Map([
  [0x20, "·"],
  [0x0a, "↵"],
  [0x0d, "␍"],
  [0x09, "⇥"],
  [0xa0, "⍽"],
  [0x7f, "␡"],
]);

/** Whether a code point has no shape of its own, or changes how its neighbors are drawn. */
function isHidden(code) {
  return (
    (code >= 0x7f && code <= 0x9f) ||
    code === 0xad ||
    code === 0x61c ||
    code === 0x180e ||
    (code >= 0x200b && code <= 0x200f) ||
    (code >= 0x2028 && code <= 0x202e) ||
    (code >= 0x2060 && code <= 0x206f) ||
    code === 0xfeff ||
    (code >= 0xfff9 && code <= 0xfffb) ||
    (code >= 0xd800 && code <= 0xdfff) ||
    (code >= 0xe0000 && code <= 0xe0fff)
  );
}

/** Return U+ notation, such as U+202E. */
export function codePoint(code) {
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

/** Return the name of a code point; of one that Python's surrogateescape made, the byte that is not UTF-8. */
function named(code) {
  const isByte = code >= 0xdc80 && code <= 0xdcff;
  return `⟨${isByte ? hex(code - 0xdc00) : codePoint(code)}⟩`;
}

function hex(byte) {
  return byte.toString(16).toUpperCase().padStart(2, "0");
}

/** Return text in which everything can be seen; runs of nine or more equal blanks are counted instead. */
export function visible(text) {
  let shown = "";
  const codes = [...text];
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i].codePointAt(0);
    let sign = NAMED.get(code);
    if (sign === undefined && code < 0x20) sign = String.fromCodePoint(0x2400 + code);
    if (sign === undefined && isHidden(code)) sign = named(code);
    if (sign === undefined) {
      shown += codes[i];
      continue;
    }
    let run = 1;
    while (codes[i + run] === codes[i]) run++;
    if (run > 8) {
      shown += `${sign}×${run}`;
      i += run - 1;
    } else {
      shown += sign;
    }
  }
  return shown;
}

const SUSPECT = /[^\t\n\u0020-\u007e\u00a0-\u00ac\u00ae-\u0600\u0620-\u1800\u1820-\u1fff\u2010-\u2027\u2030-\u205f\u2070-\ud7ff\ue000-\ufefe]/;

/** Return text for prose: hidden characters are named, white space stays. */
export function harmless(text) {
  if (!SUSPECT.test(text)) return text;
  let shown = "";
  for (const character of text) {
    const code = character.codePointAt(0);
    if (code < 0x20 && code !== 0x0a && code !== 0x09) shown += String.fromCodePoint(0x2400 + code);
    else if (isHidden(code) && code !== 0x200d) shown += named(code);
    else shown += character;
  }
  return shown;
}

const MARK = /^\p{M}$/u;

/** Number of columns that text takes in a fixed-width font. */
export function columns(text) {
  let total = 0;
  for (const character of text) {
    const code = character.codePointAt(0);
    if (code < 0x300) total += 1;
    else if (MARK.test(character) || code === 0x200d) total += 0;
    else total += isWide(code) ? 2 : 1;
  }
  return total;
}

function isWide(code) {
  return (
    (code >= 0x1100 && code <= 0x115f) ||
    (code >= 0x2e80 && code <= 0xa4cf) ||
    (code >= 0xac00 && code <= 0xd7a3) ||
    (code >= 0xf900 && code <= 0xfaff) ||
    (code >= 0xfe30 && code <= 0xfe6f) ||
    (code >= 0xff00 && code <= 0xff60) ||
    (code >= 0xffe0 && code <= 0xffe6) ||
    (code >= 0x1f300 && code <= 0x1faff) ||
    (code >= 0x20000 && code <= 0x3fffd)
  );
}

const ENCODER = new TextEncoder();
const BYTES = new TextDecoder("latin1");

/** The UTF-8 of a text in lower case as a string, so that tokens which end within a character can be joined. */
export function searchable(text) {
  const lowered = text.toLowerCase();
  return /[^\0-\x7f]/.test(lowered) ? BYTES.decode(ENCODER.encode(lowered)) : lowered;
}

/** The vocabulary that a page uses: ids with their texts; an entry of bytes is part of a character. */
export class Vocabulary {
  /**
   * @param {ArrayLike<number>} ids
   * @param {(string|number[]|null)[]} texts a text, the bytes of an incomplete character, or null if unknown
   */
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
    let known = this.cache[index];
    if (known === undefined) {
      const text = this.texts[index];
      let shown;
      if (text === null || text === undefined) shown = `⟨${this.ids[index]}⟩`;
      else if (typeof text === "string") shown = text === "" ? "∅" : visible(text);
      else shown = "⟨" + text.map(hex).join(" ") + "⟩";
      known = { shown, width: columns(shown), ends: typeof text === "string" && text.includes("\n") };
      this.cache[index] = known;
    }
    return known;
  }
}
