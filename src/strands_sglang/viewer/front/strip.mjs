// A sequence of tokens as rows of text, with a current token that the arrow keys move.

import { h, onWidth } from "./dom.mjs";
import { layOut, rowOf } from "./layout.mjs";
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
   * @param {{point: (position: number) => void, choose: (position: number) => void, seen: (position: number) => void}} told
   *     what is pointed at, what is chosen, and the first position in view if the current token is not
   */
  constructor(viewport, told) {
    this.viewport = viewport;
    this.told = told;
    this.rows = [];
    this.list = new VirtualList(viewport, ROW_HEIGHT, (row) => this.renderRow(this.rows[row]));
    this.list.onDraw = (first, shown) => {
      if (!this.rows.length) return;
      const last = this.rows.length - 1;
      const from = this.rows[Math.min(first + 1, last)].start;
      const to = this.rows[Math.min(first + Math.ceil(shown), last)].stop;
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

  /** Show a sequence that has `headings`, each with `at` and `make`; `classOf` is given a place in the columns. */
  show(sequence, classOf) {
    this.sequence = sequence;
    this.classOf = classOf;
    this.current = -1;
    this.hits = null;
    this.viewport.scrollTop = 0;
    this.layOut();
  }

  layOut() {
    const { tokens, headings } = this.sequence;
    const visibleRows = Math.ceil(this.viewport.clientHeight / ROW_HEIGHT) + 6;
    const most = Math.max(4, Math.floor(MOST_TOKENS / visibleRows));
    const top = this.rows[Math.floor(this.viewport.scrollTop / ROW_HEIGHT)];
    const keep = this.current >= 0 ? this.current : top?.start;
    this.limit = Math.max(8, Math.floor((this.viewport.clientWidth - 24) / columnWidth(this.viewport)));
    this.rows = layOut(tokens.length, (i) => this.entry(i), this.limit, headings, most);
    this.list.reset(this.rows.length);
    if (keep) this.reveal(keep, 0.3, true);
  }

  entry(i) {
    return this.sequence.vocabulary.entry(this.sequence.tokens[i]);
  }

  /** Bring a token into view, as a list does its row. */
  reveal(position, ...how) {
    this.list.reveal(rowOf(this.rows, position), ...how);
  }

  mark(hits) {
    this.hits = hits;
    this.list.redraw();
  }

  renderRow({ start, stop, heading }) {
    if (heading) return heading.make();
    const line = h("div.tokens");
    for (let i = start; i < stop; i++) {
      let name = this.classOf(this.sequence.places[i]);
      if (this.hits?.[i]) name += " hit";
      if (i === this.current) name += " current";
      line.append(tokenSpan(this.entry(i), name, i, this.limit));
    }
    return line;
  }

  /** Make a token the current one. */
  choose(position, reveal = true) {
    const last = this.sequence.tokens.length - 1;
    if (last < 0) return;
    this.current = Math.max(0, Math.min(last, position));
    if (reveal) this.reveal(this.current);
    this.give("current", this.current);
    this.told.choose(this.current);
  }

  /** Tell of a token that is not chosen, and mark it. */
  point(position) {
    this.give("hovered", position);
    this.told.point(position);
  }

  /** Give a class to one token in the document. */
  give(name, position) {
    this.viewport.querySelector(`.t.${name}`)?.classList.remove(name);
    this.viewport.querySelector(`[data-at="${position}"]`)?.classList.add(name);
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
    const rows = this.rows.filter(({ heading }) => !heading);
    const from = rowOf(rows, position);
    const { start, stop } = rows[Math.max(0, Math.min(rows.length - 1, from + by))];
    let column = 0;
    for (let i = rows[from].start; i < position; i++) column += this.entry(i).width;
    let i = start;
    while (i < stop - 1 && (column -= this.entry(i).width) >= 0) i++;
    return i;
  }
}
