// A sequence of tokens as rows of text, with a current token that the arrow keys move.

import { h, onWidth } from "./dom.mjs";
import { layOut } from "./layout.mjs";
import { VirtualList } from "./virtual.mjs";

const MOST_TOKENS = 1400; // in the document at a time
const ROW_HEIGHT = 23; // px

let probed = 0;

/** Width of a column in px. */
export function columnWidth(viewport) {
  if (!probed) {
    const probe = h("span.probe.tokens", {}, "0".repeat(100));
    viewport.append(probe);
    probed = probe.getBoundingClientRect().width / 100;
    probe.remove();
  }
  return probed || 7.8;
}

/** A token of a row of `limit` columns. */
export function tokenSpan({ shown, width }, classes, at, limit) {
  const span = document.createElement("span");
  span.className = `t ${classes}${width > limit ? " long" : ""}`;
  span.dataset.at = at;
  span.textContent = shown;
  return span;
}

export class Strip {
  /**
   * @param {HTMLElement} viewport
   * @param {{point: (position: number) => void, choose: (position: number) => void, seen?: (position: number) => void}}
   *     told what is pointed at, what is chosen, and the first position in view if the current token is not
   */
  constructor(viewport, told) {
    this.viewport = viewport;
    this.told = told;
    this.current = -1;
    this.hits = null;
    this.list = new VirtualList(viewport, ROW_HEIGHT, (row) => this.renderRow(row));
    this.list.onDraw = (first, shown) => {
      if (!this.rows?.length || !told.seen) return;
      const last = this.rows.length - 1;
      const from = this.rows.starts[Math.min(first + 1, last)];
      const to = this.rows.stops[Math.min(first + Math.ceil(shown), last)];
      if (this.current < from || this.current >= to) told.seen(from);
    };
    viewport.addEventListener("pointerover", (event) => {
      const at = event.target.dataset?.at;
      if (at !== undefined && event.pointerType === "mouse") this.point(Number(at));
    });
    viewport.addEventListener("pointerleave", () => this.current >= 0 && this.point(this.current));
    viewport.addEventListener("click", (event) => {
      const at = event.target.dataset?.at;
      if (at !== undefined) this.choose(Number(at), false);
    });
    viewport.addEventListener("keydown", (event) => this.key(event));
    onWidth(viewport, () => this.sequence && this.layOut());
  }

  /**
   * Show a sequence.
   *
   * @param {{tokens: ArrayLike<number>, places: Int32Array, vocabulary: Vocabulary,
   *     headings: {at: number, make: () => HTMLElement}[]}} sequence `places` are positions in the episode's columns
   * @param {(place: number) => string} classOf
   */
  show(sequence, classOf) {
    this.sequence = sequence;
    this.classOf = classOf;
    this.current = -1;
    this.hits = null;
    this.viewport.scrollTop = 0;
    this.layOut();
  }

  layOut() {
    const { tokens, vocabulary, headings } = this.sequence;
    const limit = Math.max(8, Math.floor((this.viewport.clientWidth - 24) / columnWidth(this.viewport)));
    const visibleRows = Math.ceil(this.viewport.clientHeight / ROW_HEIGHT) + 6;
    const most = Math.max(4, Math.floor(MOST_TOKENS / visibleRows));
    const keep = this.current >= 0 ? this.current : this.rows ? this.rows.starts[Math.floor(this.viewport.scrollTop / ROW_HEIGHT)] : 0;
    this.limit = limit;
    this.rows = layOut(tokens.length, (i) => vocabulary.entry(tokens[i]), limit, headings, most);
    this.list.reset(this.rows.length);
    if (keep) this.list.reveal(this.rows.of(keep), 0.3, true);
  }

  recolor(classOf) {
    this.classOf = classOf;
    this.list.redraw();
  }

  mark(hits) {
    this.hits = hits;
    this.list.redraw();
  }

  renderRow(row) {
    const heading = this.rows.headings[row];
    if (heading >= 0) return this.sequence.headings[heading].make();
    const line = document.createElement("div");
    line.className = "tokens";
    for (let i = this.rows.starts[row]; i < this.rows.stops[row]; i++) line.append(this.token(i));
    return line;
  }

  token(i) {
    const { tokens, places, vocabulary } = this.sequence;
    let name = this.classOf(places[i]);
    if (this.hits && this.hits[i]) name += " hit";
    if (i === this.current) name += " current";
    return tokenSpan(vocabulary.entry(tokens[i]), name, i, this.limit);
  }

  /** Make a token the current one. */
  choose(position, reveal = true) {
    if (!this.rows || !this.sequence.tokens.length) return;
    position = Math.max(0, Math.min(this.sequence.tokens.length - 1, position));
    const before = this.viewport.querySelector(".t.current");
    if (before) before.classList.remove("current");
    this.current = position;
    if (reveal) this.list.reveal(this.rowOf(position));
    const now = this.viewport.querySelector(`[data-at="${position}"]`);
    if (now) now.classList.add("current");
    this.told.choose(position);
  }

  /** Tell of a token that is not chosen, and mark it. */
  point(position) {
    this.viewport.querySelector(".t.hovered")?.classList.remove("hovered");
    this.viewport.querySelector(`[data-at="${position}"]`)?.classList.add("hovered");
    this.told.point(position);
  }

  rowOf(position) {
    return this.rows.of(position);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Math.max(0, this.current);
    const page = Math.max(1, Math.floor(this.viewport.clientHeight / ROW_HEIGHT) - 2);
    const to = {
      ArrowRight: () => this.current + 1,
      ArrowLeft: () => at - 1,
      ArrowDown: () => this.vertical(at, 1),
      ArrowUp: () => this.vertical(at, -1),
      PageDown: () => this.vertical(at, page),
      PageUp: () => this.vertical(at, -page),
      Home: () => 0,
      End: () => this.sequence.tokens.length - 1,
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.choose(to());
  }

  /** The token nearly above or below, `by` rows of tokens away. */
  vertical(position, by) {
    let row = this.rows.of(position);
    const { starts, stops, headings } = this.rows;
    const { tokens, vocabulary } = this.sequence;
    let column = 0;
    for (let i = starts[row]; i < position; i++) column += vocabulary.entry(tokens[i]).width;
    const direction = Math.sign(by);
    for (let left = Math.abs(by), at = row + direction; left > 0 && at >= 0 && at < starts.length; at += direction) {
      if (headings[at] >= 0) continue;
      row = at;
      left--;
    }
    let i = starts[row];
    for (let used = 0; i < stops[row] - 1; i++) {
      used += vocabulary.entry(tokens[i]).width;
      if (used > column) break;
    }
    return i;
  }
}
